//! The kernels against a naive oracle, bit for bit: ranks as threads, no communicator.

// Helpers of tests are tests too, but clippy's exemption stops at functions with #[test].
#![allow(clippy::unwrap_used)]

mod common;

use common::tables::{doubling, one_shot, root_sends_accumulators, two_shot};
use common::world::{Builder, Call, World};
use peerlane::{DType, Op, Protocol};

/// Every way data can travel.
const WAYS: [(Protocol, bool); 4] = [
    (Protocol::Ll, false),
    (Protocol::Sentinel, false),
    (Protocol::Flagged, false),
    (Protocol::Flagged, true),
];

fn schedules(n: usize) -> Vec<(&'static str, Builder)> {
    let mut all: Vec<(&'static str, Builder)> =
        vec![("one_shot", one_shot), ("two_shot", two_shot)];
    if n == 2 || n == 4 {
        all.push(("doubling", doubling));
    }
    if n > 1 {
        all.push(("root_sends_accumulators", root_sends_accumulators));
    }
    all
}

fn dtypes(proto: Protocol) -> impl Iterator<Item = DType> {
    DType::ALL.iter().copied().filter(move |d| proto != Protocol::Sentinel || d.has_sentinel())
}

/// Every data type and operation, with counts that are 0, 1, odd, fewer than the ranks, and several chunks long, in
/// place and not, aligned and not, one after another on one channel.
#[test]
fn every_type_and_operation_has_the_bits_of_the_tree() {
    for n in 1..=4 {
        for (name, build) in schedules(n) {
            for (proto, pull) in WAYS {
                let mut calls = Vec::new();
                for dtype in dtypes(proto) {
                    for &op in Op::ALL {
                        for (i, count) in [0, 1, 3, 257, 2000].into_iter().enumerate() {
                            let seed = (calls.len() as u64) << 4 | n as u64;
                            let shift = [0, 1, 3][(i + calls.len()) % 3];
                            let in_place = (calls.len() / 5 + i) % 2 == 1;
                            calls.push(Call { dtype, op, count, in_place, shift, seed });
                        }
                    }
                }
                println!("n {n} {name} {proto} pull {pull}");
                World::new(n, proto, pull, build).run(&calls);
            }
        }
    }
}
