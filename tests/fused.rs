//! The fused all-reduce + residual + RMSNorm: the bits of its unfused twin and of a naive reference, whatever carries it.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/ranks.rs"]
mod ranks;
#[path = "common/rows.rs"]
mod rows;

use peerlane::comm::{group_end, group_start, Communicator, Config};
use peerlane::device::Stream;
use peerlane::schedule::{exists, Islands, Tree};
use peerlane::{Algorithm, DType, Direction, Error, Op, Protocol};
use ranks::{config, on_ranks};
use rows::{beyond_one_rounding, call_and_compare, in_turn, Buffers, Case, Form, FORMS};
use std::time::Duration;

const WAYS: [(Protocol, Direction); 4] = [
    (Protocol::Ll, Direction::Push),
    (Protocol::Sentinel, Direction::Push),
    (Protocol::Flagged, Direction::Push),
    (Protocol::Flagged, Direction::Pull),
];

const fn case(rows: usize, width: usize, dtype: DType, seed: u64) -> Case {
    let weight_bias = if seed % 3 == 1 { 1.0 } else { 0.0 };
    Case { rows, width, dtype, eps: 1e-6, weight_bias, seed }
}

/// Rows of one pack (fewer than there are pieces), two, an odd number, and of a real model.
fn cases(n: usize) -> Vec<Case> {
    let seed = n as u64 * 100;
    vec![
        case(1, 8, DType::BF16, seed),
        case(11, 8, DType::F16, seed + 1),
        case(3, 16, DType::BF16, seed + 2),
        case(21, 264, DType::F16, seed + 3),
        case(7, 264, DType::BF16, seed + 4),
        case(1, 7168, DType::BF16, seed + 5),
        case(3, 7168, DType::F16, seed + 6),
    ]
}

fn partitions(n: usize) -> Vec<Islands> {
    let mut all = vec![Islands::single(n).unwrap()];
    if n > 1 {
        let half = n.div_ceil(2);
        all.push(Islands::new(n, vec![(0..half).collect(), (half..n).collect()]).unwrap());
    }
    if n > 3 {
        // Unequal, and not in the ranks' order.
        let (odd, even): (Vec<_>, Vec<_>) = (0..n).partition(|r| r % 3 == 1);
        all.push(Islands::new(n, vec![odd, even]).unwrap());
    }
    all
}

/// Every communicator that can serve `n` ranks over these islands by one schedule and way.
fn ways(n: usize, islands: &Islands) -> Vec<(String, Config)> {
    let mut all = Vec::new();
    for &algorithm in Algorithm::ALL.iter().filter(|&&a| exists(a, islands)) {
        for (protocol, direction) in WAYS {
            let config = Config {
                islands: Some(islands.clone()),
                algorithm: Some(algorithm),
                protocol: Some(protocol),
                direction: Some(direction),
                ..config(n)
            };
            let name = format!("n {n}, islands {islands}, {algorithm} {protocol} {direction}");
            all.push((name, config));
        }
    }
    all
}

fn every_way(n: usize) {
    for islands in partitions(n) {
        let tree = Tree::new(&islands);
        let known: Vec<_> = cases(n).into_iter().map(|c| (c, c.expected(&tree))).collect();
        for (k, (name, config)) in ways(n, &islands).into_iter().enumerate() {
            on_ranks(Communicator::create_local(n, &config).unwrap(), |comm| {
                for (i, (case, expected)) in known.iter().enumerate() {
                    let form = FORMS[(i + k) % FORMS.len()];
                    for fused in [true, false] {
                        if let Err(why) = call_and_compare(&comm, *case, form, fused, expected) {
                            panic!("{name}: {why}");
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn one_to_five_ranks_get_the_bits_of_the_reference_fused_and_not() {
    (1..=5).for_each(every_way);
}

#[test]
fn six_to_nine_ranks_get_the_bits_of_the_reference_fused_and_not() {
    (6..=9).for_each(every_way);
}

#[test]
fn sixteen_ranks_get_the_bits_of_the_reference_fused_and_not() {
    every_way(16);
}

#[test]
fn every_aliasing_form_gives_the_same_bits() {
    let islands = Islands::parse(4, "0-1,2-3").unwrap();
    let tree = Tree::new(&islands);
    let case = case(5, 264, DType::BF16, 31);
    let expected = case.expected(&tree);
    for (name, config) in ways(4, &islands) {
        on_ranks(Communicator::create_local(4, &config).unwrap(), |comm| {
            for form in FORMS {
                for fused in [true, false] {
                    if let Err(why) = call_and_compare(&comm, case, form, fused, &expected) {
                        panic!("{name}: {why}");
                    }
                }
            }
        });
    }
}

#[test]
fn the_norm_is_within_one_rounding_of_fp64() {
    let mut checked = 0;
    for n in 1..=9 {
        let islands = Islands::single(n).unwrap();
        let tree = Tree::new(&islands);
        for case in cases(n) {
            let expected = case.expected(&tree);
            let comms = Communicator::create_local(n, &config(n)).unwrap();
            let outputs = on_ranks(comms, |comm| {
                let mut buffers = Buffers::new(case, Form::Apart, comm.rank());
                buffers.call(&comm, true, None).unwrap();
                buffers.outputs()
            });
            for outputs in outputs {
                assert_eq!(beyond_one_rounding(&case, &outputs), None);
                assert!(outputs == expected);
                checked += outputs.normed.len();
            }
            // Control: one spacing more in one place is seen.
            let mut off = expected.clone();
            off.normed[2] ^= 1;
            assert!(beyond_one_rounding(&case, &off).is_some(), "{case:?}");
        }
    }
    assert!(checked > 500_000);
}

/// The control of all comparisons of bits: the data tell another order of the squares' sum.
#[test]
fn the_data_tell_orders_apart() {
    let tree = Tree::new(&Islands::single(3).unwrap());
    let case = Case { rows: 40, ..case(40, 7168, DType::F16, 5) };
    let (right, wrong) = (case.expected(&tree), case.expected_with(&tree, in_turn));
    assert!(right.residual == wrong.residual && right.normed != wrong.normed);
}

#[test]
fn more_rows_than_the_slab_holds_take_several_steps() {
    let islands = Islands::parse(4, "0-2,3").unwrap();
    let tree = Tree::new(&islands);
    for case in [case(301, 264, DType::BF16, 8), case(37, 7168, DType::F16, 9)] {
        let expected = case.expected(&tree);
        let mut several = 0;
        for (name, config) in ways(4, &islands) {
            let config = Config { slab_bytes: Some(1 << 20), ..config };
            let steps = on_ranks(Communicator::create_local(4, &config).unwrap(), |comm| {
                let call = |form, fused| {
                    if let Err(why) = call_and_compare(&comm, case, form, fused, &expected) {
                        panic!("{name}: {why}");
                    }
                };
                call(Form::Apart, true);
                call(Form::BothInPlace, true);
                let steps = comm.stats().steps;
                call(Form::ResidualOverInput, false);
                steps
            });
            assert!(steps.iter().all(|s| *s == steps[0]), "cut alike on all ranks");
            several += usize::from(steps[0] > 2);
        }
        assert!(several >= 8, "{case:?}: {several} ways took several steps");
    }
}

#[test]
fn a_row_wider_than_the_slab_is_refused_and_served_unfused() {
    let case = case(2, 1 << 19, DType::BF16, 3);
    let expected = case.expected(&Tree::new(&Islands::single(2).unwrap()));
    let config =
        Config { slab_bytes: Some(1 << 20), algorithm: Some(Algorithm::OneShot), ..config(2) };
    on_ranks(Communicator::create_local(2, &config).unwrap(), |comm| {
        let mut buffers = Buffers::new(case, Form::BothInPlace, comm.rank());
        let error = buffers.call(&comm, true, None).unwrap_err();
        let Error::Unsupported(text) = &error else { panic!("{error}") };
        assert!(text.contains("524288") && text.contains("PEERLANE_SLAB"), "{text}");
        assert!(text.contains("unfused"), "{text}");
        assert_eq!(buffers.outputs().residual, case.residual(), "nothing was touched");
        call_and_compare(&comm, case, Form::BothInPlace, false, &expected).unwrap();
    });
}

#[test]
fn empty_calls_and_calls_in_groups_and_on_streams_are_as_for_an_all_reduce() {
    let n = 3;
    let comms = Communicator::create_local(n, &config(n)).unwrap();
    let case = case(4, 264, DType::BF16, 12);
    let expected = case.expected(&Tree::new(&Islands::single(n).unwrap()));
    let none = Case { rows: 0, ..case };
    let streams: Vec<_> = (0..n).map(|_| Stream::new().unwrap()).collect();
    let fresh = |rank| Buffers::new(case, Form::BothInPlace, rank);
    let mut buffers: Vec<_> = (0..2 * n).map(|i| fresh(i % n)).collect();
    group_start();
    for rank in 0..n {
        Buffers::new(none, Form::Apart, rank).call(&comms[rank], true, None).unwrap();
        buffers[rank].call(&comms[rank], true, None).unwrap();
        buffers[n + rank].call(&comms[rank], false, Some(&streams[rank])).unwrap();
    }
    group_end().unwrap();
    for (rank, stream) in streams.iter().enumerate() {
        stream.synchronize().unwrap();
        assert!(buffers[rank].outputs() == expected);
        assert!(buffers[n + rank].outputs() == expected);
        let stats = comms[rank].stats();
        assert_eq!((stats.calls, stats.steps, stats.failed), (3, 2, 0));
        assert_eq!(stats.bytes, 2 * 2 * case.count() as u64);
    }
}

fn all_nan(outputs: &rows::Outputs) -> bool {
    outputs.normed.iter().chain(&outputs.residual).all(|&v| v == 0x7fff)
}

/// Both outputs are NaN, also where one of them held the residual; the error is sticky and names the rank that is missing.
#[test]
fn a_failed_call_leaves_nan_in_both_outputs() {
    for (protocol, direction) in WAYS {
        for fused in [true, false] {
            let config = Config {
                protocol: Some(protocol),
                direction: Some(direction),
                deadline: Duration::from_millis(300),
                // Several steps: what the failed one leaves undone is filled as well.
                slab_bytes: Some(1 << 20),
                ..config(3)
            };
            let case = case(90, 7168, DType::BF16, 4);
            on_ranks(Communicator::create_local(3, &config).unwrap(), |comm| {
                if comm.rank() == 2 {
                    while comm.error().is_none() {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    return std::thread::sleep(Duration::from_millis(300));
                }
                for form in [Form::Apart, Form::BothInPlace, Form::ResidualOverInput] {
                    let mut buffers = Buffers::new(case, form, comm.rank());
                    let error = buffers.call(&comm, fused, None).unwrap_err();
                    assert!(
                        matches!(error, Error::Deadline { peer: 2, rank: 0 | 1, .. }),
                        "{error}"
                    );
                    assert!(all_nan(&buffers.outputs()), "{protocol} {direction} {form:?} {fused}");
                    assert_eq!(buffers.stray_write(comm.rank()), None);
                }
                std::thread::sleep(Duration::from_millis(300));
            });
        }
    }
}

type CallOnRank = dyn Fn(&Communicator) -> Result<(), Error> + Sync;

/// What two ranks get that make these calls.
fn mismatched(config: &Config, calls: [&CallOnRank; 2]) -> Vec<Result<(), Error>> {
    on_ranks(Communicator::create_local(2, config).unwrap(), |comm| {
        let result = calls[comm.rank()](&comm);
        // Nobody leaves before all have seen it.
        std::thread::sleep(Duration::from_millis(200));
        result
    })
}

#[test]
fn ranks_that_disagree_about_rows_or_fusion_fail_together() {
    let base = Config { deadline: Duration::from_secs(20), ..config(2) };
    let norm = |rows, width| {
        move |comm: &Communicator| {
            let case = case(rows, width, DType::BF16, 1);
            Buffers::new(case, Form::Apart, comm.rank()).call(comm, true, None)
        }
    };
    let plain = |comm: &Communicator| {
        let mut both = [0u16; 128];
        let at = both.as_mut_ptr().cast();
        // SAFETY: in place, in an array that lives through the call.
        unsafe { comm.all_reduce(at, at, both.len(), DType::BF16, Op::Sum, None) }
    };
    for check in [false, true] {
        let config = Config {
            check,
            protocol: Some(if check { Protocol::Ll } else { Protocol::Flagged }),
            ..base.clone()
        };
        for (name, result) in [
            ("widths", mismatched(&config, [&norm(4, 32), &norm(2, 64)])),
            ("an all-reduce", mismatched(&config, [&norm(4, 32), &plain])),
        ] {
            for result in result {
                let Err(Error::Mismatch(text)) = &result else { panic!("{name}: {result:?}") };
                assert!(!check || text.contains("width"), "{text}");
            }
        }
        let same = mismatched(&config, [&norm(4, 32), &norm(4, 32)]);
        assert_eq!(same, [Ok(()), Ok(())], "the control");
    }
}
