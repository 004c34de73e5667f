//! The shape of a launch. All blocks of all ranks that share a GPU must be resident together, because a block waits for
//! what other ranks' blocks send: `share.rs` says how many there may be.

mod spread;

use super::cluster::ClusterRoom;
use crate::lane::longest_piece;
use crate::launch::{pl_geometry, pl_table};
use crate::types::Protocol;
pub(super) use spread::{Spread, SPARE_WARP};

/// Between two GPUs, a rank each, 448 KiB by `one_shot` take 3.7 us with 56 blocks and 4.8 with 28; over host memory 21.5 and 24.
/// With more than 64 nothing was measured there.
const MOST_BLOCKS: u32 = 64;
const FEW_THREADS: u32 = 128;
/// Threads of a block, as many as leave a pack of each piece to a thread: few, so that more multiprocessors share the work. Pieces
/// of two phases are short, and a thread has a pack of each.
const THREADS: [u32; 4] = [64, FEW_THREADS, FEWER_THREADS, SMALL_THREADS];
/// Most threads of a block that norms rows: ROW_THREADS of cuda/kernels.cu.
pub(super) const ROW_THREADS: u32 = 512;
/// The same of the largest: LARGEST_ROW_THREADS there.
pub(super) const LARGEST_ROW_THREADS: u32 = 384;
/// The same of kernels that need few registers, and of those that need more: SMALL_THREADS and THREADS there.
pub(super) const SMALL_THREADS: u32 = 512;
pub(super) const FEWER_THREADS: u32 = 256;
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
    clusters: Option<ClusterRoom>,
}

/// Blocks, threads of each, and packs of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub blocks: u32,
    pub threads: u32,
    pub chunk_packs: u32,
    /// Blocks that start together, see cluster.rs; 0: none do.
    pub cluster: u32,
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

impl ShapeRule {
    /// For a channel whose launches may have `share` blocks, unless `blocks` says otherwise. The same on all ranks: what a flag
    /// stands for follows from it.
    pub fn new(share: u32, blocks: Option<u32>, threads: Option<u32>) -> Self {
        let most_blocks = blocks.unwrap_or(share.clamp(1, MOST_BLOCKS));
        ShapeRule { most_blocks, pinned: blocks.is_some(), threads, spare: 0, clusters: None }
    }

    /// The same where a row's blocks may be launched as a cluster.
    pub fn with_clusters(self, clusters: Option<ClusterRoom>) -> Self {
        ShapeRule { clusters, ..self }
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
            Shape { blocks, threads, chunk_packs: threads, cluster: 0 }
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
        Shape { blocks, threads: ROW_THREADS, chunk_packs: 1, cluster: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::super::share::{share, CAPTURED};
    use super::*;

    fn step(rule: ShapeRule, protocol: Protocol, packs: u64) -> Shapes {
        // SAFETY: plain integers, for which zero is a value.
        let (mut table, mut geometry): (pl_table, pl_geometry) = unsafe { std::mem::zeroed() };
        (table.pieces, table.cut_den, table.cut_num[1]) = (1, 1, 1);
        geometry.flag_chunks = 32;
        rule.shape(&table, &geometry, protocol, packs, FEWER_THREADS)
    }

    /// Of captured calls, for a GPU of 132 multiprocessors.
    pub fn captured(sharers: u32) -> ShapeRule {
        ShapeRule::new(share(132, sharers, CAPTURED), None, None)
    }

    fn shape(blocks: u32, threads: u32) -> Shape {
        Shape { blocks, threads, chunk_packs: threads, cluster: 0 }
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

    /// Of all sizes, and what they are as the second of a pair.
    pub fn rules(threads: Option<u32>) -> impl Iterator<Item = ShapeRule> {
        [1, 2, 3, 4, 8, 28, 64, 256].into_iter().flat_map(move |most_blocks| {
            [0, 1].into_iter().flat_map(move |spare| {
                let rule = ShapeRule { most_blocks, pinned: false, threads, spare, clusters: None };
                let link = rule.for_a_link();
                assert!(link.most_blocks <= (most_blocks / 2).max(1), "{link:?}");
                [rule, link]
            })
        })
    }

    #[test]
    fn a_row_is_one_blocks_and_fused_steps_keep_to_the_same_share() {
        let rule = captured(8);
        assert_eq!(rule.rows(3), Shape { blocks: 3, threads: 512, chunk_packs: 1, cluster: 0 });
        assert_eq!(rule.rows(1000).blocks, rule.most_blocks);
        assert_eq!(ShapeRule::alone(1000).blocks, 1000);
        assert_eq!(ShapeRule::alone(1 << 40).blocks, MOST_BLOCKS_ALONE);
    }
}
