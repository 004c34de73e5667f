//! Broadcast, all-gather and reduce-scatter on the CPU device: every type, counts that do not divide, in place and out, messages of
//! several steps, mixed with all-reduces on one communicator.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::undocumented_unsafe_blocks
)]

#[path = "common/ranks.rs"]
mod ranks;

use peerlane::comm::{Communicator, Config};
use peerlane::{Algorithm, DType, Direction, Error, Op};
use std::time::Duration;

fn config(n: usize) -> Config {
    Config { slab_bytes: Some(2 << 20), ..ranks::config(n) }
}

/// Runs `body` as every rank, each on a thread.
fn on_ranks(n: usize, config: &Config, body: impl Fn(&Communicator) + Sync) {
    let comms = Communicator::create_local(n, config).unwrap();
    std::thread::scope(|scope| {
        for comm in &comms {
            scope.spawn(|| body(comm));
        }
    });
}

/// Bytes that differ by rank, call and place, and that are all kinds of bits: NaN with payloads, -0 and whatever else.
fn bytes(rank: usize, call: usize, count: usize) -> Vec<u8> {
    let mut x = (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (call as u64) << 32;
    (0..count)
        .map(|_| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (x >> 56) as u8
        })
        .collect()
}

/// Guard bytes behind what may be written.
const GUARD: usize = 64;

fn guarded(mut data: Vec<u8>, size: usize) -> Vec<u8> {
    data.resize(size, 0xa5);
    data.resize(size + GUARD, 0x5a);
    data
}

fn unguarded(data: &[u8]) -> &[u8] {
    let (data, guard) = data.split_at(data.len() - GUARD);
    assert!(guard.iter().all(|&b| b == 0x5a), "wrote behind the output");
    data
}

fn broadcast(
    comm: &Communicator,
    call: usize,
    root: usize,
    count: usize,
    dtype: DType,
    in_place: bool,
) {
    let size = count * dtype.size();
    let mine = bytes(comm.rank(), call, size);
    let mut output = guarded(if in_place { mine.clone() } else { Vec::new() }, size);
    let to = output.as_mut_ptr();
    let from = match (in_place, comm.rank() == root) {
        (true, _) => to.cast_const(),
        (false, true) => mine.as_ptr(),
        // Nobody looks at it.
        (false, false) => std::ptr::null(),
    };
    unsafe { comm.broadcast(from.cast(), to.cast(), count, dtype, root, None).unwrap() };
    assert!(unguarded(&output) == bytes(root, call, size), "rank {} call {call}", comm.rank());
}

fn all_gather(comm: &Communicator, call: usize, count: usize, dtype: DType, in_place: bool) {
    let (size, n) = (count * dtype.size(), comm.size());
    let mine = bytes(comm.rank(), call, size);
    let mut output = guarded(Vec::new(), n * size);
    let to = output.as_mut_ptr();
    let own = to.wrapping_add(comm.rank() * size);
    if in_place {
        unsafe { own.copy_from(mine.as_ptr(), size) };
    }
    let from = if in_place { own.cast_const() } else { mine.as_ptr() };
    unsafe { comm.all_gather(from.cast(), to.cast(), count, dtype, None).unwrap() };
    let expected: Vec<u8> = (0..n).flat_map(|rank| bytes(rank, call, size)).collect();
    assert!(unguarded(&output) == expected, "rank {} call {call}", comm.rank());
}

/// Beside an all-reduce of the same data, whose bits it must have.
fn reduce_scatter(
    comm: &Communicator,
    call: usize,
    count: usize,
    dtype: DType,
    op: Op,
    in_place: bool,
) {
    let (size, n) = (count * dtype.size(), comm.size());
    let mine = bytes(comm.rank(), call, n * size);
    let mut all = mine.clone();
    let at = all.as_mut_ptr();
    unsafe { comm.all_reduce(at.cast(), at.cast(), n * count, dtype, op, None).unwrap() };
    let expected = &all[comm.rank() * size..][..size];
    if in_place {
        let mut data = guarded(mine.clone(), n * size);
        let from = data.as_mut_ptr();
        let to = from.wrapping_add(comm.rank() * size);
        unsafe { comm.reduce_scatter(from.cast(), to.cast(), count, dtype, op, None).unwrap() };
        let data = unguarded(&data);
        assert!(&data[comm.rank() * size..][..size] == expected, "{dtype} {op} call {call}");
        let (before, after) = (..comm.rank() * size, (comm.rank() + 1) * size..);
        assert!(
            data[before] == mine[before] && data[after.clone()] == mine[after],
            "others' parts"
        );
    } else {
        let mut output = guarded(Vec::new(), size);
        let to = output.as_mut_ptr();
        unsafe {
            comm.reduce_scatter(mine.as_ptr().cast(), to.cast(), count, dtype, op, None).unwrap()
        };
        assert!(unguarded(&output) == expected, "{dtype} {op} call {call}");
    }
}

/// Nothing, less than a pack, a pack and a bit, chunks, several steps of a slab of 2 MiB.
const COUNTS: [usize; 6] = [0, 1, 3, 37, 5_001, 300_001];

#[test]
fn every_type_and_count_in_place_and_out() {
    for n in 2..=8 {
        on_ranks(n, &config(n), |comm| {
            let mut call = 0;
            for (i, &dtype) in DType::ALL.iter().enumerate() {
                for (j, &count) in COUNTS.iter().enumerate() {
                    // The largest of two types a number of ranks: they take their time.
                    if count > 100_000 && i % 5 != n % 5 {
                        continue;
                    }
                    let in_place = (i + j + n) % 2 == 0;
                    broadcast(comm, call, (i + j) % n, count, dtype, in_place);
                    all_gather(comm, call + 1, count, dtype, !in_place);
                    let op = Op::ALL[(i + j) % Op::ALL.len()];
                    reduce_scatter(comm, call + 2, count, dtype, op, in_place);
                    call += 3;
                }
            }
            assert_eq!(comm.error(), None);
        });
    }
}

#[test]
fn both_forms_of_a_broadcast_and_both_directions() {
    for n in [2, 3, 5, 8] {
        for direction in [Direction::Push, Direction::Pull] {
            for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
                let config = Config {
                    algorithm: Some(algorithm),
                    direction: Some(direction),
                    protocol: Some(peerlane::Protocol::Flagged),
                    ..config(n)
                };
                on_ranks(n, &config, |comm| {
                    let mut call = 0;
                    for count in COUNTS {
                        for root in [0, n - 1] {
                            broadcast(comm, call, root, count, DType::BF16, call % 2 == 0);
                            all_gather(comm, call + 1, count / 3, DType::F32, call % 2 == 1);
                            reduce_scatter(
                                comm,
                                call + 2,
                                count / 3,
                                DType::F16,
                                Op::Avg,
                                call % 2 == 0,
                            );
                            call += 3;
                        }
                    }
                });
            }
        }
    }
}

/// Ranks that hurry and ranks that dawdle, with roots in turn: a writer that ran ahead would overwrite what is still being read.
#[test]
fn a_root_never_runs_ahead_of_its_readers() {
    on_ranks(4, &config(4), |comm| {
        for call in 0..3000 {
            if (call + comm.rank()) % 97 == 0 {
                std::thread::sleep(Duration::from_micros(300));
            }
            match call % 4 {
                0 | 1 => broadcast(comm, call, call / 50 % 4, 2_000, DType::U8, false),
                2 => all_gather(comm, call, 700, DType::U8, true),
                _ => reduce_scatter(comm, call, 300, DType::I32, Op::Sum, false),
            }
        }
    });
}

#[test]
fn a_rank_alone_keeps_what_it_has() {
    on_ranks(1, &config(1), |comm| {
        broadcast(comm, 0, 0, 100, DType::F32, false);
        all_gather(comm, 1, 100, DType::F32, false);
        reduce_scatter(comm, 2, 100, DType::F32, Op::Avg, false);
    });
}

#[test]
fn ranks_that_call_different_collectives_all_fail() {
    for other in 0..3 {
        let config = Config { deadline: Duration::from_secs(5), ..config(3) };
        let comms = Communicator::create_local(3, &config).unwrap();
        std::thread::scope(|scope| {
            for comm in &comms {
                scope.spawn(move || {
                    let (input, mut output) = ([1.0f32; 300], [1.0f32; 300]);
                    let (from, to) = (input.as_ptr().cast(), output.as_mut_ptr().cast());
                    let result = unsafe {
                        match (comm.rank() == 1, other) {
                            (false, _) => comm.broadcast(from, to, 100, DType::F32, 0, None),
                            (_, 0) => comm.broadcast(from, to, 100, DType::F32, 2, None),
                            (_, 1) => comm.all_gather(from, to, 100, DType::F32, None),
                            _ => comm.all_reduce(from, to, 100, DType::F32, Op::Sum, None),
                        }
                    };
                    let error = result.expect_err("one rank calls something else");
                    assert!(
                        matches!(error, Error::Mismatch(_) | Error::Deadline { .. }),
                        "{error}"
                    );
                    assert!(
                        output[..100].iter().all(|v| v.is_nan()),
                        "no result, and not what was there"
                    );
                });
            }
        });
    }
}

#[test]
fn what_cannot_be_is_refused_before_anybody_waits() {
    let comms = Communicator::create_local(2, &config(2)).unwrap();
    let mut data = [0u32; 64];
    let at = data.as_mut_ptr();
    let refused = |result: peerlane::Result<()>| match result {
        Err(Error::InvalidArgument(why)) => why,
        other => panic!("{other:?}"),
    };
    unsafe {
        let (from, to) = (at.cast_const().cast(), at.wrapping_add(32).cast());
        assert!(
            refused(comms[0].broadcast(from, to, 4, DType::F32, 2, None)).contains("root 2 of 2")
        );
        let null = std::ptr::null_mut();
        assert!(refused(comms[0].broadcast(from, null, 4, DType::F32, 1, None))
            .contains("output is null"));
        assert!(
            refused(comms[0].broadcast(null, to, 4, DType::F32, 0, None)).contains("input is null")
        );
        // Rank 1's part in rank 0's output.
        let wrong =
            refused(comms[0].all_gather(at.wrapping_add(36).cast(), to, 4, DType::F32, None));
        assert!(wrong.contains("overlap"), "{wrong}");
        let wrong = refused(comms[1].reduce_scatter(from, at.cast(), 4, DType::F32, Op::Sum, None));
        assert!(wrong.contains("overlap"), "{wrong}");
        let wrong = refused(comms[0].all_gather(from, to, usize::MAX / 5, DType::F32, None));
        assert!(wrong.contains("overflow"), "{wrong}");
    }
    assert_eq!(comms[0].error(), None);
}
