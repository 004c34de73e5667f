//! How rows of a fused step are spread over the blocks of its launch.

use super::{Shape, ShapeRule, FEW_THREADS, ROW_THREADS};
use crate::lane::RowUnits;

/// Threads of a short row's block that have no packs, see cuda/straight_rows.cuh. Where threads are pinned there may be none.
const SPARE_WARP: u32 = 32;
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
        Shape { blocks: self.blocks, threads: self.threads, chunk_packs: 1 }
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
            units: RowUnits { block: block_units, row: longest, straight: false },
        }
    }

    /// The same for the short path (`cuda/straight_rows.cuh`), whose blocks have packs of one row alone, at most one unit per thread;
    /// None where rows have no room in it. `whole`: the threads of a block that has a row, as after two phases it must.
    pub fn spread_straight(&self, rows: u64, longest: u64, whole: Option<u64>) -> Option<Spread> {
        let most = u64::from(self.most_blocks().saturating_sub(self.spare).max(1));
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
            blocks: blocks.min(self.most_blocks().into()) as u32,
            threads,
            units: RowUnits { block, row: parts * block, straight: true },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{captured, rules};
    use super::*;
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
                        let needed =
                            rows * parts + u64::from(rule.spare.min(rule.most_blocks() - 1));
                        assert!(s.blocks <= rule.most_blocks(), "{said}");
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
}
