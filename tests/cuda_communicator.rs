//! What a communicator on GPUs promises, shown against the stand-in driver.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/fakecuda.rs"]
mod fakecuda;
#[path = "../examples/gpu_smoke/support.rs"]
#[allow(dead_code)]
mod support;

use fakecuda::{in_child, live, register_kernel};
use peerlane::comm::{Communicator, Config};
use peerlane::env::Env;
use peerlane::launch::pl_args;
use peerlane::schedule::{self, Islands};
use peerlane::{Algorithm, DType, Device, Direction, Error, Lane, Op, Protocol};
use std::time::Duration;
use support::{Case, Rank};

const KERNELS: (&str, &str) = ("FAKECUDA_KERNEL_MAP", "pl_all_reduce_=pl_host_all_reduce");

/// The host's kernel under the name that the stand-in driver maps the GPU's to.
unsafe extern "C" fn run(args: *const pl_args) {
    // SAFETY: the stand-in driver passes a copy of the launch's parameter, whose addresses are memory of this process.
    let done = unsafe { peerlane::device::cpu::all_reduce(&*args) };
    if let Err(error) = done {
        eprintln!("{error}");
        std::process::abort();
    }
}

fn config(n: usize) -> Config {
    register_kernel("pl_host_all_reduce", run);
    // Anything is a fatbin to the stand-in driver.
    let kernels = std::env::temp_dir().join(format!("peerlane-fake-{}.fatbin", std::process::id()));
    std::fs::write(&kernels, b"an image").unwrap();
    Config {
        device: Device::Cuda { ordinal: Some(0) },
        kernels: Some(kernels),
        slab_bytes: Some(4 << 20),
        deadline: Duration::from_secs(60),
        ..Config::from_vars(n, &Env::default()).unwrap()
    }
}

/// Runs `work` on a thread per rank.
fn on_ranks<T: Send>(comms: Vec<Communicator>, work: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| work(comm))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn case(dtype: DType, op: Op, count: usize, seed: u64) -> Case {
    Case { dtype, op, count, seed }
}

const WAYS: [(Protocol, Direction); 4] = [
    (Protocol::Ll, Direction::Push),
    (Protocol::Sentinel, Direction::Push),
    (Protocol::Flagged, Direction::Push),
    (Protocol::Flagged, Direction::Pull),
];

#[test]
fn every_schedule_and_protocol_gives_the_bits_of_the_cpu() {
    in_child("every_schedule_and_protocol_gives_the_bits_of_the_cpu", &[KERNELS], || {
        for n in 1..=9usize {
            let halves = [(0..n.div_ceil(2)).collect(), (n.div_ceil(2)..n).collect::<Vec<_>>()];
            let islands = match n {
                1 => Islands::single(1).unwrap(),
                _ => Islands::new(n, halves.to_vec()).unwrap(),
            };
            let base = Config { islands: Some(islands.clone()), ..config(n) };
            let cases = [
                case(DType::BF16, Op::Sum, 7168, 1),
                case(DType::F32, Op::Avg, 1001, 2),
                case(DType::F16, Op::Sum, 3, 3),
            ];
            let expected: Vec<_> = cases.iter().map(|c| c.expected(n, &base).unwrap()).collect();
            for &algorithm in Algorithm::ALL.iter().filter(|&&a| schedule::exists(a, &islands)) {
                for (protocol, direction) in WAYS {
                    let config = Config {
                        algorithm: Some(algorithm),
                        protocol: Some(protocol),
                        direction: Some(direction),
                        ..base.clone()
                    };
                    on_ranks(Communicator::create_local(n, &config).unwrap(), |comm| {
                        let rank = Rank::new(&comm, 0, 1 << 16).unwrap();
                        for (case, expected) in cases.iter().zip(&expected) {
                            let got = rank.reduce(case).unwrap();
                            assert!(
                                got == *expected,
                                "n {n} {algorithm} {protocol} {direction} {case:?}"
                            );
                        }
                    });
                }
            }
        }
        assert_eq!(live()[1..], [0; 12], "something was left behind");
    });
}
