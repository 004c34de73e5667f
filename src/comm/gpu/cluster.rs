//! Where the blocks of a row may be launched as a cluster (`cuda/cluster.cuh`), and that clusters find room.
//!
//! The blocks of a cluster start together, on as many multiprocessors that are neighbours: a GPU consists of groups of them, and a
//! cluster is of one group. (It may be that two of them can share one. Nothing is built on that.)
//! `share.rs` sees to it that there is a multiprocessor for every block; but those that are free may be too few in each group. A
//! cluster that waits for room is waited for by peers, and must not wait for their kernels in turn. What is beside it when it is to
//! start:
//!
//! - Kernels of other channels and of other ranks, which may wait for it: all blocks of the GPU but those of its share, each with a
//!   multiprocessor to itself at worst.
//! - Of its own rank and channel the launch before it, which ends without it, and so is no matter; and clusters of its own launch,
//!   which are of blocks like its own: they keep it from a multiprocessor only if `per_sm` of them are there.
//!
//! There is no room for another one only if every group has fewer than `cluster` multiprocessors left that have a place. So there
//! is, if more are left in all than `cluster - 1` in each group.
//!
//! The driver does not say how many groups there are, only how many clusters of a size the empty GPU holds. Of blocks that have a
//! multiprocessor to themselves, a group of m holds floor(m / 4) clusters of four, floor(m / 8) of eight and floor(m / 16) of
//! sixteen. So four times the first number, over all groups, are multiprocessors of groups that hold some. Groups of eight and more
//! are no more than there are clusters of eight beyond those of sixteen, of which each such group has one at least; and smaller ones
//! no more than there are clusters of four beyond twice those of eight.

use crate::device::cuda::{Function, FIRST_CAPABILITY, FIRST_PTX_VERSION};

/// Most blocks of a cluster: MOST_IN_CLUSTER in `cuda/dev_gpu.cuh`.
pub(super) const MOST_IN_CLUSTER: u32 = 8;

/// Most blocks of clusters on a multiprocessor, whatever they need: what an H200's driver counts with.
const MOST_PER_SM: u32 = 8;

/// Multiprocessors of a GPU whose groups hold clusters, and no fewer than there are such groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Neighbours {
    sms: u32,
    groups: u32,
}

impl Neighbours {
    /// By a kernel of which a multiprocessor holds one block of `threads` threads and no more. None where there are no clusters: on
    /// GPUs before 9.0, and with code for those.
    pub fn look<A: Copy>(
        kernel: &Function<A>,
        threads: u32,
        capability: (u32, u32),
    ) -> Option<Self> {
        if capability < FIRST_CAPABILITY || !can_be_clusters(kernel) {
            return None;
        }
        if !matches!(kernel.blocks_per_sm(threads, 0), Ok(1)) {
            return None;
        }
        let most = |cluster| kernel.most_clusters(threads, cluster).ok();
        // Not every GPU has clusters of sixteen.
        Some(Self::of(most(4)?, most(8)?, most(16).unwrap_or(0)))
    }

    /// Of what the empty GPU holds.
    pub fn of(fours: u32, eights: u32, sixteens: u32) -> Self {
        let (large, small) = (eights.saturating_sub(sixteens), fours.saturating_sub(2 * eights));
        Neighbours { sms: 4 * fours, groups: large + small }
    }
}

/// Whether the blocks of such a kernel can be told to be clusters: in code for older GPUs they have no other way than memory.
pub(super) fn can_be_clusters<A: Copy>(kernel: &Function<A>) -> bool {
    kernel.ptx_version() >= FIRST_PTX_VERSION
}

/// What clusters of a channel find room in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClusterRoom {
    neighbours: Neighbours,
    /// Multiprocessors that others may have.
    others: u32,
    /// Blocks like a launch's own beside it.
    alike: u32,
}

impl ClusterRoom {
    /// For launches on a channel with a share of `share` blocks of a GPU of `sm_count` multiprocessors.
    pub fn new(neighbours: Neighbours, sm_count: u32, share: u32) -> Self {
        ClusterRoom { neighbours, others: sm_count.saturating_sub(share), alike: 0 }
    }

    /// Where somebody has said how many blocks a launch has. Then one channel is used at a time: pairs of launches by each of the
    /// `sharers`, of the same kernel: a larger one beside it is not counted.
    pub fn pinned(neighbours: Neighbours, sharers: u32, blocks: u32) -> Self {
        let alike = (2 * sharers).saturating_mul(blocks);
        ClusterRoom { neighbours, others: 0, alike }
    }

    /// Whether all clusters of so many blocks of a launch of `blocks` find room whatever the others do. `per_sm`: blocks that a
    /// multiprocessor holds.
    pub fn holds(&self, cluster: u32, blocks: u32, per_sm: u32) -> bool {
        let Neighbours { sms, groups } = self.neighbours;
        let own = self.alike.saturating_add(blocks).saturating_sub(cluster);
        let Some(full) = own.checked_div(per_sm.min(MOST_PER_SM)) else { return false };
        let left = sms.saturating_sub(self.others).saturating_sub(full);
        (2..=MOST_IN_CLUSTER).contains(&cluster) && left > groups * (cluster - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Groups of an H200 by what its driver answers, of another 132 multiprocessors, of 188, of half a GPU, and of unlike ones.
    const GPUS: [&[u32]; 6] = [
        &[16, 16, 16, 16, 16, 16, 16, 12, 2, 2, 2, 2],
        &[16, 16, 16, 16, 16, 16, 18, 18],
        &[16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 14, 14],
        &[16, 16, 16, 12],
        &[9, 7, 5, 3, 2],
        &[4],
    ];

    fn neighbours(groups: &[u32]) -> Neighbours {
        let hold = |cluster: u32| groups.iter().map(|sms| sms / cluster).sum();
        Neighbours::of(hold(4), hold(8), hold(16))
    }

    #[test]
    fn the_driver_s_numbers_bound_what_it_does_not_say() {
        for gpu in GPUS {
            let found = neighbours(gpu);
            let holding: Vec<_> = gpu.iter().filter(|sms| **sms >= 4).collect();
            assert!(found.sms <= holding.iter().copied().sum(), "{gpu:?} {found:?}");
            assert!(found.groups as usize >= holding.len(), "{gpu:?} {found:?}");
        }
        assert_eq!(neighbours(GPUS[0]), Neighbours { sms: 124, groups: 9 });
        let without_sixteens = Neighbours::of(31, 15, 0);
        assert_eq!(without_sixteens, Neighbours { sms: 124, groups: 16 });
    }

    /// Whether a cluster finds no room if others take multiprocessors, and the other clusters places, as it suits worst: whether all
    /// groups can be left with fewer multiprocessors that have a place than it needs.
    fn can_be_kept_out(gpu: &[u32], others: u32, own: u32, cluster: u32, per_sm: u32) -> bool {
        // By the others' multiprocessors so far, the fewest places that the own clusters must take.
        let mut fewest = vec![0u32];
        for &sms in gpu {
            let mut next = vec![u32::MAX; fewest.len() + sms as usize];
            for (before, &places) in fewest.iter().enumerate() {
                for others in 0..=sms {
                    let full = per_sm * (sms - others).saturating_sub(cluster - 1);
                    let all = &mut next[before + others as usize];
                    *all = (*all).min(places.saturating_add(full));
                }
            }
            fewest = next;
        }
        fewest.iter().take(others as usize + 1).any(|&needed| needed <= own)
    }

    #[test]
    fn where_clusters_are_allowed_nobody_can_keep_one_out() {
        let (mut allowed, mut kept_out) = (0, 0);
        for gpu in GPUS {
            let sm_count: u32 = gpu.iter().sum();
            for share in (8..=sm_count).step_by(3) {
                for per_sm in 1..=8 {
                    for cluster in 2..=MOST_IN_CLUSTER.min(share) {
                        for blocks in [cluster, share / cluster * cluster] {
                            let room = ClusterRoom::new(neighbours(gpu), sm_count, share);
                            let others = sm_count - share;
                            let own = blocks - cluster;
                            let out = can_be_kept_out(gpu, others, own, cluster, per_sm);
                            kept_out += u32::from(out);
                            if room.holds(cluster, blocks, per_sm) {
                                allowed += 1;
                                assert!(!out, "{gpu:?} {share} {cluster} {blocks} {per_sm}");
                            }
                        }
                    }
                }
            }
        }
        assert!(allowed > 1000 && kept_out > 1000, "{allowed} {kept_out}");
    }

    #[test]
    fn a_rank_with_a_gpu_of_its_own_may_have_clusters_for_its_captured_calls() {
        let of = |share| ClusterRoom::new(neighbours(GPUS[0]), 132, share);
        assert!(of(66).holds(7, 7, 6) && of(66).holds(7, 14, 6) && of(66).holds(4, 64, 8));
        assert!(!of(66).holds(7, 63, 1) && !of(66).holds(1, 7, 8) && !of(66).holds(9, 9, 8));
        assert!(!of(66).holds(7, 7, 0), "what cannot be told has no room");
        assert!(!of(33).holds(7, 7, 6), "eager calls leave three quarters to others");
        assert!(!of(8).holds(7, 7, 6), "eight ranks on a GPU");
        let pinned = |blocks| ClusterRoom::pinned(neighbours(GPUS[0]), 8, blocks);
        assert!(pinned(16).holds(7, 14, 6) && !pinned(32).holds(7, 28, 6));
        let larger = ClusterRoom::new(neighbours(GPUS[2]), 188, 94);
        assert!(larger.holds(7, 14, 6), "where there are clusters of sixteen");
    }
}
