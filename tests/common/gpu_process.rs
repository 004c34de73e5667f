//! Ranks on GPUs as processes of their own, over the stand-in driver.

// Each test binary that includes this uses its own share of it.
#![allow(dead_code)]

use super::gpu::{case, config, nothing_is_left};
use super::support::{Case, Rank};
use peerlane::bootstrap::UniqueId;
use peerlane::comm::{Communicator, Config};
use peerlane::device::cuda::{kept_until_exit, Capture, CaptureMode};
use peerlane::{DType, Device, Error, Lane, Op, ProbeMode};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const CASE: Case = case(DType::BF16, Op::Sum, 7168, 3);
const WHO: &str = "PEERLANE_TEST_RANK";

/// A process that runs the same test as a rank, and talks over its standard streams.
pub struct Process {
    pub child: Child,
    says: BufReader<ChildStdout>,
    hears: ChildStdin,
}

impl Process {
    pub fn start(test: &str, id: &UniqueId, rank: usize, n: usize, env: &[(&str, String)]) -> Self {
        let hex: String = id.as_bytes().iter().map(|b| format!("{b:02x}")).collect();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture"])
            .env(WHO, format!("{hex} {rank} {n}"))
            .env("FAKECUDA_RANK", rank.to_string())
            .env("PEERLANE_LOG", "off")
            .envs(env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (says, hears) =
            (BufReader::new(child.stdout.take().unwrap()), child.stdin.take().unwrap());
        Process { child, says, hears }
    }

    /// The next line that is for this test; the test harness of the process prints others.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        while self.says.read_line(&mut line).unwrap() > 0 {
            if let Some((_, said)) = line.split_once("> ") {
                return said.trim().to_owned();
            }
            line.clear();
        }
        format!("it ended: {:?}", self.child.wait().unwrap())
    }

    pub fn go_on(&mut self) {
        self.hears.write_all(b"\n").unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn say(what: impl std::fmt::Display) {
    println!("\n> {what}");
    std::io::stdout().flush().unwrap();
}

pub fn wait_for_go() {
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// In a rank's process: which rank of which communicator.
pub fn who() -> Option<(UniqueId, usize, usize)> {
    let text = std::env::var(WHO).ok()?;
    let parts: Vec<&str> = text.split(' ').collect();
    let bytes: Vec<u8> = (0..parts[0].len() / 2)
        .map(|i| u8::from_str_radix(&parts[0][2 * i..2 * i + 2], 16).unwrap())
        .collect();
    let id = UniqueId::from_bytes(bytes.try_into().unwrap()).unwrap();
    Some((id, parts[1].parse().unwrap(), parts[2].parse().unwrap()))
}

/// The life of a rank: creation, an eager call, a capture, replays; then replays until somebody dies, or destruction.
pub fn live_as_rank(id: &UniqueId, rank: usize, n: usize) {
    // The log is off here: what goes wrong is said.
    let config = Config {
        lane: std::env::var("LANE").map_or(Lane::Auto, |lane| lane.parse().unwrap()),
        device: Device::Cuda { ordinal: Some(0) },
        probe: std::env::var("PROBE").map_or(ProbeMode::Off, |mode| mode.parse().unwrap()),
        cache_dir: std::env::var_os("CACHE").map(Into::into),
        ..config(n)
    };
    let comm = match Communicator::create(id, n, rank, &config) {
        Ok(comm) => comm,
        Err(error) => return say(error),
    };
    let expected = CASE.expected(n, &config).unwrap();
    let buffers = Rank::new(&comm, 0, CASE.bytes()).unwrap();
    assert!(buffers.reduce(&CASE).unwrap() == expected);
    let capture = Capture::begin(&buffers.stream, CaptureMode::ThreadLocal).unwrap();
    for _ in 0..3 {
        buffers.call(&CASE, None).unwrap();
    }
    let graph = capture.end().unwrap().instantiate().unwrap();
    let replay = || -> Result<(), Error> {
        graph.launch(&buffers.context.enter().unwrap(), buffers.stream.as_ref())?;
        buffers.stream.synchronize()?;
        comm.error().map_or(Ok(()), Err)
    };
    for _ in 0..3 {
        replay().unwrap();
    }
    assert!(buffers.result(&CASE).unwrap() == expected);
    let explained = comm.explain(1024, DType::F32).unwrap();
    let about_lanes: Vec<_> = explained.lines().filter(|line| line.contains("lane ")).collect();
    say(about_lanes.join(" | "));
    if std::env::var_os("UNTIL_DEATH").is_some() {
        let error = loop {
            if let Err(error) = replay() {
                break error;
            }
        };
        say(error);
        // The GPU is as good as before.
        assert!(comm.error().is_some());
        let alone = Communicator::create_local(1, &config).unwrap();
        Rank::new(&alone[0], 0, CASE.bytes()).unwrap().reduce(&CASE).unwrap();
    } else {
        wait_for_go();
    }
    let measured = comm.probe().map_or("nothing".to_owned(), |report| report.to_json());
    drop(buffers);
    comm.destroy().unwrap();
    drop(graph);
    if std::env::var_os("UNTIL_DEATH").is_none() {
        nothing_is_left();
    }
    say(format!("kept {}", kept_until_exit()));
    say(measured);
}

pub fn start(
    test: &str,
    n: usize,
    env: impl Fn(usize) -> Vec<(&'static str, String)>,
) -> Vec<Process> {
    let id = UniqueId::new().unwrap();
    (0..n).map(|rank| Process::start(test, &id, rank, n, &env(rank))).collect()
}
