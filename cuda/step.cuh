// The frame of a step: may it start, which epoch is it, and what the last block does.
#ifndef PEERLANE_STEP_CUH
#define PEERLANE_STEP_CUH

#include "wait.cuh"

namespace PL_NAMESPACE {

// The epoch after `e`. Its low 32 bits are the tag of `ll` and must not be 0, which is what cleared memory holds. From
// ...ffffffff the counter skips ...00000000 and ...00000001 as well, and so goes from an odd value to an even one.
// Every other step goes from e to e + 1. So consecutive epochs always differ in their lowest bit, and halves alternate.
PL_FN uint64_t next_epoch(uint64_t e) { return uint32_t(e + 1) == 0 ? e + 3 : e + 1; }
// A channel that was zeroed at creation starts at epoch 2, on all ranks alike.
PL_FN uint64_t valid_epoch(uint64_t e) { return uint32_t(e) == 0 ? e + 2 : e; }

// Fields of a mismatch, as bits of the record's `phase` (a mismatch is found before the first phase).
constexpr uint32_t DIFFERS_COUNT = 1, DIFFERS_DTYPE = 2, DIFFERS_OP = 4, DIFFERS_ALGO = 8, DIFFERS_PROTO = 16,
                   DIFFERS_CALL = 32, DIFFERS_WIDTH = 128;  // 64: see wait.cuh

PL_FN pl_call* call_slot(const Step& s, uint32_t at, uint32_t of) {
  return reinterpret_cast<pl_call*>(slab(s, at) + s.a.geo.calls) + (s.epoch & 1) * PL_MAX_RANKS + of;
}

// Block 0 tells every peer what this rank is about to do, and compares. Ranks whose counts differ would otherwise wait
// for packs that nobody sends, or add elements of one call to those of another. Two halves are enough for the same
// reason as for data: this exchange too needs every rank, so finishing step k+1 proves that all have read step k's.
PL_FN bool exchange_calls(Step& s) {
  const pl_table& t = s.a.table;
  const uint64_t types = uint64_t(s.a.dtype) | uint64_t(s.a.op) << 32;
  const uint64_t path = uint64_t(s.a.algo) | uint64_t(s.a.proto) << 32;
  PL_ROLL
  for (uint32_t p = dev::tid(); p < t.n; p += dev::threads()) {
    if (p == t.rank || s.a.base[p] == 0) continue;
    pl_call* c = call_slot(s, p, t.rank);
    dev::post_64(&c->count, s.a.count);
    dev::post_64(&c->dtype, types);
    dev::post_64(&c->algo, path);
    dev::post_64(&c->width, s.a.width);
    dev::post_64(&c->call, s.a.call);
    dev::flag_release(&c->tag, s.epoch);
  }
  PL_ROLL
  for (uint32_t p = dev::tid(); p < t.n; p += dev::threads()) {
    if (p == t.rank || s.a.base[p] == 0) continue;
    const pl_call* c = call_slot(s, t.rank, p);
    if (!await(
            s, [&] { return dev::flag_acquire(&c->tag) == s.epoch; }, [&] { return p; }))
      return false;
    const uint64_t x = dev::poll_64(&c->dtype) ^ types, y = dev::poll_64(&c->algo) ^ path;
    s.differs = 0;
    if (dev::poll_64(&c->count) != s.a.count) s.differs |= DIFFERS_COUNT;
    if (uint32_t(x)) s.differs |= DIFFERS_DTYPE;
    if (x >> 32) s.differs |= DIFFERS_OP;
    if (uint32_t(y)) s.differs |= DIFFERS_ALGO;
    if (y >> 32) s.differs |= DIFFERS_PROTO;
    if (dev::poll_64(&c->call) != s.a.call) s.differs |= DIFFERS_CALL;
    if (dev::poll_64(&c->width) != s.a.width) s.differs |= DIFFERS_WIDTH;
    if (s.differs) {
      s.reason = PL_REASON_MISMATCH;
      s.peer = p;
      return false;
    }
  }
  return true;
}

enum class Entry : uint32_t { Run, Refused };

// Every block enters here. The sticky word comes first: a replay after abort or destroy touches nothing.
// Then the owner word: the first block of a launch claims the channel, the others find their own id. A block that finds
// another id never waits for it (two waiting kernels may stand in opposite order on two ranks: a deadlock): it makes
// the error sticky on all ranks, and the launch it met finds that at its next look. The epoch is read from the channel,
// once per block, and only the last block advances it, after all have read it.
PL_FN Entry begin(Step& s) {
  uint64_t epoch = 0;
  if (dev::tid() == 0 && dev::local_load32(&s.a.state->abort) == PL_REASON_NONE) {
    const uint64_t id = dev::launch_id(s.a);
    const uint64_t owner = dev::claim(&s.a.channel->owner, id);
    epoch = valid_epoch(dev::local_load64(&s.a.channel->epoch));
    if (owner != 0 && owner != id) {
      s.epoch = epoch;
      s.reason = PL_REASON_CONCURRENT;
      s.peer = s.a.table.rank;
      give_up(s);
      epoch = 0;
    }
  }
  s.epoch = dev::share(epoch);
  return s.epoch == 0 ? Entry::Refused : Entry::Run;
}

// Two neighbouring epochs of every 2^30, of different parity. next_epoch skips neither: it skips only the residues 0
// and 1.
constexpr uint64_t CLEAR_PERIOD = uint64_t(1) << 30;
constexpr uint64_t CLEAR_AT = CLEAR_PERIOD - 2;
static_assert((CLEAR_AT & 1) != ((CLEAR_AT + 1) & 1), "the two steps clear both halves");
static_assert(CLEAR_AT > 1 && CLEAR_AT + 1 < CLEAR_PERIOD, "both residues occur in every period");

// A tag of `ll` must not recur. A word that small messages do not reach keeps the tag of the last large one, and 2^32
// steps later that tag is right again: stale data would be taken for new. So in two consecutive steps of every 2^30,
// which have different parity, the half of the ll region that belongs to the other parity is cleared: no tag in a slab
// is older than 2^30 + 2 steps. Steps of every protocol do it: with `ll` calls on even epochs only, and others between,
// a clear left to `ll` steps would never reach the half that they use.
//
// Why nobody writes to the half being cleared, and why block 0 alone suffices: step k uses half k & 1, if any. The
// other half was last written in step k-1; all of those words were awaited, hence landed, before this rank finished
// step k-1. The next to write there is a peer in step k+1, and it must have finished step k first: all blocks of its
// launch. Some piece of the tile is not empty, and its chunk 0 belongs to block 0 on every rank. Its result depends on
// every rank's input, and what this rank contributes to chunk 0 leaves through its own block 0, after the clear and the
// fence. So without block 0's sends no peer finishes step k, whatever the other blocks have sent.
PL_FN void clear_old_tags(const Step& s) {
  if ((s.epoch & (CLEAR_PERIOD - 1)) < CLEAR_AT || dev::block() != 0) return;
  const pl_geometry& g = s.a.geo;
  char* half = slab(s, s.a.table.rank) + g.ll + (~s.epoch & 1) * g.ll_half_bytes;
  PL_ROLL
  for (uint64_t at = uint64_t(dev::tid()) * 16; at + 16 <= g.ll_half_bytes; at += uint64_t(dev::threads()) * 16)
    dev::post_2x64(half + at, 0, 0);
  // Each thread's zeros before any thread's sends: without it a peer's word of step k+1 could be overwritten.
  dev::fence_system();
  dev::sync_block();
}

template <class D>
PL_FN void fill_range(const Step& s, const Range& r) {
  each_span<D>(s, r, dev::STRIP, [&](const Span& span) {
    const uint32_t n = extent<D>(span);
    PL_ROLL
    for (uint32_t k = 0; k < (s.rows ? 2 : 1); ++k) {  // rows have two outputs
      char* to = k == 0 ? output_at(s, span.in_tile) : residual_out_at(s, span.in_tile);
      dev::Out<typename D::T> out(to, span.bytes);
      PL_UNROLL
      for (uint32_t i = 0; i < n; ++i) out.set(i, D::FAILED);
      out.flush();
    }
    return true;
  });
}

// NaN (integers: zero) over the packs of this block. Not over more: where an output is the input another block may
// still be sending from there, and its peers would take the fill for data.
template <class D>
PL_FN void fill_own(const Step& s) {
  PL_ROLL
  for (uint32_t p = 0; p < s.a.table.pieces; ++p) PL_ROLL
  for (uint64_t c = dev::block(); c < s.chunks; c += dev::blocks()) fill_range<D>(s, chunk_of(s, p, c));
}

// Every block that began ends here, with its own verdict. The last one fills the whole output if any block failed (all
// others are done, so nobody reads it any more), or else advances the epoch; a failed step advances nothing, and the
// sticky word keeps every later launch from using the channel.
template <class D>
PL_FN void end(Step& s, bool ok, bool rearmed) {
  if (!ok) give_up(s);
  const bool failed = dev::any_in_block(!ok);
  if (failed) fill_own<D>(s);
  // Words that this rank has re-armed in host memory travel there as posted writes, which nothing orders with a peer's
  // next write to the same word from another device. Without the fence a late re-arm could erase data: a hang.
  // On a CPU every step ends with a fence: a slot that this step has read with plain loads may be overwritten in step
  // k+2 by a writer that has heard of our progress through relaxed words alone (a step k+1 of ll or sentinel). The
  // fence here and the one that the writer executed at the end of its step k+1 order our loads before its stores. On a
  // GPU the end of the kernel does that.
  if (dev::HOST || (rearmed && s.a.host_staged)) dev::fence_system();
  dev::sync_block();
  uint64_t last = 0;
  if (dev::tid() == 0) {
    if (failed) dev::local_store32(&s.a.channel->failed, 1);
    if (dev::arrive(&s.a.channel->arrived)) last = dev::local_load32(&s.a.channel->failed) ? 2 : 1;
  }
  last = dev::share(last);
  if (last == 0) return;
  if (last == 2 && dev::blocks() > 1) {
    Range all;
    all.piece0 = all.first = 0;
    all.last = s.rows ? s.rows * s.packs : s.packs;
    fill_range<D>(s, all);
  }
  if (dev::tid() == 0) {
    if (last == 1) dev::local_store64(&s.a.channel->epoch, next_epoch(s.epoch));
    dev::local_store32(&s.a.channel->arrived, 0);
    // A release: the next owner of the channel reads the epoch after it claims this word.
    dev::local_release64(&s.a.channel->owner, 0);
  }
}

}  // namespace PL_NAMESPACE

#endif
