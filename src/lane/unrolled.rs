//! Tables laid out for the kernels with unrolled loops (`cuda/unrolled.cuh`): addresses instead of slots, packs instead of
//! cuts, leaves of a complete tree instead of merges.
//!
//! What depends on the table and the slabs is worked out once, what depends on the size of the message once per size.

mod spread;

use super::fan::Fan;
use super::longest_piece;
use crate::launch::*;
use crate::types::Protocol;
pub use spread::{fits_a_cluster, short_row, RowUnits, SQUARES_HALF_BYTES};

const PHASES: usize = PL_UNROLLED_PHASES as usize;
const RANKS: usize = PL_MAX_RANKS as usize;
/// Most packs of a tile, or of a row, on the short path: a piece is two halves of a word (`PL_PIECES` in `cuda/launch.h`).
pub const MOST_PACKS: u64 = u16::MAX as u64;

/// A table in this form, for steps of any size.
#[derive(Clone, Copy, Debug)]
pub struct Unrolled<F> {
    args: F,
    /// By phase, the piece of each send and of each operand; none where there is none.
    sends: [[Option<u8>; RANKS]; PHASES],
    items: [[Option<u8>; RANKS]; PHASES],
    /// Whether `cuda/straight.cuh` has a path for it.
    short: bool,
    /// The tile for which the packs stand.
    laid_out: Option<u64>,
}

impl<F: Fan> Unrolled<F> {
    /// Lays `table` out over the slabs of `step`. None if it does not have the form: one or two phases of pushes in the
    /// caller's type; in each at most `F::K` sends, of input, or of the one piece that the phase before has summed; then
    /// one sum along the balanced tree into the result, or finished pieces of peers. So are `one_shot`, `two_shot` and
    /// most `dual_owner`. `protocol` is a word protocol.
    pub fn new(table: &pl_table, step: &pl_step, protocol: Protocol) -> Option<Self> {
        let phases = table.phase.get(..usize::from(table.phases))?;
        if protocol == Protocol::Flagged || table.pull != 0 || phases.len() > PHASES {
            return None;
        }
        let mut form = Unrolled {
            args: F::zeroed(),
            sends: [[None; RANKS]; PHASES],
            items: [[None; RANKS]; PHASES],
            short: false,
            laid_out: None,
        };
        *form.args.step() = *step;
        *form.args.head().phases = phases.len() as u16;
        let slot = |rank: u8, slot: u8| {
            let geo = &step.geo;
            step.base[usize::from(rank)] + geo.data + u64::from(slot) * geo.slot_bytes
        };
        let mut summed = None;
        for (index, phase) in phases.iter().enumerate() {
            if phase.wire_f32 != 0 {
                return None;
            }
            let sends = range(&table.send, phase.send0.into(), phase.sends.into())?;
            let folds = range(&table.fold, phase.fold0.into(), phase.folds.into())?;
            form.lay_sends(index, sends, summed, slot)?;
            summed = form.lay_folds(index, table, folds, slot)?;
        }
        form.short = if phases.len() == 1 { form.is_one_shot() } else { form.is_two_shot() };
        Some(form)
    }

    /// Whether the kernels have a short path for steps by it (`cuda/straight.cuh`).
    pub fn is_short(&self) -> bool {
        self.short
    }

    /// Whether the only phase sends to as many as it hears from, and sums: the kernels' own path for it does not count sends.
    fn is_one_shot(&mut self) -> bool {
        let sends = self.sends[0].iter().flatten().count();
        let phase = self.args.phase(0);
        *phase.fold == PL_FOLD_SUM && sends == phase.remote.count_ones() as usize
    }

    /// Whether the two phases are a reduce-scatter and an all-gather, for which the kernels have a path of their own.
    fn is_two_shot(&mut self) -> bool {
        let copies = self.items[1].iter().flatten().count();
        let sums = *self.args.phase(0).fold == PL_FOLD_SUM && *self.args.phase(0).result == 0;
        let gather = self.args.phase(1);
        sums && *gather.fold == PL_FOLD_COPIES
            && (*gather.result, *gather.one_source) == (1, 1)
            && copies <= F::K
    }

    fn lay_sends(
        &mut self,
        index: usize,
        sends: &[pl_send],
        summed: Option<u8>,
        slot: impl Fn(u8, u8) -> u64,
    ) -> Option<()> {
        let phase = self.args.phase(index);
        let Some(first) = sends.first() else { return Some(()) };
        let result = u32::from(first.src) == PL_SRC_RESULT;
        let known = |send: &pl_send| match u32::from(send.src) {
            PL_SRC_INPUT => !result,
            PL_SRC_RESULT => result && summed == Some(send.piece),
            _ => false,
        };
        if sends.len() > F::K || !sends.iter().all(known) {
            return None;
        }
        *phase.result = result.into();
        *phase.one_source = sends.iter().all(|send| send.piece == first.piece).into();
        for (k, send) in sends.iter().enumerate() {
            phase.to[k] = slot(send.peer, send.slot);
            self.sends[index][k] = Some(send.piece);
        }
        Some(())
    }

    /// The piece that the phase sums, if it sums one.
    fn lay_folds(
        &mut self,
        index: usize,
        table: &pl_table,
        folds: &[pl_fold],
        slot: impl Fn(u8, u8) -> u64,
    ) -> Option<Option<u8>> {
        let rank = table.rank;
        let result = |fold: &pl_fold| u32::from(fold.dst) == PL_DST_RESULT;
        let items = |fold: &pl_fold| range(&table.item, fold.item0.into(), fold.items.into());
        let remote = |item: &pl_item| u32::from(item.from) < PL_MAX_RANKS;
        let plain = |item: &pl_item| {
            item.wire_f32 == 0 && (remote(item) || u32::from(item.from) == PL_FROM_INPUT)
        };
        let leaves = F::K + 1;
        let phase = self.args.phase(index);
        let summed = match folds {
            [] => return Some(None),
            [fold] if fold.items > 1 => {
                let items = items(fold)?;
                if !result(fold)
                    || fold.canonical == 0
                    || items.len() > leaves
                    || !items.iter().all(plain)
                {
                    return None;
                }
                *phase.fold = PL_FOLD_SUM;
                for (at, item) in places(items.len(), leaves).into_iter().zip(items) {
                    *phase.present |= 1 << at;
                    if remote(item) {
                        *phase.remote |= 1 << at;
                        phase.at[at] = slot(rank, item.slot);
                        phase.from[at] = item.from;
                    }
                }
                self.items[index][0] = Some(fold.piece);
                Some(fold.piece)
            }
            copies => {
                if copies.len() > leaves {
                    return None;
                }
                *phase.fold = PL_FOLD_COPIES;
                for (k, fold) in copies.iter().enumerate() {
                    match items(fold)? {
                        [item] if result(fold) && plain(item) && remote(item) => {
                            phase.at[k] = slot(rank, item.slot);
                            phase.from[k] = item.from;
                        }
                        _ => return None,
                    }
                    self.items[index][k] = Some(fold.piece);
                }
                None
            }
        };
        // A kernel reads all operands at once; where nothing arrives it reads again what is read anyway.
        let some = *phase.at.iter().find(|at| **at != 0)?;
        phase.at.iter_mut().filter(|at| **at == 0).for_each(|at| *at = some);
        Some(summed)
    }

    /// The arguments for `step`, whose tile has `packs` packs. `threads`: of the whole launch, if it is a sum that the short
    /// path may take.
    pub fn lay_out(
        &mut self,
        step: &pl_step,
        table: &pl_table,
        packs: u64,
        threads: Option<u64>,
    ) -> &mut F {
        *self.args.step() = *step;
        let short = self.short && packs <= MOST_PACKS;
        let straight = short && threads.is_some_and(|all| longest_piece(table, packs) <= all);
        *self.args.head().straight = straight.into();
        self.lay_pieces(table, packs);
        &mut self.args
    }

    fn lay_pieces(&mut self, table: &pl_table, packs: u64) {
        if self.laid_out == Some(packs) {
            return;
        }
        self.laid_out = Some(packs);
        let cut =
            |p: u8| packs * u64::from(table.cut_num[usize::from(p)]) / u64::from(table.cut_den);
        let span = |piece: Option<u8>| match piece {
            // A step has fewer packs than a slab has bytes, which are fewer than 2^32.
            Some(p) => (cut(p) as u32, (cut(p + 1) - cut(p)) as u32),
            None => (0, 0),
        };
        for index in 0..PHASES {
            let phase = self.args.phase(index);
            for k in 0..F::K {
                (phase.send_first[k], phase.send_packs[k]) = span(self.sends[index][k]);
                phase.send_piece[k] = piece_of(phase.send_first[k], phase.send_packs[k]);
            }
            for k in 0..=F::K {
                (phase.item_first[k], phase.item_packs[k]) = span(self.items[index][k]);
            }
            let items = phase.item_first.iter().zip(phase.item_packs.iter());
            for (copy, (first, packs)) in phase.copy_piece.iter_mut().zip(items) {
                *copy = piece_of(*first, *packs);
            }
            *phase.own_piece = phase.copy_piece[0];
        }
        *self.args.head().widest = longest_piece(table, packs) as u32;
    }
}

/// Meaningless beyond [`MOST_PACKS`], where no step is short.
fn piece_of(first: u32, packs: u32) -> u32 {
    (first & 0xffff) | (packs << 16)
}

/// Where the leaves of the balanced tree over `leaves` operands stand in the complete tree over `room`: a node with m
/// leaves gives ceil(m/2) to its left half and the rest to its right half.
fn places(leaves: usize, room: usize) -> Vec<usize> {
    fn place(leaves: usize, first: usize, room: usize, places: &mut Vec<usize>) {
        match leaves {
            0 => {}
            1 => places.push(first),
            _ => {
                let left = leaves.div_ceil(2);
                place(left, first, room / 2, places);
                place(leaves - left, first + room / 2, room / 2, places);
            }
        }
    }
    let mut found = Vec::with_capacity(leaves);
    place(leaves, 0, room, &mut found);
    found
}

fn range<T>(all: &[T], first: usize, count: usize) -> Option<&[T]> {
    all.get(first..first + count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{build, Islands};
    use crate::types::{Algorithm, Direction};

    pub fn step(n: usize) -> pl_step {
        let mut step = *pl_unrolled_1::zeroed().step();
        (step.geo.data, step.geo.slot_bytes, step.geo.half_bytes) = (4096, 1 << 10, 1 << 20);
        for rank in 0..n {
            step.base[rank] = (rank as u64 + 1) << 32;
        }
        step
    }

    pub fn tables(algorithm: Algorithm, islands: &str, n: usize) -> Vec<pl_table> {
        let islands = if islands.is_empty() {
            Islands::single(n).unwrap()
        } else {
            Islands::parse(n, islands).unwrap()
        };
        build(algorithm, &islands).unwrap().tables(Direction::Push).unwrap()
    }

    fn has_form<F: Fan>(tables: &[pl_table], protocol: Protocol) -> bool {
        let step = step(tables.len());
        tables.iter().all(|table| Unrolled::<F>::new(table, &step, protocol).is_some())
    }

    #[test]
    fn the_hot_schedules_have_the_form_with_room_for_their_fan_in() {
        for n in 2..=16 {
            for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
                let tables = tables(algorithm, "", n);
                assert_eq!(has_form::<pl_unrolled_1>(&tables, Protocol::Ll), n <= 2);
                assert_eq!(has_form::<pl_unrolled_3>(&tables, Protocol::Ll), n <= 4);
                assert_eq!(has_form::<pl_unrolled_7>(&tables, Protocol::Sentinel), n <= 8);
                assert!(has_form::<pl_unrolled_15>(&tables, Protocol::Sentinel));
                assert!(!has_form::<pl_unrolled_15>(&tables, Protocol::Flagged));
            }
        }
        let dual = tables(Algorithm::DualOwner, "0-3,4-7", 8);
        assert!(has_form::<pl_unrolled_7>(&dual, Protocol::Sentinel));
    }

    #[test]
    fn the_short_path_is_for_a_pack_of_each_piece_per_thread() {
        let straight = |algorithm, islands, n, threads| {
            let tables = tables(algorithm, islands, n);
            let forms = tables.iter().map(|table| {
                let form = Unrolled::<pl_unrolled_7>::new(table, &step(n), Protocol::Sentinel);
                *form.unwrap().lay_out(&step(n), table, 896, threads).head().straight
            });
            forms.collect::<Vec<_>>()
        };
        for n in 2..=8 {
            assert_eq!(straight(Algorithm::OneShot, "", n, Some(896)), vec![1; n]);
            assert_eq!(straight(Algorithm::OneShot, "", n, Some(895)), vec![0; n]);
            let piece = 896_u64.div_ceil(n as u64);
            assert_eq!(straight(Algorithm::TwoShot, "", n, Some(piece)), vec![1; n]);
            assert_eq!(straight(Algorithm::TwoShot, "", n, Some(piece - 1)), vec![0; n]);
            assert_eq!(straight(Algorithm::OneShot, "", n, None), vec![0; n]);
        }
        let tables = tables(Algorithm::TwoShot, "", 2);
        let mut form =
            Unrolled::<pl_unrolled_1>::new(&tables[0], &step(2), Protocol::Sentinel).unwrap();
        for (packs, short) in [(65535, 1), (65536, 0)] {
            let args = form.lay_out(&step(2), &tables[0], packs, Some(packs));
            assert_eq!(args.straight, short, "{packs} packs in halves of words");
        }
        // A reduce-scatter to an owner in each island, and an all-gather within it.
        assert_eq!(straight(Algorithm::DualOwner, "0-3,4-7", 8, Some(896)), vec![1; 8]);
    }

    #[test]
    fn others_are_walked() {
        // Partial sums travel; a lone rank has no peer; some rank serves two pieces.
        let hierarchical = tables(Algorithm::Hierarchical, "0-3,4-7", 8);
        assert!(!has_form::<pl_unrolled_15>(&hierarchical, Protocol::Sentinel));
        assert!(!has_form::<pl_unrolled_15>(&tables(Algorithm::OneShot, "", 1), Protocol::Ll));
        let uneven = tables(Algorithm::DualOwner, "0-2,3", 4);
        assert!(!has_form::<pl_unrolled_15>(&uneven, Protocol::Sentinel));
    }

    #[test]
    fn leaves_stand_where_the_kernels_tree_looks_for_them() {
        assert_eq!(places(2, 2), [0, 1]);
        assert_eq!(places(3, 4), [0, 1, 2]);
        assert_eq!(places(3, 8), [0, 2, 4]);
        assert_eq!(places(5, 8), [0, 1, 2, 4, 6]);
        assert_eq!(places(8, 8), (0..8).collect::<Vec<_>>());
    }

    #[test]
    fn pieces_cover_the_tile_at_every_size() {
        let all = tables(Algorithm::TwoShot, "", 5);
        for table in &all {
            let mut form =
                Unrolled::<pl_unrolled_7>::new(table, &step(5), Protocol::Sentinel).unwrap();
            for packs in [1, 4, 5, 896, 897, 65535, 5] {
                let args = form.lay_out(&step(5), table, packs, None);
                let mut covered = vec![0; packs as usize];
                for phase in &args.phase {
                    for k in 0..7 {
                        let word = |first: &[u32], packs: &[u32]| first[k] | packs[k] << 16;
                        assert_eq!(phase.send_piece[k], word(&phase.send_first, &phase.send_packs));
                        assert_eq!(phase.copy_piece[k], word(&phase.item_first, &phase.item_packs));
                    }
                    assert_eq!(phase.own_piece, phase.copy_piece[0]);
                    for (first, count) in phase.item_first.iter().zip(&phase.item_packs) {
                        covered[*first as usize..][..*count as usize]
                            .iter_mut()
                            .for_each(|c| *c += 1);
                        assert!(*count <= args.widest);
                    }
                }
                assert!(covered.iter().all(|&c| c == 1), "{packs}: {covered:?}");
            }
        }
    }
}
