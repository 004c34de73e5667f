// A box of ranks in one thread: every GPU thread is a fiber, every store to a slab is a posted
// write that travels, time is a counter, and one seed decides everything.
//
// What the fabric may do to a write, and why it may:
// - Writes wait in a queue per (writer rank, slab) and are delivered at any later time, in any
// order: relaxed stores to
//   different words have no order in the PTX model, and PCIe writes with relaxed ordering may pass
//   each other.
// - A vector store travels as its 32-bit words, a 64-bit store whole: PTX promises atomicity up to
// 64 bits of a scalar.
// - Two writes of one rank to the same word keep their order (coherence).
// - A release is delivered after every write that happened before it: the thread's own, and those
// of threads it has met
//   at a barrier of the block since they were issued (cumulativity), to whichever slab. Nothing
//   orders it with writes of other threads, or with later ones.
// - A system fence orders the same writes before all *later* writes of the thread, and of threads
// that it meets at a
//   barrier afterwards. It delivers nothing by itself.
// - A launch happens after the launch before it on the same rank, so what was ordered by a barrier
// or fence in one stays
//   ordered in the next. Writes stay in flight across launches: nothing but their reader waits for
//   them.
// - A rank's words in its own device memory (flags polled, words re-armed or cleared) change at
// once. What pull publishes
//   in the writer's own slab still travels, because peers look at it. With `host_staged` the slab
//   is host memory and every store of its owner travels too.
// - Loads happen in program order, each 32-bit word (64-bit for tagged words) by itself. Loads that
// the reader's GPU
//   would reorder are not modelled.
#ifndef EXPLORER_WORLD_H
#define EXPLORER_WORLD_H

#include <stdint.h>
#include <string.h>

#include <memory>
#include <utility>
#include <vector>

#include "explorer.h"

namespace explorer {

constexpr uint32_t MAX_THREADS = 4;  // of a rank, in one block or two
constexpr uint32_t MAX_RANKS = 5;
constexpr uint32_t MAX_KEPT = 9;      // packs of a thread
constexpr uint32_t MAX_LANES = 1024;  // that a block leaves for its threads
constexpr uint32_t MAX_SQUARES = 64;  // of packs of a row that is one block's

struct Counts {
  uint32_t of[MAX_THREADS] = {};  // writes of each thread of the rank, in program order
  void merge(const Counts& o) {
    for (uint32_t t = 0; t < MAX_THREADS; ++t) of[t] = of[t] > o.of[t] ? of[t] : o.of[t];
  }
};

struct Write {
  uintptr_t at;
  uint64_t value;
  uint32_t bytes, thread, number;
  Counts after;  // delivered only when these are
};

// Writes from `head` on are in flight.
struct Queue {
  std::vector<Write> writes;
  size_t head = 0;
  size_t size() const { return writes.size() - head; }
};

// Threads that meet: of a block, of a rank between two launches, or of a cluster. They are neighbours in the list
// of fibers.
struct Barrier {
  uint32_t first = 0, threads = 0, arrived = 0, generation = 0;
  bool any = false, result = false;
  uint64_t shared = 0;
  float lanes[MAX_LANES] = {}, squares[MAX_SQUARES] = {};
  Counts before, fenced;
};

struct Fiber {
  void* sp = nullptr;
  uint32_t rank = 0, block = 0, tid = 0, thread = 0;  // thread: index in the rank
  bool runnable = true;
  bool inside = false;  // a kernel
  bool awaits_cluster = false, published = false;
  std::vector<std::pair<uint32_t, float>> squares;  // stored into the cluster, not published yet
  uint32_t squares_to = 0;                          // so many blocks of it
  uint32_t cluster_generation = 0;                  // of the cluster's barrier, when it arrived there
  uint32_t kept[MAX_KEPT][4] = {};
  const pl_args* args = nullptr;  // of the launch it is in
  Counts before;                  // writes that happened before what this thread does next
  Counts fenced;                  // those that a fence has ordered before its later writes
};

class World {
 public:
  explorer_outcome run(const explorer_case& c);

  // For the back end.
  const explorer_case* c = nullptr;
  Fiber* now = nullptr;
  int32_t quantum = 0;

  void point() {
    if (--quantum < 0) reschedule();
  }
  void post(void* p, uint64_t value, uint32_t bytes, bool published = false);
  void release(void* p, uint64_t value);
  void fence();
  void before_load(const void* p) {
    point();
    if (c->host_staged) own_writes_first(uintptr_t(p));
  }
  bool in_slab(const void* p) const { return uintptr_t(p) - uintptr_t(c->arena) < uintptr_t(c->n) << c->slab_log2; }
  bool meet(Barrier& b, bool any);
  uint64_t share(uint64_t v);
  // Memory that the threads of the calling thread's block share.
  float* lanes() { return blocks_[now->rank * c->blocks + now->block].lanes; }
  float* squares() { return blocks_[now->rank * c->blocks + now->block].squares; }
  bool meet_block(bool any);
  bool meet_part(uint32_t threads, bool any);  // the first so many of the calling thread's block
  // The blocks of the calling thread's rank as a cluster.
  void cluster_arrive(bool publish);
  void cluster_wait();
  void keep_in_cluster(uint32_t blocks, uint32_t pack, float square);
  // What a thread of the calling thread's block keeps there.
  uint32_t (*kept(uint32_t tid))[4] { return fibers_[blocks_[now->rank * c->blocks + now->block].first + tid].kept; }
  uint64_t clock();
  void failed_poll();
  void local_store() {
    point();
    fails_ = 0;
  }
  uint64_t epoch() const;  // of the step that the running thread is in
  bool is_data_flag(const void* p) const;
  void fiber_main();

 private:
  void reschedule();
  Fiber* choose();
  void switch_to(Fiber* f);
  void enqueue(uint32_t to, void* p, uint64_t value, uint32_t bytes, const Counts& after);
  bool deliverable(uint32_t rank, const Write& w) const;
  void deliver_some(uint32_t count);
  bool deliver_one();
  void deliver(Queue& q, uint32_t rank, size_t index);
  void drain(uint32_t rank);
  void own_writes_first(uintptr_t at);
  void toggle_in_flight(uint32_t rank, const Write& w);
  static size_t word_of(uintptr_t offset) { return offset / 4; }
  uint32_t random(uint32_t below) {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return uint32_t((state_ >> 33) * below >> 31);
  }
  bool quiet() const { return pending_ == 0 && fails_ > 11 * live_; }

  std::vector<Fiber> fibers_;
  std::vector<Barrier> blocks_, parts_, ranks_, clusters_;
  std::vector<Queue> queues_;
  std::vector<std::vector<uint8_t>> landed_;  // per thread: which of its writes, by number
  std::vector<uint32_t> oldest_;              // per thread: its oldest write in flight
  std::vector<uint32_t> issued_;
  std::vector<uint8_t> in_flight_;  // per 4-byte word of the arena, a bit per writing rank: at most one write each
  std::unique_ptr<char[]> stacks_;
  size_t stack_count_ = 0;
  void* main_sp_ = nullptr;
  uint64_t state_ = 0, clock_ = 0, events_ = 0, writes_ = 0;
  uint32_t live_ = 0, pending_ = 0, fails_ = 0, ring_ = 0;
  uint32_t deliver_chance_ = 0, burst_ = 0, window_ = 0, stay_ = 0;
  uint32_t slow_rank_ = 0, slow_queue_ = 0;
  bool stuck_ = false, strayed_ = false;
};

extern __thread World* world;

}  // namespace explorer

#endif
