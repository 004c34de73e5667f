//! Communicators on GPUs over the stand-in driver.

// Each test binary that includes this uses its own share of it.
#![allow(dead_code)]

use super::fakecuda::{live, register_host_kernels, set_rank};
use super::support::Case;
use peerlane::bootstrap::UniqueId;
use peerlane::comm::{Communicator, Config};
use peerlane::env::Env;
use peerlane::{DType, Device, Error, Op, ProbeMode};
use std::time::{Duration, Instant};

/// The stand-in driver runs the host's kernel for every kernel of the GPU.
pub const KERNELS: (&str, &str) = ("FAKECUDA_KERNEL_MAP", hostkernels::REGISTERED);

/// All ranks on the first GPU. Nothing is measured, and nothing kept.
pub fn config(n: usize) -> Config {
    register_host_kernels();
    // Anything is a fatbin to the stand-in driver. Tests of other processes look for the same file: it appears whole.
    let kernels = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("fake.fatbin");
    if !kernels.exists() {
        let written = kernels.with_extension(format!(
            "{}.{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        std::fs::write(&written, b"an image").unwrap();
        std::fs::rename(&written, &kernels).unwrap();
    }
    Config {
        device: Device::Cuda { ordinal: Some(0) },
        kernels: Some(kernels),
        slab_bytes: Some(4 << 20),
        deadline: Duration::from_secs(60),
        setup_deadline: Duration::from_secs(30),
        probe: ProbeMode::Off,
        ..Config::from_vars(n, &Env::default()).unwrap()
    }
}

pub const fn case(dtype: DType, op: Op, count: usize, seed: u64) -> Case {
    Case { dtype, op, count, seed }
}

/// Creates a rank per thread, each known to the stand-in driver by its number, on the GPU that `ordinal` says.
pub fn create(
    n: usize,
    config: &Config,
    ordinal: impl Fn(usize) -> u32 + Sync,
) -> Vec<Result<Communicator, Error>> {
    let id = UniqueId::new().unwrap();
    std::thread::scope(|scope| {
        let (id, ordinal) = (&id, &ordinal);
        let ranks: Vec<_> = (0..n)
            .map(|rank| {
                scope.spawn(move || {
                    set_rank(rank);
                    let device = Device::Cuda { ordinal: Some(ordinal(rank)) };
                    Communicator::create(id, n, rank, &Config { device, ..config.clone() })
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Runs `work` on a thread per rank.
pub fn on_ranks<T: Send>(
    comms: Vec<Communicator>,
    work: impl Fn(Communicator) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let ranks: Vec<_> = comms
            .into_iter()
            .map(|comm| {
                scope.spawn(move || {
                    set_rank(comm.rank());
                    work(comm)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Waits for something that another thread brings about.
pub fn soon(what: &str, is: impl Fn() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Nothing of the driver's is left: no context, memory, mapping, stream, event, module, graph.
pub fn nothing_is_left() {
    soon("something was left behind", || live() == [0; 13]);
}
