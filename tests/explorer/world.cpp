#include "world.h"

namespace {

constexpr size_t STACK_BYTES = 128 << 10;

void enter() { explorer::world->fiber_main(); }

}  // namespace

#if defined(__x86_64__)

// Saves what the calling convention lets a callee keep, and goes on where `to` was left.
extern "C" void explorer_switch(void** from, void* to);
asm(R"(
.text
.globl explorer_switch
.type explorer_switch, @function
explorer_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size explorer_switch, .-explorer_switch
)");

namespace {
// What `explorer_switch` finds when it first goes to a fiber: six registers, and `enter` to return
// to.
void* prepare(char* stack) {
  const uintptr_t top = (uintptr_t(stack) + STACK_BYTES) & ~uintptr_t(63);
  void** sp = reinterpret_cast<void**>(top) - 8;
  memset(sp, 0, 64);
  sp[6] = reinterpret_cast<void*>(&enter);
  return sp;
}
}  // namespace

#else  // slower: a system call per switch

#include <ucontext.h>

namespace {
void explorer_switch(void** from, void* to) {
  ucontext_t here;  // on the stack of the fiber that is left
  *from = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}
void* prepare(char* stack) {
  ucontext_t* context = reinterpret_cast<ucontext_t*>((uintptr_t(stack) + 63) & ~uintptr_t(63));
  getcontext(context);
  context->uc_stack.ss_sp = stack + 4096;
  context->uc_stack.ss_size = STACK_BYTES - 4096;
  context->uc_link = nullptr;
  makecontext(context, enter, 0);
  return context;
}
}  // namespace

#endif

namespace gpu_shape {
void explore(const pl_args&);
void explore_unrolled(const pl_unrolled_7&);
}  // namespace gpu_shape
namespace cpu_shape {
void explore(const pl_args&);
}

namespace explorer {

__thread World* world;

namespace {
// Longer than any deadline of a case.
constexpr uint64_t LONG_NS = uint64_t(1) << 50;
}  // namespace

// ---- fibers

void World::fiber_main() {
  const uint32_t last = c->rank_steps[now->rank];
  for (uint32_t s = 0; s < last; ++s) {
    meet(ranks_[now->rank], false);  // a launch starts when the one before it has ended
    const uint32_t launch = s * c->n + now->rank;
    now->args = &c->args[launch];
    now->inside = true;
    if (c->cpu_shape)
      cpu_shape::explore(*now->args);
    else if (c->unrolled[launch].phases != 0)
      gpu_shape::explore_unrolled(c->unrolled[launch]);
    else
      gpu_shape::explore(*now->args);
    now->inside = false;
    now->args = &c->args[s * c->n + now->rank];
  }
  now->runnable = false;
  --live_;
  fails_ = 0;
  reschedule();
}

void World::switch_to(Fiber* f) {
  Fiber* from = now;
  now = f;
  explorer_switch(&from->sp, f->sp);
}

// Who runs next. When nothing is in flight and polls keep failing, threads take turns, each up to
// its next failed poll: after three rounds without a store nothing can ever change, which is what
// `quiet` reports.
Fiber* World::choose() {
  const uint32_t count = uint32_t(fibers_.size());
  const bool turns = pending_ == 0 && fails_ > 8 * live_;
  uint32_t at = turns ? ++ring_ : random(count);
  quantum = turns ? INT32_MAX : int32_t(random(stay_ + 1));
  if (!turns && fibers_[at].rank == slow_rank_ && random(32) != 0) at = random(count);
  for (uint32_t i = 0; i < count; ++i) {
    Fiber& f = fibers_[(at + i) % count];
    if (!f.runnable) continue;
    ring_ = (at + i) % count;
    return &f;
  }
  return nullptr;
}

// The scheduling point.
void World::reschedule() {
  if (++events_ == c->abort_at) {
    c->args[c->abort_rank].step.state->abort = PL_REASON_ABORTED;
    fails_ = 0;
  }
  // Once every thread polls in vain, only a delivery changes anything.
  if (pending_ != 0 && (random(256) < deliver_chance_ || fails_ > 2 * live_)) deliver_some(1 + random(burst_));
  Fiber* next = choose();
  if (next == nullptr) {
    stuck_ = live_ != 0;
    void* nowhere;
    explorer_switch(&nowhere, main_sp_);
  } else if (next != now) {
    switch_to(next);
  }
}

void World::failed_poll() {
  ++fails_;
  reschedule();
}

// Time stands almost still while anything can happen, and jumps over every deadline when nothing
// can: a deadline fires exactly when the wait would never end.
uint64_t World::clock() { return clock_ += quiet() ? LONG_NS : 1; }

// ---- writes

void World::post(void* p, uint64_t value, uint32_t bytes, bool published) {
  point();
  fails_ = 0;
  const uintptr_t offset = uintptr_t(p) - uintptr_t(c->arena);
  const uint32_t to = uint32_t(offset >> c->slab_log2);
  const bool in_slab = offset < uintptr_t(c->n) << c->slab_log2;
  if (in_slab && (to != now->rank || published || c->host_staged))
    enqueue(to, p, value, bytes, now->fenced);
  else
    memcpy(p, &value, bytes);
}

void World::release(void* p, uint64_t value) {
  point();
  fails_ = 0;
  const uintptr_t offset = uintptr_t(p) - uintptr_t(c->arena);
  if (offset >= uintptr_t(c->n) << c->slab_log2) {
    memcpy(p, &value, 8);
    return;
  }
  const Counts after = c->control == CONTROL_PLAIN_FLAG ? now->fenced : now->before;
  enqueue(uint32_t(offset >> c->slab_log2), p, value, 8, after);
}

void World::fence() {
  point();
  if (c->control != CONTROL_NO_FENCE) now->fenced.merge(now->before);
}

void World::enqueue(uint32_t to, void* p, uint64_t value, uint32_t bytes, const Counts& after) {
  const uint32_t rank = now->rank, writer = rank * MAX_THREADS + now->thread;
  own_writes_first(uintptr_t(p));
  if (bytes == 8) own_writes_first(uintptr_t(p) + 4);
  Write w;
  w.at = uintptr_t(p);
  w.value = value;
  w.bytes = bytes;
  w.thread = now->thread;
  w.number = ++issued_[writer];
  w.after = after;
  now->before.of[now->thread] = w.number;
  landed_[writer].push_back(0);
  toggle_in_flight(rank, w);
  queues_[rank * c->n + to].writes.push_back(w);
  ++pending_;
}

// A rank's later access to a word that one of its own writes is on the way to does not pass that
// write.
void World::own_writes_first(uintptr_t at) {
  const uintptr_t offset = at - uintptr_t(c->arena);
  if (offset < uintptr_t(c->n) << c->slab_log2 && in_flight_[word_of(offset)] >> now->rank & 1) drain(now->rank);
}

// Notes that the rank has a write on the way to these words, or has no more.
void World::toggle_in_flight(uint32_t rank, const Write& w) {
  const size_t word = word_of(w.at - uintptr_t(c->arena));
  in_flight_[word] ^= uint8_t(1u << rank);
  if (w.bytes == 8) in_flight_[word + 1] ^= uint8_t(1u << rank);
}

bool World::deliverable(uint32_t rank, const Write& w) const {
  for (uint32_t t = 0; t < MAX_THREADS; ++t)
    if (oldest_[rank * MAX_THREADS + t] <= w.after.of[t]) return false;
  return true;
}

void World::deliver(Queue& q, uint32_t rank, size_t index) {
  const Write w = q.writes[index];
  q.writes[index] = q.writes[q.head];
  if (++q.head == q.writes.size()) q.head = 0, q.writes.clear();
  const uint32_t to = uint32_t((w.at - uintptr_t(c->arena)) >> c->slab_log2);
  const bool mirrored = c->mirror_from != c->mirror_to && rank == c->mirror_from && to == c->mirror_to;
  if (++writes_ != c->drop_at && !mirrored) memcpy(reinterpret_cast<void*>(w.at), &w.value, w.bytes);
  toggle_in_flight(rank, w);
  const uint32_t writer = rank * MAX_THREADS + w.thread;
  landed_[writer][w.number] = 1;
  uint32_t& oldest = oldest_[writer];
  while (oldest < landed_[writer].size() && landed_[writer][oldest]) ++oldest;
  --pending_;
  fails_ = 0;
}

bool World::deliver_one() {
  const uint32_t count = uint32_t(queues_.size()), start = random(count);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t at = (start + i) % count;
    Queue& q = queues_[at];
    if (q.size() == 0 || (at == slow_queue_ && random(64) != 0)) continue;
    const size_t index = q.head + random(uint32_t(q.size() < window_ ? q.size() : window_));
    if (!deliverable(at / c->n, q.writes[index])) continue;
    deliver(q, at / c->n, index);
    return true;
  }
  return false;
}

void World::deliver_some(uint32_t count) {
  while (count-- > 0 && pending_ != 0)
    if (!deliver_one()) return;
}

void World::drain(uint32_t rank) {
  for (bool moved = true; moved;) {
    moved = false;
    for (uint32_t to = 0; to < c->n; ++to) {
      Queue& q = queues_[rank * c->n + to];
      for (size_t i = q.head; i < q.writes.size(); ++i)
        if (deliverable(rank, q.writes[i])) {
          deliver(q, rank, i);
          moved = true;
          if (q.size() == 0) break;
        }
    }
  }
}

// ---- what controls need to know

uint64_t World::epoch() const {
  const uint64_t e = now->args->step.channel->turn >> PL_TURN_BITS;
  return uint32_t(e) == 0 ? e + 2 : e;
}

bool World::is_data_flag(const void* p) const {
  const uintptr_t in_slab = (uintptr_t(p) - uintptr_t(c->arena)) & ((uintptr_t(1) << c->slab_log2) - 1);
  const pl_geometry& g = now->args->step.geo;
  const uint64_t bytes = uint64_t(now->args->table.flag_slots) * g.flag_chunks * 64;
  return in_slab >= g.flags && in_slab < g.flags + g.flags_half_bytes + bytes;
}

// ---- a case

explorer_outcome World::run(const explorer_case& which) {
  c = &which;
  world = this;
  state_ = which.seed * 0x9e3779b97f4a7c15ull + 0x1234567;
  for (int i = 0; i < 4; ++i) random(2);
  // How this seed's box behaves: prompt or lazy fabric, bursts, order or none, long or short turns,
  // a slow rank, a slow link.
  const uint32_t chances[] = {8, 40, 128, 230}, bursts[] = {1, 4, 16, 100}, windows[] = {1, 4, 1 << 30, 1 << 30},
                 stays[] = {0, 3, 15, 100};
  deliver_chance_ = chances[random(4)];
  burst_ = bursts[random(4)];
  window_ = windows[random(4)];
  stay_ = stays[random(4)];
  slow_rank_ = random(2) ? random(which.n) : MAX_RANKS;
  const uint32_t links = which.n * which.n;
  slow_queue_ = random(2) ? random(links) : links;

  const uint32_t threads = which.blocks * which.threads, count = which.n * threads;
  fibers_.assign(count, Fiber());
  blocks_.assign(which.n * which.blocks, Barrier());
  parts_.assign(which.n * which.blocks, Barrier());
  ranks_.assign(which.n, Barrier());
  clusters_.assign(which.n, Barrier());
  queues_.resize(links);
  for (Queue& q : queues_) q.writes.clear(), q.head = 0;
  const uint32_t writers = which.n * MAX_THREADS;
  landed_.resize(writers);
  for (auto& l : landed_) l.assign(1, 1);
  oldest_.assign(writers, 1);
  issued_.assign(writers, 0);
  // All zero at the end of a case, so only growth is cleared.
  in_flight_.resize(size_t(which.n) << which.slab_log2 >> 2);
  if (stack_count_ < count) stacks_.reset(new char[count * STACK_BYTES]), stack_count_ = count;
  for (uint32_t i = 0; i < count; ++i) {
    Fiber& f = fibers_[i];
    f.rank = i / threads;
    f.thread = i % threads;
    f.block = f.thread / which.threads;
    f.tid = f.thread % which.threads;
    f.sp = prepare(stacks_.get() + i * STACK_BYTES);
    Barrier& b = blocks_[f.rank * which.blocks + f.block];
    if (f.tid == 0) b.first = i, b.threads = which.threads;
    if (f.thread == 0)
      for (auto* all : {&ranks_, &clusters_}) (*all)[f.rank].first = i, (*all)[f.rank].threads = threads;
  }
  live_ = count;
  pending_ = fails_ = ring_ = 0;
  clock_ = events_ = writes_ = 0;
  stuck_ = strayed_ = false;
  now = &fibers_[random(count)];
  quantum = 0;
  explorer_switch(&main_sp_, now->sp);
  for (uint32_t rank = 0; rank < which.n; ++rank) drain(rank);
  explorer_outcome out;
  out.events = events_;
  out.writes = writes_;
  out.stuck = stuck_ || pending_ != 0;
  out.strayed = strayed_;
  return out;
}

}  // namespace explorer

extern "C" void explorer_run(const explorer_case* c, explorer_outcome* out) {
  static thread_local explorer::World instance;
  *out = instance.run(*c);
}
