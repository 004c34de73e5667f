//! Ranks as threads: every schedule and protocol, eager and in graphs.
//!
//! `virtual`: up to nine share one GPU. `multi`: one on each GPU of the machine, over every lane that threads can have.

use crate::check;
use crate::support::{gpus, on_ranks, Case, Rank};
use peerlane::bootstrap::UniqueId;
use peerlane::comm::{Communicator, Config};
use peerlane::device::cuda::{Capture, CaptureMode, GraphExec};
use peerlane::schedule::{self, Islands};
use peerlane::{Algorithm, DType, Device, Direction, Error, Lane, Op, Protocol};
use std::sync::Barrier;
use std::time::{Duration, Instant};

pub const WAYS: [(Protocol, Direction); 4] = [
    (Protocol::Ll, Direction::Push),
    (Protocol::Sentinel, Direction::Push),
    (Protocol::Flagged, Direction::Push),
    (Protocol::Flagged, Direction::Pull),
];

/// Calls in the graph and replays of it: odd, so that halves alternate between replays.
const CALLS: usize = 3;
const REPLAYS: usize = 5;

pub fn config(n: usize) -> Result<Config, String> {
    let config = Config::from_env(n).map_err(|e| e.to_string())?;
    Ok(Config {
        device: Device::Cuda { ordinal: Some(0) },
        deadline: Duration::from_secs(10),
        ..config
    })
}

/// Sizes in bytes of bf16, and a few other types and operations.
fn cases(protocol: Protocol) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, bytes) in [16, 1000, 14_336, 114_688, 1 << 20].into_iter().enumerate() {
        cases.push(Case { dtype: DType::BF16, op: Op::Sum, count: bytes / 2, seed: i as u64 });
    }
    cases.push(Case { dtype: DType::F32, op: Op::Avg, count: 5003, seed: 11 });
    cases.push(Case { dtype: DType::F16, op: Op::Sum, count: 4099, seed: 12 });
    cases.push(Case { dtype: DType::BF16, op: Op::Max, count: 4099, seed: 13 });
    if protocol != Protocol::Sentinel {
        cases.push(Case { dtype: DType::I64, op: Op::Sum, count: 777, seed: 14 });
        cases.push(Case { dtype: DType::U8, op: Op::Prod, count: 777, seed: 15 });
        cases.push(Case { dtype: DType::F64, op: Op::Avg, count: 2049, seed: 16 });
    }
    cases
}

/// Where ranks are.
#[derive(Clone, Copy)]
enum Place {
    Shared,
    OneEach,
}

impl Place {
    fn gpu(self, rank: usize) -> u32 {
        match self {
            Place::Shared => 0,
            Place::OneEach => rank as u32,
        }
    }
}

/// Communicators of all ranks, each on its GPU.
fn create(n: usize, config: &Config, place: Place) -> Result<Vec<Communicator>, Error> {
    if matches!(place, Place::Shared) {
        return Communicator::create_local(n, config);
    }
    let id = UniqueId::new()?;
    std::thread::scope(|scope| {
        let create = |rank: usize| {
            let device = Device::Cuda { ordinal: Some(place.gpu(rank)) };
            let config = Config { device, ..config.clone() };
            let id = &id;
            scope.spawn(move || Communicator::create(id, n, rank, &config))
        };
        let ranks: Vec<_> = (0..n).map(create).collect();
        let joined = ranks.into_iter().map(|rank| rank.join());
        joined
            .map(|r| r.unwrap_or_else(|_| Err(Error::Internal("a rank panicked".into()))))
            .collect()
    })
}

/// A communicator of one rank on each of the first `gpus` GPUs. While they live, contexts and kernels stay there from one
/// communicator to the next: to make and unmake them for each takes many times as long as what is checked in between.
fn keep(gpus: usize) -> Result<Vec<Communicator>, String> {
    let base = config(1)?;
    std::thread::scope(|scope| {
        let create = |gpu: usize| {
            let device = Device::Cuda { ordinal: Some(gpu as u32) };
            let config = Config { device, ..base.clone() };
            scope.spawn(move || Communicator::create_local(1, &config))
        };
        let keepers: Vec<_> = (0..gpus).map(create).collect();
        let joined = keepers.into_iter().map(|keeper| keeper.join());
        let created = joined.map(|keeper| match keeper {
            Ok(created) => created.map_err(|e| e.to_string()),
            Err(_) => Err("a thread panicked".into()),
        });
        created
            .collect::<Result<Vec<_>, String>>()
            .map(|keepers| keepers.into_iter().flatten().collect())
    })
}

/// A rank on each GPU, over the direct lane and over the host-staged one.
pub fn run_on_all_gpus() {
    let gpus = match gpus() {
        Ok(gpus @ 2..=16) => gpus,
        Ok(gpus) => {
            return check("a rank on each GPU", || Err(format!("{gpus} GPUs; it takes 2 to 16")))
        }
        Err(why) => return check("a rank on each GPU", || Err(why)),
    };
    let _keepers = match keep(gpus) {
        Ok(keepers) => keepers,
        Err(why) => return check("a communicator of one rank on each GPU", || Err(why)),
    };
    for islands in partitions(gpus) {
        // Whatever the lane, the sums are those of the islands.
        let known = known(gpus, &islands);
        for lane in [Lane::Vmm, Lane::Host] {
            check(&format!("n={gpus} GPUs over {lane}, islands {islands}"), || {
                every_way(gpus, &islands, known.as_ref()?, lane, Place::OneEach)
            });
        }
    }
}

fn partitions(n: usize) -> impl Iterator<Item = Islands> {
    let mut partitions = vec![Islands::single(n)];
    if n > 1 {
        let half = n.div_ceil(2);
        partitions.push(Islands::new(n, vec![(0..half).collect(), (half..n).collect()]));
    }
    partitions.into_iter().flatten()
}

pub fn run() {
    let _keeper = match keep(1) {
        Ok(keeper) => keeper,
        Err(why) => return check("a communicator of one rank", || Err(why)),
    };
    for n in 1..=9 {
        for islands in partitions(n) {
            check(&format!("n={n} islands {islands}"), || {
                every_way(n, &islands, &known(n, &islands)?, Lane::Auto, Place::Shared)
            });
        }
    }
}

/// All cases and the CPU device's results of them.
fn known(n: usize, islands: &Islands) -> Result<Vec<(Case, Vec<u8>)>, String> {
    let config = Config { islands: Some(islands.clone()), ..config(n)? };
    cases(Protocol::Ll)
        .into_iter()
        .map(|case| case.expected(n, &config).map(|bits| (case, bits)).map_err(|e| e.to_string()))
        .collect()
}

fn every_way(
    n: usize,
    islands: &Islands,
    expected: &[(Case, Vec<u8>)],
    lane: Lane,
    place: Place,
) -> Result<String, String> {
    let base = Config { islands: Some(islands.clone()), lane, ..config(n)? };
    let mut ways = 0;
    let mut set_up = Duration::ZERO;
    let exists = |a: &&Algorithm| schedule::exists(**a, islands);
    for &algorithm in Algorithm::ALL.iter().filter(exists) {
        for (protocol, direction) in WAYS {
            let config = Config {
                algorithm: Some(algorithm),
                protocol: Some(protocol),
                direction: Some(direction),
                ..base.clone()
            };
            let begun = Instant::now();
            let comms = create(n, &config, place)
                .map_err(|e| format!("{algorithm} {protocol} {direction}: {e}"))?;
            set_up += begun.elapsed();
            let known: Vec<_> = cases(protocol)
                .into_iter()
                .filter_map(|case| expected.iter().find(|(c, _)| *c == case))
                .collect();
            let together = Barrier::new(n);
            on_ranks(comms, |comm| {
                let rank = Rank::new(comm, place.gpu(comm.rank()), 1 << 20);
                together.wait();
                let rank = rank?;
                let mut outcome = Ok(());
                for (case, bits) in &known {
                    let eager =
                        rank.reduce(case).and_then(|got| differs(&got, bits, case, "eager"));
                    let graph = capture(&rank, case);
                    // What allocates or frees may wait for the whole GPU, hence for kernels that wait for this rank.
                    together.wait();
                    let replayed = graph
                        .as_ref()
                        .map_err(Clone::clone)
                        .and_then(|graph| replay(&rank, graph, case, bits));
                    together.wait();
                    outcome = outcome.and(eager).and(replayed);
                }
                outcome
            })
            .map_err(|e| format!("{algorithm} {protocol} {direction}: {e}"))?;
            ways += 1;
        }
    }
    Ok(format!(
        "{ways} ways, {} cases each, eager and {REPLAYS} replays of {CALLS} calls; set-up {:.2} s of it",
        expected.len(),
        set_up.as_secs_f64()
    ))
}

fn capture(rank: &Rank, case: &Case) -> Result<GraphExec, Error> {
    rank.fill(case)?;
    let capture = Capture::begin(&rank.stream, CaptureMode::ThreadLocal)?;
    for _ in 0..CALLS {
        rank.call(case, None)?;
    }
    capture.end()?.instantiate()
}

fn replay(rank: &Rank, graph: &GraphExec, case: &Case, bits: &[u8]) -> Result<(), Error> {
    for _ in 0..REPLAYS {
        graph.launch(&rank.context.enter()?, rank.stream.as_ref())?;
    }
    rank.stream.synchronize()?;
    match rank.comm.error() {
        Some(error) => Err(error),
        None => differs(&rank.result(case)?, bits, case, "replayed"),
    }
}

fn differs(got: &[u8], expected: &[u8], case: &Case, how: &str) -> Result<(), Error> {
    if got == expected {
        return Ok(());
    }
    let byte = got.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(got.len());
    Err(Error::Internal(format!(
        "{case:?}, {how}: element {} differs from the CPU's",
        byte / case.dtype.size()
    )))
}
