// Folds: operands in tree order, summed along the tree, rounded once.
//
// A fold's items are the tree in postfix order: push an item, then combine the top two `merge` times. K operands are
// loaded at once (their loads are in flight together); the stack carries over between batches, so any number of items
// works with any K. Stack depth: STACK values besides the operand in hand, which a merge takes without a push.
#ifndef PEERLANE_FOLD_CUH
#define PEERLANE_FOLD_CUH

#include "protocol_flagged.cuh"
#include "protocol_ll.cuh"
#include "protocol_sentinel.cuh"

namespace PL_NAMESPACE {

// Trees that halve, over up to 4 islands that halve, never need more (a test counts over all compositions of 16).
constexpr uint32_t STACK = 6;

// A GPU keeps the stack in registers, so its top always has index 0 and a push shifts (a run-time index would put it
// into local memory). A CPU keeps strips in L1 and moves an index instead.
template <class D>
struct Stack {
  using A = typename D::A;
  static constexpr bool SHIFTS = dev::STRIP == 1;
  static constexpr uint32_t N = dev::STRIP * elements<D>();
  alignas(64) A v[STACK][N];
  uint32_t size = 0;

  PL_FN A* top() { return SHIFTS ? v[0] : v[size - 1]; }
  PL_FN void grow() {
    if (SHIFTS) {
      PL_EACH for (uint32_t d = STACK - 1; d > 0; --d)
        PL_UNROLL for (uint32_t i = 0; i < N; ++i) v[d][i] = v[d - 1][i];
    }
    ++size;
  }
  template <class O>
  PL_FN void merge(O, uint32_t n) {
    A* __restrict to = SHIFTS ? v[0] : v[size - 2];
    const A* __restrict under = SHIFTS ? v[1] : v[size - 2];
    const A* __restrict upper = SHIFTS ? v[0] : v[size - 1];
    PL_UNROLL for (uint32_t i = 0; i < n; ++i) to[i] = O::of(under[i], upper[i]);
    if (SHIFTS) {
      PL_EACH for (uint32_t d = 1; d + 1 < STACK; ++d)
        PL_UNROLL for (uint32_t i = 0; i < N; ++i) v[d][i] = v[d + 1][i];
    }
    --size;
  }
};

// Element i of an operand, as an accumulator.
template <class D, bool WIDE>
struct Lift {
  dev::In<typename D::T> narrow;
  dev::In<typename D::A> wide;
  bool is_wide;
  PL_FN Lift(const dev::Raw& r, bool w) : narrow(r), wide(r), is_wide(w) {}
  PL_FN typename D::A operator[](uint32_t i) const {
    return WIDE && is_wide ? wide[i] : D::up(narrow[i]);
  }
};

template <class D>
PL_FN typename D::T finish(typename D::A v, bool average, uint32_t n) {
  return D::down(average ? Arith<typename D::A>::div(v, n) : v);
}

// Loads of the rank's own operands, before the wait for the remote ones.
template <class D, uint32_t K, bool WIDE>
PL_FN void load_own(const Step& s, uint32_t item0, uint32_t items, const Span& span,
                    dev::Raw (&raw)[K]) {
  PL_EACH for (uint32_t k = 0; k < K; ++k) {
    if (k >= items) break;
    const pl_item& it = s.a.table.item[item0 + k];
    if (it.from == PL_FROM_INPUT)
      dev::user_load<typename D::T, false>(raw[k], input_at(s, span.in_tile), span.packs, span.bytes);
    else if (it.from == PL_FROM_PARTIAL)
      dev::partial_load(raw[k], partial_at<D>(s, span.in_tile), WIDE);
  }
}

PL_FN bool item_is_wide(const pl_item& it) { return it.wire_f32 || it.from == PL_FROM_PARTIAL; }

template <class D, bool HOT, bool WIDE, uint32_t K>
PL_FN void take(Step& s, Stack<D>& st, uint32_t item0, uint32_t items, const Span& span,
                const dev::Raw (&raw)[K]) {
  const uint32_t n = extent<D>(span);
  with_op<HOT>(s.a.op, [&](auto op) {
    using O = decltype(op);
    PL_EACH for (uint32_t k = 0; k < K; ++k) {
      if (k >= items) break;
      const pl_item& it = s.a.table.item[item0 + k];
      const Lift<D, WIDE> x(raw[k], WIDE && item_is_wide(it));
      uint32_t merges = it.merge;
      if (merges == 0) {
        // On a CPU two leaves in a row are summed in one pass over the strip.
        if (dev::STRIP > 1 && k + 1 < items && k + 1 < K && s.a.table.item[item0 + k + 1].merge) {
          const pl_item& next = s.a.table.item[item0 + k + 1];
          const Lift<D, WIDE> y(raw[k + 1], WIDE && item_is_wide(next));
          st.grow();
          typename D::A* __restrict top = st.top();
          PL_UNROLL for (uint32_t i = 0; i < n; ++i) top[i] = O::of(x[i], y[i]);
          for (merges = next.merge; merges > 1; --merges) st.merge(op, n);
          ++k;
          continue;
        }
        st.grow();
        typename D::A* __restrict top = st.top();
        PL_UNROLL for (uint32_t i = 0; i < n; ++i) top[i] = x[i];
      } else {
        typename D::A* top = st.top();
        PL_UNROLL for (uint32_t i = 0; i < n; ++i) top[i] = O::of(top[i], x[i]);
        for (; merges > 1; --merges) st.merge(op, n);
      }
    }
  });
}

// What a finished value becomes: the caller's type, once; or an accumulator for a later phase.
template <class D, class Value>
PL_FN void store(const Step& s, const pl_fold& f, const Span& span, Value value) {
  const uint32_t n = extent<D>(span);
  if (f.dst == PL_DST_PARTIAL) {
    dev::Out<typename D::A> out(partial_at<D>(s, span.in_tile), 16);
    PL_UNROLL for (uint32_t i = 0; i < n; ++i) out.set(i, value(i));
    out.flush_partial(D::SHORT_FLOAT);
    return;
  }
  const uint32_t ranks = s.a.table.n;
  dev::Out<typename D::T> out(output_at(s, span.in_tile), span.bytes);
  if (s.a.op == PL_AVG) {
    PL_UNROLL for (uint32_t i = 0; i < n; ++i) out.set(i, finish<D>(value(i), true, ranks));
  } else {
    PL_UNROLL for (uint32_t i = 0; i < n; ++i) out.set(i, finish<D>(value(i), false, ranks));
  }
  out.flush();
}

// A whole number of operands that the balanced tree pairs up: on a GPU K of them, on a CPU two, need no stack.
template <class D, bool HOT, bool WIDE, uint32_t K>
PL_FN void reduce_paired(Step& s, const pl_fold& f, const Span& span, const dev::Raw (&raw)[K]) {
  using A = typename D::A;
  with_op<HOT>(s.a.op, [&](auto op) {
    using O = decltype(op);
    if (K == 2) {
      const pl_item* it = &s.a.table.item[f.item0];
      const Lift<D, WIDE> x(raw[0], WIDE && item_is_wide(it[0]));
      const Lift<D, WIDE> y(raw[K - 1], WIDE && item_is_wide(it[1]));
      store<D>(s, f, span, [&](uint32_t i) { return O::of(x[i], y[i]); });
    } else {
      store<D>(s, f, span, [&](uint32_t i) {
        A v[K];
        PL_EACH for (uint32_t k = 0; k < K; ++k)
          v[k] = Lift<D, WIDE>(raw[k], WIDE && item_is_wide(s.a.table.item[f.item0 + k]))[i];
        PL_EACH for (uint32_t half = K / 2; half > 0; half /= 2)
          PL_EACH for (uint32_t k = 0; k < half; ++k) v[k] = O::of(v[2 * k], v[2 * k + 1]);
        return v[0];
      });
    }
  });
}

template <class D, class P, bool HOT, bool WIDE, uint32_t K>
PL_FN bool reduce_span(Step& s, const pl_fold& f, const Span& span) {
  if (f.canonical && f.items == K && K > 1) {
    dev::Raw raw[K];
    load_own<D, K, WIDE>(s, f.item0, K, span, raw);
    if (!P::template gather<K, WIDE>(s, f.item0, K, span, raw)) return false;
    P::template consumed<K, WIDE>(s, f.item0, K, span);
    reduce_paired<D, HOT, WIDE, K>(s, f, span, raw);
    return true;
  }
  Stack<D> st;
  for (uint32_t i = 0; i < f.items; i += K) {
    const uint32_t m = f.items - i < K ? f.items - i : K;
    dev::Raw raw[K];
    load_own<D, K, WIDE>(s, f.item0 + i, m, span, raw);
    if (!P::template gather<K, WIDE>(s, f.item0 + i, m, span, raw)) return false;
    P::template consumed<K, WIDE>(s, f.item0 + i, m, span);
    take<D, HOT, WIDE, K>(s, st, f.item0 + i, m, span, raw);
  }
  const typename D::A* top = st.top();
  store<D>(s, f, span, [&](uint32_t i) { return top[i]; });
  return true;
}

// Only wait: the items stay in their slots for a later fold.
template <class D, class P, bool WIDE>
PL_FN bool await_fold(Step& s, const pl_fold& f, const Range& r) {
  return each_span<D>(s, r, dev::STRIP, [&](const Span& span) {
    for (uint32_t i = 0; i < f.items; ++i) {
      dev::Raw raw[1];
      if (!P::template gather<1, WIDE>(s, f.item0 + i, 1, span, raw)) return false;
    }
    return true;
  });
}

// One item that a peer has rounded already: its bytes are the result. (A lone item of accumulators, or the rank's own
// input when it is alone, still has to be finished.)
template <class D, class P>
PL_FN bool copy_fold(Step& s, const pl_fold& f, const Range& r) {
  const uint32_t width = P::BULK && dev::HOST ? uint32_t(r.last - r.first) : dev::STRIP;
  return each_span<D>(s, r, width, [&](const Span& span) {
    dev::Raw raw[1];
    if (!P::template gather<1, false>(s, f.item0, 1, span, raw)) return false;
    P::template consumed<1, false>(s, f.item0, 1, span);
    dev::user_copy<typename D::T>(output_at(s, span.in_tile), raw[0], span.bytes);
    return true;
  });
}

template <class D, class P, bool HOT, uint32_t K>
PL_FN bool fold_chunk(Step& s, const pl_fold& f, uint64_t chunk) {
  const Range r = chunk_of(s, f.piece, chunk);
  if (r.empty()) return true;
  if (!P::await_chunk(s, f, chunk)) return false;
  const pl_item* items = &s.a.table.item[f.item0];
  bool wide = false;
  if (D::SHORT_FLOAT)
    for (uint32_t i = 0; i < f.items; ++i) wide |= item_is_wide(items[i]);
  if (f.dst == PL_DST_AWAIT) {
    if (P::BULK) return true;
    return wide ? await_fold<D, P, D::SHORT_FLOAT>(s, f, r) : await_fold<D, P, false>(s, f, r);
  }
  if (f.items == 1 && f.dst == PL_DST_RESULT && items[0].from < PL_MAX_RANKS && !items[0].wire_f32)
    return copy_fold<D, P>(s, f, r);
  // Accumulators take twice the registers; folds over them have few operands (islands, or the two sides of a node).
  constexpr uint32_t KW = K < 4 ? K : 4;
  if (D::SHORT_FLOAT && wide)
    return each_span<D>(s, r, dev::STRIP, [&](const Span& span) {
      return reduce_span<D, P, HOT, D::SHORT_FLOAT, KW>(s, f, span);
    });
  return each_span<D>(s, r, dev::STRIP, [&](const Span& span) {
    return reduce_span<D, P, HOT, false, K>(s, f, span);
  });
}

}  // namespace PL_NAMESPACE

#endif
