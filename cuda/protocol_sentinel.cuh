// sentinel: 32-bit words of floats; a word of all ones means "not written yet".
//
// Why it is right:
// - A 32-bit aligned store is atomic in every model (PTX, PCIe, CPUs), and every word proves its own arrival, so no
//   order among words is needed: no fence, no flag, once the bytes.
// - All ones is a NaN in every legal type (two bf16 or f16, one f32, an fp32 partial), so a sender may write the one
//   in its place that is less by one. Sent as it is, the word would never arrive: a hang. For f64 and integers all ones
//   is a number, so the protocol refuses them.
// - Every word of a pack is written, the tail padded with zeros: a reader polls whole packs, and an unwritten tail word
//   would hang it. 0 is not the sentinel.
// - The reader re-arms each word it has read before it ends the step. Left in place, the word would be taken for the
//   data of step k+2. That write of step k+2 comes from a rank that has finished step k+1, so after this rank's step k:
//   a re-arm can never erase it.
// - Not so in host memory that other devices write: there re-arms travel as posted writes, which nothing orders with a
//   peer's next write to the same word. So there are four buffers, and in every step, of any protocol (but for steps by
//   delta that follow one), a block fences behind its first sends (land_rearmed in step.cuh): what was armed in step k
//   has landed before this rank sends in step k+2. A peer writes those words again in step k+4, when it has finished
//   step k+3, for which it needed what this rank sent in step k+3. (Three buffers would do; a power of two is a mask.)
// - A fold that only awaits polls without re-arming: the words stay for the fold that consumes them. A slot is consumed
//   by one fold only; a second would wait for ever.
#ifndef PEERLANE_PROTOCOL_SENTINEL_CUH
#define PEERLANE_PROTOCOL_SENTINEL_CUH

#include "operands.cuh"

namespace PL_NAMESPACE {

template <class D>
struct Sentinel {
  static_assert(D::WORDS_HAVE_NAN, "all ones must be a NaN of the type");
  static constexpr bool HAS_STRAIGHT = true;  // see straight.cuh
  static constexpr bool REMEMBERS = false;    // see protocol_delta.cuh
  static constexpr bool BULK = false, WHOLE = true;
  static constexpr uint32_t UNWRITTEN = 0xffffffffu;

  static PL_FN bool moves_data(const TableStep&, uint32_t) { return true; }

  static constexpr uint32_t PACK_BYTES = 16;  // of a pack that is not wide, in a slot

  static PL_FN void put(const TableStep& s, const pl_send& to, const Span& span, const dev::Raw& raw, bool wide) {
    put_at(s, slot_data(s, to.peer, to.slot) + span.in_piece * (wide ? 32 : 16), span, raw, wide);
  }
  // The word, or the NaN in the place of the one that means "not written".
  static PL_FN uint32_t legal(uint32_t word) { return smaller(word, UNWRITTEN - 1); }
  static PL_FN void put_at(const Step&, char* p, const Span& span, const dev::Raw& raw, bool wide) {
    const uint32_t words = wide ? 8 : 4;
    PL_ROLL
    for (uint32_t j = 0; j < span.packs; ++j) PL_EACH
    for (uint32_t w = 0; w < 8; w += 4)
      if (w < words) {
        uint32_t v[4];
        PL_EACH
        for (uint32_t i = 0; i < 4; ++i) v[i] = legal(raw.word(j * words + w + i));
        dev::post_4x32(p + (j * words + w) * 4, v);
      }
  }
  // One pack of legal words.
  static PL_FN void put_pack_if(uint32_t on, const Step&, char* p, const uint32_t* words) {
    dev::post_4x32_if(on, p, words);
  }
  static PL_FN void publish(const TableStep&, const pl_phase&, uint64_t) {}
  static PL_FN bool await_chunk(const TableStep&, const pl_fold&, uint64_t) { return true; }

  // Polls a strip: all words at `p` to `raw`, and whether each has been written.
  template <bool WIDE>
  static PL_FN bool arrived_at(const Step&, const char* p, const Span& span, dev::Raw& raw, bool wide) {
    const uint32_t words = WIDE && wide ? 8 : 4;
    raw.own();
    bool unwritten = false;
    PL_ROLL
    for (uint32_t j = 0; j < span.packs; ++j) PL_EACH
    for (uint32_t w = 0; w < (WIDE ? 8 : 4); w += 4)
      if (!WIDE || w < words) {
        uint32_t* to = raw.words(j * words + w);
        dev::poll_4x32(p + (j * words + w) * 4, to);
        PL_EACH
        for (uint32_t i = 0; i < 4; ++i) unwritten |= to[i] == UNWRITTEN;
      }
    return !unwritten;
  }
  // The same for one of several packs, which may not be awaited at all: then `raw` stays, and its words are legal ones.
  // On a GPU `complete` looks at all of them at once: see Straight::gather.
  static PL_FN bool poll_if(uint32_t on, const Step& s, const char* p, const Span& span, dev::Raw& raw) {
    if (dev::HOST) return !on || arrived_at<false>(s, p, span, raw, false);
    dev::poll_4x32_if(on, p, raw.words(0));
    return true;
  }
  template <uint32_t N>
  static PL_FN bool complete(const dev::Raw (&raw)[N]) {
    uint32_t most = 0;
    if (!dev::HOST) PL_EACH
    for (uint32_t k = 0; k < N; ++k) most = larger(most, largest(raw[k]));
    return most != UNWRITTEN;
  }
  static PL_FN void consumed_at(const Step&, char* p, const Span& span) { rearm_at(p, span, false); }
  static PL_FN void rearm_at(char* p, const Span& span, bool wide) {
    const uint32_t armed[4] = {UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN};
    PL_ROLL
    for (uint32_t at = 0; at < span.packs * (wide ? 32 : 16); at += 16) dev::post_4x32(p + at, armed);
  }

  // Of a pack that has been polled: UNWRITTEN, which no word exceeds, if one of its words has not been written.
  static PL_FN uint32_t largest(const dev::Raw& raw) {
    return larger(larger(raw.word(0), raw.word(1)), larger(raw.word(2), raw.word(3)));
  }
  static PL_FN bool is_missing(const Step&, const char* p) {
    dev::Raw raw;
    dev::poll_4x32(p, raw.words(0));
    return largest(raw) == UNWRITTEN;
  }
  // A pack of such words. Of the epoch, whose upper bits are 0: of constants the compiler would set four registers anew
  // for every pack that is armed, an instruction each.
  struct Armed {
    uint32_t words[4];
    PL_FN explicit Armed(uint64_t epoch) {
      PL_EACH
      for (uint32_t i = 0; i < 4; ++i) words[i] = ~uint32_t(epoch >> (64 - PL_TURN_BITS + i));
    }
    PL_FN void post_if(uint32_t on, char* p) const { dev::post_4x32_if(on, p, words); }
  };

  template <uint32_t K, bool WIDE>
  static PL_FN bool gather(TableStep& s, const Operands<K>& o, const Span& span, dev::Raw (&raw)[K]) {
    uint32_t missing = 0;
    return await(
        s,
        [&] {
          missing = 0;
          PL_EACH
          for (uint32_t k = 0; k < K; ++k) {  // absent operands: see protocol_ll.cuh
            const bool on = o.remote >> k & 1;
            if (dev::HOST && !on) continue;
            const pl_item& it = s.t.item[o.item[k]];
            const bool wide = WIDE && it.wire_f32;
            const char* p = slot_data(s, s.t.rank, it.slot) + span.in_piece * (wide ? 32 : 16);
            missing |= uint32_t(!arrived_at<WIDE>(s, p, span, raw[k], wide) && on) << k;
          }
          return missing == 0;
        },
        [&] { return uint32_t(s.t.item[missing_item(o, missing)].from); });
  }

  template <uint32_t K, bool WIDE>
  static PL_FN void consumed(const TableStep& s, const Operands<K>& o, const Span& span) {
    PL_EACH
    for (uint32_t k = 0; k < K; ++k) {
      if (!(o.remote >> k & 1)) continue;
      const pl_item& it = s.t.item[o.item[k]];
      const bool wide = WIDE && it.wire_f32;
      rearm_at(slot_data(s, s.t.rank, it.slot) + span.in_piece * (wide ? 32 : 16), span, wide);
    }
  }
};

}  // namespace PL_NAMESPACE

#endif
