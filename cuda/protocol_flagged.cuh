// flagged: bulk data, then one 64-bit release flag per chunk and arrival; several chunks are in flight.
//
// Push: the writer stores the chunk into the reader's slab, then the flag. Pull: the writer stores it into its own
// slab, only the flag travels, and the reader loads from the writer's slab.
//
// Why it is right:
// - The flag is a release after the data, the reader's load of it an acquire before the data. Posted writes to one
//   destination usually keep their order, but relaxed ordering may break that: without the pair the reader sums old
//   bytes. In a block the barrier in between makes every thread's stores part of thread t's release, and every thread's
//   loads follow thread t's acquire.
// - A flag is the epoch, compared for equality. With `>=` over a wrapped value, a flag last used long ago would count
//   as arrived. A flag of the other half has the other parity and never matches.
// - The high 16 bits of the flag also carry the call's signature, by exclusive or. Epochs stay below 2^44, which is
// what a
//   channel's word has room for (at a step per 5 us for three years), so a flag of another epoch differs in the low 48
//   bits, and one of this epoch differs in the high 16 exactly where the signature does. A rank therefore takes data
//   only from ranks that make the same call, and every output needs every input: over a chain of accepted flags, so
//   from ranks of one signature alone. Where one rank calls differently, no rank finishes the step: nobody gets a sum
//   of two calls' data.
// - Two halves are enough: a rank that has finished step k+1 has had data of step k+1 from (transitively) every rank,
//   and each had finished step k, reads included, before it sent that. So nobody overwrites, in step k+2, data or a
//   flag that somebody still needs in step k. The same holds for pull, where it is the writer's own slot that must have
//   been read.
// - A flag has 64 bytes for itself: readers poll it while the writer stores its neighbours.
#ifndef PEERLANE_PROTOCOL_FLAGGED_CUH
#define PEERLANE_PROTOCOL_FLAGGED_CUH

#include "operands.cuh"

namespace PL_NAMESPACE {

struct Flagged {
  // A strip is a plain copy of any length; a short tail needs no padding, the reader knows the count.
  static constexpr bool BULK = true, WHOLE = false;

  // Whether this send moves data. In pull a data slot is written once per step, whoever else is told of it: a second
  // copy could change bytes that the first reader is loading.
  static PL_FN bool moves_data(const TableStep& s, uint32_t send) {
    const pl_table& t = s.t;
    if (t.send[send].src == PL_SRC_NOTHING) return false;
    if (!t.pull) return true;
    PL_ROLL
    for (uint32_t i = 0; i < send; ++i)
      if (t.send[i].data == t.send[send].data && t.send[i].src != PL_SRC_NOTHING) return false;
    return true;
  }

  static PL_FN void put(const TableStep& s, const pl_send& to, const Span& span, const dev::Raw& raw, bool wide) {
    const uint32_t at = s.t.pull ? s.t.rank : to.peer;
    dev::slab_store(slot_data(s, at, to.data) + span.in_piece * (wide ? 32 : 16), raw,
                    wide ? 2 * span.bytes : span.bytes, wide);
  }

  static constexpr uint64_t EPOCH_BITS = (uint64_t(1) << 48) - 1;
  static PL_FN uint64_t flag_value(const TableStep& s) { return s.epoch ^ s.a.signature; }

  // After all of a chunk's data: one flag per send. On a GPU a release waits for the stores before it, so the chunk's
  // sends share that wait.
  static PL_FN void publish(const TableStep& s, const pl_phase& ph, uint64_t chunk) {
    dev::sync_block();
    PL_ROLL
    for (uint32_t i = ph.send0 + dev::tid(); i < uint32_t(ph.send0 + ph.sends); i += dev::threads()) {
      const pl_send& to = s.t.send[i];
      if (!chunk_of(s, to.piece, chunk).empty())
        dev::flag_release(slot_flag(s, to.peer, to.slot, chunk), flag_value(s));
    }
  }

  // The same verdict for all threads of the block, because all of them meet at the barrier.
  static PL_FN bool await_chunk(TableStep& s, const pl_fold& f, uint64_t chunk) {
    bool ok = true;
    PL_ROLL
    for (uint32_t i = dev::tid(); ok && i < f.items; i += dev::threads()) {
      const pl_item& it = s.t.item[f.item0 + i];
      if (it.from >= PL_MAX_RANKS) continue;
      const char* flag = slot_flag(s, s.t.rank, it.slot, chunk);
      uint64_t other = 0;  // in what the flag differs
      // A flag of this step from a rank that makes another call ends the wait too: what is awaited will never come.
      ok = await(
          s,
          [&] {
            other = dev::flag_acquire(flag) ^ flag_value(s);
            return (other & EPOCH_BITS) == 0;
          },
          [&] { return uint32_t(it.from); });
      if (ok && other != 0) {
        Verdict verdict;
        verdict.reason = PL_REASON_MISMATCH;
        verdict.peer = it.from;
        verdict.differs = DIFFERS_SIGNATURE;
        give_up(s.a, s.epoch, verdict);
        ok = false;
      }
    }
    return !dev::any_in_block(!ok);
  }

  // The data is there once the flag is: one pass, all loads in flight.
  template <uint32_t K, bool WIDE>
  static PL_FN bool gather(TableStep& s, const Operands<K>& o, const Span& span, dev::Raw (&raw)[K]) {
    PL_EACH
    for (uint32_t k = 0; k < K; ++k) {
      if (!(o.remote >> k & 1)) continue;
      const pl_item& it = s.t.item[o.item[k]];
      const bool wide = WIDE && it.wire_f32;
      const uint32_t at = s.t.pull ? it.from : s.t.rank;
      dev::slab_load(raw[k], slot_data(s, at, it.data) + span.in_piece * (wide ? 32 : 16), wide);
    }
    return true;
  }
  template <uint32_t K, bool WIDE>
  static PL_FN void consumed(const TableStep&, const Operands<K>&, const Span&) {}
};

}  // namespace PL_NAMESPACE

#endif
