//! The choice of algorithm, protocol and direction by size, until a measured plan takes its place.
//!
//! A pure function of what all ranks know alike: ranks that chose differently would wait for messages that nobody sends.

use crate::schedule::Islands;
use crate::types::{Algorithm, DType, Direction, Protocol};

/// Where a communicator's kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// Ranks are threads or processes that share memory.
    Cpu,
    /// Ranks are GPUs that reach each other over PCIe.
    Gpu,
}

/// How a call is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Choice {
    /// The schedule.
    pub algorithm: Algorithm,
    /// How a word is known to have arrived.
    pub protocol: Protocol,
    /// Who moves the data; [`Direction::Pull`] only with [`Protocol::Flagged`].
    pub direction: Direction,
}

/// Messages of up to so many bytes, and the algorithm for them.
type BySize<'a> = &'a [(usize, Algorithm)];

/// Shared memory. What counts is the number of phases, since a wait may cost a change of context, until the n-fold reading
/// of `one_shot` outweighs it. Islands make no difference.
const CPU: BySize<'static> = &[(2 << 10, Algorithm::OneShot), (usize::MAX, Algorithm::TwoShot)];

/// Two ranks in shared memory: one hop, until the copies of whole messages outgrow the caches. Measured over 2 cores with
/// 2 MiB each: 112 KiB take 17 us in one hop and 14 us in two.
const CPU_PAIR: BySize<'static> =
    &[(64 << 10, Algorithm::OneShot), (usize::MAX, Algorithm::TwoShot)];

/// GPUs in one island: so many bytes that a GPU sends in one hop, (n-1) times the message, cost as much as a second hop.
/// Measured with ranks that share an H200, between foreign kernels: over 8 of them 56 KiB take 5.1 us in one hop and 5.5 in
/// two, 112 KiB 6.9 and 5.9; over 4 112 KiB take 3.7 and 4.3, 448 KiB 9.4 and 5.7. Back to back, where the next kernel starts
/// early, two hops gain more: 8 ranks and 56 KiB 5.4 and 4.2, with a norm in the same kernel 6.0 and 4.9. There every hop is within
/// one memory; over links the bytes of one hop cost more, so that is two hops' as well.
const ONE_HOP_BYTES: usize = 384 << 10;

/// GPUs in several islands: first the hops count, then the bytes that cross, then the fan-out.
const GPU_ISLANDS: BySize<'static> = &[
    (4 << 10, Algorithm::OneShot),
    (24 << 10, Algorithm::DualOwner),
    (400 << 10, Algorithm::Hierarchical),
    (usize::MAX, Algorithm::Staged),
];

/// Above this the doubled bytes of `ll` cost more than the fences of `flagged`.
const LL_BYTES: usize = 64 << 10;

/// How an all-reduce of `bytes` bytes (the whole message) is served. The algorithm exists for these islands.
///
/// - One or two GPUs: `one_shot`; nothing else has as few hops, and for two ranks nothing sends fewer bytes.
/// - More: by size, from the constants above.
/// - CPU: `flagged`, and pull: one store serves all readers, where push stores once per reader. Two ranks in
///   one hop push: there is one reader, and it then polls and reads its own slab.
/// - GPU: push, since loads over PCIe wait for a round trip. `sentinel` where the type allows it, else `ll` for small
///   messages, else `flagged`; `staged` is for bytes that matter, so always `flagged`. In host memory: [`host_staged_protocol`].
pub fn choose(device: DeviceKind, islands: &Islands, bytes: usize, dtype: DType) -> Choice {
    let n = islands.ranks();
    let one_island: BySize = &[
        (ONE_HOP_BYTES / n.saturating_sub(1).max(1), Algorithm::OneShot),
        (usize::MAX, Algorithm::TwoShot),
    ];
    let by_size = match (device, islands.groups().len()) {
        (DeviceKind::Cpu, _) if n == 2 => CPU_PAIR,
        (DeviceKind::Cpu, _) => CPU,
        (DeviceKind::Gpu, 1) => one_island,
        (DeviceKind::Gpu, _) => GPU_ISLANDS,
    };
    let algorithm = match by_size.iter().find(|(up_to, _)| bytes <= *up_to) {
        Some((_, algorithm)) if n > 2 || (n == 2 && device == DeviceKind::Cpu) => *algorithm,
        _ => Algorithm::OneShot,
    };
    let (protocol, direction) = match device {
        DeviceKind::Cpu if algorithm == Algorithm::TwoShot || n > 2 => {
            (Protocol::Flagged, Direction::Pull)
        }
        DeviceKind::Cpu => (Protocol::Flagged, Direction::Push),
        DeviceKind::Gpu => (gpu_protocol(algorithm, bytes, dtype), Direction::Push),
    };
    Choice { algorithm, protocol, direction }
}

/// The same where slabs are host memory. Measured over the link of an H200, two ranks in one hop: 14 KiB take 13 us by `ll`,
/// 8 by `flagged` and 5 by `sentinel`.
const HOST_STAGED_LL_BYTES: usize = 4 << 10;
/// Up to here `sentinel` has been measured, and led: 448 KiB take 43 us, by `flagged` 45; over a link each, and by words that differ
/// (`cuda/protocol_delta.cuh`), 19 and 28, and 4 MiB 172 and 218. Over one link that eight ranks share both take the same.
const HOST_STAGED_SENTINEL_BYTES: usize = 4 << 20;

/// How words travel where slabs are host memory that GPUs write.
pub fn host_staged_protocol(bytes: usize, dtype: DType) -> Protocol {
    match dtype.has_sentinel() {
        true if bytes <= HOST_STAGED_SENTINEL_BYTES => Protocol::Sentinel,
        false if bytes <= HOST_STAGED_LL_BYTES => Protocol::Ll,
        _ => Protocol::Flagged,
    }
}

fn gpu_protocol(algorithm: Algorithm, bytes: usize, dtype: DType) -> Protocol {
    match algorithm {
        Algorithm::Staged => Protocol::Flagged,
        _ if dtype.has_sentinel() => Protocol::Sentinel,
        _ if bytes <= LL_BYTES => Protocol::Ll,
        _ => Protocol::Flagged,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::exists;

    const SIZES: &[usize] =
        &[0, 1, 16, 2048, 2049, 14_336, 28_672, 65_536, 65_537, 1 << 20, usize::MAX];

    fn partitions() -> impl Iterator<Item = Islands> {
        [
            (1, "0"),
            (2, "0-1"),
            (2, "0,1"),
            (3, "0-2"),
            (3, "0,1,2"),
            (7, "0,1-6"),
            (8, "0-7"),
            (8, "0-3,4-7"),
        ]
        .into_iter()
        .map(|(n, text)| Islands::parse(n, text).unwrap())
    }

    #[test]
    fn what_is_chosen_exists_and_can_be_carried() {
        for islands in partitions() {
            for device in [DeviceKind::Cpu, DeviceKind::Gpu] {
                for (&bytes, &dtype) in
                    SIZES.iter().flat_map(|b| DType::ALL.iter().map(move |d| (b, d)))
                {
                    let c = choose(device, &islands, bytes, dtype);
                    let call = format!("{device:?} {islands} {bytes} {dtype}: {c:?}");
                    assert!(exists(c.algorithm, &islands), "{call}");
                    assert!(c.protocol != Protocol::Sentinel || dtype.has_sentinel(), "{call}");
                    assert!(
                        c.direction != Direction::Pull || c.protocol == Protocol::Flagged,
                        "{call}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_choice_is_the_documented_one() {
        use {Algorithm::*, DeviceKind::*, Direction::*, Protocol::*};
        for (device, n, islands, bytes, dtype, expected) in [
            (Cpu, 1, "0", 4096, DType::F32, (OneShot, Flagged, Push)),
            (Cpu, 1, "0", 1 << 20, DType::F32, (OneShot, Flagged, Push)),
            (Cpu, 2, "0-1", 57_344, DType::F32, (OneShot, Flagged, Push)),
            (Cpu, 2, "0-1", 114_688, DType::F32, (TwoShot, Flagged, Pull)),
            (Cpu, 8, "0-7", 1024, DType::F64, (OneShot, Flagged, Pull)),
            (Cpu, 8, "0-3,4-7", 14_336, DType::BF16, (TwoShot, Flagged, Pull)),
            (Gpu, 2, "0,1", 1 << 20, DType::BF16, (OneShot, Sentinel, Push)),
            (Gpu, 8, "0-7", 14_336, DType::BF16, (OneShot, Sentinel, Push)),
            (Gpu, 8, "0-7", 57_344, DType::BF16, (TwoShot, Sentinel, Push)),
            (Gpu, 8, "0-7", 114_688, DType::BF16, (TwoShot, Sentinel, Push)),
            (Gpu, 4, "0-3", 114_688, DType::BF16, (OneShot, Sentinel, Push)),
            (Gpu, 8, "0-3,4-7", 2048, DType::I32, (OneShot, Ll, Push)),
            (Gpu, 8, "0-3,4-7", 14_336, DType::BF16, (DualOwner, Sentinel, Push)),
            (Gpu, 8, "0-3,4-7", 28_672, DType::BF16, (Hierarchical, Sentinel, Push)),
            (Gpu, 8, "0-3,4-7", 114_688, DType::I64, (Hierarchical, Flagged, Push)),
            (Gpu, 8, "0-3,4-7", 1 << 20, DType::BF16, (Staged, Flagged, Push)),
        ] {
            let islands = Islands::parse(n, islands).unwrap();
            let c = choose(device, &islands, bytes, dtype);
            assert_eq!(
                (c.algorithm, c.protocol, c.direction),
                expected,
                "{device:?} {islands} {bytes} {dtype}"
            );
        }
    }
}
