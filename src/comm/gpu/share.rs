//! What of a GPU a channel may take: as many blocks as there are multiprocessors in its share.
//!
//! A block waits for what blocks of other ranks send, so all blocks of all ranks that share a GPU must be resident together,
//! on all channels: one that found no room would be waited for by those that keep it out. They are, because
//!
//! - a block counts as a multiprocessor, whatever it needs. Two small ones that are counted as one do not do: they may end up
//!   on two multiprocessors, and a large block then fits on neither. So the sum of all blocks may be no more than there are
//!   multiprocessors, and that is enough, but for clusters (cluster.rs);
//! - each rank has an equal part of the GPU, and its channels' shares are no more than that part in sum: the test below;
//! - of a channel one launch runs at a time, or a pair that is chained, of which the second has started early. A launch takes
//!   no more than the share of its channel (`ShapeRule`). A pair takes no more either, both together (`Room::holds`), and if
//!   it is of two channels no more than the smaller of their shares.
//!
//! The exception: a launch has one block at least. Where more ranks share a GPU than it has multiprocessors for a block of each
//! on every channel, calls on all channels at once would not fit, whatever the shares.
//!
//! Where blocks are pinned, for a benchmark, nothing of this is kept, and one channel is measured at a time.

use crate::bootstrap::CHANNELS;

/// The channel of eager calls that name none, so that they may run beside a replay.
pub(super) const EAGER: usize = 0;
/// The channel of captured calls that name none: where time matters most, and so half of the GPU is theirs. A quarter is the
/// eager calls', and an eighth is left for each of the channels that are used only if they are named.
pub(super) const CAPTURED: usize = 1;

/// What a rank's part of the GPU is divided by, by channel.
const PARTS: [u32; CHANNELS] = {
    let mut parts = [8; CHANNELS];
    (parts[EAGER], parts[CAPTURED]) = (4, 2);
    parts
};

/// Most blocks of a rank's launch on `channel`, or of a chained pair of them, for a GPU of `sm_count` multiprocessors that
/// `sharers` ranks use.
pub(super) fn share(sm_count: u32, sharers: u32, channel: usize) -> u32 {
    let own = sm_count / sharers.max(1);
    let share = |channel: usize| (own / PARTS[channel]).max(1);
    if channel != CAPTURED {
        return share(channel);
    }
    // Where others have been rounded up to a block, less than half may be left.
    let others = (0..CHANNELS).filter(|&other| other != CAPTURED).map(share).sum();
    share(CAPTURED).min(own.saturating_sub(others)).max(1)
}

#[cfg(test)]
mod tests {
    use super::super::chain::{Grid, Room};
    use super::super::shape::{ShapeRule, SMALL_THREADS};
    use super::*;
    use crate::launch::{pl_geometry, pl_table};
    use crate::types::Protocol;

    type Shares = [u32; CHANNELS];

    fn shares(sm_count: u32, sharers: u32) -> Shares {
        [0, 1, 2, 3].map(|channel| share(sm_count, sharers, channel))
    }

    /// Multiprocessors that a rank takes if every channel has the most in flight that it may: a launch of what `launches` says
    /// for it, or two such of any size that are chained because `pairs` lets them.
    fn taken(launches: Shares, pairs: Shares) -> u32 {
        // SAFETY: plain integers, for which zero is a value.
        let (mut table, geometry): (pl_table, pl_geometry) = unsafe { std::mem::zeroed() };
        (table.phases, table.pieces, table.cut_den, table.cut_num[1]) = (1, 1, 1, 1);
        let room = Room::new((9, 0), 1, 1, Some(pairs)).unwrap();
        let most = |channel: usize| {
            let rule = ShapeRule::new(launches[channel], None, None);
            let mut blocks = Vec::new();
            for rule in [rule, rule.with_spare_block()] {
                // Sizes of a block more each, and some of all blocks.
                for packs in (0..70).map(|more| 1 + more * 128).chain([1 << 14, 1 << 15, 1 << 20]) {
                    let protocol = Protocol::Sentinel;
                    let shapes = rule.shape(&table, &geometry, protocol, packs, SMALL_THREADS);
                    blocks.extend([shapes.usual.blocks, shapes.linked.blocks]);
                }
                blocks.push(rule.rows(1000).blocks);
                for rule in [rule, rule.for_a_link()] {
                    blocks.push(rule.spread(64, 896, 512, false).blocks);
                    // Rows by the short path, a block or several for each.
                    for (longest, whole) in [(896, None), (112, Some(256))] {
                        let short = |rows| rule.spread_straight(rows, longest, whole, &mut |_| 8);
                        blocks.extend((1..70).filter_map(short).map(|spread| spread.blocks));
                    }
                }
            }
            blocks.sort_unstable();
            blocks.dedup();
            let grid = |blocks| Grid { blocks, per_sm: 1 };
            let twos = blocks.iter().flat_map(|a| blocks.iter().map(move |b| (*a, *b)));
            let held = twos.filter(|(a, b)| room.holds((grid(*a), channel), (grid(*b), channel)));
            held.map(|(a, b)| a + b).chain(blocks.last().copied()).max().unwrap()
        };
        (0..CHANNELS).map(most).sum()
    }

    #[test]
    fn launches_and_pairs_of_all_channels_and_ranks_fit_at_once() {
        for sm_count in 20..=188 {
            for sharers in 1..=16 {
                let shares = shares(sm_count, sharers);
                let taken = taken(shares, shares) * sharers;
                // One block a launch is the least.
                let least = CHANNELS as u32 * sharers;
                assert!(taken <= sm_count.max(least), "{taken} of {sm_count}, {sharers}");
            }
        }
    }

    /// The test above sees what it is there to see.
    #[test]
    fn shares_that_are_too_large_do_not_fit() {
        let right = shares(132, 1);
        assert_eq!(taken(right, right), 131);
        for (channel, blocks) in [(0, 66), (1, 100), (2, 33), (3, 18)] {
            let mut wrong = right;
            wrong[channel] = blocks;
            assert!(taken(wrong, wrong) > 132, "{wrong:?}");
        }
        // Pairs of launches that are right one by one.
        assert!(taken(right, right.map(|share| 2 * share)) > 132);
        // A half for captured calls although the others have been rounded up.
        assert!(taken([1, 2, 1, 1], [1, 2, 1, 1]) * 5 > 20);
    }

    #[test]
    fn captured_calls_have_half_of_the_gpu_and_eager_ones_a_quarter() {
        assert_eq!(shares(132, 1), [33, 66, 16, 16]);
        assert_eq!(shares(132, 2), [16, 33, 8, 8]);
        assert_eq!(shares(132, 8), [4, 8, 2, 2]);
        assert_eq!(shares(132, 16), [2, 4, 1, 1]);
        assert_eq!(shares(20, 4), [1, 2, 1, 1]);
        assert_eq!(shares(20, 5), [1, 1, 1, 1], "half would be a block too many");
        assert_eq!(shares(20, 16), [1, 1, 1, 1], "and here there is no room for all of these");
    }
}
