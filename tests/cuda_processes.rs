//! Ranks on GPUs as processes of their own, over the stand-in driver.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

#[path = "common/fakecuda.rs"]
mod fakecuda;
#[path = "common/gpu.rs"]
mod gpu;
#[path = "../examples/gpu_smoke/support.rs"]
mod support;

use fakecuda::{in_child, live};
use gpu::{case, config, nothing_is_left, KERNELS};
use peerlane::bootstrap::UniqueId;
use peerlane::comm::{Communicator, Config};
use peerlane::device::cuda::{kept_until_exit, Capture, CaptureMode};
use peerlane::{DType, Device, Error, Lane, Op};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use support::{Case, Rank};

const CASE: Case = case(DType::BF16, Op::Sum, 7168, 3);
const WHO: &str = "PEERLANE_TEST_RANK";

/// A process that runs the same test as a rank, and talks over its standard streams.
struct Process {
    child: Child,
    says: BufReader<ChildStdout>,
    hears: ChildStdin,
}

impl Process {
    fn start(test: &str, id: &UniqueId, rank: usize, n: usize, env: &[(&str, String)]) -> Self {
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
    fn line(&mut self) -> String {
        let mut line = String::new();
        while self.says.read_line(&mut line).unwrap() > 0 {
            if let Some((_, said)) = line.split_once("> ") {
                return said.trim().to_owned();
            }
            line.clear();
        }
        format!("it ended: {:?}", self.child.wait().unwrap())
    }

    fn go_on(&mut self) {
        self.hears.write_all(b"\n").unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(what: impl std::fmt::Display) {
    println!("\n> {what}");
    std::io::stdout().flush().unwrap();
}

fn wait_for_go() {
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// In a rank's process: which rank of which communicator.
fn who() -> Option<(UniqueId, usize, usize)> {
    let text = std::env::var(WHO).ok()?;
    let parts: Vec<&str> = text.split(' ').collect();
    let bytes: Vec<u8> = (0..parts[0].len() / 2)
        .map(|i| u8::from_str_radix(&parts[0][2 * i..2 * i + 2], 16).unwrap())
        .collect();
    let id = UniqueId::from_bytes(bytes.try_into().unwrap()).unwrap();
    Some((id, parts[1].parse().unwrap(), parts[2].parse().unwrap()))
}

/// The life of a rank: creation, an eager call, a capture, replays; then replays until somebody dies, or destruction.
fn live_as_rank(id: &UniqueId, rank: usize, n: usize) {
    // The log is off here: what goes wrong is said.
    let config = Config {
        lane: std::env::var("LANE").map_or(Lane::Auto, |lane| lane.parse().unwrap()),
        device: Device::Cuda { ordinal: Some(0) },
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
    say(explained.lines().find(|line| line.contains("lane")).unwrap());
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
    drop(buffers);
    comm.destroy().unwrap();
    drop(graph);
    if std::env::var_os("UNTIL_DEATH").is_none() {
        nothing_is_left();
    }
    say(format!("kept {}", kept_until_exit()));
}

fn start(test: &str, n: usize, env: impl Fn(usize) -> Vec<(&'static str, String)>) -> Vec<Process> {
    let id = UniqueId::new().unwrap();
    (0..n).map(|rank| Process::start(test, &id, rank, n, &env(rank))).collect()
}

#[test]
fn eight_processes_create_capture_replay_and_leave_over_every_lane() {
    const NAME: &str = "eight_processes_create_capture_replay_and_leave_over_every_lane";
    in_child(NAME, &[KERNELS], || {
        if let Some((id, rank, n)) = who() {
            return live_as_rank(&id, rank, n);
        }
        for lane in ["vmm", "ipc", "host"] {
            let mut ranks = start(NAME, 8, |_| vec![("LANE", lane.into())]);
            for rank in &mut ranks {
                let line = rank.line();
                assert!(line.contains(&format!("lane {lane}")), "{line}");
            }
            ranks.iter_mut().for_each(Process::go_on);
            for rank in &mut ranks {
                assert_eq!(rank.line(), "kept 0", "{lane}");
                assert!(rank.child.wait().unwrap().success(), "{lane}");
            }
        }
    });
}

#[test]
fn survivors_of_a_kill_in_the_middle_of_replays_learn_who_died() {
    const NAME: &str = "survivors_of_a_kill_in_the_middle_of_replays_learn_who_died";
    in_child(NAME, &[KERNELS], || {
        if let Some((id, rank, n)) = who() {
            return live_as_rank(&id, rank, n);
        }
        for (lane, killed) in [("vmm", 3), ("ipc", 0), ("host", 7)] {
            let mut ranks =
                start(NAME, 8, |_| vec![("LANE", lane.into()), ("UNTIL_DEATH", "1".into())]);
            for rank in &mut ranks {
                let line = rank.line();
                assert!(line.contains("lane"), "{line}");
            }
            std::thread::sleep(Duration::from_millis(100));
            ranks[killed].child.kill().unwrap();
            let start = Instant::now();
            for (r, rank) in ranks.iter_mut().enumerate().filter(|(r, _)| *r != killed) {
                assert_eq!(rank.line(), format!("rank {killed} died"), "{lane}, rank {r}");
            }
            let elapsed = start.elapsed();
            assert!(elapsed < Duration::from_secs(10), "{lane}: {elapsed:?}");
            for (r, rank) in ranks.iter_mut().enumerate().filter(|(r, _)| *r != killed) {
                let line = rank.line();
                assert_eq!(line, "kept 0", "{lane}, rank {r}");
                assert!(rank.child.wait().unwrap().success(), "{lane}, rank {r}");
            }
        }
    });
}

/// A handle that only one rank cannot open: all go over host memory, none is left behind.
#[test]
fn a_handle_that_one_process_cannot_open_moves_all_to_host_memory() {
    const NAME: &str = "a_handle_that_one_process_cannot_open_moves_all_to_host_memory";
    in_child(NAME, &[KERNELS, ("FAKECUDA_NO_VMM", "1")], || {
        if let Some((id, rank, n)) = who() {
            return live_as_rank(&id, rank, n);
        }
        // The code that boxes without peer access give.
        let mut ranks =
            start(NAME, 3, |_| vec![("FAKECUDA_FAIL", "cuIpcOpenMemHandle:1:2:101".into())]);
        for rank in &mut ranks {
            let line = rank.line();
            assert!(line.contains("lane host"), "{line}");
        }
        ranks.iter_mut().for_each(Process::go_on);
        for rank in &mut ranks {
            assert_eq!(rank.line(), "kept 0");
        }
    });
}

/// Every process sees its own GPU as the first, by number, by UUID or in another order: a GPU is its UUID.
#[test]
fn processes_that_see_different_gpus_as_the_first_find_each_other() {
    const NAME: &str = "processes_that_see_different_gpus_as_the_first_find_each_other";
    in_child(NAME, &[KERNELS, ("FAKECUDA_DEVICES", "4")], || {
        if let Some((id, rank, n)) = who() {
            return live_as_rank(&id, rank, n);
        }
        let reordered = ["0,1,2,3", "1,0,3,2", "GPU-fa6ecd02,3,0,1", "3,GPU-fa6ecd00-0000,1,2"];
        // The driver opens nothing of a GPU that the process does not see.
        let alone = ["0", "GPU-fa6ecd01", "2", "3"];
        for (lane, visible, used) in
            [("vmm", reordered, "vmm"), ("ipc", reordered, "ipc"), ("auto", alone, "host")]
        {
            let env = |rank: usize| {
                vec![("LANE", lane.into()), ("CUDA_VISIBLE_DEVICES", visible[rank].into())]
            };
            let mut ranks = start(NAME, 4, env);
            for rank in &mut ranks {
                let line = rank.line();
                assert!(line.contains(&format!("lane {used}")), "{line}");
            }
            ranks.iter_mut().for_each(Process::go_on);
            for rank in &mut ranks {
                assert_eq!(rank.line(), "kept 0");
            }
        }
        assert_eq!(live(), [0; 13]);
    });
}

/// A process that dies at each call of set-up it makes to the driver: the others fail alike, and soon.
#[test]
fn a_process_that_dies_in_set_up_is_named_by_all() {
    const NAME: &str = "a_process_that_dies_in_set_up_is_named_by_all";
    in_child(NAME, &[KERNELS], || {
        if let Some((id, rank, n)) = who() {
            return live_as_rank(&id, rank, n);
        }
        for call in
            ["cuMemAlloc", "cuMemCreate", "cuMemImportFromShareableHandle", "cuLaunchKernelEx"]
        {
            // Held up in this call, where it is then killed.
            let delay = format!("{call}:1:1:60000");
            let log =
                std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("set-up-{call}"));
            let _ = std::fs::remove_file(&log);
            let env = |rank: usize| {
                let log = (rank == 1).then(|| ("FAKECUDA_LOG", log.to_str().unwrap().to_owned()));
                log.into_iter().chain([("FAKECUDA_DELAY", delay.clone())]).collect()
            };
            let mut ranks = start(NAME, 3, env);
            // The log has a line for every call that has returned; when it grows no more, the process is in the delay.
            let lines = || std::fs::read_to_string(&log).map_or(0, |text| text.lines().count());
            let mut last = (0, Instant::now());
            while last.0 == 0 || last.1.elapsed() < Duration::from_millis(700) {
                std::thread::sleep(Duration::from_millis(20));
                if lines() != last.0 {
                    last = (lines(), Instant::now());
                }
            }
            ranks[1].child.kill().unwrap();
            let start = Instant::now();
            let said: Vec<_> = [0, 2].map(|r| ranks[r].line()).into();
            assert!(said[0] == said[1] && said[0].contains("rank 1"), "{call}: {said:?}");
            assert!(start.elapsed() < Duration::from_secs(10), "{call}: {:?}", start.elapsed());
        }
    });
}
