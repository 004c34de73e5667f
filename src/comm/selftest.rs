//! The first use of the real kernels, checked by the owner of the memory.
//!
//! A driver or a fabric may accept mappings and then drop, mirror or reorder what is written. So before a communicator
//! serves, every protocol reduces fresh random data over the very slabs that calls will use, all ranks at once, both
//! halves, and each rank checks its own result. A mirror that shows a writer its own words cannot pass: the sums hold
//! every rank's data.

use super::plans::Plans;
use crate::bootstrap::random;
use crate::error::{Error, Result};
use crate::plan::Choice;
use crate::types::{DType, Direction, Protocol};

/// Steps per protocol: each of four buffers is used, re-armed and used again.
const STEPS: u64 = 16;
/// Elements: several packs per piece for 16 ranks.
pub(super) const COUNT: usize = 1024;
/// Fewer in half of the steps: a short tail, for which a GPU has other kernels and in host memory another protocol. Four in a row, so
/// that either uses each of its buffers and uses it again.
const TAIL: usize = 3;

/// A random number that no earlier communicator's memory can hold the answers to.
pub(super) fn nonce() -> Result<u64> {
    let mut bytes = [0u8; 8];
    random(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// A small integer, so that sums are exact in any order: element `i` of the rank that drew `nonce`.
fn element(nonce: u64, step: u64, i: usize) -> f32 {
    // SplitMix64 (Steele, Lea, Flood 2014).
    let mut z = nonce ^ (step << 32 | i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) % 64) as f32 - 32.0
}

/// Runs every protocol through the algorithm that small calls get, on `channel`. `nonces` are the ranks' own, in order;
/// `reduce` sums its input over all ranks into its output by the plan with the index given.
pub(super) fn run(
    plans: &Plans,
    rank: usize,
    nonces: &[u64],
    channel: usize,
    mut reduce: impl FnMut(&[f32], &mut [f32], usize) -> Result<()>,
) -> Result<()> {
    let mut output = vec![0f32; COUNT];
    let algorithm = plans.choose(COUNT * 4, DType::F32)?.algorithm;
    // Steps of another channel have other data.
    let mut step = channel as u64 * 4 * STEPS;
    let mut verdict = Ok(());
    for (protocol, direction) in [
        (Protocol::Ll, Direction::Push),
        (Protocol::Sentinel, Direction::Push),
        (Protocol::Flagged, Direction::Push),
        (Protocol::Flagged, Direction::Pull),
    ] {
        let plan = plans.index(Choice { algorithm, protocol, direction })?;
        for _ in 0..STEPS {
            step += 1;
            let count = if step % 8 < 4 { COUNT } else { COUNT - TAIL };
            let input: Vec<f32> = (0..count).map(|i| element(nonces[rank], step, i)).collect();
            let output = &mut output[..count];
            output.fill(f32::NAN);
            reduce(&input, output, plan)?;
            for (i, &got) in output.iter().enumerate() {
                let want: f32 = nonces.iter().map(|&n| element(n, step, i)).sum();
                if got != want && verdict.is_ok() {
                    // The other ranks wait for the remaining steps, so these are run all the same.
                    verdict = Err(Error::Lane(format!(
                        "{algorithm} by {protocol} ({direction}), channel {channel}, step {step}, element {i} is {got} instead of {want}"
                    )));
                }
            }
        }
    }
    verdict
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_data_differs_by_rank_step_and_element() {
        let a: Vec<f32> = (0..64).map(|i| element(1, 1, i)).collect();
        assert!(a.iter().any(|v| *v != a[0]));
        assert_ne!(a, (0..64).map(|i| element(2, 1, i)).collect::<Vec<_>>());
        assert_ne!(a, (0..64).map(|i| element(1, 2, i)).collect::<Vec<_>>());
        assert!(a.iter().all(|v| v.fract() == 0.0 && v.abs() <= 32.0));
    }
}
