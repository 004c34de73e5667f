//! Ranks of a communicator as threads of this process.

#![allow(dead_code)]

use peerlane::comm::{Communicator, Config};
use peerlane::device::Stream;
use peerlane::env::Env;
use peerlane::{DType, Error, Op};
use std::time::Duration;

/// The default configuration, but a test that goes wrong ends within a minute.
pub fn config(n: usize) -> Config {
    let deadline = Duration::from_secs(60);
    Config { deadline, ..Config::from_vars(n, &Env::default()).unwrap() }
}

pub fn sum(
    comm: &Communicator,
    input: &[f32],
    output: &mut [f32],
    stream: Option<&Stream>,
) -> Result<(), Error> {
    assert_eq!(input.len(), output.len());
    // SAFETY: both slices live through the call, and callers with a stream keep them until they have synchronised.
    unsafe {
        comm.all_reduce(
            input.as_ptr().cast(),
            output.as_mut_ptr().cast(),
            input.len(),
            DType::F32,
            Op::Sum,
            stream,
        )
    }
}

/// The sum takes the place of what is summed.
pub fn sum_in_place(comm: &Communicator, both: &mut [f32]) -> Result<(), Error> {
    let at = both.as_mut_ptr();
    // SAFETY: in place: one buffer, alive through the call.
    unsafe { comm.all_reduce(at.cast(), at.cast(), both.len(), DType::F32, Op::Sum, None) }
}

pub fn data(rank: usize, call: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7 + rank * 13 + call * 29) % 61) as f32 - 30.0).collect()
}

pub fn expected(n: usize, call: usize, count: usize) -> Vec<f32> {
    let mut all = vec![0.0; count];
    for rank in 0..n {
        for (a, v) in all.iter_mut().zip(data(rank, call, count)) {
            *a += v;
        }
    }
    all
}

/// Runs `work` on a thread per rank.
pub fn on_ranks<T: Send>(
    comms: Vec<Communicator>,
    work: impl Fn(Communicator) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| work(comm))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}
