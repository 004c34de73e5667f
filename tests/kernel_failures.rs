//! Waits that end: deadline, abort, mismatched calls, two launches on one channel. Each leaves a record that says who
//! waited for whom, an output nobody can mistake for a result, and a channel that never runs again.

// Helpers of tests are tests too, but clippy's exemption stops at functions with #[test].
#![allow(clippy::unwrap_used)]

mod common;

use common::oracle;
use common::tables::{one_shot, two_shot};
use common::world::{payload, Buffers, Call, World, PLAIN};
use peerlane::launch::*;
use peerlane::{DType, Op, Protocol};
use std::time::{Duration, Instant};

const WAYS: [(Protocol, bool); 4] = [
    (Protocol::Ll, false),
    (Protocol::Sentinel, false),
    (Protocol::Flagged, false),
    (Protocol::Flagged, true),
];

const NAN: u64 = 0x7fff_ffff;
const MS: u64 = 1_000_000;

/// The given ranks make the call at once; their outputs.
fn run_ranks(world: &World, ranks: &[usize], call: &Call) -> Vec<Vec<u64>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .iter()
            .map(|&r| {
                scope.spawn(move || {
                    let mut buffers = Buffers::new(r, call);
                    buffers.run(world, r, call);
                    buffers.guards_hold(call);
                    buffers.output(call)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn all_nan(output: &[u64]) -> bool {
    !output.is_empty() && output.iter().all(|&v| v == NAN)
}

#[test]
fn a_wait_for_a_missing_rank_ends_and_names_it() {
    for (proto, pull) in WAYS {
        for build in [one_shot, two_shot] {
            let mut world = World::new(4, proto, pull, build);
            world.run(&[PLAIN, Call { seed: 8, ..PLAIN }]);
            // Long enough that a busy machine gets all three into the step: else one of them is named.
            world.deadline_ns = 300 * MS;
            let begun = Instant::now();
            // Ranks 0, 1 and 3 call; rank 2 does not.
            let outputs = run_ranks(&world, &[0, 1, 3], &PLAIN);
            assert!(begun.elapsed() < Duration::from_secs(10));
            assert!(outputs.iter().all(|o| all_nan(o)), "{proto} pull {pull}");
            let first = world.state(0).record;
            assert_eq!((first.reason, first.valid), (PL_REASON_DEADLINE, 1));
            for r in [0, 1, 3] {
                let (s, c) = (world.state(r), world.channel(r));
                assert_eq!((s.abort, s.record.valid), (PL_REASON_DEADLINE, 1));
                assert_eq!(
                    (s.record.peer, s.record.phase),
                    (2, 0),
                    "rank {r} waited for the missing one"
                );
                assert_eq!((s.record.step, s.record.bytes), (3, 4000));
                assert_eq!((c.epoch(), c.launch()), (3, 0), "a failed step advances nothing");
            }
            // Who gave up first has told the rank that was not there.
            let teller = world.state(0).record.rank as usize;
            let told = world.record(2, teller);
            assert_eq!((told.valid, told.rank, told.peer), (1, teller as u32, 2));
            // It comes late, finds the record, and gives up at once instead of waiting for its own deadline.
            world.deadline_ns = 60_000 * MS;
            let begun = Instant::now();
            let late = run_ranks(&world, &[2], &PLAIN);
            assert!(begun.elapsed() < Duration::from_secs(10));
            let s = world.state(2);
            if build(4, 2, false).phases == 2 {
                assert!(all_nan(&late[0]));
                assert_eq!((s.abort, s.record.peer), (PL_REASON_DEADLINE, 2));
            } else {
                // In one_shot everything it waits for has been sent, and it takes what is there.
                for (i, &got) in late[0].iter().enumerate() {
                    let inputs: Vec<_> = (0..4).map(|r| payload(&PLAIN, r, i)).collect();
                    assert_eq!(got, oracle::reduce(PLAIN.dtype, PLAIN.op, &inputs), "element {i}");
                }
                assert_eq!((s.abort, world.channel(2).epoch()), (0, 4));
            }
        }
    }
}

#[test]
fn a_failed_step_fills_integers_with_zero_and_every_dtype_with_its_own_nan() {
    for (dtype, fill) in [
        (DType::I8, 0),
        (DType::U64, 0),
        (DType::F16, 0x7fff),
        (DType::BF16, 0x7fff),
        (DType::F32, 0x7fff_ffff),
        (DType::F64, 0x7fff_ffff_ffff_ffff),
    ] {
        let mut world = World::new(2, Protocol::Flagged, false, one_shot);
        world.deadline_ns = MS;
        let call = Call { dtype, op: Op::Max, count: 333, shift: 1, ..PLAIN };
        let out = run_ranks(&world, &[0], &call);
        assert!(out[0].iter().all(|&v| v == fill), "{dtype}");
    }
}

#[test]
fn sticky_is_for_good() {
    for (proto, pull) in WAYS {
        let mut world = World::new(2, proto, pull, one_shot);
        world.run(&[PLAIN]);
        world.abort(0, PL_REASON_ABORTED);
        world.deadline_ns = 20 * MS;
        // Rank 0 sends nothing, so rank 1 cannot finish; the channel of rank 0 is untouched.
        let outputs = run_ranks(&world, &[0, 1], &PLAIN);
        assert!(outputs.iter().all(|o| all_nan(o)), "{proto} pull {pull}");
        assert_eq!((world.channel(0).epoch(), world.channel(0).launch()), (2, 0));
        assert_eq!(world.state(0).abort, PL_REASON_ABORTED, "the first reason stays");
        assert_eq!(world.state(1).abort, PL_REASON_DEADLINE);
        let again = run_ranks(&world, &[0, 1], &PLAIN);
        assert!(again.iter().all(|o| all_nan(o)));
    }
}

#[test]
fn an_abort_ends_a_wait_long_before_its_deadline() {
    for (proto, pull) in WAYS {
        let world = World::new(2, proto, pull, one_shot); // deadline 20 s
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| run_ranks(&world, &[0], &PLAIN));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waiting.is_finished(), "the control: without an abort it waits");
            world.raise(0, PL_REASON_RANK_DIED);
            assert!(all_nan(&waiting.join().unwrap()[0]));
        });
        assert!(begun.elapsed() < Duration::from_secs(10));
        assert_eq!(world.state(0).abort, PL_REASON_RANK_DIED);
        assert_eq!(world.record(1, 0).valid, 0, "the host's verdict is the host's to spread");
    }
}

/// A rank whose data has all arrived finishes the step even if the word is set meanwhile.
#[test]
fn a_wait_takes_what_is_there() {
    let mut world = World::new(2, Protocol::Flagged, false, one_shot);
    world.deadline_ns = 5 * MS;
    // Rank 0 sends, waits in vain and gives up. Rank 1 then finds rank 0's record, but also all of its data.
    assert!(all_nan(&run_ranks(&world, &[0], &PLAIN)[0]));
    assert_eq!(world.record(1, 0).reason, PL_REASON_DEADLINE);
    let out = run_ranks(&world, &[1], &PLAIN);
    let want =
        |i| oracle::reduce(PLAIN.dtype, PLAIN.op, &[payload(&PLAIN, 0, i), payload(&PLAIN, 1, i)]);
    assert!(out[0].iter().enumerate().all(|(i, &v)| v == want(i)));
    assert_eq!((world.state(1).abort, world.channel(1).epoch()), (0, 2));
}

#[test]
fn two_launches_on_one_channel_fail_on_all_ranks() {
    for (proto, pull) in WAYS {
        let world = World::new(2, proto, pull, one_shot);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| run_ranks(&world, &[0], &PLAIN));
            // The first launch holds the channel and waits for rank 1.
            std::thread::sleep(Duration::from_millis(30));
            assert!(!first.is_finished());
            let second = run_ranks(&world, &[0], &Call { seed: 99, ..PLAIN });
            assert!(all_nan(&second[0]), "it never waits, it never sends");
            assert!(all_nan(&first.join().unwrap()[0]));
        });
        let record = world.state(0).record;
        assert_eq!(
            (world.state(0).abort, record.reason),
            (PL_REASON_CONCURRENT, PL_REASON_CONCURRENT)
        );
        assert_eq!((record.rank, record.valid), (0, 1));
        assert_eq!(world.record(1, 0).reason, PL_REASON_CONCURRENT, "rank 1 is told");
    }
}

#[test]
fn launches_one_after_another_are_not_concurrent() {
    let world = World::new(2, Protocol::Ll, false, one_shot);
    world.run(&[PLAIN; 20]);
}

fn mismatch(change: impl Fn(&mut pl_args)) -> (pl_record, pl_record) {
    let mut world = World::new(3, Protocol::Ll, false, two_shot);
    world.check = true;
    world.deadline_ns = 5_000 * MS;
    world.run(&[PLAIN, Call { seed: 8, ..PLAIN }]);
    std::thread::scope(|scope| {
        for r in 0..3 {
            let (world, change) = (&world, &change);
            let mut rank = Buffers::new(r, &PLAIN).kernel_args(world, r, &PLAIN);
            let buffers = Buffers::new(r, &PLAIN);
            rank.args = buffers.kernel_args(world, r, &PLAIN).args;
            if r == 1 {
                change(&mut rank.args);
            }
            scope.spawn(move || {
                let rank = rank;
                // SAFETY: the world and the buffers live; no count grows beyond the buffers.
                unsafe { peerlane::device::cpu::all_reduce(&rank.args) }.unwrap();
                assert!(all_nan(&buffers.output(&PLAIN)[..500]));
            });
        }
    });
    for r in 0..3 {
        assert_eq!(world.state(r).abort, PL_REASON_MISMATCH, "rank {r}");
    }
    (world.state(0).record, world.state(1).record)
}

#[test]
fn different_calls_are_refused_and_the_record_says_what_differs() {
    let (at_0, at_1) = mismatch(|a| a.step.count = 999);
    for (rank, record) in [(0, at_0), (1, at_1)] {
        assert_eq!(record.valid, 1);
        // Whoever compared first has told the others.
        if record.rank == 1 {
            assert_eq!((record.count, record.phase), (1000, 1), "seen by rank 1, found at {rank}");
        } else {
            assert_eq!((record.peer, record.count, record.phase), (1, 999, 1), "found at {rank}");
        }
    }
    assert_eq!(mismatch(|a| a.step.op = PL_MAX).0.phase, 4);
    assert_eq!(mismatch(|a| a.step.algo = 3).0.phase, 8);
    assert_eq!(mismatch(|a| a.step.call += 1).0.phase, 32);
    assert_eq!(mismatch(|a| (a.step.op, a.step.count) = (PL_MIN, 998)).0.phase, 5);
}

/// Rank 1 of 3 takes the maximum where the others sum; `signature` is its call's.
fn another_op(pull: bool, build: common::world::Builder, signature: u64) -> (World, Vec<Vec<u64>>) {
    let mut world = World::new(3, Protocol::Flagged, pull, build);
    world.signature = 7 << 48;
    world.deadline_ns = 5_000 * MS;
    let call = Call { seed: 8, dtype: DType::I32, ..PLAIN };
    world.run(&[Call { dtype: DType::I32, ..PLAIN }, call]);
    let outputs = std::thread::scope(|scope| {
        let threads = [0, 1, 2].map(|r| {
            let world = &world;
            scope.spawn(move || {
                let buffers = Buffers::new(r, &call);
                let mut rank = buffers.kernel_args(world, r, &call);
                if r == 1 {
                    (rank.args.step.op, rank.args.step.signature) = (PL_MAX, signature);
                }
                // SAFETY: the world and the buffers live.
                unsafe { peerlane::device::cpu::all_reduce(&rank.args) }.unwrap();
                buffers.output(&call)
            })
        });
        threads.map(|t| t.join().unwrap()).to_vec()
    });
    (world, outputs)
}

#[test]
fn a_flag_of_another_call_is_taken_for_no_data_and_ends_the_wait() {
    for build in [one_shot, two_shot] {
        for pull in [false, true] {
            // The lowest and the highest bit of a signature.
            for bit in [48, 63] {
                let (world, outputs) = another_op(pull, build, 7 << 48 ^ 1 << bit);
                for (r, output) in outputs.iter().enumerate() {
                    assert!(output.iter().all(|&v| v == 0), "rank {r} got a sum of two calls");
                    let (s, c) = (world.state(r), world.channel(r));
                    assert_eq!(
                        (s.abort, s.record.reason),
                        (PL_REASON_MISMATCH, PL_REASON_MISMATCH)
                    );
                    assert_eq!((s.record.phase, s.record.step, c.epoch()), (64, 3, 3));
                    assert!(s.record.rank == 1 || s.record.peer == 1, "{:?}", s.record);
                }
            }
            // Control: without a signature the flags match, and ranks get results that differ.
            let (world, outputs) = another_op(pull, build, 7 << 48);
            assert!((0..3).all(|r| world.state(r).abort == 0));
            assert!(outputs[0].iter().any(|&v| v != 0));
        }
    }
}

#[test]
fn what_no_kernel_exists_for_is_refused_before_anything_happens() {
    let world = World::new(2, Protocol::Sentinel, false, one_shot);
    let refused = |change: &dyn Fn(&mut pl_args)| {
        let buffers = Buffers::new(0, &PLAIN);
        let mut args = buffers.kernel_args(&world, 0, &PLAIN).args;
        change(&mut args);
        // SAFETY: it must return before it touches anything.
        let error = unsafe { peerlane::device::cpu::all_reduce(&args) }.unwrap_err();
        assert_eq!(world.channel(0).launch(), 0);
        error.to_string()
    };
    assert!(refused(&|a| a.step.dtype = PL_F64).contains("sentinel cannot carry double"));
    assert!(refused(&|a| a.step.dtype = 77).contains("77"));
    assert!(refused(&|a| a.step.op = 9).contains('9'));
    assert!(refused(&|a| a.table.pull = 1).contains("cannot pull"));
    assert!(refused(&|a| a.step.chunk_packs = 0).contains("chunk_packs is 0"));
    assert!(refused(&|a| a.step.launch = 0).contains("launch id 0"));
    assert!(refused(&|a| a.table.rank = 2).contains("rank 2 of 2"));
}
