// The driver: walks a rank's table, phase by phase.
//
// Phase-major: in a phase all sends come first, then all waits. A wait never sits in a loop that also sends: with
// several chunks per block, a rank waiting for its peer's chunk 0 before it has sent its own chunk 1 may meet a peer
// that does the same in another order, and neither moves.
#ifndef PEERLANE_ALL_REDUCE_CUH
#define PEERLANE_ALL_REDUCE_CUH

#include "add_rms_norm.cuh"
#include "fold.cuh"
#include "step.cuh"

namespace PL_NAMESPACE {

// What is sent, as it travels: the caller's type, or accumulators.
template <class D, class P>
PL_FN void load_source(const TableStep& s, const pl_send& send, const Span& span, bool wide, dev::Raw& raw) {
  if (send.src == PL_SRC_PARTIAL) {
    dev::partial_load(raw, partial_at<D>(s, span.in_tile), wide);
    return;
  }
  const char* from = send.src == PL_SRC_INPUT ? input_at(s, span.in_tile) : output_at(s, span.in_tile);
  if (!wide) {
    dev::user_load<typename D::T, P::WHOLE>(raw, from, span.packs, span.bytes);
    return;
  }
  dev::Raw narrow;
  dev::user_load<typename D::T, true>(narrow, from, span.packs, span.bytes);
  const dev::In<typename D::T> x(narrow);
  raw.own();
  dev::Fill<typename D::A> to(raw);
  const uint32_t n = whole_extent<D>(span);
  PL_UNROLL
  for (uint32_t i = 0; i < n; ++i) to.set(i, D::up(x[i]));
}

// A chunk of all sends of a phase. Sends of the same piece and source that stand together load it once.
template <class D, class P>
PL_FN void push_chunk(TableStep& s, const pl_phase& ph, uint64_t chunk) {
  const pl_table& t = s.t;
  const bool wide = D::SHORT_FLOAT && ph.wire_f32;
  const uint32_t end = ph.send0 + ph.sends;
  PL_ROLL
  for (uint32_t i = ph.send0, next; i < end; i = next) {
    uint32_t moves = 0;
    PL_ROLL
    for (next = i;
         next < end && next - i < 32 && t.send[next].piece == t.send[i].piece && t.send[next].src == t.send[i].src;
         ++next)
      moves |= uint32_t(P::moves_data(s, next)) << (next - i);
    const Range r = chunk_of(s, t.send[i].piece, chunk);
    if (moves == 0 || r.empty()) continue;
    const bool copy = P::BULK && dev::HOST && (!wide || t.send[i].src == PL_SRC_PARTIAL);
    const uint32_t width = copy && next - i == 1 ? uint32_t(r.last - r.first) : dev::STRIP;
    each_span<D>(s, r, width, [&](const Span& span) {
      dev::Raw raw;
      load_source<D, P>(s, t.send[i], span, wide, raw);
      PL_ROLL
      for (uint32_t k = i; k < next; ++k)
        if (moves >> (k - i) & 1) P::put(s, t.send[k], span, raw, wide);
      return true;
    });
  }
  P::publish(s, ph, chunk);
}

template <class D, class P, bool HOT, uint32_t K>
PL_FN bool run_phases(TableStep& s) {
  const pl_table& t = s.t;
  PL_ROLL
  for (uint32_t p = 0; p < t.phases; ++p) {
    const pl_phase& ph = t.phase[p];
    s.phase = p;
    if (ph.sends) PL_ROLL
    for (uint64_t c = dev::block(); c < s.chunks; c += dev::blocks()) push_chunk<D, P>(s, ph, c);
    if (p == 0) land_rearmed(s);
    if (ph.folds) PL_ROLL
    for (uint64_t c = dev::block(); c < s.chunks; c += dev::blocks()) PL_ROLL
    for (uint32_t f = ph.fold0; f < uint32_t(ph.fold0 + ph.folds); ++f)
      if (!fold_chunk<D, P, HOT, K>(s, t.fold[f], c)) return false;
  }
  return true;
}

template <class D>
PL_FN void fill_own(const TableStep& s) {
  PL_ROLL
  for (uint32_t p = 0; p < s.t.pieces; ++p) PL_ROLL
  for (uint64_t c = dev::block(); c < s.chunks; c += dev::blocks()) fill_range<D>(s, chunk_of(s, p, c));
}

template <class D>
PL_FN void fail(const TableStep& s) {
  fill_own<D>(s);
  end_failed<D>(s.a, s.epoch, s.entered, s.advance);
}

// One step. HOT: sum and avg only; else the operation is a run-time switch. K: operands loaded at once.
template <class D, class P, bool HOT, uint32_t K>
PL_FN void all_reduce(const pl_args& a) {
  if (a.step.count == 0) return;  // an empty call is no step: no rank sends, waits or counts
  TableStep s(a, (a.step.count + elements<D>() - 1) / elements<D>(), 0);
  if (PL_UNLIKELY(begin(s, [] {}) == Entry::Refused)) {
    fill_own<D>(s);
    return;
  }
  bool ok = may_run(s);
  if (ok) ok = run_phases<D, P, HOT, K>(s);
  end(s, ok, [&] { fail<D>(s); });
}

// One step of the fused operation: an all-reduce whose tiles are rows, and then every block norms the rows that it has
// reduced. Until then their sums are in the output, where the last phases may still send from: so no row is normed
// before all phases of all rows of the block are over. What is read of the input has been read by then as well, so that
// an output may lie over it.
template <class D, class P, uint32_t K>
PL_FN void all_reduce_add_rms_norm(const pl_args& a) {
  if (a.step.rows == 0) return;
  TableStep s(a, a.step.width / elements<D>(), a.step.rows);
  if (PL_UNLIKELY(begin(s, [] {}) == Entry::Refused)) {
    fill_own<D>(s);
    return;
  }
  bool ok = may_run(s);
  if (ok) ok = run_phases<D, P, true, K>(s);
  // The barrier in here also puts all threads' parts of the sums before what the norm reads.
  if (PL_LIKELY(!dev::any_in_block(!ok))) add_rms_norm<D>(a.step);
  end(s, ok, [&] { fail<D>(s); });
}

}  // namespace PL_NAMESPACE

#endif
