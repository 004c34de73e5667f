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
  const uint64_t types = uint64_t(s.a.dtype) | uint64_t(s.a.op) << 32;
  const uint64_t path = uint64_t(s.a.algo) | uint64_t(s.a.proto) << 32;
  PL_ROLL
  for (uint32_t p = dev::tid(); p < s.a.n; p += dev::threads()) {
    if (p == s.a.rank || s.a.base[p] == 0) continue;
    pl_call* c = call_slot(s, p, s.a.rank);
    dev::post_64(&c->count, s.a.count);
    dev::post_64(&c->dtype, types);
    dev::post_64(&c->algo, path);
    dev::post_64(&c->width, s.a.width);
    dev::post_64(&c->call, s.a.call);
    dev::flag_release(&c->tag, s.epoch);
  }
  PL_ROLL
  for (uint32_t p = dev::tid(); p < s.a.n; p += dev::threads()) {
    if (p == s.a.rank || s.a.base[p] == 0) continue;
    const pl_call* c = call_slot(s, s.a.rank, p);
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

// Under PEERLANE_CHECK: whether all ranks make the same call, the same verdict for all threads of a block.
PL_FN bool may_run(Step& s) {
  if (!s.a.check) return true;
  const bool ok = dev::block() != 0 || exchange_calls(s);
  return !dev::any_in_block(!ok);
}

// Of the channel's word.
constexpr uint64_t TURN_ID_MASK = (uint64_t(1) << PL_TURN_ID_BITS) - 1;

// An id that launches in flight together do not share: they would have to be 65535 apart. 0 means idle.
PL_FN uint64_t turn_id(const pl_step& a) { return dev::launch_id(a) % TURN_ID_MASK + 1; }

enum class Entry : uint32_t { Run, Refused };

// Every block enters here. The sticky word comes first: a replay after abort or destroy sends nothing, and leaves
// the channel as it was.
//
// One atomic OR both claims the channel and reads the epoch: a second round trip to memory would be paid by every step.
// The first block of a launch finds no id and leaves its own, the others find their own. A block that finds another id
// never waits for it (two waiting kernels may stand in opposite order on two ranks: a deadlock): it makes the error
// sticky on all ranks, and the launch it met finds that at its next look. Of two ids that met, the bits of both stand
// there: no third launch is let in by them, since the sticky word is set by then.
//
// The epoch and the id are one word, so that a launch cannot find the channel idle and yet read the epoch of the step
// before. Only the last block of a step advances it, after all have read it.
//
// On a GPU the word carries no order for other memory. It need not: the launches of a channel are in stream order, and
// a launch sees what kernels before it did. Launches without order that happen not to overlap still get consecutive
// epochs from it; those that do overlap are refused here. On a CPU a step begins with an acquire and ends with a
// release of it.
PL_FN Entry begin(Step& s) {
  uint64_t epoch = 0;
  if (dev::tid() == 0) {
    const uint32_t abort = dev::local_load32(&s.a.state->abort);
    const uint64_t id = turn_id(s.a);
    const uint64_t turn = dev::enter(&s.a.channel->turn, id);
    epoch = valid_epoch(turn >> PL_TURN_ID_BITS);
    const uint64_t owner = turn & TURN_ID_MASK;
    if (abort != PL_REASON_NONE) {
      if (owner == 0) dev::leave(&s.a.channel->turn, turn);
      epoch = 0;
    } else if (owner != 0 && owner != id) {
      s.epoch = epoch;
      s.reason = PL_REASON_CONCURRENT;
      s.peer = s.a.rank;
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
  char* half = slab(s, s.a.rank) + g.ll + (~s.epoch & 1) * g.ll_half_bytes;
  PL_ROLL
  for (uint64_t at = uint64_t(dev::tid()) * 16; at + 16 <= g.ll_half_bytes; at += uint64_t(dev::threads()) * 16)
    dev::post_2x64(half + at, 0, 0);
  // Each thread's zeros before any thread's sends: without it a peer's word of step k+1 could be overwritten.
  dev::fence_system();
  dev::sync_block();
}

template <class D>
PL_FN void fill_span(const Step& s, const Span& span) {
  const uint32_t n = extent<D>(span);
  PL_ROLL
  for (uint32_t k = 0; k < (s.rows ? 2 : 1); ++k) {  // rows have two outputs
    char* to = k == 0 ? output_at(s, span.in_tile) : residual_out_at(s, span.in_tile);
    dev::Out<typename D::T> out(to, span.bytes);
    PL_UNROLL
    for (uint32_t i = 0; i < n; ++i) out.set(i, D::FAILED);
    out.flush();
  }
}

template <class D>
PL_FN void fill_range(const Step& s, const Range& r) {
  each_span<D>(s, r, dev::STRIP, [&](const Span& span) {
    fill_span<D>(s, span);
    return true;
  });
}

// Every block that began ends here, with its own verdict. The last one advances the epoch, or if any block failed fills
// the whole output; a failed step advances nothing, and the sticky word keeps every later launch from using the
// channel.
//
// `fill_own()` writes NaN (integers: zero) over the packs of this block. Not over more: where an output is the input
// another block may still be sending from there, and its peers would take the fill for data.
//
// On a GPU counting the blocks carries no order either. The count and the failures are one word, so the last block
// knows of each. What a block that succeeded wrote into the output may land after the fill of the last one: then a few
// sums of a failed step are there, and they are right. The next launch is behind the end of this kernel.
template <class D, class Fill>
PL_FN void end(Step& s, bool ok, bool rearmed, Fill fill_own) {
  if (!ok) give_up(s);
  const bool failed = dev::any_in_block(!ok);  // all threads of the block are done with the channel's data
  if (failed) fill_own();
  // Words that this rank has re-armed in host memory travel there as posted writes, which nothing orders with a peer's
  // next write to the same word from another device. Without the fence a late re-arm could erase data: a hang.
  // On a CPU every step ends with a fence: a slot that this step has read with plain loads may be overwritten in step
  // k+2 by a writer that has heard of our progress through relaxed words alone (a step k+1 of ll or sentinel). The
  // fence here and the one that the writer executed at the end of its step k+1 order our loads before its stores. On a
  // GPU the end of the kernel does that.
  if (failed || dev::HOST || (rearmed && s.a.host_staged)) {
    dev::fence_system();
    dev::sync_block();
  }
  bool fill_all = false;
  if (dev::tid() == 0) {
    uint32_t failures = failed;
    if (dev::arrive(&s.a.channel->arrived, failures)) {
      const uint64_t next = failures ? s.epoch : next_epoch(s.epoch);
      if (dev::blocks() > 1) dev::local_store32(&s.a.channel->arrived, 0);
      dev::leave(&s.a.channel->turn, next << PL_TURN_ID_BITS);
      fill_all = failures != 0;
    }
  }
  // A lone block has filled what there is.
  if (dev::blocks() == 1 || !dev::any_in_block(fill_all)) return;
  Range all;
  all.piece0 = all.first = 0;
  all.last = s.rows ? s.rows * s.packs : s.packs;
  fill_range<D>(s, all);
}

}  // namespace PL_NAMESPACE

#endif
