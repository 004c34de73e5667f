//! The shape of a launch. All blocks of all ranks that share a GPU must be resident together, because a block waits for
//! what other ranks' blocks send; the rest of the GPU is for the kernels around the all-reduce.

use crate::lane::{longest_piece, RowUnits};
use crate::launch::{pl_geometry, pl_table};
use crate::types::Protocol;

/// More than this many blocks of the largest kernels brought nothing at any size that was measured.
const MOST_BLOCKS: u32 = 28;
const FEW_THREADS: u32 = 128;
/// Threads of a block, as many as leave a pack of each piece to a thread: few, so that more multiprocessors share the work. Pieces
/// of two phases are short, and a thread has a pack of each.
const THREADS: [u32; 4] = [64, FEW_THREADS, FEWER_THREADS, SMALL_THREADS];
/// Most threads of a block that norms rows: ROW_THREADS of cuda/kernels.cu.
pub(super) const ROW_THREADS: u32 = 512;
/// Threads of a short row's block that have no packs, see cuda/straight_rows.cuh. Where threads are pinned there may be none.
const SPARE_WARP: u64 = 32;
/// The same of the largest: LARGEST_ROW_THREADS there.
pub(super) const LARGEST_ROW_THREADS: u32 = 384;
/// The same of kernels that need few registers, and of those that need more: SMALL_THREADS and THREADS there.
pub(super) const SMALL_THREADS: u32 = 512;
pub(super) const FEWER_THREADS: u32 = 256;
/// Threads whose packs a block keeps (KEEPERS in cuda/dev.cuh), and groups of threads that share them (cuda/spread_norm.cuh).
const MOST_KEEPERS: u32 = 256;
const MOST_GROUPS: u32 = 4;
/// Several per multiprocessor of the largest GPU; with more rows blocks take turns.
const MOST_BLOCKS_ALONE: u32 = 1024;
/// Chunks of a block that are in flight at once, for the protocol that raises a flag per chunk.
const CHUNKS_IN_FLIGHT: u64 = 4;

/// What every launch of a rank keeps to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShapeRule {
    most_blocks: u32,
    threads: Option<u32>,
    /// Blocks beside those that have packs.
    spare: u32,
}

/// Blocks, threads of each, and packs of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub blocks: u32,
    pub threads: u32,
    pub chunk_packs: u32,
}

/// How a step's rows are spread over blocks: a unit is a pack of each piece of a row, see `cuda/spread.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spread {
    pub blocks: u32,
    pub threads: u32,
    pub units: RowUnits,
}

impl ShapeRule {
    /// For a GPU of `sm_count` multiprocessors that `sharers` ranks use: together they take a quarter at most, so that calls on
    /// all channels are resident at once, unless `blocks` says otherwise. A block counts as a multiprocessor, whatever it
    /// needs: beside a smaller one a large one may find no room. The same on all ranks: what a flag stands for follows from it.
    pub fn new(sm_count: u32, sharers: u32, blocks: Option<u32>, threads: Option<u32>) -> Self {
        let share = (sm_count / 4 / sharers.max(1)).clamp(1, MOST_BLOCKS);
        ShapeRule { most_blocks: blocks.unwrap_or(share), threads, spare: 0 }
    }

    /// The same with a block to spare for fences: `land_rearmed` in `cuda/step.cuh`.
    pub fn with_spare_block(self) -> Self {
        ShapeRule { spare: 1, ..self }
    }

    /// Blocks of a large step.
    pub fn most_blocks(&self) -> u32 {
        self.most_blocks
    }

    /// For a step of `packs` packs: one pack of each piece per thread while there are blocks of at most so many threads for it.
    pub fn shape(
        &self,
        table: &pl_table,
        geometry: &pl_geometry,
        protocol: Protocol,
        packs: u64,
        most_threads: u32,
    ) -> Shape {
        let longest = longest_piece(table, packs).max(1);
        let most = u64::from(self.most_blocks.saturating_sub(self.spare).max(1));
        // Half of the blocks if more threads make it do: then two kernels of a rank fit its share (chain.rs).
        let room = |blocks: u64| move |threads: &&u32| longest <= blocks * u64::from(**threads);
        let from = usize::from(table.phases < 2);
        let sizes = || THREADS[from..].iter().filter(|threads| **threads <= most_threads);
        let threads = sizes().find(room(most / 2)).or_else(|| sizes().find(room(most)));
        let threads = self.threads.or(threads.copied()).unwrap_or(most_threads).min(most_threads);
        let busy = longest.div_ceil(threads.into()).min(most);
        let blocks = (busy + u64::from(self.spare)).min(self.most_blocks.into()) as u32;
        let mut chunk = u64::from(threads);
        if protocol == Protocol::Flagged {
            let coarse = longest.div_ceil(u64::from(blocks) * CHUNKS_IN_FLIGHT);
            chunk = chunk.max(coarse).max(longest.div_ceil(geometry.flag_chunks.max(1).into()));
        }
        Shape { blocks, threads, chunk_packs: chunk as u32 }
    }

    /// For a fused step of `rows` rows of `longest` units, spread over blocks of at most so many threads: one unit per thread while
    /// there are blocks for it, as in [`shape`](Self::shape). After two phases a unit is a pack of each of the `pieces`: then several
    /// threads for each, which share them.
    pub fn spread(&self, rows: u64, longest: u64, most_threads: u32, pieces: bool) -> Spread {
        let blocks = u64::from(self.most_blocks.saturating_sub(self.spare).max(1));
        let (rows, longest) = (rows.max(1), longest.max(1));
        // While there are blocks enough, a block has packs of one row, whose squares are then all it has to gather; if not so at the
        // price of half of the blocks.
        let each = (blocks / rows).min(longest.div_ceil(FEW_THREADS.into())).max(1);
        let whole = (1..=each).rev().find(|each| longest.is_multiple_of(*each)).unwrap_or(1);
        let block_units = match whole * 2 > each {
            _ if rows > blocks => (rows * longest).div_ceil(blocks),
            true => longest / whole,
            false => longest.div_ceil(each),
        };
        let turns = block_units.div_ceil(most_threads.into());
        let one_turn = block_units.div_ceil(turns).next_multiple_of(32) as u32;
        let threads = match pieces && one_turn <= MOST_KEEPERS {
            true => one_turn * (most_threads / one_turn).clamp(1, MOST_GROUPS),
            false => one_turn.max(FEW_THREADS),
        };
        Spread {
            blocks: ((rows * longest).div_ceil(block_units) + u64::from(self.spare))
                .min(self.most_blocks.into()) as u32,
            threads: self.threads.unwrap_or(threads).min(most_threads),
            units: RowUnits { block: block_units, row: longest, straight: false },
        }
    }

    /// The same for the short path (`cuda/straight_rows.cuh`), whose blocks have packs of one row alone, at most one unit per thread;
    /// None where rows have no room in it. `whole`: the threads of a block that has a row, as after two phases it must.
    pub fn spread_straight(&self, rows: u64, longest: u64, whole: Option<u64>) -> Option<Spread> {
        let most = u64::from(self.most_blocks.saturating_sub(self.spare).max(1));
        if rows == 0 || rows > most || longest == 0 {
            return None;
        }
        let each = (most / rows).min(longest.div_ceil(FEW_THREADS.into()));
        let (block, threads) = match whole {
            Some(threads) => (longest, threads),
            // Whole warps, since their accesses are.
            None => {
                let block = longest.div_ceil(each).next_multiple_of(32);
                (block, block.max(FEW_THREADS.into()))
            }
        };
        let each = longest.div_ceil(block);
        let fits = threads <= u64::from(self.threads.unwrap_or(ROW_THREADS).min(ROW_THREADS));
        let spare = if whole.is_some() { 0 } else { SPARE_WARP };
        let threads = self.threads.map_or(threads + spare, u64::from);
        fits.then(|| Spread {
            blocks: (rows * each + u64::from(self.spare)).min(self.most_blocks.into()) as u32,
            threads: threads as u32,
            units: RowUnits { block, row: each * block, straight: true },
        })
    }

    /// For a fused step of `rows` rows that walks its table, each of which is one block's: its norm needs all of it.
    pub fn rows(&self, rows: u64) -> Shape {
        Shape {
            threads: self.threads.unwrap_or(ROW_THREADS),
            ..Self::blocks_for(rows.saturating_add(self.spare.into()), self.most_blocks)
        }
    }

    /// For a norm by itself, which waits for nobody and may have the whole GPU.
    pub fn alone(rows: u64) -> Shape {
        Self::blocks_for(rows, MOST_BLOCKS_ALONE)
    }

    fn blocks_for(rows: u64, most: u32) -> Shape {
        let blocks = rows.clamp(1, most.into()) as u32;
        // Chunks are rows, whatever is said here.
        Shape { blocks, threads: ROW_THREADS, chunk_packs: 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::short_row;

    fn step(rule: ShapeRule, protocol: Protocol, packs: u64) -> Shape {
        // SAFETY: plain integers, for which zero is a value.
        let (mut table, mut geometry): (pl_table, pl_geometry) = unsafe { std::mem::zeroed() };
        (table.pieces, table.cut_den, table.cut_num[1]) = (1, 1, 1);
        geometry.flag_chunks = 32;
        rule.shape(&table, &geometry, protocol, packs, FEWER_THREADS)
    }

    #[test]
    fn ranks_that_share_a_gpu_fill_at_most_a_quarter_of_it() {
        for sm_count in [20, 82, 132, 188] {
            for sharers in 1..=16 {
                let rule = ShapeRule::new(sm_count, sharers, None, None);
                let blocks = step(rule, Protocol::Sentinel, 1 << 20).blocks;
                assert!(blocks * sharers <= (sm_count / 4).max(sharers), "{sm_count} {sharers}");
            }
        }
        assert_eq!(ShapeRule::new(132, 8, Some(40), None).most_blocks, 40);
    }

    #[test]
    fn a_thread_takes_one_pack_while_there_are_blocks() {
        let rule = ShapeRule::new(132, 1, None, None);
        let shape = |packs| step(rule, Protocol::Sentinel, packs);
        assert_eq!(shape(1), Shape { blocks: 1, threads: 128, chunk_packs: 128 });
        assert_eq!(shape(896), Shape { blocks: 7, threads: 128, chunk_packs: 128 });
        assert_eq!(shape(3584), Shape { blocks: 14, threads: 256, chunk_packs: 256 });
        assert_eq!(shape(7168), Shape { blocks: 28, threads: 256, chunk_packs: 256 });
        let bulk = step(rule, Protocol::Flagged, 1 << 20);
        assert!(u64::from(bulk.chunk_packs) * 32 >= 1 << 20, "the flags are enough: {bulk:?}");
        assert_eq!(step(ShapeRule { threads: Some(64), ..rule }, Protocol::Ll, 100).threads, 64);
        // SAFETY: plain integers, for which zero is a value.
        let (mut table, geometry): (pl_table, pl_geometry) = unsafe { std::mem::zeroed() };
        (table.phases, table.pieces, table.cut_den) = (2, 2, 2);
        table.cut_num[1..3].copy_from_slice(&[1, 2]);
        let shape = rule.shape(&table, &geometry, Protocol::Sentinel, 896, SMALL_THREADS);
        assert_eq!(shape, Shape { blocks: 7, threads: 64, chunk_packs: 64 });
    }

    #[test]
    fn where_fences_are_needed_a_block_is_free_for_them() {
        let rule = ShapeRule::new(132, 1, None, None).with_spare_block();
        assert_eq!(step(rule, Protocol::Sentinel, 896).blocks, 8);
        assert_eq!(step(rule, Protocol::Sentinel, 1 << 20).blocks, rule.most_blocks);
        assert_eq!(rule.rows(3).blocks, 4);
    }

    fn spread(rule: ShapeRule, rows: u64, longest: u64, most_threads: u32) -> (u32, u32, u64) {
        let s = rule.spread(rows, longest, most_threads, longest == 112);
        (s.blocks, s.threads, s.units.block)
    }

    #[test]
    fn rows_are_spread_over_the_blocks_that_there_are() {
        let alone = ShapeRule::new(132, 1, None, None);
        assert_eq!(spread(alone, 1, 896, 512), (7, 128, 128), "as an all-reduce of the row");
        assert_eq!(spread(alone, 4, 896, 512), (28, 128, 128));
        assert_eq!(spread(alone, 16, 896, 512), (16, 448, 896), "a row is a block's, in two turns");
        assert_eq!(
            spread(alone, 16, 112, 512),
            (16, 512, 112),
            "pieces of an eighth, four threads each"
        );
        assert_eq!(spread(alone, 16, 112, 256), (16, 256, 112));
        let shared = ShapeRule::new(132, 8, None, None);
        assert_eq!(spread(shared, 1, 896, 512), (4, 224, 224));
        assert_eq!(spread(shared, 4, 896, 512), (4, 448, 896));
        assert_eq!(spread(shared, 5, 896, 512), (4, 384, 1120), "rows that end inside of a block");
        assert_eq!(spread(shared, 1, 887, 512), (4, 224, 222), "no block has an even part");
        assert_eq!(spread(shared, 1, 1, 512), (1, 128, 1));
        assert_eq!(spread(alone.with_spare_block(), 1, 896, 512), (8, 128, 128));
        let pinned = ShapeRule::new(132, 8, Some(1), Some(64)).with_spare_block();
        assert_eq!(spread(pinned, 3, 896, 512), (1, 64, 3 * 896));
    }

    #[test]
    fn every_unit_has_a_block_and_blocks_are_no_more_than_the_rule_says() {
        for most_blocks in [1, 2, 3, 4, 8, 28, 256] {
            for spare in [0, 1] {
                let rule = ShapeRule { most_blocks, threads: None, spare };
                for rows in (1..40).chain([73, 1000]) {
                    for longest in [1, 2, 7, 33, 112, 128, 129, 360, 640, 887, 896, 1024, 2048] {
                        for most in [256, 512] {
                            let s = rule.spread(rows, longest, most, rows % 2 == 0);
                            let said = format!("{rule:?} {rows} {longest} {s:?}");
                            assert!(s.blocks <= most_blocks && s.blocks > 0, "{said}");
                            assert!(
                                u64::from(s.blocks) * s.units.block >= rows * longest,
                                "{said}"
                            );
                            assert!(s.threads <= most && s.threads.is_multiple_of(32), "{said}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_short_rows_blocks_have_packs_of_that_row_alone() {
        let short = |rule: ShapeRule, rows, longest, whole| {
            let s = rule.spread_straight(rows, longest, whole)?;
            assert!(s.units.straight && s.units.row.is_multiple_of(s.units.block));
            Some((s.blocks, s.threads, s.units.block, s.units.row))
        };
        let sixteen = ShapeRule::new(132, 8, Some(16), None);
        assert_eq!(short(sixteen, 1, 896, None), Some((7, 160, 128, 896)));
        assert_eq!(short(sixteen, 2, 896, None), Some((14, 160, 128, 896)));
        assert_eq!(short(sixteen, 3, 896, None), Some((15, 224, 192, 960)));
        assert_eq!(short(sixteen, 8, 896, None), Some((16, 480, 448, 896)));
        assert_eq!(short(sixteen, 16, 896, None), None, "more units than threads");
        assert_eq!(short(sixteen, 1, 887, None), Some((7, 160, 128, 896)));
        assert_eq!(short(sixteen, 1, 1, None), Some((1, 160, 32, 32)));
        for rows in 1..=16 {
            let whole = short_row(7, 896, 112);
            assert_eq!(short(sixteen, rows, 112, whole), Some((rows as u32, 256, 112, 112)));
        }
        assert_eq!(short(sixteen, 17, 112, short_row(7, 896, 112)), None);
        assert_eq!(short_row(3, 896, 224), Some(224));
        assert_eq!(short_row(1, 896, 448), Some(448));
        assert_eq!(short_row(1, 1025, 513), None);
        let spare = sixteen.with_spare_block();
        assert_eq!(short(spare, 15, 112, Some(512)), Some((16, 512, 112, 112)));
        assert_eq!(short(spare, 16, 112, Some(512)), None, "no block is left for fences");
        let pinned = ShapeRule::new(132, 8, Some(16), Some(256));
        assert_eq!(short(pinned, 2, 896, None), Some((14, 256, 128, 896)));
        assert_eq!(short(pinned, 2, 112, Some(512)), None);
    }

    #[test]
    fn a_row_is_one_blocks_and_fused_steps_keep_to_the_same_share() {
        let rule = ShapeRule::new(132, 8, None, None);
        assert_eq!(rule.rows(3), Shape { blocks: 3, threads: 512, chunk_packs: 1 });
        assert_eq!(rule.rows(1000).blocks, rule.most_blocks);
        assert_eq!(ShapeRule::alone(1000).blocks, 1000);
        assert_eq!(ShapeRule::alone(1 << 40).blocks, MOST_BLOCKS_ALONE);
    }
}
