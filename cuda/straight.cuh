// The hottest path: sums by `one_shot`, and by `two_shot` and `dual_owner` (a reduce-scatter, then an all-gather), over
// `sentinel` or `delta`, where every thread has at most one pack of each piece. The host says which launches are of
// this kind (pl_unrolled_*.straight). `ll` is for types without them, whose messages are small; its tags take twice the
// registers.
//
// It does what Unrolled does (unrolled.cuh), pack for pack and in the same order, without a loop or a branch between
// the first load and the last store: what a thread has no part in is switched off by a predicate. At these sizes a step
// is the latency of one chain of instructions that a launch finds cold, so every one of them counts, taken or skipped;
// and a value that lives in registers from its load to its last use is fetched once. Addresses are worked out before
// the wait.
//
// The rules of the walk hold (all_reduce.cuh): in a phase all sends come first, then all waits; pack j of every piece
// is the same thread's in both phases.
#ifndef PEERLANE_STRAIGHT_CUH
#define PEERLANE_STRAIGHT_CUH

#include "fan.cuh"
#include "protocol_delta.cuh"

namespace PL_NAMESPACE {

// What Straight::gather does between polls, now and then. Apart, with all that only a wait in vain needs: what stands
// in the middle of the step is fetched by every launch, executed or not.
template <class P, uint32_t K>
PL_COLD uint64_t look_or_give_up(const typename Fan<K>::Args& u, uint64_t epoch, uint32_t phase, uint32_t wanted,
                                 uint64_t place, uint64_t found, uint32_t spins) {
  if (look_of(found) == Look::KeepWaiting) return look_again(u.step, epoch, found, spins);
  Step s(u.step, 0, 0);
  s.epoch = epoch;
  s.phase = phase;
  give_up_waiting(s, look_of(found), [&] {
    const auto& ph = u.phase[phase];
    PL_ROLL
    for (uint32_t k = 0; k < K + 1; ++k) {
      if (bit(wanted, k) && P::is_missing(s, reinterpret_cast<const char*>(ph.at[k] + place)))
        return uint32_t(ph.from[k]);
    }
    return wanted ? uint32_t(ph.from[dev::lowest_bit(wanted)]) : s.a.rank;  // it has come since
  });
  return GAVE_UP;
}

// A piece of a short step, from one word (PL_PIECES in launch.h).
struct Piece {
  uint32_t first, packs;
  explicit PL_FN Piece(uint32_t word) : first(word & 0xffff), packs(word >> 16) {}
};

template <class D, class P, uint32_t K>
struct Straight {
  using Words = P;
  using Phase = typename Fan<K>::Phase;
  static constexpr uint32_t LEAVES = K + 1, WORDS = PL_PACK_BYTES / 4;

  Step& s;
  const typename Fan<K>::Args& u;
  const uint32_t j;                 // the pack of each piece that is this thread's
  const uint32_t in_slot, in_tile;  // where it stands in a slot, and in the tile if a piece began there: j without rows
  uint64_t place = 0;               // of that pack in any slot of the buffer in use
  dev::Raw mine;                    // the rank's own operand
  dev::Raw sent[K];                 // two phases: what goes to the owners of the other pieces
  dev::Raw last[K];                 // delta: what went there before
  dev::Raw recalled[2], seen[LEAVES];  // and what came before
  uint32_t rearming = 0;

  PL_FN Straight(Step& step, const typename Fan<K>::Args& args)
      : Straight(step, args, dev::block() * dev::threads() + dev::tid(), 0, 0) {}
  // A pack of a row, before which the slot and the tile have so many packs.
  PL_FN Straight(Step& step, const typename Fan<K>::Args& args, uint32_t pack, uint32_t slot_packs, uint32_t tile_packs)
      : s(step), u(args), j(pack), in_slot(slot_packs + pack), in_tile(tile_packs + pack) {}

  PL_FN const char* input(uint32_t first) const {
    return static_cast<const char*>(s.a.input) + uint64_t(first + in_tile) * PL_PACK_BYTES;
  }
  PL_FN char* output(uint32_t first) const {
    return static_cast<char*>(s.a.output) + uint64_t(first + in_tile) * PL_PACK_BYTES;
  }
  PL_FN char* at(uint64_t slot) const { return reinterpret_cast<char*>(slot + place); }

  static PL_FN uint64_t place_of(const Step& s, uint32_t in_slot) {
    return uint64_t(uint32_t(s.epoch) & s.a.geo.rotation) * s.a.geo.half_bytes + uint64_t(in_slot) * Words::PACK_BYTES;
  }
  PL_FN void find_place() { place = place_of(s, in_slot); }

  static PL_FN dev::Raw legal(const dev::Raw& raw) {
    dev::Raw words;
    PL_EACH
    for (uint32_t w = 0; w < WORDS; ++w) *words.words(w) = Words::legal(raw.word(w));
    return words;
  }
  PL_FN void post_if(uint32_t on, const Phase& ph, uint32_t send, uint32_t k, dev::Raw words) {
    if constexpr (Words::REMEMBERS)
      Words::post_if(on, at(ph.to[k]), sent_at(send + k), last[k], words);
    else
      dev::post_4x32_if(on, at(ph.to[k]), words.words(0));
  }

  // delta: where it is remembered what was sent, and what stands there. It is asked for long before it is needed: for
  // the first phase of two ranks before it is known which buffer it will be.
  static constexpr bool EARLY = K == 1;
  PL_FN char* sent_at(uint32_t send) const { return Words::sent(s, send) + uint64_t(j) * Words::PACK_BYTES; }
  PL_FN void recall_early(bool on) {
    if constexpr (Words::REMEMBERS) rearming = dev::local_load32(&s.a.channel->rearming);
    if constexpr (Words::REMEMBERS && EARLY) {
      char* first = static_cast<char*>(s.a.sent) + uint64_t(j) * Words::PACK_BYTES;
      PL_EACH
      for (uint32_t b = 0; b < Words::BUFFERS; ++b)
        dev::poll_4x32_if(on, first + b * s.a.geo.slot_bytes, clear(recalled[b]).words(0));
    }
  }
  template <class On>
  PL_FN void recall(uint32_t send, On on) {
    if constexpr (Words::REMEMBERS) {
      if (EARLY && send == 0) {
        PL_EACH
        for (uint32_t w = 0; w < WORDS; ++w)
          *last[0].words(w) = uint32_t(s.epoch) & s.a.geo.rotation ? recalled[1].word(w) : recalled[0].word(w);
        return;
      }
      PL_EACH
      for (uint32_t k = 0; k < K; ++k) dev::poll_4x32_if(on(k), sent_at(send + k), clear(last[k]).words(0));
    }
  }
  // What came last where the packs in `wanted` are awaited. Asked for before the sends, since polls are to follow those
  // at once: 300 cycles later they cost 0.3 us for 56 KiB over a link. What is not awaited differs from a legal word.
  PL_FN void recall_seen(const Phase& ph, uint32_t wanted) {
    if constexpr (Words::REMEMBERS) {
      PL_EACH
      for (uint32_t k = 0; k < LEAVES; ++k) {
        PL_EACH
        for (uint32_t w = 0; w < WORDS; ++w) *seen[k].words(w) = Words::SAME;
        dev::poll_4x32_if(bit(wanted, k), Words::seen(s, at(ph.at[k])), seen[k].words(0));
      }
    }
  }
  static PL_FN dev::Raw& clear(dev::Raw& raw) {
    PL_EACH
    for (uint32_t w = 0; w < WORDS; ++w) *raw.words(w) = 0;
    return raw;
  }

  // One look at the packs of `raw` in `wanted`; the others stay as they are, and are legal. All polls come before the
  // first look at what they brought: in between, a look would wait for one load before the next is even on its way. The
  // largest word says whether any is still to come: a comparison of each would need more predicates than there are.
  template <uint32_t N, class Slot>
  PL_FN bool poll(uint32_t wanted, Slot* const (&slots)[N], dev::Raw (&raw)[N]) const {
    PL_EACH
    for (uint32_t k = 0; k < N; ++k) dev::poll_4x32_if(bit(wanted, k), slots[k], raw[k].words(0));
    if constexpr (Words::REMEMBERS) {
      uint32_t least = ~0u;
      PL_EACH
      for (uint32_t k = 0; k < N; ++k) least = smaller(least, Words::least_change(raw[k], seen[k]));
      return least != 0;
    } else {
      uint32_t largest = 0;
      PL_EACH
      for (uint32_t k = 0; k < N; ++k) largest = larger(largest, Words::largest(raw[k]));
      return largest != Words::UNWRITTEN;
    }
  }
  // Waits for them.
  template <uint32_t N>
  PL_FN bool gather(const Phase& ph, uint32_t wanted, dev::Raw (&raw)[N]) {
    wanted = dev::in_register(wanted);
    const char* slots[N];
    PL_EACH
    for (uint32_t k = 0; k < N; ++k) slots[k] = at(ph.at[k]);
    const auto again = [&](uint64_t found, uint32_t spins) {
      return look_or_give_up<P, K>(u, s.epoch, s.phase, wanted, place, found, spins);
    };
    if (PL_UNLIKELY(!poll_until(
            s, [&] { return poll(wanted, slots, raw); }, again)))
      return false;
    if constexpr (Words::REMEMBERS) PL_EACH
    for (uint32_t k = 0; k < N; ++k) Words::take_if(bit(wanted, k), s, at(ph.at[k]), raw[k], seen[k]);
    return true;
  }
  // Between the first sends and the first polls.
  PL_FN void land() {
    if constexpr (Words::REMEMBERS) {
      land_rearmed_once(s, rearming);
      if (u.widest <= Words::LINGER_PACKS) dev::linger(Words::linger_cycles(u.widest));
    } else {
      land_rearmed(s);
    }
  }
  template <uint32_t N>
  PL_FN void rearm(const Phase& ph, uint32_t read) {
    if constexpr (!Words::REMEMBERS) {
      const typename Words::Armed armed(s.epoch);
      PL_EACH
      for (uint32_t k = 0; k < N; ++k) armed.post_if(bit(read, k), at(ph.at[k]));
    }
  }

  // The leaves that arrive, and the rank's own, summed along the balanced tree (add_tree in fold.cuh).
  PL_FN bool sum(const Phase& ph, uint32_t wanted, dev::Raw& total) {
    const uint32_t own = ph.present & ~ph.remote;
    dev::Raw raw[LEAVES];
    PL_EACH
    for (uint32_t k = 0; k < LEAVES; ++k) PL_EACH
    for (uint32_t w = 0; w < WORDS; ++w)
      *raw[k].words(w) = bit(own, k) ? Words::legal(mine.word(w)) : negative_zero<D>();
    const bool ok = gather(ph, wanted, raw);
    float value[elements<D>()];
    PL_UNROLL
    for (uint32_t i = 0; i < elements<D>(); ++i) {
      float x[LEAVES];
      PL_EACH
      for (uint32_t k = 0; k < LEAVES; ++k) x[k] = D::up(dev::In<typename D::T>(raw[k])[i]);
      value[i] = Along<0, LEAVES>::sum(x);
    }
    PL_EACH
    for (uint32_t w = 0; w < WORDS; ++w) *total.words(w) = D::down_word(value + w * (elements<D>() / WORDS));
    return ok;
  }

  // one_shot: the tile to all, the sum of all.
  PL_FN void load_one() {
    recall_early(j < u.widest);
    dev::pack_load_if(j < u.widest, mine, input(0));
  }
  PL_FN void send_one() {
    const Phase& ph = u.phase[0];
    find_place();
    const uint32_t peers = dev::set_bits(ph.remote);
    recall(0, [&](uint32_t k) { return j < u.widest && k < peers; });
    recall_seen(ph, j < u.widest ? ph.remote : 0);
    const dev::Raw words = legal(mine);
    PL_EACH
    for (uint32_t k = 0; k < K; ++k) post_if(j < u.widest && k < peers, ph, 0, k, words);
    land();
  }
  PL_FN bool run_one() {
    const Phase& ph = u.phase[0];
    const bool has = j < u.widest;
    send_one();
    const uint32_t wanted = has ? ph.remote : 0;
    dev::Raw total;
    if (PL_UNLIKELY(!sum(ph, wanted, total))) return false;
    dev::pack_store_if(has, output(0), total);
    rearm<LEAVES>(ph, wanted);
    return true;
  }

  // two phases: each piece to its owners, the sum of the own one to those who need it, theirs from them.
  PL_FN void load_two() {
    const Phase& ph = u.phase[0];
    recall_early(j < Piece(ph.send_piece[0]).packs);
    PL_EACH
    for (uint32_t k = 0; k < K; ++k) {
      const Piece piece(ph.send_piece[k]);
      dev::pack_load_if(j < piece.packs, sent[k], input(piece.first));
    }
    const Piece own(ph.own_piece);
    dev::pack_load_if(j < own.packs, mine, input(own.first));
  }
  PL_FN bool run_two() {
    const Phase &scatter = u.phase[0], &collect = u.phase[1];
    find_place();
    recall(0, [&](uint32_t k) { return j < Piece(scatter.send_piece[k]).packs; });
    recall_seen(scatter, j < Piece(scatter.own_piece).packs ? scatter.remote : 0);
    PL_EACH
    for (uint32_t k = 0; k < K; ++k) post_if(j < Piece(scatter.send_piece[k]).packs, scatter, 0, k, legal(sent[k]));
    recall(K, [&](uint32_t k) { return j < Piece(collect.send_piece[k]).packs; });
    land();
    const bool owns = j < Piece(scatter.own_piece).packs;
    const uint32_t parts = owns ? scatter.remote : 0;
    dev::Raw total;
    if (PL_UNLIKELY(!sum(scatter, parts, total))) return false;
    const dev::Raw words = legal(total);
    uint32_t theirs = 0;
    PL_EACH
    for (uint32_t k = 0; k < K; ++k) theirs |= uint32_t(j < Piece(collect.copy_piece[k]).packs) << k;
    recall_seen(collect, theirs);
    PL_EACH
    for (uint32_t k = 0; k < K; ++k) post_if(j < Piece(collect.send_piece[k]).packs, collect, K, k, words);
    dev::pack_store_if(owns, output(Piece(scatter.own_piece).first), total);
    rearm<LEAVES>(scatter, parts);
    s.phase = 1;
    dev::Raw raw[K];
    PL_EACH
    for (uint32_t k = 0; k < K; ++k) PL_EACH
    for (uint32_t w = 0; w < WORDS; ++w) *raw[k].words(w) = 0;
    if (PL_UNLIKELY(!gather(collect, theirs, raw))) return false;
    PL_EACH
    for (uint32_t k = 0; k < K; ++k)
      dev::pack_store_if(bit(theirs, k), output(Piece(collect.copy_piece[k]).first), raw[k]);
    rearm<K>(collect, theirs);
    return true;
  }
};

}  // namespace PL_NAMESPACE

#endif
