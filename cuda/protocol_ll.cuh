// ll ("low latency"): 64-bit words of 32 bits of data and a 32-bit tag, the low half of the epoch.
//
// Why it is right:
// - A 64-bit aligned store is single-copy atomic in the PTX model and on every CPU here: a word whose tag matches holds
//   that step's data. Nothing is assumed about the order of words, so no fence is needed between a writer's stores, and
//   splitting or reordering a PCIe write cannot produce a mixed word.
// - Two halves are enough, as for `flagged`: finishing step k+1 proves that every rank has finished reading step k.
// - A tag is compared for equality and is never 0, the value of cleared memory (see next_epoch).
// - A tag does not recur: see clear_old_tags in step.cuh.
#ifndef PEERLANE_PROTOCOL_LL_CUH
#define PEERLANE_PROTOCOL_LL_CUH

#include "operands.cuh"

namespace PL_NAMESPACE {

struct Ll {
  static constexpr bool HAS_STRAIGHT = false;  // see straight.cuh
  static constexpr bool REMEMBERS = false;     // see protocol_delta.cuh
  static constexpr bool BULK = false, WHOLE = true;

  static PL_FN bool moves_data(const TableStep&, uint32_t) { return true; }

  static constexpr uint32_t PACK_BYTES = 32;  // of a pack that is not wide, in a slot

  static PL_FN void put(const TableStep& s, const pl_send& to, const Span& span, const dev::Raw& raw, bool wide) {
    put_at(s, slot_data(s, to.peer, to.slot) + span.in_piece * (wide ? 64 : 32), span, raw, wide);
  }
  static PL_FN void put_at(const Step& s, char* p, const Span& span, const dev::Raw& raw, bool wide) {
    const uint32_t words = wide ? 8 : 4;
    const uint64_t tag = uint64_t(uint32_t(s.epoch)) << 32;
    PL_ROLL
    for (uint32_t j = 0; j < span.packs; ++j) PL_EACH
    for (uint32_t w = 0; w < 8; w += 2)
      if (w < words)
        dev::post_2x64(p + (j * words + w) * 8, tag | raw.word(j * words + w), tag | raw.word(j * words + w + 1));
  }
  static PL_FN void put_pack_if(uint32_t on, const Step& s, char* p, const uint32_t* words) {
    const uint64_t tag = uint64_t(uint32_t(s.epoch)) << 32;
    dev::post_2x64_if(on, p, tag | words[0], tag | words[1]);
    dev::post_2x64_if(on, p + 16, tag | words[2], tag | words[3]);
  }
  static PL_FN void publish(const TableStep&, const pl_phase&, uint64_t) {}
  static PL_FN bool await_chunk(const TableStep&, const pl_fold&, uint64_t) { return true; }

  // Polls a strip: the data of all words at `p` to `raw`, and whether each has this step's tag.
  template <bool WIDE>
  static PL_FN bool arrived_at(const Step& s, const char* p, const Span& span, dev::Raw& raw, bool wide) {
    const uint32_t words = WIDE && wide ? 8 : 4, tag = uint32_t(s.epoch);
    raw.own();
    bool arrived = true;
    PL_ROLL
    for (uint32_t j = 0; j < span.packs; ++j) PL_EACH
    for (uint32_t w = 0; w < (WIDE ? 8 : 4); w += 2)
      if (!WIDE || w < words) {
        const uint32_t at = j * words + w;
        arrived &= dev::poll_tagged(p + at * 8, raw.words(at), tag);
      }
    return arrived;
  }
  // The same for one of several packs, which may not be awaited at all: then `raw` stays.
  static PL_FN bool poll_if(uint32_t on, const Step& s, const char* p, const Span& span, dev::Raw& raw) {
    if (dev::HOST) return !on || arrived_at<false>(s, p, span, raw, false);
    const uint32_t tag = uint32_t(s.epoch);
    bool arrived = dev::poll_tagged_if(on, p, raw.words(0), tag);
    arrived &= dev::poll_tagged_if(on, p + 16, raw.words(2), tag);
    return arrived;
  }
  template <uint32_t N>
  static PL_FN bool complete(const dev::Raw (&)[N]) {
    return true;
  }
  static PL_FN uint32_t legal(uint32_t word) { return word; }
  static PL_FN void consumed_at(const Step&, char*, const Span&) {}

  template <uint32_t K, bool WIDE>
  static PL_FN bool gather(TableStep& s, const Operands<K>& o, const Span& span, dev::Raw (&raw)[K]) {
    uint32_t missing = 0;
    return await(
        s,
        [&] {
          missing = 0;
          // On a GPU absent operands are read as well (of the fold's first slot): a branch would keep the loads of
          // the others from being in flight together.
          PL_EACH
          for (uint32_t k = 0; k < K; ++k) {
            const bool on = o.remote >> k & 1;
            if (dev::HOST && !on) continue;
            const pl_item& it = s.t.item[o.item[k]];
            const bool wide = WIDE && it.wire_f32;
            const char* p = slot_data(s, s.t.rank, it.slot) + span.in_piece * (wide ? 64 : 32);
            missing |= uint32_t(!arrived_at<WIDE>(s, p, span, raw[k], wide) && on) << k;
          }
          return missing == 0;
        },
        [&] { return uint32_t(s.t.item[missing_item(o, missing)].from); });
  }
  template <uint32_t K, bool WIDE>
  static PL_FN void consumed(const TableStep&, const Operands<K>&, const Span&) {}
};

}  // namespace PL_NAMESPACE

#endif
