//! A process per rank, over each lane: results, and a rank that is killed in the middle of replays.

use crate::check;
use crate::support::{gpus, Case, Rank};
use crate::virtual_ranks::config;
use peerlane::bootstrap::UniqueId;
use peerlane::comm::{Communicator, Config};
use peerlane::device::cuda::{Capture, CaptureMode};
use peerlane::{DType, Device, Error, Lane, Op};
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

const CASE: Case = Case { dtype: DType::BF16, op: Op::Sum, count: 7168, seed: 9 };
/// Processes take turns on a GPU, some milliseconds each, and every hop of every step waits for a turn: few ranks and short
/// graphs keep a round at a second or two, most of which is the start of CUDA.
const RANKS: usize = 3;
const KILLED: usize = 1;
const ROUNDS: usize = 10;
const CALLS: usize = 1;
const REPLAYS: usize = 2;

/// How ranks are placed: all on the first GPU, or one on each of so many.
#[derive(Clone, Copy)]
enum Place {
    Shared,
    OneEach(usize),
}

impl Place {
    fn ranks(self) -> usize {
        match self {
            Place::Shared => RANKS,
            Place::OneEach(gpus) => gpus,
        }
    }
}

/// What is checked.
#[derive(Clone, Copy)]
pub enum Part {
    Results,
    Kills,
}

/// In this order, so that what is cut short has shown the lane of most boxes, and then that of boxes without peer access.
const LANES: [Lane; 3] = [Lane::Vmm, Lane::Host, Lane::Ipc];

pub fn run() {
    for lane in LANES {
        on(Place::Shared, lane, Part::Results);
        on(Place::Shared, lane, Part::Kills);
    }
}

pub fn run_on_all_gpus(part: Part) {
    match gpus() {
        Ok(gpus @ 2..) => {
            LANES.into_iter().for_each(|lane| on(Place::OneEach(gpus.min(16)), lane, part));
        }
        Ok(_) => check("a process on each GPU", || Err("one GPU; it takes 2 or more".into())),
        Err(why) => check("a process on each GPU", || Err(why)),
    }
}

fn on(place: Place, lane: Lane, part: Part) {
    match part {
        Part::Results => check(&format!("a process per rank over {lane}"), || {
            together(lane, place, false).map(|_| String::new())
        }),
        Part::Kills => check(
            &format!("kill -9 in the middle of replays over {lane}, {ROUNDS} of {ROUNDS}"),
            || kills(lane, place),
        ),
    }
}

fn kills(lane: Lane, place: Place) -> Result<String, String> {
    let mut slowest = 0f64;
    for round in 0..ROUNDS {
        let start = Instant::now();
        let knew = together(lane, place, true).map_err(|e| format!("round {round}: {e}"))?;
        let took = start.elapsed().as_secs_f64();
        println!("  round {round}: {took:.2} s, survivors knew after {knew:.3} s");
        slowest = slowest.max(knew);
    }
    Ok(format!("survivors knew after {slowest:.3} s at most"))
}

struct Process {
    child: Child,
    says: BufReader<ChildStdout>,
}

impl Process {
    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        self.says.read_line(&mut line).map_err(|e| e.to_string())?;
        Ok(line.trim().to_owned())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One round; the seconds until all survivors knew.
fn together(lane: Lane, place: Place, kill: bool) -> Result<f64, String> {
    let id = UniqueId::new().map_err(|e| e.to_string())?;
    let hex: String = id.as_bytes().iter().map(|b| format!("{b:02x}")).collect();
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut ranks = Vec::new();
    for rank in 0..place.ranks() {
        let mut child = Command::new(&program)
            .args([
                "rank",
                &hex,
                &rank.to_string(),
                lane.name(),
                if kill { "for-ever" } else { "once" },
                &place.ranks().to_string(),
                match place {
                    Place::Shared => "shared",
                    Place::OneEach(_) => "one-each",
                },
            ])
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| e.to_string())?;
        let says = child.stdout.take().ok_or("no output")?;
        ranks.push(Process { child, says: BufReader::new(says) });
    }
    for (rank, process) in ranks.iter_mut().enumerate() {
        match process.line()?.as_str() {
            "ready" => {}
            other => return Err(format!("rank {rank} said '{other}'")),
        }
    }
    let mut killed = Instant::now();
    if kill {
        std::thread::sleep(Duration::from_millis(100));
        ranks[KILLED].child.kill().map_err(|e| e.to_string())?;
        killed = Instant::now();
    }
    for (rank, process) in ranks.iter_mut().enumerate().filter(|(rank, _)| !kill || *rank != KILLED)
    {
        let expected = if kill { format!("rank {KILLED} died") } else { "done".into() };
        let line = process.line()?;
        if line != expected {
            return Err(format!("rank {rank} said '{line}'"));
        }
    }
    let seconds = killed.elapsed().as_secs_f64();
    match kill {
        true if seconds > 2.0 => Err(format!("the survivors needed {seconds:.2} s")),
        _ => Ok(seconds),
    }
}

/// One rank in a process of its own: the id in hexadecimal, the rank, the lane, and for how long.
pub fn rank(arguments: &[String]) -> ExitCode {
    match arguments {
        [id, rank, lane, how_long, n, place] => {
            match work(id, rank, n, lane, place == "one-each", how_long == "for-ever") {
                Ok(()) => println!("done"),
                Err(error) => println!("{error}"),
            }
        }
        _ => println!("arguments: ID RANK LANE once|for-ever N shared|one-each"),
    }
    ExitCode::SUCCESS
}

fn work(
    id: &str,
    rank: &str,
    n: &str,
    lane: &str,
    one_each: bool,
    for_ever: bool,
) -> Result<(), String> {
    let text = |e: Error| e.to_string();
    let digits =
        |i: usize| id.get(2 * i..2 * i + 2).and_then(|two| u8::from_str_radix(two, 16).ok());
    let bytes: Option<Vec<u8>> = (0..id.len() / 2).map(digits).collect();
    let id = UniqueId::from_bytes(bytes.and_then(|b| b.try_into().ok()).ok_or("no id")?)
        .map_err(text)?;
    let rank: usize = rank.parse().map_err(|_| "no rank")?;
    let n: usize = n.parse().map_err(|_| "no number of ranks")?;
    let gpu = if one_each { rank as u32 } else { 0 };
    let device = Device::Cuda { ordinal: Some(gpu) };
    let config = Config { device, lane: lane.parse().map_err(text)?, ..config(n)? };
    let comm = Communicator::create(&id, n, rank, &config).map_err(text)?;
    let expected = CASE.expected(n, &config).map_err(text)?;
    let buffers = Rank::new(&comm, gpu, CASE.bytes()).map_err(text)?;
    if buffers.reduce(&CASE).map_err(text)? != expected {
        return Err("the eager result is wrong".into());
    }
    let capture = Capture::begin(&buffers.stream, CaptureMode::ThreadLocal).map_err(text)?;
    for _ in 0..CALLS {
        buffers.call(&CASE, None).map_err(text)?;
    }
    let graph = capture.end().and_then(|graph| graph.instantiate()).map_err(text)?;
    let replay = || -> Result<(), Error> {
        graph.launch(&buffers.context.enter()?, buffers.stream.as_ref())?;
        buffers.stream.synchronize()?;
        comm.error().map_or(Ok(()), Err)
    };
    for _ in 0..REPLAYS {
        replay().map_err(text)?;
    }
    if buffers.result(&CASE).map_err(text)? != expected {
        return Err("the replayed result is wrong".into());
    }
    println!("ready");
    if for_ever {
        loop {
            replay().map_err(text)?;
        }
    }
    drop(buffers);
    comm.destroy().map_err(text)
}
