//! Ranks that call differently, with nothing switched on to compare their calls: no rank may get a sum that is made of two
//! calls' data. `flagged` finds the difference by itself; `ll` and `sentinel` end at the deadline or, where words of both
//! calls fit each other, need `PEERLANE_CHECK`.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/ranks.rs"]
mod ranks;

use peerlane::comm::{Communicator, Config};
use peerlane::device::Stream;
use peerlane::schedule::Islands;
use peerlane::{Algorithm, DType, Direction, Error, Op, Protocol};
use ranks::{config, on_ranks};
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Most elements of any call here, of 8 bytes each.
const ROOM: usize = 700_000;

#[derive(Clone, Copy, Debug, PartialEq)]
struct Made {
    count: usize,
    dtype: DType,
    op: Op,
}

const fn made(count: usize, dtype: DType, op: Op) -> Made {
    Made { count, dtype, op }
}

/// What the other ranks call, and what rank 1 does.
const KINDS: [(&str, Made, Made); 8] = [
    ("count, a little", made(100, DType::F32, Op::Sum), made(101, DType::F32, Op::Sum)),
    ("count, twice", made(200, DType::F32, Op::Sum), made(100, DType::F32, Op::Sum)),
    ("dtype of one size", made(1000, DType::F32, Op::Sum), made(1000, DType::I32, Op::Sum)),
    ("dtype, equal bytes", made(1000, DType::F32, Op::Sum), made(2000, DType::BF16, Op::Sum)),
    ("op", made(1000, DType::I64, Op::Sum), made(1000, DType::I64, Op::Max)),
    ("avg for sum", made(3584, DType::BF16, Op::Sum), made(3584, DType::BF16, Op::Avg)),
    ("several steps, op", made(ROOM, DType::F32, Op::Sum), made(ROOM, DType::F32, Op::Min)),
    // Of the same steps at first; the smaller call ends in the middle of the larger.
    ("several steps, count", made(ROOM, DType::F32, Op::Sum), made(ROOM / 2, DType::F32, Op::Sum)),
];

/// The output after the call, and its result. Inputs are ones, so that a sum of old or foreign data shows.
fn call(comm: &Communicator, made: Made) -> (Vec<u8>, Result<(), Error>) {
    let one: &[u8] = match made.dtype {
        DType::F32 => &1f32.to_ne_bytes(),
        DType::BF16 => &0x3f80u16.to_ne_bytes(),
        DType::I32 => &1i32.to_ne_bytes(),
        _ => &1i64.to_ne_bytes(),
    };
    // Whole words, for the alignment of every type.
    let bytes = made.count * made.dtype.size();
    let mut input = vec![0u64; bytes.div_ceil(8)];
    let mut output = vec![0x5a5a_5a5a_5a5a_5a5au64; bytes.div_ceil(8)];
    bytemuck::cast_slice_mut::<_, u8>(&mut input)[..bytes].copy_from_slice(&one.repeat(made.count));
    // SAFETY: both hold `bytes` bytes and live through the call.
    let result = unsafe {
        comm.all_reduce(
            input.as_ptr().cast(),
            output.as_mut_ptr().cast(),
            made.count,
            made.dtype,
            made.op,
            None,
        )
    };
    (bytemuck::cast_slice(&output)[..bytes].to_vec(), result)
}

/// Whether it is the fill of a failed call from end to end: NaN, zero for integers.
fn is_filled(output: &[u8], dtype: DType) -> bool {
    let fill: &[u8] = match dtype {
        DType::F32 => &0x7fff_ffffu32.to_ne_bytes(),
        DType::BF16 => &0x7fffu16.to_ne_bytes(),
        _ => &[0],
    };
    output.chunks(fill.len()).all(|chunk| chunk == fill)
}

/// A call that all make, then one in which rank 1 differs; what each rank got of the latter, and its sticky error.
fn differing(config: &Config, n: usize, theirs: Made, ours: Made) -> Vec<(Vec<u8>, Error)> {
    let all_warm = Barrier::new(n);
    on_ranks(Communicator::create_local(n, config).unwrap(), |comm| {
        // Data of an earlier call in every slot, which a mismatched one could take for its own.
        for op in [Op::Sum, Op::Sum] {
            call(&comm, Made { count: ROOM, op, ..theirs }).1.unwrap();
        }
        // An error that comes while a rank is still in the call before would be that call's.
        all_warm.wait();
        let made = if comm.rank() == 1 { ours } else { theirs };
        let (output, result) = call(&comm, made);
        let error = match result {
            Err(error) => error,
            Ok(()) => panic!("rank {} got a result from {theirs:?} against {ours:?}", comm.rank()),
        };
        assert_eq!(comm.error(), Some(error.clone()));
        // Nobody leaves before all have seen it.
        std::thread::sleep(Duration::from_millis(100));
        (output, error)
    })
}

fn flagged(n: usize, algorithm: Algorithm, direction: Direction) -> Config {
    let islands = (n == 4).then(|| Islands::parse(4, "0-1,2-3").unwrap());
    Config {
        islands,
        algorithm: Some(algorithm),
        protocol: Some(Protocol::Flagged),
        direction: Some(direction),
        slab_bytes: Some(1 << 20),
        ..config(n)
    }
}

/// The defaults, and flagged in both directions through schedules with and without partial sums.
#[test]
fn flagged_calls_that_differ_fail_at_once_on_all_ranks_and_nobody_gets_a_sum() {
    let configs = [
        (2, Config { slab_bytes: Some(1 << 20), ..config(2) }),
        (3, Config { slab_bytes: Some(1 << 20), ..config(3) }),
        (2, flagged(2, Algorithm::OneShot, Direction::Pull)),
        (3, flagged(3, Algorithm::TwoShot, Direction::Push)),
        (4, flagged(4, Algorithm::Hierarchical, Direction::Push)),
        (4, flagged(4, Algorithm::Staged, Direction::Pull)),
    ];
    for (n, config) in configs {
        for (kind, theirs, ours) in KINDS {
            let begun = Instant::now();
            let all = differing(&config, n, theirs, ours);
            assert!(begun.elapsed() < Duration::from_secs(40), "{kind}: not by the deadline");
            for (rank, (output, error)) in all.iter().enumerate() {
                let made = if rank == 1 { ours } else { theirs };
                assert!(is_filled(output, made.dtype), "{kind}, rank {rank} of {n}: {error}");
                assert!(
                    matches!(error, Error::Mismatch(text) if text.contains("PEERLANE_CHECK")),
                    "{kind}, rank {rank} of {n}: {error}"
                );
            }
        }
    }
}

#[test]
fn under_check_the_difference_is_named_on_every_rank_by_every_protocol() {
    for (protocol, direction) in [
        (Protocol::Ll, Direction::Push),
        (Protocol::Flagged, Direction::Push),
        (Protocol::Flagged, Direction::Pull),
    ] {
        let config = Config { check: true, ..flagged(3, Algorithm::TwoShot, direction) };
        let config = Config { protocol: Some(protocol), ..config };
        for (kind, theirs, ours) in KINDS {
            if kind == "several steps, count" {
                continue; // its first steps are alike: found where it ends, by the call's number or by the flags
            }
            for (_, error) in differing(&config, 3, theirs, ours) {
                let Error::Mismatch(text) = &error else { panic!("{kind}, {protocol}: {error}") };
                assert!(!text.contains("PEERLANE_CHECK"), "{kind}, {protocol}: {text}");
                // What was called, at least by the rank that is named.
                let by_either = [theirs, ours].iter().any(|made| {
                    let counts = made.count == ROOM || text.contains(&made.count.to_string());
                    counts && text.contains(made.dtype.name()) && text.contains(made.op.name())
                });
                assert!(by_either, "{kind}, {protocol}: {text}");
            }
        }
    }
}

#[test]
fn calls_in_another_order_are_found_out() {
    let calls = [made(500, DType::F32, Op::Sum), made(500, DType::F32, Op::Max)];
    for check in [false, true] {
        let config = Config { check, ..config(3) };
        let errors = on_ranks(Communicator::create_local(3, &config).unwrap(), |comm| {
            let order = if comm.rank() == 2 { [1, 0] } else { [0, 1] };
            let results = order.map(|i| call(&comm, calls[i]).1);
            std::thread::sleep(Duration::from_millis(100));
            results[0].clone().unwrap_err()
        });
        for error in errors {
            let Error::Mismatch(text) = &error else { panic!("{error}") };
            assert!(text.contains("max") || !check, "{text}");
        }
    }
}

/// What `ll` and `sentinel` can do: where one waits for words that the other does not send, the deadline ends it. The
/// control for the flags: the words carry no signature, so a call with another operation is not found out.
#[test]
fn ll_and_sentinel_end_at_the_deadline_or_need_check() {
    for protocol in [Protocol::Ll, Protocol::Sentinel] {
        let config = Config {
            protocol: Some(protocol),
            // The calls before, and those that are to succeed, must make it on a busy machine.
            deadline: Duration::from_millis(1500),
            ..flagged(2, Algorithm::TwoShot, Direction::Push)
        };
        let (theirs, ours) = (made(100, DType::F32, Op::Sum), made(200, DType::F32, Op::Sum));
        for (rank, (output, error)) in differing(&config, 2, theirs, ours).iter().enumerate() {
            assert!(matches!(error, Error::Deadline { .. }), "{protocol}, rank {rank}: {error}");
            assert!(is_filled(output, DType::F32), "{protocol}, rank {rank}");
        }
        let results = on_ranks(Communicator::create_local(2, &config).unwrap(), |comm| {
            let op = [Op::Sum, Op::Max][comm.rank()];
            call(&comm, made(64, DType::F32, op)).1
        });
        assert_eq!(
            results,
            [Ok(()), Ok(())],
            "{protocol}: if this fails, the documentation may be bolder"
        );
    }
}

/// Promise 6 at this level: calls from several threads and streams are ordered, so two are never in flight at once.
#[test]
fn calls_from_several_threads_are_never_in_flight_at_once() {
    let comms = Communicator::create_local(2, &config(2)).unwrap();
    on_ranks(comms, |comm| {
        let stream = Stream::new().unwrap();
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (comm, stream) = (&comm, &stream);
                scope.spawn(move || {
                    for _ in 0..200 {
                        let input = [1f32; 64];
                        let mut output = [0f32; 64];
                        // All calls are alike, so any order is the same order on both ranks.
                        let on = (thread == 0).then_some(stream);
                        ranks::sum(comm, &input, &mut output, on).unwrap();
                        if thread == 0 {
                            stream.synchronize().unwrap();
                        }
                        assert_eq!(output, [2.0; 64]);
                    }
                });
            }
        });
        assert_eq!((comm.error(), comm.stats().calls, comm.stats().failed), (None, 600, 0));
    });
}
