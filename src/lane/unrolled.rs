//! Tables laid out for the kernels with unrolled loops (`cuda/unrolled.cuh`): addresses instead of slots, packs instead of
//! cuts, leaves of a complete tree instead of merges.
//!
//! What depends on the table and the slabs is worked out once, what depends on the size of the message once per size.

use super::longest_piece;
use crate::launch::*;
use crate::types::Protocol;

/// The arguments of a kernel with room for [`K`](Fan::K) sends and `K + 1` operands a phase.
pub trait Fan: Copy {
    /// Most sends of a phase.
    const K: usize;
    /// Everything zero.
    fn zeroed() -> Self;
    /// What every step has.
    fn step(&mut self) -> &mut pl_step;
    /// What stands before the phases.
    fn head(&mut self) -> Head<'_>;
    /// One of `PL_UNROLLED_PHASES` phases.
    fn phase(&mut self, index: usize) -> PhaseMut<'_>;
}

/// The fields of a `pl_unrolled_*` before its phases, see `cuda/launch.h`.
#[allow(missing_docs)]
pub struct Head<'a> {
    pub phases: &'a mut u16,
    pub straight: &'a mut u16,
    pub widest: &'a mut u32,
    pub block_units: &'a mut u32,
    pub row_units: &'a mut u32,
    pub row_magic: &'a mut u32,
}

/// The fields of a `pl_unrolled_phase_*`, see `cuda/launch.h`.
#[allow(missing_docs)]
pub struct PhaseMut<'a> {
    pub to: &'a mut [u64],
    pub at: &'a mut [u64],
    pub send_first: &'a mut [u32],
    pub send_packs: &'a mut [u32],
    pub item_first: &'a mut [u32],
    pub item_packs: &'a mut [u32],
    pub fold: &'a mut u32,
    pub present: &'a mut u32,
    pub remote: &'a mut u32,
    pub one_source: &'a mut u8,
    pub result: &'a mut u8,
    pub from: &'a mut [u8],
}

macro_rules! fans {
    ($($k:literal $args:ident),*) => {$(
        impl Fan for $args {
            const K: usize = $k;
            fn zeroed() -> Self {
                // SAFETY: integers and raw pointers, for which zero is a value.
                unsafe { std::mem::zeroed() }
            }
            fn step(&mut self) -> &mut pl_step {
                &mut self.step
            }
            fn head(&mut self) -> Head<'_> {
                Head {
                    phases: &mut self.phases,
                    straight: &mut self.straight,
                    widest: &mut self.widest,
                    block_units: &mut self.block_units,
                    row_units: &mut self.row_units,
                    row_magic: &mut self.row_magic,
                }
            }
            fn phase(&mut self, index: usize) -> PhaseMut<'_> {
                let phase = &mut self.phase[index];
                PhaseMut {
                    to: &mut phase.to,
                    at: &mut phase.at,
                    send_first: &mut phase.send_first,
                    send_packs: &mut phase.send_packs,
                    item_first: &mut phase.item_first,
                    item_packs: &mut phase.item_packs,
                    fold: &mut phase.fold,
                    present: &mut phase.present,
                    remote: &mut phase.remote,
                    one_source: &mut phase.one_source,
                    result: &mut phase.result,
                    from: &mut phase.from,
                }
            }
        }
    )*};
}
fans!(1 pl_unrolled_1, 3 pl_unrolled_3, 7 pl_unrolled_7, 15 pl_unrolled_15);

const PHASES: usize = PL_UNROLLED_PHASES as usize;
const RANKS: usize = PL_MAX_RANKS as usize;

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

    /// The arguments for a step whose tile has `packs` packs, with everything but `step` set. `threads`: of the whole
    /// launch, if it is a sum that the short path may take.
    pub fn lay_out(&mut self, table: &pl_table, packs: u64, threads: Option<u64>) -> &mut F {
        let straight = self.short && threads.is_some_and(|all| longest_piece(table, packs) <= all);
        *self.args.head().straight = straight.into();
        if self.laid_out == Some(packs) {
            return &mut self.args;
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
            }
            for k in 0..=F::K {
                (phase.item_first[k], phase.item_packs[k]) = span(self.items[index][k]);
            }
        }
        *self.args.head().widest = longest_piece(table, packs) as u32;
        &mut self.args
    }
}

/// Bytes of one half of the words through which blocks tell each other their packs' sums of squares. Steps in slabs of the default
/// size have rows of no more packs.
pub const SQUARES_HALF_BYTES: u64 = 8 << 16;

impl<F: Fan> Unrolled<F> {
    /// Whether rows of tables of this form may be spread over blocks: what a thread sums it sums in the first phase.
    fn sums_first(&mut self) -> bool {
        let fold = |form: &mut Self, index| *form.args.phase(index).fold;
        fold(self, 0) != PL_FOLD_COPIES && fold(self, 1) != PL_FOLD_SUM
    }

    /// Spreads `rows` rows of `packs` packs over blocks, by `hand_out(longest piece, whether a short path may be taken)`; what
    /// [`lay_out`](Self::lay_out) does besides. `plain`: it is a sum that the short path may take, if the table has one. None
    /// where they have no room in the step's `squares`, or no way to be spread.
    pub fn lay_out_rows(
        &mut self,
        table: &pl_table,
        packs: u64,
        rows: u64,
        plain: bool,
        hand_out: impl FnOnce(u64, bool) -> RowUnits,
    ) -> Option<&mut F> {
        let longest = longest_piece(table, packs);
        let words = rows.checked_mul(packs.next_multiple_of(2))?;
        if words > self.args.step().squares_half_bytes / 8 || !self.sums_first() {
            return None;
        }
        let units = hand_out(longest, plain && self.short);
        // It keeps `row_magic` exact: that is less than `row` too large for units below 2^32 / row.
        if rows * units.row * units.row >= 1 << 32 {
            return None;
        }
        self.lay_out(table, packs, None);
        let head = self.args.head();
        *head.straight = units.straight.into();
        *head.block_units = units.block as u32;
        *head.row_units = units.row as u32;
        *head.row_magic = if units.row == 1 { 0 } else { (1u64 << 32).div_ceil(units.row) as u32 };
        Some(&mut self.args)
    }
}

/// How the units of rows are handed out, see `cuda/spread.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowUnits {
    /// What a block has.
    pub block: u64,
    /// What a row is counted with, at least the packs of its longest piece.
    pub row: u64,
    /// By the short path: `row` is a multiple of `block`, which has a thread for each unit; of two phases it is the same, with
    /// the threads of `cuda/straight_rows.cuh` and the packs of [`short_row`].
    pub straight: bool,
}

/// Most packs of a row that the short path keeps in one block, and how many packs of a unit a thread has: MOST_SQUARES and
/// ROW_PACKS in `cuda/dev_gpu.cuh`.
const MOST_SQUARES: u64 = 1024;
const ROW_PACKS: usize = 4;
/// SHARED_ROW_THREADS in `cuda/kernels.cu`.
const MOST_SHARED: u64 = 256;

/// The threads of a block for a row of two phases by the short path of kernels for `fan` sends, if it has such a block.
pub fn short_row(fan: usize, packs: u64, longest: u64) -> Option<u64> {
    let groups = (fan as u64 + 1) / ROW_PACKS.min(fan + 1) as u64;
    let threads = groups * longest.next_multiple_of(32);
    (packs <= MOST_SQUARES && (fan == 1 || threads <= MOST_SHARED)).then_some(threads)
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

    fn step(n: usize) -> pl_step {
        let mut step = *pl_unrolled_1::zeroed().step();
        (step.geo.data, step.geo.slot_bytes, step.geo.half_bytes) = (4096, 1 << 10, 1 << 20);
        for rank in 0..n {
            step.base[rank] = (rank as u64 + 1) << 32;
        }
        step
    }

    fn tables(algorithm: Algorithm, islands: &str, n: usize) -> Vec<pl_table> {
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
                *form.unwrap().lay_out(table, 896, threads).head().straight
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
    fn the_row_of_a_unit_is_exact_or_rows_are_not_spread() {
        let mut spread = 0;
        for (algorithm, n) in [(Algorithm::OneShot, 2), (Algorithm::TwoShot, 8)] {
            let table = tables(algorithm, "", n).remove(1);
            let mut step = step(n);
            step.squares_half_bytes = SQUARES_HALF_BYTES;
            let mut form =
                Unrolled::<pl_unrolled_7>::new(&table, &step, Protocol::Sentinel).unwrap();
            for packs in (1..40u64).chain([112, 640, 887, 896, 1024, 4096, 16384, 65535, 65536]) {
                for rows in [1u64, 2, 3, 16, 73, 74, 1000, 65536] {
                    let words = rows * packs.next_multiple_of(2);
                    // Rows may be counted with more units than they have.
                    let row = |longest| longest + rows % 3 * (longest / 7);
                    let hand_out = |longest, straight| RowUnits {
                        block: longest,
                        row: row(longest),
                        straight,
                    };
                    let longest = longest_piece(&table, packs);
                    let Some(args) = form.lay_out_rows(&table, packs, rows, true, hand_out) else {
                        assert!(words > 1 << 16 || row(longest) >= 1 << 15, "{packs} {rows}");
                        continue;
                    };
                    assert!(words <= 1 << 16 && args.straight == 1);
                    let (widest, magic) = (u64::from(args.row_units), u64::from(args.row_magic));
                    let has = (u64::from(args.block_units), u64::from(args.widest), widest);
                    assert_eq!(has, (longest, longest, row(longest)));
                    let units = rows * widest;
                    for unit in
                        (0..units).step_by(101).chain((1..=rows).map(|row| row * widest - 1))
                    {
                        for unit in [unit, (unit + 1).min(units - 1)] {
                            let row = if magic == 0 { unit } else { (unit * magic) >> 32 };
                            assert_eq!(row, unit / widest, "{packs} {rows} {unit}");
                        }
                    }
                    spread += 1;
                }
            }
        }
        assert!(spread > 300, "{spread}");
    }

    #[test]
    fn pieces_cover_the_tile_at_every_size() {
        let all = tables(Algorithm::TwoShot, "", 5);
        for table in &all {
            let mut form =
                Unrolled::<pl_unrolled_7>::new(table, &step(5), Protocol::Sentinel).unwrap();
            for packs in [1, 4, 5, 897, 5] {
                let args = form.lay_out(table, packs, None);
                let mut covered = vec![0; packs as usize];
                for phase in &args.phase {
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
