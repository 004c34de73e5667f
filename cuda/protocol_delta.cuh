// delta: 32-bit words of floats; a word is new if it differs from the one that stood there before.
//
// `sentinel` arms every word again that it has read. In host memory, which GPUs reach over their links, that is half of
// all that is written. Here nothing is written back. Both ends remember, in their own GPU's memory, the last word that
// went to each place. The sender sends the next one, or, where it would be the same again, all ones, which is no legal
// word (protocol_sentinel.cuh); the reader takes what differs from the last word, and all ones for that last word.
//
// Why it is right:
// - A 32-bit aligned store is atomic, and every word proves its own arrival, as in sentinel: no order among words is
//   needed.
// - Two words in a row at one place never are the same: a legal one differs from the last or goes as all ones, and
//   behind all ones every legal one differs.
// - Both ends remember the same. Each schedule has a region of its own (Layout::delta_geometry), in which its checked
//   table lets one rank alone write to a slot, and whatever arrives there is awaited. A step that leaves a place out
//   leaves it out at both ends. In the beginning there is 0 in all three.
// - Two buffers are enough, in host memory too, and no fence is needed. A word of step k+2 is sent by a rank that has
//   finished step k+1, hence after this rank's step k, which has read the word of step k at that place: no word is on
//   its way to a place while another one is, or is yet to be read.
// - A step that fails may leave the two ends apart. There is no step after it: the verdict is sticky on all ranks.
// - Ranks go by it alike: what decides are the call's type, operation and count and the plan, which all share, never an
//   address (comm/gpu/delta.rs).
// - What two ranks have sent last is asked for before the channel is claimed (Straight::recall_early): all that came
//   before the launch is done then. Launches that nobody has put in order are a fault that is refused where they
//   overlap.
// - What a rank remembers goes past the caches of multiprocessors, like the words themselves: the next launch may have
//   another thread for the place.
#ifndef PEERLANE_PROTOCOL_DELTA_CUH
#define PEERLANE_PROTOCOL_DELTA_CUH

#include "protocol_sentinel.cuh"

namespace PL_NAMESPACE {

template <class D>
struct Delta : Sentinel<D> {
  static constexpr bool REMEMBERS = true;
  static constexpr uint32_t SAME = Sentinel<D>::UNWRITTEN, BUFFERS = 2;
  // Steps whose longest piece has up to so many packs wait a moment before they poll. Peers send at about the same
  // time, and a poll that is a little too early costs a second round trip over the link, where it takes 1 us. Measured
  // between two H200s: 14 KiB 3.4 to 3.0 us with 300 to 600 cycles, a few percent at 56 KiB with 900, nothing at 112.
  static constexpr uint32_t LINGER_PACKS = 4096;
  static PL_FN uint32_t linger_cycles(uint32_t packs) { return packs <= LINGER_PACKS / 2 ? 450 : 900; }

  // Where the last word is remembered that was read at `p`, in the own slab.
  static PL_FN char* seen(const Step& s, const char* p) {
    return reinterpret_cast<char*>(uint64_t(p) + s.a.seen_shift);
  }
  // Where those are that send `k` of a phase put at the beginning of its slot.
  static PL_FN char* sent(const Step& s, uint32_t send) {
    const uint32_t buffer = uint32_t(s.epoch) & s.a.geo.rotation;
    return static_cast<char*>(s.a.sent) + uint64_t(send * BUFFERS + buffer) * s.a.geo.slot_bytes;
  }
  static PL_FN uint32_t encoded(uint32_t word, uint32_t last) { return word == last ? SAME : word; }
  static PL_FN uint32_t decoded(uint32_t word, uint32_t last) { return word == SAME ? last : word; }

  // Sends a pack of legal words to `p`, and remembers it at `sent`, where `last` stood.
  static PL_FN void post_if(uint32_t on, char* p, char* sent, const dev::Raw& last, const dev::Raw& words) {
    uint32_t w[4];
    PL_EACH
    for (uint32_t i = 0; i < 4; ++i) w[i] = encoded(words.word(i), last.word(i));
    dev::post_4x32_if(on, p, w);
    dev::post_4x32_if(on, sent, w);
  }
  // 0 if one of a pack's words has not come.
  static PL_FN uint32_t least_change(const dev::Raw& raw, const dev::Raw& last) {
    uint32_t least = raw.word(0) ^ last.word(0);
    PL_EACH
    for (uint32_t i = 1; i < 4; ++i) least = smaller(least, raw.word(i) ^ last.word(i));
    return least;
  }
  static PL_FN bool is_missing(const Step& s, const char* p) {
    dev::Raw raw, last;
    dev::poll_4x32(p, raw.words(0));
    dev::poll_4x32(seen(s, p), last.words(0));
    return least_change(raw, last) == 0;
  }
  // Remembers what came to `p`, and makes of it what was meant.
  static PL_FN void take_if(uint32_t on, const Step& s, char* p, dev::Raw& raw, const dev::Raw& last) {
    dev::post_4x32_if(on, seen(s, p), raw.words(0));
    PL_EACH
    for (uint32_t i = 0; i < 4; ++i) *raw.words(i) = decoded(raw.word(i), last.word(i));
  }

  // What follows is for CPUs, strip by strip (unrolled.cuh): the stand-in driver's, since the CPU device arms its
  // words.

  static PL_FN void put_at(char* p, char* sent, const Span& span, const dev::Raw& raw) {
    PL_ROLL
    for (uint32_t at = 0; at < span.packs * 4; at += 4) {
      dev::Raw last, words;
      last.own(), words.own();
      dev::poll_4x32(sent + at * 4, last.words(0));
      for (uint32_t i = 0; i < 4; ++i) *words.words(i) = Sentinel<D>::legal(raw.word(at + i));
      post_if(true, p + at * 4, sent + at * 4, last, words);
    }
  }
  template <bool WIDE>
  static PL_FN bool arrived_at(const Step& s, const char* p, const Span& span, dev::Raw& raw, bool) {
    raw.own();
    bool all = true;
    PL_ROLL
    for (uint32_t at = 0; at < span.packs * 4; at += 4) {
      uint32_t last[4], *to = raw.words(at);
      dev::poll_4x32(seen(s, p) + at * 4, last);
      dev::poll_4x32(p + at * 4, to);
      for (uint32_t i = 0; i < 4; ++i) {
        all &= to[i] != last[i];
        to[i] = decoded(to[i], last[i]);
      }
    }
    return all;
  }
  static PL_FN bool poll_if(uint32_t on, const Step& s, const char* p, const Span& span, dev::Raw& raw) {
    return !on || arrived_at<false>(s, p, span, raw, false);
  }
  static PL_FN void consumed_at(const Step& s, char* p, const Span& span) {
    PL_ROLL
    for (uint32_t at = 0; at < span.packs * 16; at += 16) {
      uint32_t w[4];
      dev::poll_4x32(p + at, w);  // it stays until this rank has finished the step
      dev::post_4x32(seen(s, p) + at, w);
    }
  }
};

}  // namespace PL_NAMESPACE

#endif
