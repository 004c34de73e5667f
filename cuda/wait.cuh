// The one bounded wait, and what a rank does when it gives up.
#ifndef PEERLANE_WAIT_CUH
#define PEERLANE_WAIT_CUH

#include "tile.cuh"

namespace PL_NAMESPACE {

// Between two looks at the abort word, the records and the clock. A failed poll costs a fraction of a microsecond, so a
// look comes soon enough to end a wait, and its dozen loads stay off the path of data that is about to arrive.
constexpr uint32_t POLLS_PER_LOOK = 256;
// Where each failed poll gives the core away, one poll may take milliseconds: a look costs nothing beside that.
constexpr uint32_t YIELDS_PER_LOOK = 4;
// A CPU that has polled so often (some 20 us) waits for a rank that is late, or for one that waits for this
// core: from then on it gives the core away.
constexpr uint32_t POLLS_BEFORE_YIELD = 1000;

// A bit of a mismatch's record beside those of step.cuh: flags of one step with different signatures. What the other
// rank calls is then not known.
constexpr uint32_t DIFFERS_SIGNATURE = 64;

// The host's word lies in host memory: a load of it crosses the link, so it is looked at more rarely still, every few
// milliseconds.
constexpr uint32_t LOOKS_PER_HOST_LOOK = 16;

enum class Look { KeepWaiting, Stop, Expired, Left };

PL_FN char* record_slot(const pl_step& a, uint32_t at, uint32_t of) {
  return slab(a, at) + a.geo.records + of * sizeof(pl_record);
}

PL_FN uint64_t record_word(const pl_record& r, uint32_t i) {
  switch (i) {
    case 0:
      return uint64_t(r.reason) | uint64_t(r.rank) << 32;
    case 1:
      return uint64_t(r.peer) | uint64_t(r.phase) << 32;
    case 2:
      return r.step;
    case 3:
      return r.bytes;
    case 4:
      return uint64_t(r.dtype) | uint64_t(r.op) << 32;
    default:
      return r.count;
  }
}
constexpr uint32_t RECORD_WORDS = 6;
static_assert(sizeof(pl_record) == 8 * (RECORD_WORDS + 1), "a record is its words and `valid`");
static_assert(offsetof(pl_record, valid) == 8 * RECORD_WORDS, "`valid` comes last");

// The first peer with a record in this rank's slab, or n.
PL_FN uint32_t who_gave_up(const pl_step& a) {
  PL_ROLL
  for (uint32_t p = 0; p < a.n; ++p)
    if (p != a.rank && dev::flag_acquire(record_slot(a, a.rank, p) + offsetof(pl_record, valid)) == 1) return p;
  return a.n;
}

// Writes the sticky state, once: the first reason stays. The claim of `abort` decides among threads, blocks and the
// host; whoever reads `abort` first may have to wait a moment for `record.valid`.
PL_FN bool claim_state(const pl_step& a, uint32_t reason) {
  return dev::claim(&a.state->abort, reason) == PL_REASON_NONE;
}

// What the host has to say, where it cannot write into the rank's memory itself while kernels run.
PL_FN Look host_look(const pl_step& a, uint64_t epoch) {
  pl_report* report = a.report;
  const uint32_t reason = dev::local_load32(&report->abort);
  if (reason != PL_REASON_NONE) {
    claim_state(a, reason);
    return Look::Stop;
  }
  // A rank that left had finished every step before `left`, so what those need of it is on its way; later ones wait for
  // words that nobody will send.
  const uint64_t left = dev::flag_acquire(&report->left);
  return left != 0 && epoch >= left ? Look::Left : Look::KeepWaiting;
}

// `start`: when the first look was, 0 for that one.
PL_FN Look look(const pl_step& a, uint64_t epoch, uint64_t& start, uint32_t spins) {
  if (dev::local_load32(&a.state->abort) != PL_REASON_NONE) return Look::Stop;
  if (a.report != nullptr && spins % (POLLS_PER_LOOK * LOOKS_PER_HOST_LOOK) == 0) {
    const Look said = host_look(a, epoch);
    if (said != Look::KeepWaiting) return said;
  }
  if (who_gave_up(a) < a.n) return Look::Stop;
  const uint64_t now = dev::now_ns();
  if (start == 0) {
    start = now;
    return Look::KeepWaiting;
  }
  return now - start >= a.deadline_ns ? Look::Expired : Look::KeepWaiting;
}

// What a look has found and when the first one was, in one word: a cold function takes and returns values alone, since
// a reference to what a wait keeps in registers would put that into memory.
constexpr uint32_t LOOK_BITS = 2;
static_assert(uint32_t(Look::Left) < 1u << LOOK_BITS, "a look fits its bits");
constexpr uint64_t NOTHING_YET = 0, GAVE_UP = ~uint64_t(0);
PL_FN Look look_of(uint64_t found) { return Look(found & ((1u << LOOK_BITS) - 1)); }
PL_COLD uint64_t look_again(const pl_step& a, uint64_t epoch, uint64_t found, uint32_t spins) {
  uint64_t start = found >> LOOK_BITS;
  const Look seen = look(a, epoch, start, spins);
  return start << LOOK_BITS | uint64_t(seen);
}

// A thread's step has failed, `verdict` says why: makes it sticky here and, where the verdict is this rank's own, tells
// every peer it has mapped. A verdict that came from a peer is not passed on: that peer has told everybody itself.
PL_COLD void give_up(const pl_step& a, uint64_t epoch, Verdict verdict) {
  if (verdict.reason == PL_REASON_NONE) {
    const uint32_t p = who_gave_up(a);
    if (p == a.n) return;  // this rank's abort word was set already
    const char* from = record_slot(a, a.rank, p);
    if (!claim_state(a, uint32_t(dev::poll_64(from)))) return;
    PL_ROLL
    for (uint32_t k = 0; k < 2; ++k) {
      if (k == 1 && a.report == nullptr) break;
      char* to = reinterpret_cast<char*>(k == 0 ? &a.state->record : &a.report->record);
      PL_ROLL
      for (uint32_t i = 0; i < RECORD_WORDS; ++i) dev::post_64(to + 8 * i, dev::poll_64(from + 8 * i));
      dev::flag_release(to + 8 * RECORD_WORDS, 1);
    }
    return;
  }
  if (!claim_state(a, verdict.reason)) return;
  pl_record r;
  r.reason = verdict.reason;
  r.rank = a.rank;
  r.peer = verdict.peer;
  r.phase = verdict.reason == PL_REASON_MISMATCH ? verdict.differs : verdict.phase;
  r.step = epoch;
  r.dtype = a.dtype;
  r.op = a.op;
  r.count = a.count;
  if (verdict.reason == PL_REASON_MISMATCH && verdict.differs != DIFFERS_SIGNATURE) {
    const pl_call* theirs =
        reinterpret_cast<const pl_call*>(slab(a, a.rank) + a.geo.calls) + (epoch & 1) * PL_MAX_RANKS + verdict.peer;
    const uint64_t types = dev::poll_64(&theirs->dtype);
    r.count = dev::poll_64(&theirs->count);
    r.dtype = uint32_t(types);
    r.op = uint32_t(types >> 32);
  }
  // Element sizes by number of the type, a hex digit each: an array would be copied to the stack of every thread.
  r.bytes = a.count * ((0x2842884411ull >> (4 * a.dtype)) & 15);
  PL_ROLL
  for (uint32_t p = 0; p < a.n + 2u; ++p) {  // the last rounds are the rank's own state and the host's copy
    if (p == a.rank || (p < a.n && a.base[p] == 0) || (p > a.n && a.report == nullptr)) continue;
    char* to = p < a.n    ? record_slot(a, p, a.rank)
               : p == a.n ? reinterpret_cast<char*>(&a.state->record)
                          : reinterpret_cast<char*>(&a.report->record);
    PL_ROLL
    for (uint32_t i = 0; i < RECORD_WORDS; ++i) dev::post_64(to + 8 * i, record_word(r, i));
    // Validity last, and only after the words are visible: a reader never takes half a record for a whole one.
    dev::flag_release(to + 8 * RECORD_WORDS, 1);
  }
}

// Why a wait has ended in vain, to all; `peer()` names whom it was for, and is called only when the deadline has
// passed.
template <class Peer>
PL_FN void give_up_waiting(const Step& s, Look seen, Peer peer) {
  Verdict verdict;
  verdict.phase = s.phase;
  if (seen == Look::Expired) {
    verdict.reason = PL_REASON_DEADLINE;
    verdict.peer = peer();
  } else if (seen == Look::Left) {
    verdict.reason = PL_REASON_LEFT;
    verdict.peer = dev::local_load32(&s.a.report->leaver);
  }
  give_up(s.a, s.epoch, verdict);
}

// Polls until `poll()` is true. Every spin of every kernel is this loop, so every spin ends: `again(found, spins)`,
// called now and then, looks, and returns what it has found, which is `found` the next time (in the beginning
// NOTHING_YET). Given a look that ends the wait it must return GAVE_UP, or begin anew a number of times that is
// bounded.
//
// After a look that ends the wait it polls once more and takes what is there: a rank whose data had all arrived
// finishes the step, so ranks differ by at most the step in which the fault arose, and a rank that is done never turns
// good data into NaN.
template <class Poll, class Again>
PL_FN bool poll_until(const Step& s, Poll poll, Again again) {
  uint64_t found = NOTHING_YET;
  PL_ROLL
  for (uint32_t spins = 1;; ++spins) {
    if (PL_LIKELY(poll())) return true;
    const bool yield = dev::HOST && (s.a.yield || spins > POLLS_BEFORE_YIELD);
    if (look_of(found) == Look::KeepWaiting) dev::pause(yield);
    if (PL_UNLIKELY(look_of(found) != Look::KeepWaiting || spins % (yield ? YIELDS_PER_LOOK : POLLS_PER_LOOK) == 0)) {
      found = again(found, spins);
      if (found == GAVE_UP) return false;
    }
  }
}

// Polls until `poll()` is true; false after the deadline, or when this rank's abort word or a peer's record says that
// the step cannot finish. Then it has given up already.
template <class Poll, class Peer>
PL_FN bool await(const Step& s, Poll poll, Peer peer) {
  return poll_until(s, poll, [&](uint64_t found, uint32_t spins) {
    if (look_of(found) == Look::KeepWaiting) return look_again(s.a, s.epoch, found, spins);
    give_up_waiting(s, look_of(found), peer);
    return GAVE_UP;
  });
}

// Waits twice, for what comes from another block of this rank, or by way of another thread. Such a one began its wait
// for a peer before this one, but may look at the clock after it: it names the peer that is missing, where this one
// would name its own rank, or a peer that waits itself. And where a peer gave up in a later step than this, all that
// this step needs has come, and the others have time to say so. The deadline of such a wait is twice as long: where
// nobody else gives up, it ends after two.
template <class Poll, class Peer>
PL_FN bool await_twice(const Step& s, Poll poll, Peer peer) {
  uint32_t tries = 0;
  return poll_until(s, poll, [&](uint64_t found, uint32_t spins) {
    if (look_of(found) == Look::KeepWaiting) return look_again(s.a, s.epoch, found, spins);
    if (tries++ == 0) return NOTHING_YET;
    give_up_waiting(s, look_of(found), peer);
    return GAVE_UP;
  });
}

}  // namespace PL_NAMESPACE

#endif
