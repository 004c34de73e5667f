//! Rows of tables in the form for unrolled loops, spread over blocks (`cuda/spread.cuh`).

use super::{Unrolled, MOST_PACKS};
use crate::lane::{longest_piece, Fan};
use crate::launch::*;

/// Bytes of one half of the words through which blocks tell each other their packs' sums of squares. Steps in slabs of the default
/// size have rows of no more packs.
pub const SQUARES_HALF_BYTES: u64 = 8 << 16;

impl<F: Fan> Unrolled<F> {
    /// Whether rows of tables of this form may be spread over blocks: what a thread sums it sums in the first phase.
    fn sums_first(&mut self) -> bool {
        let fold = |form: &mut Self, index| *form.args.phase(index).fold;
        fold(self, 0) != PL_FOLD_COPIES && fold(self, 1) != PL_FOLD_SUM
    }

    /// The same as [`lay_out`](Self::lay_out) for a step of rows of `packs` packs, spread over blocks by `hand_out(longest
    /// piece, whether a short path may be taken)`. `plain`: it is a sum that the short path may take, if the table has one. None
    /// where they have no room in the step's `squares`, or no way to be spread.
    pub fn lay_out_rows(
        &mut self,
        step: &pl_step,
        table: &pl_table,
        packs: u64,
        plain: bool,
        hand_out: impl FnOnce(u64, bool) -> RowUnits,
    ) -> Option<&mut F> {
        let (rows, longest) = (step.rows, longest_piece(table, packs));
        let words = rows.checked_mul(packs.next_multiple_of(2))?;
        if words > step.squares_half_bytes / 8 || !self.sums_first() {
            return None;
        }
        let short = plain && self.is_short() && packs <= MOST_PACKS;
        let units = hand_out(longest, short);
        // It keeps `row_magic` exact: that is less than `row` too large for units below 2^32 / row.
        if rows * units.row * units.row >= 1 << 32 {
            return None;
        }
        self.lay_pieces(table, packs);
        *self.args.head().straight = units.straight.into();
        let laid_out = self.args.step();
        *laid_out = *step;
        laid_out.cluster = units.cluster;
        laid_out.block_units = units.block as u32;
        laid_out.row_units = units.row as u32;
        laid_out.row_magic =
            if units.row == 1 { 0 } else { (1u64 << 32).div_ceil(units.row) as u32 };
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
    /// the threads and packs of [`short_row`].
    pub straight: bool,
    /// The blocks of a row, if they are launched as a cluster; else 0.
    pub cluster: u32,
}

/// Most packs of a row whose squares the short path keeps in a block, and how many packs of a unit a thread has: MOST_SQUARES and
/// ROW_PACKS in `cuda/dev_gpu.cuh`.
const MOST_SQUARES: u64 = 1024;
const ROW_PACKS: usize = 4;
/// SHARED_ROW_THREADS in `cuda/kernels.cu`.
const MOST_SHARED: u64 = 256;

/// Whether a row of so many packs may be a cluster's.
pub fn fits_a_cluster(packs: u64) -> bool {
    packs <= MOST_SQUARES
}

/// The threads of a block for a row of two phases by the short path of kernels for `fan` sends, if it has such a block.
pub fn short_row(fan: usize, packs: u64, longest: u64) -> Option<u64> {
    let groups = (fan as u64 + 1) / ROW_PACKS.min(fan + 1) as u64;
    let threads = groups * longest.next_multiple_of(32);
    (packs <= MOST_SQUARES && (fan == 1 || threads <= MOST_SHARED)).then_some(threads)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{step, tables};
    use super::*;
    use crate::types::{Algorithm, Protocol};

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
                    (step.rows, step.call) = (rows, step.call + 1);
                    let words = rows * packs.next_multiple_of(2);
                    // Rows may be counted with more units than they have.
                    let row = |longest| longest + rows % 3 * (longest / 7);
                    let hand_out = |longest, straight| RowUnits {
                        block: longest,
                        row: row(longest),
                        straight,
                        cluster: 0,
                    };
                    let longest = longest_piece(&table, packs);
                    let Some(args) = form.lay_out_rows(&step, &table, packs, true, hand_out) else {
                        assert!(words > 1 << 16 || row(longest) >= 1 << 15, "{packs} {rows}");
                        continue;
                    };
                    assert!(words <= 1 << 16 && args.straight == u16::from(packs <= MOST_PACKS));
                    assert_eq!((args.step.rows, args.step.call), (rows, step.call), "its own step");
                    let (widest, magic) =
                        (u64::from(args.step.row_units), u64::from(args.step.row_magic));
                    let has = (u64::from(args.step.block_units), u64::from(args.widest), widest);
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
}
