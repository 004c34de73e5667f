//! The shape of a launch. All blocks of all ranks that share a GPU must be resident together, because a block waits for
//! what other ranks' blocks send: `share.rs` says how many there may be.

use crate::lane::{longest_piece, RowUnits};
use crate::launch::{pl_geometry, pl_table};
use crate::types::Protocol;

/// Between two GPUs, a rank each, 448 KiB by `one_shot` take 3.7 us with 56 blocks and 4.8 with 28; over host memory 21.5 and 24.
/// With more than 64 nothing was measured there.
const MOST_BLOCKS: u32 = 64;
const FEW_THREADS: u32 = 128;
/// Threads of a block, as many as leave a pack of each piece to a thread: few, so that more multiprocessors share the work. Pieces
/// of two phases are short, and a thread has a pack of each.
const THREADS: [u32; 4] = [64, FEW_THREADS, FEWER_THREADS, SMALL_THREADS];
/// Most threads of a block that norms rows: ROW_THREADS of cuda/kernels.cu.
pub(super) const ROW_THREADS: u32 = 512;
/// Threads of a short row's block that have no packs, see cuda/straight_rows.cuh. Where threads are pinned there may be none.
const SPARE_WARP: u32 = 32;
/// The same of the largest: LARGEST_ROW_THREADS there.
pub(super) const LARGEST_ROW_THREADS: u32 = 384;
/// The same of kernels that need few registers, and of those that need more: SMALL_THREADS and THREADS there.
pub(super) const SMALL_THREADS: u32 = 512;
pub(super) const FEWER_THREADS: u32 = 256;
/// Threads whose packs a block keeps (KEEPERS in cuda/dev_gpu_packs.cuh), and groups of threads that share them
/// (cuda/spread_norm.cuh).
const MOST_KEEPERS: u32 = 256;
const MOST_GROUPS: u32 = 4;
/// Several per multiprocessor of the largest GPU; with more rows blocks take turns.
const MOST_BLOCKS_ALONE: u32 = 1024;
/// Chunks of a block that are in flight at once, for the protocol that raises a flag per chunk.
const CHUNKS_IN_FLIGHT: u64 = 4;

/// What every launch of a rank on a channel keeps to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShapeRule {
    most_blocks: u32,
    /// Somebody has said how many.
    pinned: bool,
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

/// Where a launch may go one of two ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shapes {
    /// Where no kernel of ours stands beside it: as many blocks as its channel may have.
    pub usual: Shape,
    /// As one of a chained pair (chain.rs): with fewer and larger blocks, so that both fit the channel's share. What else a
    /// kernel is told about the step is the same for both.
    pub linked: Shape,
    /// What the same call would take right behind this one.
    pub again: Shape,
}

impl From<Shape> for Shapes {
    fn from(shape: Shape) -> Self {
        Shapes { usual: shape, linked: shape, again: shape }
    }
}

impl Shapes {
    /// For kernels of at most so many threads a block.
    pub fn with_at_most(self, threads: u32) -> Self {
        let fewer = |shape: Shape| Shape { threads: shape.threads.min(threads), ..shape };
        let [usual, linked, again] = [self.usual, self.linked, self.again].map(fewer);
        Shapes { usual, linked, again }
    }
}

/// How a step's rows are spread over blocks: a unit is a pack of each piece of a row, see `cuda/spread.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spread {
    pub blocks: u32,
    pub threads: u32,
    pub units: RowUnits,
}

impl Spread {
    /// Of the launch. Chunks are no matter to these kernels.
    pub fn shape(&self) -> Shape {
        Shape { blocks: self.blocks, threads: self.threads, chunk_packs: 1 }
    }
}

impl ShapeRule {
    /// For a channel whose launches may have `share` blocks, unless `blocks` says otherwise. The same on all ranks: what a flag
    /// stands for follows from it.
    pub fn new(share: u32, blocks: Option<u32>, threads: Option<u32>) -> Self {
        let most_blocks = blocks.unwrap_or(share.clamp(1, MOST_BLOCKS));
        ShapeRule { most_blocks, pinned: blocks.is_some(), threads, spare: 0 }
    }

    /// The same with a block to spare for fences: `land_rearmed` in `cuda/step.cuh`.
    pub fn with_spare_block(self) -> Self {
        ShapeRule { spare: 1, ..self }
    }

    /// The same without it, for steps that seldom fence.
    pub fn without_spare_block(self) -> Self {
        ShapeRule { spare: 0, ..self }
    }

    /// The same with half of the blocks, where a step has one shape alone and is to be the second of a chained pair. Pinned blocks
    /// stay: two launches of them fit, or else were not to be chained.
    pub fn for_a_link(self) -> Self {
        let half = (self.most_blocks / 2).max(1);
        ShapeRule { most_blocks: if self.pinned { self.most_blocks } else { half }, ..self }
    }

    /// Blocks of a large step.
    pub fn most_blocks(&self) -> u32 {
        self.most_blocks
    }

    /// Packs of a piece for which there is a thread each, with blocks of so many threads.
    pub fn most_packs(&self, threads: u32) -> u64 {
        let blocks = self.most_blocks.saturating_sub(self.spare).max(1);
        u64::from(blocks) * u64::from(self.threads.unwrap_or(threads).min(threads))
    }

    /// For a step of `packs` packs: one pack of each piece per thread, in the smallest blocks of which there are enough for it,
    /// of at most so many threads. Linked, those of which half of the share is enough, if there are any.
    pub fn shape(
        &self,
        table: &pl_table,
        geometry: &pl_geometry,
        protocol: Protocol,
        packs: u64,
        most_threads: u32,
    ) -> Shapes {
        let longest = longest_piece(table, packs).max(1);
        let most = u64::from(self.most_blocks.saturating_sub(self.spare).max(1));
        let half = u64::from((self.most_blocks / 2).saturating_sub(self.spare));
        let from = usize::from(table.phases < 2);
        let smallest = |blocks: u64| {
            let mut sizes = THREADS[from..].iter().filter(|threads| **threads <= most_threads);
            sizes.find(|threads| longest <= blocks * u64::from(**threads)).copied()
        };
        let shape = |threads: Option<u32>| {
            let threads = self.threads.or(threads).unwrap_or(most_threads).min(most_threads);
            let busy = longest.div_ceil(threads.into()).min(most);
            let blocks = (busy + u64::from(self.spare)).min(self.most_blocks.into()) as u32;
            Shape { blocks, threads, chunk_packs: threads }
        };
        let mut usual = shape(smallest(most));
        if protocol != Protocol::Flagged {
            let linked = smallest(half).map_or(usual, |threads| shape(Some(threads)));
            return Shapes { usual, linked, again: linked };
        }
        let coarse = longest.div_ceil(u64::from(usual.blocks) * CHUNKS_IN_FLIGHT);
        let least = coarse.max(longest.div_ceil(geometry.flag_chunks.max(1).into()));
        usual.chunk_packs = usual.chunk_packs.max(least as u32);
        // A flag is a chunk's, so all ranks must cut alike; and what stands before a call is each rank's own affair.
        usual.into()
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
        match whole {
            None => self.parts_of_rows(rows, longest, most / rows),
            Some(threads) => self.whole_rows(rows, longest, u32::try_from(threads).ok()?),
        }
    }

    /// One phase, where there are blocks for so many parts of each row. Beside the threads for packs there is a warp to spare, or
    /// what pinned threads leave for one.
    fn parts_of_rows(&self, rows: u64, longest: u64, most_parts: u64) -> Option<Spread> {
        let parts = most_parts.min(longest.div_ceil(FEW_THREADS.into()));
        // Whole warps, since their accesses are.
        let block = longest.div_ceil(parts).next_multiple_of(32);
        let busy = u32::try_from(block).ok()?.max(FEW_THREADS);
        let most = ROW_THREADS + SPARE_WARP;
        let threads = self.threads.map_or(busy + SPARE_WARP, |pinned| pinned.min(most));
        let fits = busy <= threads.min(ROW_THREADS);
        fits.then(|| self.straight(rows, block, longest.div_ceil(block), threads))
    }

    /// Two phases. What pack a thread has follows from the threads that there must be, so here nobody pins them.
    fn whole_rows(&self, rows: u64, longest: u64, threads: u32) -> Option<Spread> {
        (threads <= ROW_THREADS).then(|| self.straight(rows, longest, 1, threads))
    }

    fn straight(&self, rows: u64, block: u64, parts: u64, threads: u32) -> Spread {
        let blocks = rows * parts + u64::from(self.spare);
        Spread {
            blocks: blocks.min(self.most_blocks.into()) as u32,
            threads,
            units: RowUnits { block, row: parts * block, straight: true },
        }
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
    use super::super::share::{share, CAPTURED};
    use super::*;
    use crate::lane::short_row;

    fn step(rule: ShapeRule, protocol: Protocol, packs: u64) -> Shapes {
        // SAFETY: plain integers, for which zero is a value.
        let (mut table, mut geometry): (pl_table, pl_geometry) = unsafe { std::mem::zeroed() };
        (table.pieces, table.cut_den, table.cut_num[1]) = (1, 1, 1);
        geometry.flag_chunks = 32;
        rule.shape(&table, &geometry, protocol, packs, FEWER_THREADS)
    }

    /// Of captured calls, for a GPU of 132 multiprocessors.
    fn captured(sharers: u32) -> ShapeRule {
        ShapeRule::new(share(132, sharers, CAPTURED), None, None)
    }

    fn shape(blocks: u32, threads: u32) -> Shape {
        Shape { blocks, threads, chunk_packs: threads }
    }

    #[test]
    fn a_thread_takes_one_pack_while_there_are_blocks() {
        let rule = captured(1);
        let usual = |packs| step(rule, Protocol::Sentinel, packs).usual;
        assert_eq!(usual(1), shape(1, 128));
        assert_eq!(usual(896), shape(7, 128));
        assert_eq!(usual(3584), shape(28, 128));
        assert_eq!(usual(7168), shape(56, 128));
        assert_eq!(usual(14336), shape(56, 256));
        assert_eq!(usual(28672), shape(64, 256), "several for each");
        assert_eq!(
            step(ShapeRule { threads: Some(64), ..rule }, Protocol::Ll, 100).usual.threads,
            64
        );
        let pinned = ShapeRule::new(8, Some(40), None);
        assert_eq!(step(pinned, Protocol::Ll, 1 << 20).usual.blocks, 40);
    }

    fn two_phases(rule: ShapeRule, packs: u64) -> Shapes {
        // SAFETY: plain integers, for which zero is a value.
        let (mut table, geometry): (pl_table, pl_geometry) = unsafe { std::mem::zeroed() };
        (table.phases, table.pieces, table.cut_den) = (2, 2, 2);
        table.cut_num[1..3].copy_from_slice(&[1, 2]);
        rule.shape(&table, &geometry, Protocol::Sentinel, packs, SMALL_THREADS)
    }

    #[test]
    fn a_link_has_half_of_the_blocks_if_more_threads_make_it_do() {
        let both = |packs| {
            let Shapes { usual, linked, .. } = step(captured(1), Protocol::Sentinel, packs);
            [usual, linked]
        };
        assert_eq!(both(896), [shape(7, 128), shape(7, 128)]);
        assert_eq!(both(3584), [shape(28, 128), shape(28, 128)]);
        assert_eq!(both(7168), [shape(56, 128), shape(28, 256)]);
        assert_eq!(both(14336), [shape(56, 256), shape(56, 256)], "not even so");
        let shapes = two_phases(captured(1), 896);
        assert_eq!([shapes.usual, shapes.linked], [shape(7, 64), shape(7, 64)]);
        let shapes = two_phases(captured(8), 896);
        assert_eq!([shapes.usual, shapes.linked], [shape(7, 64), shape(4, 128)]);
    }

    #[test]
    fn what_a_kernel_is_told_is_true_of_both_shapes() {
        for share in 1..70 {
            for rule in
                [ShapeRule::new(share, None, None), ShapeRule::new(9, Some(share), Some(96))]
            {
                for rule in [rule, rule.with_spare_block()] {
                    for packs in (1..99).chain([500, 1000, 5000, 9999, 20000, 1 << 20]) {
                        let Shapes { usual, linked, .. } = two_phases(rule, 2 * packs);
                        // Whether there is a thread for each pack of a piece: then the short path is taken.
                        let enough = |s: Shape| u64::from(s.blocks) * u64::from(s.threads) >= packs;
                        assert_eq!(enough(usual), enough(linked), "{rule:?} {packs}");
                        assert!(linked.blocks <= usual.blocks, "{rule:?} {packs}");
                        let flagged = step(rule, Protocol::Flagged, packs);
                        assert_eq!(flagged.usual, flagged.linked);
                    }
                }
            }
        }
    }

    #[test]
    fn the_flags_are_enough() {
        for rule in [captured(1), captured(8), captured(1).with_spare_block()] {
            for packs in [1, 32, 33, 4000, 4096 * 31, 1 << 20] {
                let shape = step(rule, Protocol::Flagged, packs).usual;
                assert!(u64::from(shape.chunk_packs) * 32 >= packs, "{shape:?}");
            }
        }
    }

    #[test]
    fn where_fences_are_needed_a_block_is_free_for_them() {
        let rule = captured(1).with_spare_block();
        let blocks = |packs| {
            let Shapes { usual, linked, .. } = step(rule, Protocol::Sentinel, packs);
            [usual.blocks, linked.blocks]
        };
        assert_eq!(blocks(896), [8, 8]);
        assert_eq!(blocks(3584), [29, 29]);
        assert_eq!(blocks(7168), [57, 29]);
        assert_eq!(blocks(31 * 256), [63, 32], "half of the share, that block counted");
        assert_eq!(blocks(1 << 20), [rule.most_blocks; 2]);
        assert_eq!(rule.rows(3).blocks, 4);
    }

    fn spread(rule: ShapeRule, rows: u64, longest: u64, most_threads: u32) -> (u32, u32, u64) {
        let s = rule.spread(rows, longest, most_threads, longest == 112);
        (s.blocks, s.threads, s.units.block)
    }

    #[test]
    fn rows_are_spread_over_the_blocks_that_there_are() {
        let alone = captured(1);
        assert_eq!(spread(alone, 1, 896, 512), (7, 128, 128), "as an all-reduce of the row");
        assert_eq!(spread(alone, 4, 896, 512), (28, 128, 128));
        assert_eq!(spread(alone, 16, 896, 512), (64, 224, 224), "four blocks for a row");
        let link = alone.for_a_link();
        assert_eq!(spread(link, 4, 896, 512), (28, 128, 128));
        assert_eq!(spread(link, 16, 896, 512), (32, 448, 448), "two of these fit the share");
        assert_eq!(spread(alone, 50, 896, 512), (50, 448, 896), "a row is a block's, in two turns");
        assert_eq!(
            spread(alone, 16, 112, 512),
            (16, 512, 112),
            "pieces of an eighth, four threads each"
        );
        assert_eq!(spread(alone, 16, 112, 256), (16, 256, 112));
        let shared = ShapeRule::new(4, None, None);
        assert_eq!(spread(shared, 1, 896, 512), (4, 224, 224));
        assert_eq!(spread(shared, 4, 896, 512), (4, 448, 896));
        assert_eq!(spread(shared, 5, 896, 512), (4, 384, 1120), "rows that end inside of a block");
        assert_eq!(spread(shared, 1, 887, 512), (4, 224, 222), "no block has an even part");
        assert_eq!(spread(shared, 1, 1, 512), (1, 128, 1));
        assert_eq!(spread(alone.with_spare_block(), 1, 896, 512), (8, 128, 128));
        let pinned = ShapeRule::new(4, Some(1), Some(64)).with_spare_block();
        assert_eq!(pinned.for_a_link(), pinned);
        assert_eq!(spread(pinned, 3, 896, 512), (1, 64, 3 * 896));
    }

    const LONGEST: [u64; 13] = [1, 2, 7, 33, 112, 128, 129, 360, 640, 887, 896, 1024, 2048];

    /// Of all sizes, and what they are as the second of a pair.
    fn rules(threads: Option<u32>) -> impl Iterator<Item = ShapeRule> {
        [1, 2, 3, 4, 8, 28, 64, 256].into_iter().flat_map(move |most_blocks| {
            [0, 1].into_iter().flat_map(move |spare| {
                let rule = ShapeRule { most_blocks, pinned: false, threads, spare };
                let link = rule.for_a_link();
                assert!(link.most_blocks <= (most_blocks / 2).max(1), "{link:?}");
                [rule, link]
            })
        })
    }

    #[test]
    fn every_unit_has_a_block_and_blocks_are_no_more_than_the_rule_says() {
        for rule in rules(None) {
            for rows in (1..40).chain([73, 1000]) {
                for longest in LONGEST {
                    for most in [256, 512] {
                        let s = rule.spread(rows, longest, most, rows % 2 == 0);
                        let said = format!("{rule:?} {rows} {longest} {s:?}");
                        assert!(s.blocks <= rule.most_blocks && s.blocks > 0, "{said}");
                        assert!(u64::from(s.blocks) * s.units.block >= rows * longest, "{said}");
                        assert!(s.threads <= most && s.threads.is_multiple_of(32), "{said}");
                    }
                }
            }
        }
    }

    #[test]
    fn on_the_short_path_every_unit_has_a_thread_besides() {
        let pins = [None, Some(64), Some(128), Some(288), Some(512), Some(1024)];
        let mut found = 0;
        for rule in pins.into_iter().flat_map(rules) {
            for rows in (1..40).chain([73, 1000]) {
                for longest in LONGEST {
                    let whole = short_row(7, longest * 8, longest);
                    for whole in [None, whole.or(Some(512)).filter(|most| longest <= *most)] {
                        let Some(s) = rule.spread_straight(rows, longest, whole) else { continue };
                        let said = format!("{rule:?} {rows} {longest} {whole:?} {s:?}");
                        let parts = s.units.row / s.units.block;
                        let needed = rows * parts + u64::from(rule.spare.min(rule.most_blocks - 1));
                        assert!(s.blocks <= rule.most_blocks, "{said}");
                        assert_eq!(u64::from(s.blocks), needed, "{said}");
                        assert!(s.units.row >= longest && s.units.row == parts * s.units.block);
                        let busy = u32::try_from(s.units.block).unwrap();
                        let threads = s.threads;
                        assert!(threads >= busy && threads.is_multiple_of(32), "{said}");
                        match whole {
                            Some(whole) => {
                                assert_eq!((threads.into(), parts), (whole, 1), "{said}")
                            }
                            None => assert!((FEW_THREADS..=544).contains(&threads), "{said}"),
                        }
                        found += 1;
                    }
                }
            }
        }
        assert!(found > 1000, "{found}");
    }

    #[test]
    fn a_short_rows_blocks_have_packs_of_that_row_alone() {
        let short = |rule: ShapeRule, rows, longest, whole| {
            let s = rule.spread_straight(rows, longest, whole)?;
            assert!(s.units.straight && s.units.row.is_multiple_of(s.units.block));
            Some((s.blocks, s.threads, s.units.block, s.units.row))
        };
        let sixteen = ShapeRule::new(8, Some(16), None);
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
        let pinned = |threads| ShapeRule::new(8, Some(16), Some(threads));
        assert_eq!(short(pinned(256), 2, 896, None), Some((14, 256, 128, 896)));
        assert_eq!(short(pinned(256), 8, 896, None), None, "448 units");
        assert_eq!(short(pinned(64), 1, 1, None), None, "a row's lanes have 128 threads");
        assert_eq!(short(pinned(512), 8, 896, None), Some((16, 512, 448, 896)));
        assert_eq!(
            short(pinned(1024), 8, 896, None),
            Some((16, 544, 448, 896)),
            "the kernel's most"
        );
        for threads in [64, 288, 512, 1024] {
            let whole = short(pinned(threads), 2, 112, Some(256));
            assert_eq!(
                whole,
                Some((2, 256, 112, 112)),
                "which is what the kernel takes, {threads}"
            );
        }
    }

    #[test]
    fn a_row_is_one_blocks_and_fused_steps_keep_to_the_same_share() {
        let rule = captured(8);
        assert_eq!(rule.rows(3), Shape { blocks: 3, threads: 512, chunk_packs: 1 });
        assert_eq!(rule.rows(1000).blocks, rule.most_blocks);
        assert_eq!(ShapeRule::alone(1000).blocks, 1000);
        assert_eq!(ShapeRule::alone(1 << 40).blocks, MOST_BLOCKS_ALONE);
    }
}
