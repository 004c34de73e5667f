//! Where a rank's slab has what: flags, the data of each protocol, and the regions of `delta`.

use peerlane::launch::*;
use peerlane::Protocol;

pub(super) const SLAB_LOG2: u32 = 18;
pub(super) const SLAB: usize = 1 << SLAB_LOG2;
pub(super) const HALF: u64 = 16 << 10;
const FLAGS: u64 = 4096;
const FLAGS_HALF: u64 = 8192;
pub(super) const DATA: u64 = FLAGS + 2 * FLAGS_HALF;
/// Packs of the largest message.
pub(super) const MAX_PACKS: u64 = 40;
/// Of `delta`: a slot, and where its two regions begin, behind those of the protocols.
const DELTA_SLOT: u64 = 512;
pub(super) const DELTAS: u64 = DATA + 3 * 2 * HALF;
/// What a rank has sent, of all sends of both phases and both buffers, and what it has seen, each for two regions.
pub(super) const DELTA_SENT: usize = 14 * 2 * DELTA_SLOT as usize;
pub(super) const DELTA_SEEN: usize = 2 * HALF as usize;

/// `late_rearms`: as `Layout::with_late_rearms` makes it.
pub fn geometry(protocol: Protocol, table: &pl_table, late_rearms: bool) -> pl_geometry {
    let buffers = if protocol == Protocol::Sentinel && late_rearms { 4 } else { 2 };
    let half_bytes = 2 * HALF / buffers;
    pl_geometry {
        data: DATA + 2 * HALF * protocol as u64,
        half_bytes,
        slot_bytes: half_bytes / u64::from(table.slots) / 128 * 128,
        flags: FLAGS,
        flags_half_bytes: FLAGS_HALF,
        records: 0,
        calls: 1024,
        flag_chunks: (FLAGS_HALF / 64) as u32 / u32::from(table.flag_slots),
        ll: DATA + 2 * HALF * Protocol::Ll as u64,
        ll_half_bytes: HALF,
        rotation: buffers as u32 - 1,
    }
}

/// As `Layout::delta_geometry` makes it.
pub(super) fn delta_geometry(table: &pl_table, one_region: bool) -> pl_geometry {
    let phases = u64::from(table.phases);
    // Slots of one size would have the same writers in both schedules.
    let (region, slots) = if one_region { (0, phases) } else { (phases - 1, 1) };
    assert!(u64::from(table.slots) * DELTA_SLOT <= HALF);
    pl_geometry {
        data: DELTAS + 2 * HALF * region,
        half_bytes: HALF,
        slot_bytes: DELTA_SLOT / slots,
        rotation: 1,
        ..geometry(Protocol::Sentinel, table, false)
    }
}
