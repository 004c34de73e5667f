// The probe: how long a flag takes from rank to rank, and how fast stores and loads are, with every word checked.
//
// It uses the seam, the waits and the memory that calls use, so that what it finds is what they will find. All ranks
// that take part launch together, with the same number of blocks; block b of a rank works with block b of the others.
#ifndef PEERLANE_PROBE_CUH
#define PEERLANE_PROBE_CUH

#include "wait.cuh"

namespace PL_NAMESPACE {

enum : uint32_t { ARRIVED = 0, ACKNOWLEDGED = 1, CHECKED = 2 };
// Round trips before the clock is read: the first meets cold caches, and a peer that is yet to start.
constexpr uint32_t PROBE_WARM_ROUNDS = 8;

struct Probe {
  const pl_probe& p;
  Step s;
  uint32_t wrong;  // a bit per rank whose data were not what it had written

  PL_FN explicit Probe(const pl_probe& probe) : p(probe), s(probe.step, 0, 0), wrong(0) {}

  PL_FN uint32_t rank() const { return p.step.rank; }
  PL_FN uint64_t* flag(uint32_t at, uint32_t kind, uint32_t of) const {
    const uint64_t line = (uint64_t(kind) * PL_MAX_RANKS + of) * PL_PROBE_BLOCKS + dev::block();
    return reinterpret_cast<uint64_t*>(slab(s.a, at) + p.flags + line * 64);
  }
  PL_FN char* slot(uint32_t at, uint32_t of) const { return slab(s.a, at) + p.data + of * p.slot_bytes; }
  PL_FN uint64_t* result() const {
    return reinterpret_cast<uint64_t*>(p.result) + uint64_t(dev::block()) * (1 + 2 * p.rounds);
  }
};

// Word 0 of what `writer` stores for `reader` in a round; word i is i times an odd number more. A slab that shows its
// owner an earlier round, another writer's words or another reader's, shows it wrong ones.
PL_FN uint32_t probe_word(uint64_t tag, uint32_t writer, uint32_t reader) {
  // SplitMix64 (Steele, Lea, Flood 2014).
  uint64_t z = (tag ^ uint64_t(writer) << 56 ^ uint64_t(reader) << 48) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return uint32_t(z >> 32);
}
constexpr uint32_t PROBE_STRIDE = 0x9e3779b9u;

// The strips of a slot that this thread takes; the bytes of a round are whole strips.
template <class F>
PL_FN void each_strip(const Probe& x, F f) {
  const uint64_t strips = x.p.bytes / (uint64_t(dev::STRIP) * PL_PACK_BYTES);
  const uint64_t all = uint64_t(dev::blocks()) * dev::threads();
  PL_ROLL
  for (uint64_t i = uint64_t(dev::block()) * dev::threads() + dev::tid(); i < strips; i += all)
    f(i * dev::STRIP * PL_PACK_BYTES);
}

PL_FN void probe_store(const Probe& x, uint32_t at, uint32_t of, uint32_t word0) {
  char* to = x.slot(at, of);
  each_strip(x, [&](uint64_t offset) {
    dev::Raw r;
    r.own();
    const uint32_t first = word0 + uint32_t(offset / 4) * PROBE_STRIDE;
    PL_UNROLL
    for (uint32_t i = 0; i < 4 * dev::STRIP; ++i) *r.words(i) = first + i * PROBE_STRIDE;
    dev::slab_store(to + offset, r, dev::STRIP * PL_PACK_BYTES, false);
  });
}

// True if every word of this thread's share is there.
PL_FN bool probe_check(const Probe& x, uint32_t at, uint32_t of, uint32_t word0) {
  const char* from = x.slot(at, of);
  uint32_t differs = 0;
  each_strip(x, [&](uint64_t offset) {
    dev::Raw r;
    dev::slab_load(r, from + offset, false);
    const uint32_t first = word0 + uint32_t(offset / 4) * PROBE_STRIDE;
    PL_UNROLL
    for (uint32_t i = 0; i < 4 * dev::STRIP; ++i) differs |= r.word(i) ^ (first + i * PROBE_STRIDE);
  });
  return differs == 0;
}

// Everything that this block has stored, then the flag, at each rank of `mask`.
PL_FN void probe_raise(const Probe& x, uint32_t kind, uint32_t mask, uint64_t tag) {
  dev::sync_block();
  PL_ROLL
  for (uint32_t r = dev::tid(); r < x.p.step.n; r += dev::threads())
    if (mask >> r & 1) dev::flag_release(x.flag(r, kind, x.rank()), tag);
}

PL_FN bool probe_await(Probe& x, uint32_t kind, uint32_t mask, uint64_t tag) {
  bool ok = true;
  PL_ROLL
  for (uint32_t r = dev::tid(); r < x.p.step.n && ok; r += dev::threads()) {
    if (!(mask >> r & 1)) continue;
    const uint64_t* flag = x.flag(x.rank(), kind, r);
    ok = await(
        x.s, [&] { return dev::flag_acquire(flag) == tag; }, [&] { return r; });
  }
  return !dev::any_in_block(!ok);
}

// All blocks of this rank begin a round together, else its time would hold the drift between them.
PL_FN bool probe_line_up(Probe& x, uint64_t tag) {
  uint64_t* generation = reinterpret_cast<uint64_t*>(x.p.barrier);
  dev::sync_block();
  bool ok = true;
  if (dev::tid() == 0) {
    uint32_t* count = reinterpret_cast<uint32_t*>(generation + 1);
    if (dev::arrive_in_order(count)) {
      dev::local_store32(count, 0);
      dev::local_release64(generation, tag);
    } else {
      ok = await(
          x.s, [&] { return dev::local_load64(generation) == tag; }, [&] { return x.rank(); });
    }
  }
  return !dev::any_in_block(!ok);
}

PL_FN void probe_note(const Probe& x, uint32_t round, uint64_t start) {
  const uint64_t end = dev::now_ns();
  if (dev::tid() != 0) return;
  dev::local_store64(x.result() + 1 + 2 * round, start);
  dev::local_store64(x.result() + 2 + 2 * round, end);
}

// The owner of the memory says when all has arrived, and only then looks at it: the writer's clock stops before.
PL_FN bool probe_store_round(Probe& x, uint32_t round, uint64_t tag, bool loaded) {
  if (!probe_line_up(x, tag)) return false;
  const uint32_t n = x.p.step.n;
  const uint64_t start = dev::now_ns();
  PL_ROLL
  for (uint32_t i = 1; i < n && loaded; ++i) {
    const uint32_t peer = (x.rank() + i) % n;
    if (x.p.to >> peer & 1) probe_store(x, peer, x.rank(), probe_word(tag, x.rank(), peer));
  }
  probe_raise(x, ARRIVED, x.p.to, tag);
  if (!probe_await(x, ARRIVED, x.p.from, tag)) return false;
  probe_raise(x, ACKNOWLEDGED, x.p.from, tag);
  if (!probe_await(x, ACKNOWLEDGED, x.p.to, tag)) return false;
  probe_note(x, round, start);
  PL_ROLL
  for (uint32_t writer = 0; writer < n && loaded; ++writer)
    if (x.p.from >> writer & 1 &&
        dev::any_in_block(!probe_check(x, x.rank(), writer, probe_word(tag, writer, x.rank()))))
      x.wrong |= 1u << writer;
  probe_raise(x, CHECKED, x.p.from, tag);
  return probe_await(x, CHECKED, x.p.to, tag);
}

// Every owner writes its own slot anew, and the readers check what they load while the clock runs: a few instructions
// per pack, beside a load from another device.
PL_FN bool probe_load_round(Probe& x, uint32_t round, uint64_t tag, bool loaded) {
  const uint32_t n = x.p.step.n;
  if (loaded && x.p.from != 0) probe_store(x, x.rank(), x.rank(), probe_word(tag, x.rank(), x.rank()));
  probe_raise(x, ARRIVED, x.p.from, tag);
  if (!probe_await(x, ARRIVED, x.p.to, tag)) return false;
  if (!probe_line_up(x, tag)) return false;
  const uint64_t start = dev::now_ns();
  PL_ROLL
  for (uint32_t i = 1; i < n && loaded; ++i) {
    const uint32_t peer = (x.rank() + i) % n;
    if (x.p.to >> peer & 1 && dev::any_in_block(!probe_check(x, peer, peer, probe_word(tag, peer, peer))))
      x.wrong |= 1u << peer;
  }
  dev::sync_block();
  probe_note(x, round, start);
  probe_raise(x, CHECKED, x.p.to, tag);
  return probe_await(x, CHECKED, x.p.from, tag);
}

// A word goes to the peer and comes back, as relaxed stores and polls: what `ll` and `sentinel` pay for a hop.
PL_FN void probe_latency(Probe& x) {
  if (dev::block() != 0 || dev::tid() != 0 || x.p.to == 0) return;
  const uint32_t peer = dev::lowest_bit(x.p.to);
  uint64_t* there = x.flag(peer, ARRIVED, x.rank());
  const uint64_t* here = x.flag(x.rank(), ARRIVED, peer);
  uint64_t start = 0;
  PL_ROLL
  for (uint32_t round = 0; round < x.p.rounds; ++round) {
    if (round == PROBE_WARM_ROUNDS) start = dev::now_ns();
    const uint64_t tag = x.p.tag + 1 + round;
    if (x.rank() < peer) dev::post_64(there, tag);
    if (!await(
            x.s, [&] { return dev::poll_64(here) == tag; }, [&] { return peer; }))
      return;
    if (x.rank() > peer) dev::post_64(there, tag);
  }
  probe_note(x, 0, start);
}

PL_FN void probe(const pl_probe& p) {
  Probe x(p);
  if (p.what == PL_PROBE_LATENCY) return probe_latency(x);
  PL_ROLL
  for (uint32_t round = 0; round < p.rounds; ++round) {
    const uint64_t tag = p.tag + 1 + round;
    const bool loaded = round % 2 == 1;
    x.s.phase = round;
    const bool ok =
        p.what == PL_PROBE_STORE ? probe_store_round(x, round, tag, loaded) : probe_load_round(x, round, tag, loaded);
    if (!ok) return;
  }
  if (dev::tid() == 0) dev::local_store64(x.result(), x.wrong);
}

}  // namespace PL_NAMESPACE

#endif
