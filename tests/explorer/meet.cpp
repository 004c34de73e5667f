// Threads that meet: of a block, of a rank between two launches, or of a cluster.
#include "world.h"

namespace explorer {

bool World::meet(Barrier& b, bool any) {
  if (b.threads == 1) return any;
  point();
  b.any |= any;
  b.before.merge(now->before);
  b.fenced.merge(now->fenced);
  if (++b.arrived < b.threads) {
    const uint32_t generation = b.generation;
    now->runnable = false;
    while (b.generation == generation) reschedule();
    return b.result;
  }
  b.result = b.any;
  b.any = false;
  b.arrived = 0;
  ++b.generation;
  fails_ = 0;
  for (uint32_t i = 0; i < b.threads; ++i) {
    Fiber& f = fibers_[b.first + i];
    f.before.merge(b.before);
    f.fenced.merge(b.fenced);
    f.runnable = true;
  }
  return b.result;
}

bool World::meet_block(bool any) { return meet(blocks_[now->rank * c->blocks + now->block], any); }

bool World::meet_part(uint32_t threads, bool any) {
  const uint32_t at = now->rank * c->blocks + now->block;
  Barrier& part = parts_[at];
  part.first = blocks_[at].first;
  part.threads = threads;
  return meet(part, any);
}

// Who has arrived goes on, until it has to wait for the others.
void World::cluster_arrive(bool publish) {
  Barrier& cluster = clusters_[now->rank];
  point();
  now->published = publish;
  if (publish) {
    for (uint32_t block = 0; block < now->squares_to; ++block)
      for (auto [pack, square] : now->squares) blocks_[now->rank * c->blocks + block].squares[pack] = square;
    now->squares.clear();
  }
  now->cluster_generation = cluster.generation;
  if (++cluster.arrived < cluster.threads) return;
  cluster.arrived = 0;
  ++cluster.generation;
  fails_ = 0;
  for (uint32_t i = 0; i < cluster.threads; ++i) {
    Fiber& f = fibers_[cluster.first + i];
    if (f.awaits_cluster) f.awaits_cluster = false, f.runnable = true;
  }
}

void World::cluster_wait() {
  Barrier& cluster = clusters_[now->rank];
  point();
  while (cluster.generation == now->cluster_generation) {
    now->awaits_cluster = true;
    now->runnable = false;
    reschedule();
  }
}

// What is stored is there for others once it has been published.
void World::keep_in_cluster(uint32_t blocks, uint32_t pack, float square) {
  const Barrier& cluster = clusters_[now->rank];
  for (uint32_t i = 0; i < cluster.threads; ++i) strayed_ |= !fibers_[cluster.first + i].inside;
  now->squares.push_back({pack, square});
  now->squares_to = blocks;
}

uint64_t World::share(uint64_t v) {
  Barrier& b = blocks_[now->rank * c->blocks + now->block];
  meet(b, false);
  if (now->tid == 0) b.shared = v;
  meet(b, false);
  return b.shared;
}

}  // namespace explorer
