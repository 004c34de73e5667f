//! What lies where in a slab.
//!
//! ```text
//! 0        header: pl_record[16], one per rank that may give up
//! 4096     channel 0   calls | flags, half 0 and 1 | ll, half 0 and 1 | sentinel, ... | delta, ... | flagged, ...
//!          channel 1   likewise
//! ```
//! Every offset follows from the slab's size, the number of channels and the schedule's slot counts, never from the
//! call: a layout that moved with the message would let one step's words be found where another step looks. Protocols
//! have regions of their own, because a word of one would read as "arrived" to another.

use crate::error::{Error, Result};
use crate::launch::{pl_geometry, pl_table, PL_MAX_RANKS};
use crate::types::{DType, Protocol, PACK_BYTES};

/// Bytes before channel 0, and the alignment of channels.
const PAGE: u64 = 4096;
/// Data slots start on their own pair of cache lines, so that two writers never share one.
const SLOT_ALIGN: u64 = 128;
/// A flag has a cache line of its own; `pl_geometry` states it.
const FLAG_BYTES: u64 = 64;
/// Most bytes of flags per half: 2,048 flags, 32 chunks for each of 64 arrivals.
const MAX_FLAGS_HALF: u64 = 2048 * FLAG_BYTES;
/// Least buffer for which more than two are worth their memory.
const MIN_BUFFER: u64 = 512 << 10;
/// Least channel: the largest schedule (dual_owner over islands of 1 and 15) has 225 slots, and each must hold a pack.
const MIN_CHANNEL: u64 = 640 << 10;
/// Schedules with a region of their own for `delta`: one of one phase and one of two.
const DELTAS: u64 = 2;

/// The layout of every slab of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Buffers of the bulk protocol's data region.
    buffers: u64,
    /// Buffers of `sentinel`'s.
    sentinel_buffers: u64,
    /// Schedules that have a region for `delta`: [`DELTAS`] or none.
    deltas: u64,
    channels: u64,
    channel_bytes: u64,
    flags_half_bytes: u64,
}

impl Layout {
    /// The layout of a slab of `slab_bytes` with `channels` channels.
    pub fn new(slab_bytes: u64, channels: usize) -> Result<Self> {
        let channels = channels as u64;
        let least = PAGE + channels * MIN_CHANNEL;
        if channels == 0 || slab_bytes < least {
            return Err(Error::InvalidArgument(format!(
                "a slab of {slab_bytes} bytes is too small for {channels} channels; it takes at least {least} (PEERLANE_SLAB)"
            )));
        }
        let channel_bytes = (slab_bytes - PAGE) / channels / PAGE * PAGE;
        let flags_half_bytes = (channel_bytes / 16 / PAGE * PAGE).min(MAX_FLAGS_HALF);
        Ok(Layout {
            buffers: 2,
            sentinel_buffers: 2,
            deltas: 0,
            channels,
            channel_bytes,
            flags_half_bytes,
        })
    }

    /// The same with more than two buffers for the bulk protocol, as many of 4 and 8 as have room for a typical message.
    ///
    /// On a CPU, taking a line back for writing is slow while it is in the reader's innermost cache and faster once it
    /// has moved out; how many a step uses depends on its size.
    pub fn with_rotation(mut self) -> Self {
        let (_, bytes) = self.region(0, Protocol::Flagged);
        self.buffers = [8, 4].into_iter().find(|n| bytes / n >= MIN_BUFFER).unwrap_or(2);
        self
    }

    /// The same for slabs in host memory that GPUs write, where words that `sentinel` has armed again land late: see
    /// `cuda/protocol_sentinel.cuh`.
    pub fn with_late_rearms(mut self) -> Self {
        self.sentinel_buffers = 4;
        self
    }

    /// The same with room for sums of some schedules by `delta`: see `cuda/protocol_delta.cuh`.
    pub fn with_deltas(mut self) -> Self {
        self.deltas = DELTAS;
        self
    }

    /// Bytes of the slab in use.
    pub fn bytes(&self) -> u64 {
        PAGE + self.channels * self.channel_bytes
    }

    /// Number of channels.
    pub fn channels(&self) -> usize {
        self.channels as usize
    }

    /// Start and length of all buffers of a protocol's data region in a channel. `flagged` carries the large messages
    /// and gets half of the room, the two word protocols a quarter each. With `delta`, which takes the place of `sentinel` for sums, it and
    /// `sentinel` get a quarter each, `ll` an eighth and `flagged` three.
    pub fn region(&self, channel: usize, protocol: Protocol) -> (u64, u64) {
        let (data, quarter) = self.data(channel);
        let ll = quarter / if self.deltas == 0 { 1 } else { 2 } / PAGE * PAGE;
        let delta = if self.deltas == 0 { 0 } else { quarter };
        match protocol {
            Protocol::Ll => (data, ll),
            Protocol::Sentinel => (data + ll, quarter),
            Protocol::Flagged => (data + ll + quarter + delta, 3 * quarter - ll - delta),
        }
    }

    /// The same of `delta` for the schedules of so many phases that go by it: a word is new there if it differs from the one that
    /// the same schedule has sent before. None where the slab has no such region.
    fn delta_region(&self, channel: usize, phases: u8) -> Option<(u64, u64)> {
        let (start, bytes) = self.region(channel, Protocol::Sentinel);
        let (_, quarter) = self.data(channel);
        let share = quarter.checked_div(self.deltas)? / PAGE * PAGE;
        let at = u64::from(phases).checked_sub(1).filter(|at| *at < self.deltas)?;
        Some((start + bytes + at * share, share))
    }

    /// Where a channel's data begins, and a quarter of its length.
    fn data(&self, channel: usize) -> (u64, u64) {
        let start = PAGE + channel as u64 * self.channel_bytes;
        let data = start + PAGE + 2 * self.flags_half_bytes;
        (data, (start + self.channel_bytes - data) / 4 / PAGE * PAGE)
    }

    /// Where a step of `table` over `delta` finds everything; none where the slab has no room for it. One table alone of so many
    /// phases may be used with it. A slot has `most_packs` packs at most.
    pub fn delta_geometry(
        &self,
        channel: usize,
        table: &pl_table,
        most_packs: u64,
    ) -> Option<pl_geometry> {
        let (data, bytes) = self.delta_region(channel, table.phases)?;
        let (slots, most_bytes) = (u64::from(table.slots.max(1)), most_packs * PACK_BYTES as u64);
        let slot_bytes =
            (bytes / 2 / PAGE * PAGE / slots).min(most_bytes) / SLOT_ALIGN * SLOT_ALIGN;
        let half_bytes = (slots * slot_bytes).next_multiple_of(PAGE);
        let geometry = self.geometry(channel, Protocol::Sentinel, table);
        (slot_bytes > 0).then_some(pl_geometry {
            data,
            half_bytes,
            slot_bytes,
            rotation: 1,
            ..geometry
        })
    }

    /// Where a step of `table` over `protocol` finds everything.
    pub fn geometry(&self, channel: usize, protocol: Protocol, table: &pl_table) -> pl_geometry {
        let start = PAGE + channel as u64 * self.channel_bytes;
        let (data, bytes) = self.region(channel, protocol);
        let buffers = match protocol {
            Protocol::Ll => 2,
            Protocol::Sentinel => self.sentinel_buffers,
            Protocol::Flagged => self.buffers,
        };
        let half_bytes = bytes / buffers / PAGE * PAGE;
        let (ll, ll_bytes) = self.region(channel, Protocol::Ll);
        let slots = u64::from(table.slots.max(1));
        let flag_slots = u64::from(table.flag_slots.max(1));
        pl_geometry {
            data,
            half_bytes,
            slot_bytes: half_bytes / slots / SLOT_ALIGN * SLOT_ALIGN,
            flags: start + PAGE,
            flags_half_bytes: self.flags_half_bytes,
            records: 0,
            calls: start,
            ll,
            ll_half_bytes: ll_bytes / 2 / PAGE * PAGE,
            flag_chunks: (self.flags_half_bytes / FLAG_BYTES / flag_slots) as u32,
            rotation: buffers as u32 - 1,
        }
    }
}

/// Size of the largest piece of a tile of `packs` packs.
pub fn longest_piece(table: &pl_table, packs: u64) -> u64 {
    let (widest, den) = widest_piece(table);
    (packs * widest).div_ceil(den)
}

/// Most packs of one step: the largest tile whose every piece fits its slot in whatever form it travels.
pub fn step_packs(
    geometry: &pl_geometry,
    table: &pl_table,
    dtype: DType,
    protocol: Protocol,
) -> u64 {
    tile_packs(table, slot_packs(geometry, table, dtype, protocol))
}

/// Packs of the largest tile whose every piece has at most `longest` packs.
pub fn tile_packs(table: &pl_table, longest: u64) -> u64 {
    let (widest, den) = widest_piece(table);
    // A piece of L packs' tile has at most ceil(L * widest / den) packs.
    longest * den / widest
}

/// Most rows of `row_packs` packs of one fused step: a slot holds a piece's share of every row, and a row has a flag of its
/// own. 0: not even one fits.
pub fn step_rows(
    geometry: &pl_geometry,
    table: &pl_table,
    dtype: DType,
    protocol: Protocol,
    row_packs: u64,
) -> u64 {
    let fit = slot_packs(geometry, table, dtype, protocol) / longest_piece(table, row_packs).max(1);
    match protocol {
        Protocol::Flagged => fit.min(geometry.flag_chunks.into()),
        Protocol::Ll | Protocol::Sentinel => fit,
    }
}

/// Packs that a slot holds in whatever form they travel.
fn slot_packs(geometry: &pl_geometry, table: &pl_table, dtype: DType, protocol: Protocol) -> u64 {
    let widened = table.phase.iter().take(usize::from(table.phases)).any(|p| p.wire_f32 != 0);
    let elements = PACK_BYTES / dtype.size();
    let pack = elements * if widened { dtype.acc_size() } else { dtype.size() };
    let wire = pack as u64 * if protocol == Protocol::Ll { 2 } else { 1 };
    geometry.slot_bytes / wire
}

fn widest_piece(table: &pl_table) -> (u64, u64) {
    let cuts = &table.cut_num[..=usize::from(table.pieces)];
    let widest = cuts.windows(2).map(|c| c[1].saturating_sub(c[0])).max().unwrap_or(1);
    (u64::from(widest.max(1)), u64::from(table.cut_den.max(1)))
}

const _: () = assert!(
    std::mem::size_of::<crate::launch::pl_record>() * PL_MAX_RANKS as usize <= PAGE as usize
        && 2 * std::mem::size_of::<crate::launch::pl_call>() * PL_MAX_RANKS as usize
            <= PAGE as usize
);

#[cfg(test)]
mod tests {
    use super::*;

    fn table(slots: u8, flag_slots: u8, cuts: &[u16], den: u16) -> pl_table {
        // SAFETY: a pl_table is plain integers, for which zero is a value.
        let mut t: pl_table = unsafe { std::mem::zeroed() };
        t.slots = slots;
        t.flag_slots = flag_slots;
        t.pieces = (cuts.len() - 1) as u8;
        t.cut_num[..cuts.len()].copy_from_slice(cuts);
        t.cut_den = den;
        t
    }

    #[test]
    fn regions_are_disjoint_and_inside_the_slab() {
        for slab in [PAGE + 4 * MIN_CHANNEL, 4 << 20, (32 << 20) + 4097, 1 << 30] {
            for (channels, staged) in (1..=4).flat_map(|c| [(c, false), (c, true)]) {
                let layout = Layout::new(slab, channels).unwrap();
                let layout = if channels % 2 == 0 { layout.with_rotation() } else { layout };
                let layout = if staged { layout.with_late_rearms().with_deltas() } else { layout };
                let mut spans = vec![(0, PAGE)];
                for c in 0..channels {
                    let t = table(225, 225, &[0, 1], 1);
                    let g = layout.geometry(c, Protocol::Flagged, &t);
                    spans.push((g.calls, g.calls + PAGE));
                    spans.push((g.flags, g.flags + 2 * g.flags_half_bytes));
                    assert!(u64::from(g.flag_chunks) * 225 * FLAG_BYTES <= g.flags_half_bytes);
                    assert!(g.flag_chunks > 0);
                    for &p in Protocol::ALL {
                        let (at, len) = layout.region(c, p);
                        spans.push((at, at + len));
                        let g = layout.geometry(c, p, &t);
                        assert!(g.slot_bytes > 0 && g.slot_bytes * 225 <= g.half_bytes);
                        assert!(g.half_bytes * u64::from(g.rotation + 1) <= len);
                        assert!((g.rotation + 1).is_power_of_two());
                        assert!(p != Protocol::Ll || g.rotation == 1);
                        assert_eq!(
                            (g.ll, 2 * g.ll_half_bytes <= layout.region(c, Protocol::Ll).1),
                            (layout.region(c, Protocol::Ll).0, true)
                        );
                    }
                    for phases in 1..=2 {
                        let mut t = table(14, 14, &[0, 1], 1);
                        t.phases = phases;
                        let Some(g) = layout.delta_geometry(c, &t, 1 << 20) else {
                            assert!(!staged);
                            continue;
                        };
                        assert!(g.slot_bytes > 0 && g.slot_bytes * 14 <= g.half_bytes);
                        assert_eq!(g.rotation, 1);
                        let few = layout.delta_geometry(c, &t, 8).unwrap();
                        assert_eq!((few.slot_bytes, few.half_bytes), (128, PAGE));
                        spans.push((g.data, g.data + 2 * g.half_bytes));
                    }
                }
                spans.sort_unstable();
                assert!(spans.windows(2).all(|s| s[0].1 <= s[1].0), "{spans:?}");
                assert!(spans.last().unwrap().1 <= layout.bytes() && layout.bytes() <= slab);
            }
        }
    }

    #[test]
    fn a_step_fills_its_slots_and_no_more() {
        let layout = Layout::new(4 << 20, 1).unwrap();
        let t = table(7, 7, &[0, 21, 28, 42, 63], 63);
        for &protocol in Protocol::ALL {
            let g = layout.geometry(0, protocol, &t);
            let packs = step_packs(&g, &t, DType::BF16, protocol);
            let wire = if protocol == Protocol::Ll { 32 } else { 16 };
            assert!(longest_piece(&t, packs) * wire <= g.slot_bytes);
            assert!(longest_piece(&t, packs + 4) * wire > g.slot_bytes);
        }
    }

    #[test]
    fn a_fused_step_fills_its_slots_and_flags_and_needs_no_more_scratch_than_another() {
        let layout = Layout::new(4 << 20, 1).unwrap();
        let t = table(7, 7, &[0, 21, 28, 42, 63], 63);
        for &protocol in Protocol::ALL {
            let g = layout.geometry(0, protocol, &t);
            let wire = if protocol == Protocol::Ll { 32 } else { 16 };
            for row_packs in [1, 2, 33, 896, 10_000] {
                let rows = step_rows(&g, &t, DType::BF16, protocol, row_packs);
                let piece = longest_piece(&t, row_packs) * wire;
                let flags = u64::from(g.flag_chunks);
                let bulk = protocol == Protocol::Flagged;
                assert!(rows > 0 || row_packs == 10_000, "{protocol} {row_packs}");
                assert!(rows * piece <= g.slot_bytes && (!bulk || rows <= flags));
                assert!((rows + 1) * piece > g.slot_bytes || (bulk && rows == flags));
                assert!(rows * row_packs <= step_packs(&g, &t, DType::BF16, protocol));
            }
            assert_eq!(step_rows(&g, &t, DType::BF16, protocol, g.slot_bytes), 0);
        }
    }

    #[test]
    fn a_slab_too_small_says_so() {
        let error = Layout::new(1 << 20, 4).unwrap_err().to_string();
        assert!(error.contains("PEERLANE_SLAB") && error.contains("4 channels"), "{error}");
        assert!(Layout::new(1 << 20, 0).is_err());
    }
}
