// The frame of a step: may it start, which epoch is it, and what the last block does.
#ifndef PEERLANE_STEP_CUH
#define PEERLANE_STEP_CUH

#include "wait.cuh"

namespace PL_NAMESPACE {

// The epoch after `e`. Its low 32 bits are the tag of `ll` and must not be 0, which is what cleared memory holds. From
// ...ffffffff the counter goes on to ...00000004. Every other step goes from e to e + 1. So the lowest two bits go
// round without a jump: halves alternate, and of four buffers each comes back after four steps.
PL_FN uint64_t next_epoch(uint64_t e) { return uint32_t(e + 1) == 0 ? e + 5 : e + 1; }
// A channel that was zeroed at creation starts at epoch 2, on all ranks alike.
PL_FN uint64_t valid_epoch(uint64_t e) { return uint32_t(e) == 0 ? e + 2 : e; }

// Fields of a mismatch, as bits of the record's `phase` (a mismatch is found before the first phase).
constexpr uint32_t DIFFERS_COUNT = 1, DIFFERS_DTYPE = 2, DIFFERS_OP = 4, DIFFERS_ALGO = 8, DIFFERS_PROTO = 16,
                   DIFFERS_CALL = 32, DIFFERS_WIDTH = 128;  // 64: see wait.cuh

PL_FN pl_call* call_slot(const Step& s, uint32_t at, uint32_t of) {
  return reinterpret_cast<pl_call*>(slab(s.a, at) + s.a.geo.calls) + (s.epoch & 1) * PL_MAX_RANKS + of;
}

// Block 0 tells every peer what this rank is about to do, and compares. Ranks whose counts differ would otherwise wait
// for packs that nobody sends, or add elements of one call to those of another. Two halves are enough for the same
// reason as for data: this exchange too needs every rank, so finishing step k+1 proves that all have read step k's.
PL_COLD bool calls_agree(const pl_step& a, uint64_t epoch) {
  Step s(a, 0, 0);
  s.epoch = epoch;
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
    Verdict verdict;
    if (dev::poll_64(&c->count) != s.a.count) verdict.differs |= DIFFERS_COUNT;
    if (uint32_t(x)) verdict.differs |= DIFFERS_DTYPE;
    if (x >> 32) verdict.differs |= DIFFERS_OP;
    if (uint32_t(y)) verdict.differs |= DIFFERS_ALGO;
    if (y >> 32) verdict.differs |= DIFFERS_PROTO;
    if (dev::poll_64(&c->call) != s.a.call) verdict.differs |= DIFFERS_CALL;
    if (dev::poll_64(&c->width) != s.a.width) verdict.differs |= DIFFERS_WIDTH;
    if (verdict.differs) {
      verdict.reason = PL_REASON_MISMATCH;
      verdict.peer = p;
      give_up(s.a, s.epoch, verdict);
      return false;
    }
  }
  return true;
}

// Under PEERLANE_CHECK: whether all ranks make the same call, the same verdict for all threads of a block.
PL_FN bool may_run(const Step& s) {
  if (PL_LIKELY(!s.a.check)) return true;
  return !dev::any_in_block(dev::block() == 0 && !calls_agree(s.a, s.epoch));
}

// Of the channel's word, from the low end: the id of the launch in flight, how many of its blocks are done, the epoch.
constexpr uint64_t TURN_ID_MASK = (uint64_t(1) << PL_TURN_ID_BITS) - 1;
constexpr uint64_t TURN_MASK = (uint64_t(1) << PL_TURN_BITS) - 1;  // id and count; 0: idle
constexpr uint64_t BLOCK_DONE = uint64_t(1) << PL_TURN_ID_BITS;
static_assert(sizeof(pl_channel) <= 32, "one sector");
static_assert(PL_MAX_BLOCKS <= 1u << (PL_TURN_BITS - PL_TURN_ID_BITS), "all blocks but one can be counted");

// An id of a launch: eight bits of a hash of its number, and how many of them are 0 (a Berger code). So it is never 0,
// and the bits of two different ids together are neither of them: where two launches have met, every later block of
// either sees that. Two that share an id, one pair in 256, are not told apart.
constexpr uint32_t HASH_BITS = 8;
static_assert(PL_TURN_ID_BITS == HASH_BITS + 4, "four bits count up to eight zeros");
PL_FN uint32_t turn_id(const pl_step& a) {
  const uint32_t hash = uint32_t(dev::launch_id(a)) * 0x9e3779b1u >> (32 - HASH_BITS);
  return hash | (HASH_BITS - dev::set_bits(hash)) << HASH_BITS;
}

// Two neighbouring epochs of every 2^30, of different parity. next_epoch skips neither: it skips only the residues 0
// to 3.
constexpr uint64_t CLEAR_PERIOD = uint64_t(1) << 30;
constexpr uint64_t CLEAR_AT = CLEAR_PERIOD - 2;
static_assert((CLEAR_AT & 1) != ((CLEAR_AT + 1) & 1), "the two steps clear both halves");
static_assert(CLEAR_AT > 3 && CLEAR_AT + 1 < CLEAR_PERIOD, "both residues occur in every period");

// Of the epoch that a channel's word has, whether begin() has more to do than to read it, by one comparison: whether
// tags are to be cleared (the two from CLEAR_AT on), or it is none yet (valid_epoch: the low half is 0), or the next
// one does not follow it (next_epoch: the low half is all ones).
PL_FN bool special(uint64_t epoch) { return ((uint32_t(epoch) + 2) & (CLEAR_PERIOD - 1)) < 3; }
static_assert(((CLEAR_AT + 2) & (CLEAR_PERIOD - 1)) == 0,
              "two that clear, the second all ones, and then one with zeros");
// By how much that epoch goes on when the step of `epoch` ends: 1 unless it is special, at most 5.
PL_FN uint32_t advance_of(uint64_t turn, uint64_t epoch) {
  return uint32_t(next_epoch(epoch)) - uint32_t(turn >> PL_TURN_BITS);
}
static_assert(uint64_t(5) << PL_TURN_BITS < uint64_t(1) << 32, "what the last block adds is 32 bits");

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
// fence. So without block 0's sends no peer finishes step k, whatever the other blocks have sent. One thread clears:
// the others of its block wait for it anyway, at a barrier that every step has, and it happens once in 2^30 steps.
//
// The words of `squares` (spread.cuh) have such tags too, and halves by the same parity, written and read by this rank
// alone, and in one launch: that of step k-1 is over, and that of step k+1 does not begin before this one ends.
PL_FN void clear_old_tags(const pl_step& a, uint64_t epoch) {
  PL_ROLL
  for (uint32_t k = 0; k < (a.squares ? 2 : 1); ++k) {
    const uint64_t bytes = k == 0 ? a.geo.ll_half_bytes : a.squares_half_bytes;
    char* half = (k == 0 ? slab(a, a.rank) + a.geo.ll : static_cast<char*>(a.squares)) + (~epoch & 1) * bytes;
    PL_ROLL
    for (uint64_t at = 0; at + 16 <= bytes; at += 16) dev::post_2x64(half + at, 0, 0);
  }
  // The zeros before the sends of the block, which follow its barrier: without it a peer's word of step k+1 could be
  // overwritten.
  dev::fence_system();
}

enum class Entry : uint32_t { Run, Refused };

// What thread 0 of a block does where begin() has found something unusual. The epoch, or 0 if the block must not run.
PL_COLD uint64_t begin_unusual(const pl_step& a, uint64_t turn, uint32_t abort, bool mine) {
  const uint64_t epoch = valid_epoch(turn >> PL_TURN_BITS);
  if (abort != PL_REASON_NONE) {
    if ((turn & TURN_MASK) == 0) dev::leave(&a.channel->turn, turn);
    return 0;
  }
  if (!mine) {
    Verdict verdict;
    verdict.reason = PL_REASON_CONCURRENT;
    verdict.peer = a.rank;
    give_up(a, epoch, verdict);
    return 0;
  }
  if (dev::block() == 0 && (epoch & (CLEAR_PERIOD - 1)) >= CLEAR_AT) clear_old_tags(a, epoch);
  return epoch;
}

// Every block enters here. A replay after abort or destroy finds the sticky word, sends nothing, and leaves the
// channel as it was.
//
// One atomic OR both claims the channel and reads the epoch: a second round trip to memory would be paid by every step.
// The first block of a launch finds the channel idle and leaves its own id, the others find their own. A block that
// finds anything else never waits for it (two waiting kernels may stand in opposite order on two ranks: a deadlock): it
// makes the error sticky on all ranks, and the launch it met finds that at its next look. Of two ids that met, the bits
// of both stand there, and no block of either is let in by them.
//
// The epoch and the id are one word, so that a launch cannot find the channel idle and yet read the epoch of the step
// before.
//
// How the word goes from this step's epoch to the next one's when the last block is done, though no block waits to
// learn whether it is the last (an atomic that returns a value would hold up the end of the kernel for its round trip):
// every block that is done adds to the word, and the sum of all that is added is what is missing to (next epoch, no
// count, no id). All terms are positive, so the sum is there with the last term alone. (Where the epoch goes on by more
// than 1, part of that may be there before, but with a count that is not 0: a launch that comes along finds it busy.)
// All but one add BLOCK_DONE; the one whose term takes the id away is the last that began, which it learns here from a
// count whose round trip is beside that of the OR: behind it no block of the launch looks at the word any more, so that
// nobody misses the id. (Both words lie in one sector of memory, and a GPU makes the two atomics of a thread there in
// their order, though PTX does not promise it. Were they made in the other one, and a whole step apart, a block would
// find no id and raise an error that is none; it would never run with a wrong epoch.) Until the last term somebody's
// launch that comes along finds id and count not 0 and is refused.
//
// On a GPU the word carries no order for other memory. It need not: the launches of a channel are in stream order, and
// a launch sees what kernels before it did. Launches without order that happen not to overlap still get consecutive
// epochs from it; those that do overlap are refused here. On a CPU a step begins with an acquire and ends with a
// release of it.
//
// All threads wait for the first one. `meanwhile()` is what the others do until then.
template <class Meanwhile>
PL_FN Entry begin(Step& s, Meanwhile meanwhile) {
  uint64_t epoch = 0;
  if (dev::tid() == 0) {
    s.id = dev::in_register(turn_id(s.a));  // for the end too: once, not twice
    // Nothing in between that depends on one of them: three round trips at once.
    const uint64_t turn = dev::enter(&s.a.channel->turn, s.id);
    s.entered = dev::count_in(&s.a.channel->entered);
    const uint32_t abort = dev::local_load32(&s.a.state->abort);
    epoch = turn >> PL_TURN_BITS;
    const bool mine = (turn & TURN_MASK) == 0 || (turn & TURN_ID_MASK) == s.id;
    if (PL_UNLIKELY(abort != PL_REASON_NONE || !mine || special(epoch))) {
      epoch = begin_unusual(s.a, turn, abort, mine);
      s.advance = advance_of(turn, epoch);  // of no use where it is refused
    }
  } else {
    meanwhile();
  }
  s.epoch = dev::share(epoch);
  return PL_LIKELY(s.epoch != 0) ? Entry::Run : Entry::Refused;
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

// What a block that is done adds to the channel's word: see begin().
PL_FN void count_out(const pl_step& a, uint32_t id, uint32_t entered, uint32_t advance) {
  const uint32_t others = dev::blocks() - 1;
  const uint32_t last = (advance << PL_TURN_BITS) - id - others * uint32_t(BLOCK_DONE);
  dev::count_out(&a.channel->turn, entered == others ? last : uint32_t(BLOCK_DONE));
}

// Long after every block of a launch that has given up is done.
constexpr uint64_t FILL_AFTER_NS = 200 * 1000 * 1000;

// A block that has failed and has filled its own packs counts itself out, once that fill has landed. Then it waits
// until all others are done, takes the epoch back, since a failed step advances nothing, and fills the whole output.
// What is awaited is the carry into the epoch, or that another block has taken it back already. The others are done
// soon, since the sticky word is set; a launch whose word is spoilt by one that it met never sees the carry, and has
// filled this block's packs at least.
template <class D>
PL_COLD void end_failed(const pl_step& a, uint64_t epoch, uint32_t entered, uint32_t advance) {
  dev::fence_system();
  dev::sync_block();
  if (dev::tid() == 0) count_out(a, turn_id(a), entered, advance);
  const uint64_t mine = epoch << PL_TURN_BITS, next = next_epoch(epoch) << PL_TURN_BITS, before = dev::now_ns();
  bool all_done = false;
  PL_ROLL
  while (!all_done && dev::now_ns() - before < FILL_AFTER_NS) {
    const uint64_t turn = dev::local_load64(&a.channel->turn);
    all_done = turn == next || turn == mine;
    if (!all_done) dev::pause(true);
  }
  dev::sync_block();
  if (dev::tid() == 0 && all_done) dev::leave(&a.channel->turn, mine);
  if (dev::blocks() == 1) return;  // it has filled what there is
  const uint64_t packs = ((a.rows ? a.width : a.count) + elements<D>() - 1) / elements<D>();
  Step s(a, packs, a.rows);
  Range all;
  all.piece0 = all.first = 0;
  all.last = a.rows ? a.rows * packs : packs;
  fill_range<D>(s, all);
}

// Between the first sends of a step and its first wait, where slabs are host memory that GPUs write: what this rank
// armed again in the step before lands now at the latest. See protocol_sentinel.cuh. At the end of a step the fence
// would cost its round trip over the link; here it would hold up the polls of whoever makes it, so the last block does,
// to which the host gives nothing else to do where there are blocks to spare. One thread's fence is enough: all of the
// step before happened before this launch, and all of the next launch happens after it.
PL_FN void land_rearmed(const Step& s) {
  if (PL_UNLIKELY(s.a.host_staged) && dev::block() == dev::blocks() - 1) {
    if (dev::tid() == 0) dev::local_store32(&s.a.channel->rearming, 1);
    dev::fence_system();
  }
}
// The same in steps that arm nothing (delta), and so need no fence but behind one of the others, which may have armed
// words after its own. `rearming`: what stands in the channel, asked for early.
PL_FN void land_rearmed_once(const Step& s, uint32_t rearming) {
  if (PL_UNLIKELY(rearming != 0) && dev::block() == dev::blocks() - 1 && dev::tid() == 0) {
    dev::fence_system();
    dev::local_store32(&s.a.channel->rearming, 0);
  }
}

// Every block that began ends here; where threads are not `ok`, one of the block has given up.
//
// `fail()` writes NaN (integers: zero) over the packs of this block, and goes on with end_failed. Not over more, before
// all blocks are done: where an output is the input another block may still be sending from there, and its peers would
// take the fill for data. A block that failed then fills the rest as well. What a block that succeeded wrote into the
// output may land after that: then a few sums of a failed step are there, and they are right. The next launch is behind
// the end of this kernel.
template <class Fail>
PL_FN void end(const Step& s, bool ok, Fail fail) {
  // Behind the barrier all threads of the block are done with the channel's data.
  if (PL_LIKELY(!dev::any_in_block(!ok))) {
    // On a CPU every step ends with a fence: a slot that this step has read with plain loads may be overwritten in step
    // k+2 by a writer that has heard of our progress through relaxed words alone (a step k+1 of ll or sentinel). The
    // fence here and the one that the writer executed at the end of its step k+1 order our loads before its stores. On
    // a GPU the end of the kernel does that.
    if (dev::HOST) {
      dev::fence_system();
      dev::sync_block();
    }
    if (dev::tid() == 0) count_out(s.a, s.id, s.entered, s.advance);
    return;
  }
  fail();
}

}  // namespace PL_NAMESPACE

#endif
