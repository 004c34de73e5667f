//! The signature of a call, by which `flagged` keeps data of different calls apart (`cuda/protocol_flagged.cuh`).

use super::call::Call;
use crate::plan::Choice;
use crate::schedule::Goal;
use crate::types::DType;

/// Codes of all-reduces alone: types, operations, ways.
const CODES: u64 = 10 * 5 * 6 * 3 * 2;
/// Codes that are left over for fused calls, a hundred-odd types and ways for each of so many widths.
const WIDTHS: u64 = 800;
/// Where the codes of the other collectives begin: roots, forms, types, operations and directions of those.
const OTHERS: u64 = CODES + WIDTHS * 2 * 6 * 3 * 2;

/// What `flagged` puts into the high 16 bits of its flags: differs where calls do. Calls of one count that differ in type,
/// operation or way always differ in it, and so do calls alike in those whose counts differ by less than 65,536 within
/// one such range; any other two are alike by chance once in 65,536.
///
/// A fused call differs from every all-reduce of its count, and from fused ones whose widths differ by less than 6,400. The
/// unfused form is an all-reduce to the other ranks, and has the signature of one.
pub(super) fn signature(call: &Call, choice: Choice) -> u64 {
    let way = [
        (call.dtype as u64, 10),
        (call.op as u64, 5),
        (choice.algorithm as u64, 6),
        (choice.protocol as u64, 3),
        (choice.direction as u64, 2),
    ];
    let fold = |code, (value, values): &(u64, u64)| code * values + value;
    let code = match call.rows() {
        None if call.other.is_some() => OTHERS + other(call, choice),
        None => way.iter().fold(0, fold),
        Some((_, width)) => {
            // Of types there are two here, and one operation.
            let dtype = u64::from(call.dtype == DType::F16);
            CODES + way[2..].iter().fold((width / 8) % WIDTHS * 2 + dtype, fold)
        }
    };
    let count = call.count as u64;
    let count = count ^ count >> 16 ^ count >> 32 ^ count >> 48;
    // An odd factor (2^16 over the golden ratio) moves every bit and loses none: without it one count more would make up
    // for one operation less.
    (code.wrapping_mul(0x9e37).wrapping_add(count) & 0xffff) << 48
}

/// A number below 920 of what is no all-reduce.
fn other(call: &Call, choice: Choice) -> u64 {
    let Some(other) = call.other else { return 0 };
    let way = call.dtype as u64 * 2 + choice.direction as u64;
    match other.goal {
        Goal::Broadcast { root } => {
            (u64::from(root) * 2 + u64::from(other.parts.is_some())) * 20 + way
        }
        Goal::AllGather => 640 + way,
        Goal::ReduceScatter | Goal::AllReduce => 660 + call.op as u64 * 20 + way,
    }
}

const _: () = assert!(OTHERS + 920 <= 1 << 16, "a code fits the flag's 16 bits");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::call::{Norm, Other};
    use crate::types::{Algorithm, Direction, Op, Protocol};
    use std::collections::HashSet;

    fn of(count: usize, dtype: DType, op: Op, algorithm: Algorithm) -> u64 {
        signature(&call(count, dtype, op), choice(algorithm))
    }

    fn call(count: usize, dtype: DType, op: Op) -> Call {
        let (input, output) = (std::ptr::null(), std::ptr::null_mut());
        Call { input, output, count, dtype, op, norm: None, other: None }
    }

    fn choice(algorithm: Algorithm) -> Choice {
        Choice { algorithm, protocol: Protocol::Flagged, direction: Direction::Pull }
    }

    fn of_rows(rows: usize, width: usize, dtype: DType, fused: bool) -> u64 {
        let norm = Norm {
            residual: std::ptr::null(),
            gamma: std::ptr::null(),
            residual_out: std::ptr::null_mut(),
            rows,
            width,
            eps: 0.0,
            weight_bias: 0.0,
            fused,
        };
        let call = Call { norm: Some(norm), ..call(rows * width, dtype, Op::Sum) };
        signature(&call, choice(Algorithm::TwoShot))
    }

    #[test]
    fn fused_calls_share_a_signature_with_no_all_reduce_and_with_no_other_width() {
        let count = 7168 * 48;
        let mut seen = HashSet::new();
        for &dtype in DType::ALL {
            for &op in Op::ALL {
                for &algorithm in Algorithm::ALL {
                    seen.insert(of(count, dtype, op, algorithm));
                }
            }
        }
        for width in (8..6400).step_by(8).filter(|width| count % width == 0) {
            for dtype in [DType::F16, DType::BF16] {
                let fused = of_rows(count / width, width, dtype, true);
                assert_eq!(fused << 16, 0);
                assert!(seen.insert(fused), "{width} {dtype}");
            }
        }
        assert_eq!(
            of_rows(48, 7168, DType::BF16, false),
            of(count, DType::BF16, Op::Sum, Algorithm::TwoShot),
            "unfused it is an all-reduce"
        );
    }

    #[test]
    fn other_collectives_share_a_signature_with_nothing_else() {
        let mut seen = HashSet::new();
        let directions = [Direction::Push, Direction::Pull];
        for &dtype in DType::ALL {
            for &op in Op::ALL {
                for &algorithm in Algorithm::ALL {
                    seen.insert(of(4096, dtype, op, algorithm));
                }
                for direction in directions {
                    let choice = Choice { direction, ..choice(Algorithm::OneShot) };
                    let mut add = |goal, parts| {
                        let other = Some(Other { goal, ranks: 16, rank: 0, parts });
                        let call = Call { other, ..call(4096, dtype, op) };
                        seen.insert(signature(&call, choice))
                    };
                    assert!(add(Goal::ReduceScatter, Some([64, 0])), "{dtype} {op}");
                    if op != Op::Sum {
                        continue;
                    }
                    assert!(add(Goal::AllGather, Some([0, 64])), "{dtype}");
                    for root in 0..16 {
                        let goal = Goal::Broadcast { root };
                        assert!(add(goal, None) && add(goal, Some([64, 64])), "{dtype} {root}");
                    }
                }
            }
        }
    }

    #[test]
    fn calls_of_one_count_never_share_a_signature() {
        for count in [1, 3584, 1 << 20, 123_456_789_012] {
            let mut seen = HashSet::new();
            for &dtype in DType::ALL {
                for &op in Op::ALL {
                    for &algorithm in Algorithm::ALL {
                        let signature = of(count, dtype, op, algorithm);
                        assert_eq!(signature << 16, 0, "the epoch's bits stay free");
                        assert!(seen.insert(signature), "{count} {dtype} {op} {algorithm}");
                    }
                }
            }
        }
    }

    #[test]
    fn neighbouring_counts_never_share_a_signature_and_far_ones_seldom() {
        let of = |count| of(count, DType::BF16, Op::Sum, Algorithm::TwoShot);
        let near: HashSet<u64> = (0..65_536).map(of).collect();
        assert_eq!(near.len(), 65_536);
        let alike = (1..1000).filter(|k| of(k * 1_000_003) == of(777)).count();
        assert!(alike <= 1, "{alike}");
    }
}
