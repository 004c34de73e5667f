//! Where the blocks of a row may be launched as a cluster (`cuda/cluster.cuh`), and that clusters find room.
//!
//! The blocks of a cluster start together, and on multiprocessors that are neighbours: a GPU consists of groups of them, and a
//! cluster is of one group. `share.rs` sees to it that there is a multiprocessor for every block; but those that are free may be
//! too few in each group. A cluster that waits for room is waited for by peers, and must not wait for their kernels in turn. What
//! is beside it when it is to start:
//!
//! - Kernels of other channels and of other ranks, which may wait for it: all blocks of the GPU but those of its share, each with a
//!   multiprocessor to itself at worst.
//! - Of its own rank and channel the launch before it, which ends without it, and so is no matter; and clusters of its own launch,
//!   which are of blocks like its own: each takes one place, of which a multiprocessor has `per_sm`.
//!
//! There is no room for another one only if no group has `cluster` places left: if all are taken but `cluster - 1` in each. So
//! there is, if what remains is more than that.
//!
//! The driver does not say how many groups there are, only how many clusters of a size the empty GPU holds. Of blocks that have a
//! multiprocessor to themselves, a group of m holds floor(m / 4) clusters of four and floor(m / 8) of eight. So four times the
//! first number, over all groups, are multiprocessors of groups that hold some; and since the two differ by 1 at least in each of
//! those, there are no more groups than the difference of the sums.

use super::chain::{FIRST_CAPABILITY, FIRST_PTX_VERSION};
use super::kernels::{HasKernels, Kernels};
use super::shape::{ROW_THREADS, SPARE_WARP};
use crate::device::cuda::Function;
use crate::launch::pl_unrolled_7;
use crate::types::DType;

/// Most blocks of a cluster: MOST_IN_CLUSTER in `cuda/dev_gpu.cuh`.
pub(super) const MOST_IN_CLUSTER: u32 = 8;

/// Multiprocessors of a GPU whose groups hold clusters, and no fewer than there are such groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Neighbours {
    sms: u32,
    groups: u32,
}

impl Neighbours {
    /// None where there are no clusters: on GPUs before 9.0, with code for those, by old drivers.
    pub fn look(kernels: &Kernels, capability: (u32, u32)) -> Option<Self> {
        // One block of the largest of its kernels is all that a multiprocessor holds.
        let kernel = pl_unrolled_7::of(kernels).cluster(DType::BF16)?;
        let threads = ROW_THREADS + SPARE_WARP;
        if capability < FIRST_CAPABILITY || !can_be_clusters(kernel) {
            return None;
        }
        if !matches!(kernel.blocks_per_sm(threads, 0), Ok(1)) {
            return None;
        }
        let most = |cluster| kernel.most_clusters(threads, cluster).ok().flatten();
        Some(Self::of(most(4)?, most(8)?))
    }

    /// Of what the empty GPU holds.
    pub fn of(fours: u32, eights: u32) -> Self {
        Neighbours { sms: 4 * fours, groups: fours.saturating_sub(eights) }
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
    /// Blocks that there are besides.
    own: u32,
}

impl ClusterRoom {
    /// For launches of up to `share` blocks on a GPU of `sm_count` multiprocessors.
    pub fn new(neighbours: Neighbours, sm_count: u32, share: u32) -> Self {
        ClusterRoom { neighbours, others: sm_count.saturating_sub(share), own: share }
    }

    /// Where somebody has said how many blocks a launch has. Then one channel is used at a time: pairs of launches by each of the
    /// `sharers`.
    pub fn pinned(neighbours: Neighbours, sharers: u32, blocks: u32) -> Self {
        ClusterRoom { neighbours, others: 0, own: (2 * sharers).saturating_mul(blocks) }
    }

    /// Whether clusters of so many blocks, of which a multiprocessor holds `per_sm`, find room whatever the others do.
    pub fn holds(&self, cluster: u32, per_sm: u32) -> bool {
        let Neighbours { sms, groups } = self.neighbours;
        let places = u64::from(per_sm) * u64::from(sms.saturating_sub(self.others));
        let own = u64::from(self.own.saturating_sub(cluster));
        let left = u64::from(groups) * u64::from(cluster.saturating_sub(1));
        (2..=MOST_IN_CLUSTER).contains(&cluster) && places > own + left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Groups of an H200, of an RTX PRO 6000 as it may be cut, of half a GPU, and of unlike ones.
    const GPUS: [&[u32]; 5] = [
        &[16, 16, 16, 16, 16, 16, 18, 18],
        &[16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 14, 14],
        &[16, 16, 16, 12],
        &[9, 7, 5, 3, 2],
        &[4],
    ];

    fn neighbours(groups: &[u32]) -> Neighbours {
        let hold = |cluster: u32| groups.iter().map(|sms| sms / cluster).sum();
        Neighbours::of(hold(4), hold(8))
    }

    #[test]
    fn the_driver_s_two_numbers_bound_what_it_does_not_say() {
        for gpu in GPUS {
            let found = neighbours(gpu);
            let holding: Vec<_> = gpu.iter().filter(|sms| **sms >= 4).collect();
            assert!(found.sms <= holding.iter().copied().sum(), "{gpu:?} {found:?}");
            assert!(found.groups as usize >= holding.len(), "{gpu:?} {found:?}");
        }
        assert_eq!(neighbours(GPUS[0]), Neighbours { sms: 128, groups: 16 });
    }

    /// Whether a cluster finds no room if others take multiprocessors, and the launch's other clusters places, as it suits worst.
    fn can_be_kept_out(gpu: &[u32], room: ClusterRoom, cluster: u32, per_sm: u32) -> bool {
        let (mut others, mut own) = (room.others, (room.own / cluster - 1) * cluster);
        // A group is full when fewer places than a cluster's are left: whole multiprocessors first, since they take more.
        gpu.iter().all(|sms| {
            let mut left = sms * per_sm;
            while left >= cluster && others > 0 {
                (left, others) = (left - per_sm, others - 1);
            }
            while left >= cluster && own > 0 {
                (left, own) = (left - 1, own - 1);
            }
            left < cluster
        })
    }

    #[test]
    fn where_clusters_are_allowed_nobody_can_keep_one_out() {
        let (mut allowed, mut kept_out) = (0, 0);
        for gpu in GPUS {
            let sm_count: u32 = gpu.iter().sum();
            for share in 8..=sm_count {
                for per_sm in 1..=8 {
                    for cluster in 2..=MOST_IN_CLUSTER.min(share) {
                        let room = ClusterRoom::new(neighbours(gpu), sm_count, share);
                        let held_out = can_be_kept_out(gpu, room, cluster, per_sm);
                        kept_out += u32::from(held_out);
                        if room.holds(cluster, per_sm) {
                            allowed += 1;
                            assert!(!held_out, "{gpu:?} {share} {cluster} {per_sm}");
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
        assert!(of(66).holds(7, 3) && of(66).holds(4, 8));
        assert!(!of(66).holds(7, 1) && !of(66).holds(1, 8) && !of(66).holds(9, 8));
        assert!(!of(33).holds(7, 3), "eager calls leave three quarters to others");
        assert!(!of(8).holds(7, 3), "eight ranks on a GPU");
        let pinned = |blocks| ClusterRoom::pinned(neighbours(GPUS[0]), 8, blocks);
        assert!(pinned(16).holds(7, 3) && !pinned(24).holds(7, 3));
        let larger = ClusterRoom::new(neighbours(GPUS[1]), 188, 94);
        assert!(larger.holds(7, 3) && larger.holds(4, 8));
    }
}
