//! The signature of a call, by which `flagged` keeps data of different calls apart (`cuda/protocol_flagged.cuh`).

use super::call::Call;
use crate::plan::Choice;

/// What `flagged` puts into the high 16 bits of its flags: differs where calls do. Calls of one count that differ in type,
/// operation or way always differ in it, and so do calls alike in those whose counts differ by less than 65,536 within
/// one such range; any other two are alike by chance once in 65,536.
pub(super) fn signature(call: &Call, choice: Choice) -> u64 {
    let way = [
        (call.dtype as u64, 10),
        (call.op as u64, 5),
        (choice.algorithm as u64, 6),
        (choice.protocol as u64, 3),
        (choice.direction as u64, 2),
    ];
    let code = way.iter().fold(0, |code, (value, values)| code * values + value);
    let count = call.count as u64;
    let count = count ^ count >> 16 ^ count >> 32 ^ count >> 48;
    // An odd factor (2^16 over the golden ratio) moves every bit and loses none: without it one count more would make up
    // for one operation less.
    (code.wrapping_mul(0x9e37).wrapping_add(count) & 0xffff) << 48
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Algorithm, DType, Direction, Op, Protocol};
    use std::collections::HashSet;

    fn of(count: usize, dtype: DType, op: Op, algorithm: Algorithm) -> u64 {
        let call = Call { input: std::ptr::null(), output: std::ptr::null_mut(), count, dtype, op };
        signature(
            &call,
            Choice { algorithm, protocol: Protocol::Flagged, direction: Direction::Pull },
        )
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
