// The blocks of a row as a cluster, which tell each other their squares through shared memory.
//
// On GPUs of 9.0 and newer the host may launch the blocks of a row of the short path of one phase as a cluster
// (pl_step.cluster). Whoever has r of a pack then stores its sum of squares into the shared memory of all of them,
// instead of posting it to where they poll for it (spread.cuh): half of the time and less. They meet twice:
// - Before the first store: a block's shared memory is there once the block runs. All arrive at the beginning, so that
//   nobody waits any more by the time that it has a sum.
// - Behind the last one. From there on nobody stores, so that a block may end whatever the others do.
// A block that is refused or has waited in vain takes part in both: others would wait for it, and one that has ended
// must not be stored to. It tells them that squares will not come, so that no block norms with what a launch before has
// left in shared memory: the others have failed then as well.
//
// Neither meeting has a deadline, and needs none. The blocks of a cluster start together; none waits for another before
// it has arrived; and whatever else a block waits for ends by itself.
#ifndef PEERLANE_CLUSTER_CUH
#define PEERLANE_CLUSTER_CUH

#include "spread.cuh"

namespace PL_NAMESPACE {

// Stores the squares of a pack of this block's row, behind the first meeting.
PL_FN void tell_cluster_if(uint32_t on, const pl_step& a, uint32_t pack, bool ok, float squares) {
  dev::keep_square_in_cluster_if(on, a.cluster, pack, ok ? squares : dev::bit_cast<float>(NO_SQUARES));
}

// What a block does that is refused: `pack` is one of its packs.
PL_COLD void refuse_in_cluster(const pl_step& a, uint32_t pack) {
  dev::cluster_arrive();
  dev::cluster_wait();
  tell_cluster_if(dev::tid() == 0, a, pack, false, 0.0f);
  dev::cluster_publish();
  dev::cluster_wait();
}

}  // namespace PL_NAMESPACE

#endif
