//! From which size on NCCL is faster on a described box, by published figures: in the place of NCCL, larger calls are its own.
//!
//! NCCL's all-reduce among GPUs without NVLink is a ring: 2(n-1) hops, and 2(n-1)/n of the message over every link. With `LL` a
//! hop is short and the bytes double; its bulk protocols have the bytes once and longer hops. It is reckoned at its best: tuned
//! to go directly from GPU to GPU, in a replayed graph. As it comes it is several times slower on boxes of several sockets.

use super::predict::Model;
use crate::types::{DType, MAX_RANKS};

/// What a ring is reckoned with.
#[derive(Clone, Debug, PartialEq)]
pub struct Ring {
    /// Launch and everything else that a call costs once, in microseconds.
    pub launch_us: f64,
    /// A hop with `LL`.
    pub ll_hop_us: f64,
    /// A hop of the bulk protocols.
    pub bulk_hop_us: f64,
}

/// A line through published small messages: 10.9 us over 2 GPUs (shared host memory, Gen5, 1 KB), 13.5 over 4 (RTX PRO 6000 on one
/// NUMA node, 1 KB), 22 to 26 over 8 (tuned, up to 64 KB), 36.1 over 16 (four switches of four, 14 KB). The bulk hop: 86 us at 1 MB
/// and 128 at 2 MB over 8 GPUs, a slope of 43.7 GB/s on a bus and 44 us that no byte explains.
pub const RING: Ring = Ring { launch_us: 9.2, ll_hop_us: 0.9, bulk_hop_us: 2.5 };

/// Sizes that are compared, ascending: two to every doubling. Larger messages than the last are NCCL's in any case: they take more
/// than one step of the default slab, which no prediction reckons with.
fn sizes() -> impl Iterator<Item = usize> {
    (12..21).flat_map(|log| [1 << log, 3 << (log - 1)]).chain([1 << 21])
}

impl Ring {
    /// Microseconds for `bytes` over the ranks of a model.
    pub fn us(&self, model: &Model, bytes: usize) -> f64 {
        let ranks = model.fabric.seats.len().clamp(1, MAX_RANKS) as f64;
        let hops = 2.0 * (ranks - 1.0);
        // A ring crosses every link, uplink and socket once in each direction.
        let links = model.fabric.seats.iter().map(|seat| seat.link);
        let carriers = links.chain(model.fabric.uplinks.iter().copied());
        let crosses = model.fabric.seats.iter().any(|s| s.side != model.fabric.seats[0].side);
        let carriers = carriers.chain(crosses.then_some(model.fabric.sockets));
        let gb_per_s = carriers.reduce(f64::min).unwrap_or(f64::INFINITY);
        let wire_us = hops / ranks * bytes as f64 / (gb_per_s * 1e3);
        let ll = hops * self.ll_hop_us + 2.0 * wire_us;
        let bulk = hops * self.bulk_hop_us + wire_us;
        self.launch_us + ll.min(bulk)
    }
}

/// The largest message that is served here: the last size up to which the prediction for every size is below NCCL's. 0 where NCCL
/// is faster from the start. The same on all ranks that see the same box.
///
/// There is no margin: a NCCL that nobody has tuned takes 205 us where a tuned one takes 26 (8 GPUs, two sockets, 43 to 115 KB), so
/// to hand over too early costs eight times the time, and to serve a little too long a few percent.
pub fn served_bytes(model: &Model, ring: &Ring) -> usize {
    let faster = |&bytes: &usize| {
        // The type of most messages, whose partial sums travel in twice the bytes.
        let ours = model.choose(bytes, DType::BF16, |_| true);
        ours.is_some_and(|line| line.us(bytes) <= ring.us(model, bytes))
    };
    sizes().take_while(faster).last().unwrap_or(0)
}
