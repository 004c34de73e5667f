//! How rows of a fused step are spread over the blocks of its launch.

use super::{Shape, ShapeRule, FEW_THREADS, ROW_THREADS};
use crate::comm::gpu::cluster::ClusterRoom;
use crate::lane::{fits_a_cluster, RowUnits};

/// Threads of a short row's block that have no packs, see cuda/straight_rows.cuh. Where threads are pinned there may be none.
pub(in crate::comm::gpu) const SPARE_WARP: u32 = 32;
/// Threads whose packs a block keeps (KEEPERS in cuda/dev_gpu_packs.cuh), and groups of threads that share them (cuda/spread_norm.cuh).
const MOST_KEEPERS: u32 = 256;
const MOST_GROUPS: u32 = 4;

/// How a step's rows are spread over blocks: a unit is a pack of each piece of a row, see `cuda/spread.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::comm::gpu) struct Spread {
    pub blocks: u32,
    pub threads: u32,
    pub units: RowUnits,
}

impl Spread {
    /// Of the launch. Chunks are no matter to these kernels.
    pub fn shape(&self) -> Shape {
        let cluster = self.units.cluster;
        Shape { blocks: self.blocks, threads: self.threads, chunk_packs: 1, cluster }
    }
}

impl ShapeRule {
    /// For a fused step of `rows` rows of `longest` units, spread over blocks of at most so many threads: one unit per thread while
    /// there are blocks for it, as in [`shape`](Self::shape). After two phases a unit is a pack of each of the `pieces`: then several
    /// threads for each, which share them.
    pub fn spread(&self, rows: u64, longest: u64, most_threads: u32, pieces: bool) -> Spread {
        let blocks = u64::from(self.most_blocks().saturating_sub(self.spare).max(1));
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
                .min(self.most_blocks().into()) as u32,
            threads: self.threads.unwrap_or(threads).min(most_threads),
            units: RowUnits { block: block_units, row: longest, straight: false, cluster: 0 },
        }
    }

    /// The same for the short path (`cuda/straight_rows.cuh`), whose blocks have packs of one row alone, at most one unit per thread;
    /// None where rows have no room in it. `whole`: the threads of a block that has a row, as after two phases it must. `per_sm`: how
    /// many blocks of so many threads a multiprocessor holds, of the kernel for clusters, if there is one.
    pub fn spread_straight(
        &self,
        rows: u64,
        longest: u64,
        whole: Option<u64>,
        per_sm: &mut dyn FnMut(u32) -> u32,
    ) -> Option<Spread> {
        let most = u64::from(self.most_blocks().saturating_sub(self.spare).max(1));
        if rows == 0 || rows > most || longest == 0 {
            return None;
        }
        match whole {
            None => {
                let spread = self.parts_of_rows(rows, longest, most / rows)?;
                let RowUnits { block, row, .. } = spread.units;
                let room = self.clusters.filter(|_| self.spare == 0 && fits_a_cluster(longest));
                let cluster = u32::try_from(row / block).ok()?;
                let fits = |room: ClusterRoom| {
                    cluster > 1 && room.holds(cluster, spread.blocks, per_sm(spread.threads))
                };
                let cluster = if room.is_some_and(fits) { cluster } else { 0 };
                Some(Spread { units: RowUnits { cluster, ..spread.units }, ..spread })
            }
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
            blocks: blocks.min(self.most_blocks().into()) as u32,
            threads,
            units: RowUnits { block, row: parts * block, straight: true, cluster: 0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{captured, rules};
    use super::*;
    use crate::comm::gpu::cluster::Neighbours;
    use crate::lane::short_row;

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

    #[test]
    fn every_unit_has_a_block_and_blocks_are_no_more_than_the_rule_says() {
        for rule in rules(None) {
            for rows in (1..40).chain([73, 1000]) {
                for longest in LONGEST {
                    for most in [256, 512] {
                        let s = rule.spread(rows, longest, most, rows % 2 == 0);
                        let said = format!("{rule:?} {rows} {longest} {s:?}");
                        assert!(s.blocks <= rule.most_blocks() && s.blocks > 0, "{said}");
                        assert!(u64::from(s.blocks) * s.units.block >= rows * longest, "{said}");
                        assert!(s.threads <= most && s.threads.is_multiple_of(32), "{said}");
                    }
                }
            }
        }
    }

    /// By the short path of one phase, or of two of eight ranks, where a multiprocessor holds as many of its blocks as fit by
    /// their threads.
    fn straight(rule: ShapeRule, rows: u64, longest: u64, two: bool) -> Option<Spread> {
        let whole = if two { Some(short_row(7, longest * 8, longest)?) } else { None };
        rule.spread_straight(rows, longest, whole, &mut |threads| 512 / threads)
    }

    /// With room for clusters on a GPU of an H200's multiprocessors that the rank has to itself.
    fn with_clusters(rule: ShapeRule) -> ShapeRule {
        rule.with_clusters(Some(ClusterRoom::new(
            Neighbours::of(31, 15, 7),
            132,
            rule.most_blocks(),
        )))
    }

    #[test]
    fn on_the_short_path_every_unit_has_a_thread_besides() {
        let pins = [None, Some(64), Some(128), Some(288), Some(512), Some(1024)];
        let (mut found, mut clusters) = (0, 0);
        let rules = pins.into_iter().flat_map(rules);
        for rule in rules.flat_map(|rule| [rule, with_clusters(rule)]) {
            for rows in (1..40).chain([73, 1000]) {
                for (longest, two) in LONGEST.into_iter().flat_map(|l| [(l, false), (l, true)]) {
                    let Some(s) = straight(rule, rows, longest, two) else { continue };
                    let said = format!("{rule:?} {rows} {longest} {two} {s:?}");
                    let parts = s.units.row / s.units.block;
                    let needed = rows * parts + u64::from(rule.spare.min(rule.most_blocks() - 1));
                    assert!(s.blocks <= rule.most_blocks(), "{said}");
                    assert_eq!(u64::from(s.blocks), needed, "{said}");
                    assert!(s.units.row >= longest && s.units.row == parts * s.units.block);
                    assert!(s.units.row - longest < s.units.block, "each has some, {said}");
                    let busy = u32::try_from(s.units.block).unwrap();
                    let threads = s.threads;
                    assert!(threads >= busy && threads.is_multiple_of(32), "{said}");
                    match two {
                        true => {
                            let whole = short_row(7, longest * 8, longest);
                            assert_eq!((whole, parts), (Some(threads.into()), 1), "{said}");
                        }
                        false => assert!((FEW_THREADS..=544).contains(&threads), "{said}"),
                    }
                    if s.units.cluster != 0 {
                        assert_eq!(u64::from(s.units.cluster), parts, "{said}");
                        assert!(s.blocks.is_multiple_of(s.units.cluster) && longest <= 1024);
                        clusters += 1;
                    }
                    found += 1;
                }
            }
        }
        assert!(found > 2000 && clusters > 100, "{found} {clusters}");
    }

    #[test]
    fn a_short_rows_blocks_have_packs_of_that_row_alone() {
        let short = |rule: ShapeRule, rows, longest, two| {
            let s = straight(rule, rows, longest, two)?;
            assert!(s.units.straight && s.units.row.is_multiple_of(s.units.block));
            assert_eq!(s.units.cluster, 0);
            Some((s.blocks, s.threads, s.units.block, s.units.row))
        };
        let sixteen = ShapeRule::new(8, Some(16), None);
        assert_eq!(short(sixteen, 1, 896, false), Some((7, 160, 128, 896)));
        assert_eq!(short(sixteen, 2, 896, false), Some((14, 160, 128, 896)));
        assert_eq!(short(sixteen, 3, 896, false), Some((15, 224, 192, 960)));
        assert_eq!(short(sixteen, 8, 896, false), Some((16, 480, 448, 896)));
        assert_eq!(short(sixteen, 16, 896, false), None, "more units than threads");
        assert_eq!(short(sixteen, 1, 887, false), Some((7, 160, 128, 896)));
        assert_eq!(short(sixteen, 1, 1, false), Some((1, 160, 32, 32)));
        for rows in 1..=16 {
            assert_eq!(short(sixteen, rows, 112, true), Some((rows as u32, 256, 112, 112)));
        }
        assert_eq!(short(sixteen, 17, 112, true), None);
        assert_eq!(short_row(3, 896, 224), Some(224));
        assert_eq!(short_row(1, 896, 448), Some(448));
        assert_eq!(short_row(1, 1025, 513), None);
        let spare = sixteen.with_spare_block();
        assert_eq!(short(spare, 15, 112, true), Some((16, 256, 112, 112)));
        assert_eq!(short(spare, 16, 112, true), None, "no block is left for fences");
        let pinned = |threads| ShapeRule::new(8, Some(16), Some(threads));
        assert_eq!(short(pinned(256), 2, 896, false), Some((14, 256, 128, 896)));
        assert_eq!(short(pinned(256), 8, 896, false), None, "448 units");
        assert_eq!(short(pinned(64), 1, 1, false), None, "a row's lanes have 128 threads");
        assert_eq!(short(pinned(512), 8, 896, false), Some((16, 512, 448, 896)));
        assert_eq!(
            short(pinned(1024), 8, 896, false),
            Some((16, 544, 448, 896)),
            "the kernel's most"
        );
        for threads in [64, 288, 512, 1024] {
            let whole = short(pinned(threads), 2, 112, true);
            assert_eq!(
                whole,
                Some((2, 256, 112, 112)),
                "which is what the kernel takes, {threads}"
            );
        }
    }

    #[test]
    fn a_rows_blocks_are_a_cluster_where_those_find_room() {
        let rule = with_clusters(captured(1));
        let cluster = |rule, rows, longest, two| {
            let s = straight(rule, rows, longest, two)?;
            Some((s.blocks, s.threads, s.units.block, s.units.cluster))
        };
        assert_eq!(cluster(rule, 1, 896, false), Some((7, 160, 128, 7)));
        assert_eq!(cluster(rule, 16, 896, false), Some((64, 256, 224, 0)), "no room for so many");
        assert_eq!(cluster(rule, 1, 1100, false), Some((9, 160, 128, 0)), "too long");
        assert_eq!(cluster(rule, 1, 32, false), Some((1, 160, 32, 0)), "a block alone");
        assert_eq!(cluster(rule, 4, 112, true), Some((4, 256, 112, 0)), "a row is a block's");
        assert_eq!(cluster(rule.with_spare_block(), 1, 896, false).unwrap().3, 0);
        assert_eq!(cluster(captured(1), 1, 896, false), Some((7, 160, 128, 0)));
    }
}
