// Folds: operands in tree order, summed along the tree, rounded once.
//
// A fold's items are the tree in postfix order: push an item, then combine the top two `merge` times. Two ways to do
// it: a balanced tree over up to K operands is unrolled, with all loads in flight together; any other tree walks its
// items with a stack of at most STACK values besides the operand in hand, which a merge takes without a push.
#ifndef PEERLANE_FOLD_CUH
#define PEERLANE_FOLD_CUH

#include "protocol_flagged.cuh"
#include "protocol_ll.cuh"
#include "protocol_sentinel.cuh"

namespace PL_NAMESPACE {

// Enough for trees that halve, over up to four islands that are joined by halving, of 16 ranks. The worst is islands of
// 1, 1, 1 and 13: two joins wait while the last island's 13 are summed, which takes three.
constexpr uint32_t STACK = PL_FOLD_STACK;

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
      PL_EACH
      for (uint32_t d = STACK - 1; d > 0; --d) PL_UNROLL
      for (uint32_t i = 0; i < N; ++i) v[d][i] = v[d - 1][i];
    }
    ++size;
  }
  template <bool HOT>
  PL_FN void merge(uint32_t op, uint32_t n) {
    A* to = SHIFTS ? v[0] : v[size - 2];
    const A* under = SHIFTS ? v[1] : v[size - 2];
    const A* upper = SHIFTS ? v[0] : v[size - 1];
    with_op<HOT>(op, [&](auto o) {
      PL_UNROLL
      for (uint32_t i = 0; i < n; ++i) to[i] = decltype(o)::of(under[i], upper[i]);
    });
    if (SHIFTS) {
      PL_EACH
      for (uint32_t d = 1; d + 1 < STACK; ++d) PL_UNROLL
      for (uint32_t i = 0; i < N; ++i) v[d][i] = v[d + 1][i];
    }
    --size;
  }
};

// Element i of an operand, as an accumulator. WIDE: it may be an accumulator already.
template <class D, bool WIDE>
struct Lift {
  dev::In<typename D::T> narrow;
  dev::In<typename D::A> wide;
  bool is_wide;
  PL_FN Lift(const dev::Raw& r, bool w) : narrow(r), wide(r), is_wide(w) {}
  PL_FN typename D::A operator[](uint32_t i) const { return WIDE && is_wide ? wide[i] : D::up(narrow[i]); }
};

PL_FN bool item_is_wide(const pl_item& it) { return it.wire_f32 || it.from == PL_FROM_PARTIAL; }

template <class D, bool WIDE>
PL_FN Lift<D, WIDE> lift(const TableStep& s, const dev::Raw& raw, uint32_t item) {
  return Lift<D, WIDE>(raw, WIDE && item_is_wide(s.t.item[item]));
}

// Operands, arrived. The rank's own are loaded before the wait for the others, once each: a fold has one, seldom two.
template <class D, class P, uint32_t K, bool WIDE>
PL_FN bool fetch(TableStep& s, const Operands<K>& o, const Span& span, dev::Raw (&raw)[K]) {
  uint32_t input = 0, partial = 0;
  PL_EACH
  for (uint32_t k = 0; k < K; ++k) {
    const uint32_t from = s.t.item[o.item[k]].from;
    input |= uint32_t(from == PL_FROM_INPUT) << k;
    partial |= uint32_t(from == PL_FROM_PARTIAL) << k;
  }
  input &= o.present;
  partial &= o.present;
  dev::Raw mine, kept;
  if (input) dev::user_load<typename D::T, false>(mine, input_at(s, span.in_tile), span.packs, span.bytes);
  if (partial) dev::partial_load(kept, partial_at<D>(s, span.in_tile), WIDE);
  if (!P::template gather<K, WIDE>(s, o, span, raw)) return false;
  PL_EACH
  for (uint32_t k = 0; k < K; ++k) {
    if (input >> k & 1) dev::same_view(raw[k], mine);
    if (partial >> k & 1) dev::same_view(raw[k], kept);
  }
  return true;
}

// What a finished value becomes: the caller's type, rounded once; or an accumulator for a later phase.
template <class D, class Value>
PL_FN void store_values(const TableStep& s, const pl_fold& f, const Span& span, Value value) {
  using A = typename D::A;
  const uint32_t n = extent<D>(span);
  if (f.dst == PL_DST_PARTIAL) {
    dev::Out<A> out(partial_at<D>(s, span.in_tile), 16);
    PL_UNROLL
    for (uint32_t i = 0; i < n; ++i) out.set(i, value(i));
    out.flush_partial(D::SHORT_FLOAT);
    return;
  }
  const uint32_t ranks = s.t.n;
  dev::Out<typename D::T> out(output_at(s, span.in_tile), span.bytes);
  if (s.a.op == PL_AVG) {
    PL_UNROLL
    for (uint32_t i = 0; i < n; ++i) out.set(i, D::down(Arith<A>::div(value(i), ranks)));
  } else {
    PL_UNROLL
    for (uint32_t i = 0; i < n; ++i) out.set(i, D::down(value(i)));
  }
  out.flush();
}

template <class D, class Value>
PL_FN void store(const TableStep& s, const pl_fold& f, const Span& span, Value value) {
  if constexpr (dev::STRIP == 1) {
    // In registers once: `value` may be a whole tree, and there are three uses of it.
    typename D::A v[elements<D>()];
    PL_UNROLL
    for (uint32_t i = 0; i < elements<D>(); ++i) v[i] = value(i);
    store_values<D>(s, f, span, [&](uint32_t i) { return v[i]; });
  } else {
    store_values<D>(s, f, span, value);
  }
}

// The sum over a complete tree of K operands, some of them absent, into `v`.
template <class D, bool WIDE, uint32_t K>
PL_FN void add_tree(const TableStep& s, const Operands<K>& o, const dev::Raw (&raw)[K],
                    typename D::A (&v)[elements<D>()]) {
  PL_UNROLL
  for (uint32_t i = 0; i < elements<D>(); ++i) {
    typename D::A x[K];
    PL_EACH
    for (uint32_t k = 0; k < K; ++k) x[k] = lift<D, WIDE>(s, raw[k], o.item[k])[i];
    PL_EACH
    for (uint32_t half = K / 2, width = 1; half > 0; half /= 2, width *= 2) PL_EACH
    for (uint32_t k = 0; k < half; ++k) {
      // A right half is there if its first leaf is.
      const bool both = o.present >> ((2 * k + 1) * width) & 1;
      x[k] = both ? Sum::of(x[2 * k], x[2 * k + 1]) : x[2 * k];
    }
    v[i] = x[0];
  }
}

// A balanced tree of sums over up to K operands. More than 8 do not fit into registers with what else is needed: 16 are
// two halves of 8, whose sums are added.
template <class D, class P, bool WIDE, uint32_t K>
PL_FN bool sum_tree(TableStep& s, const pl_fold& f, const Span& span) {
  constexpr uint32_t N = K < 8 ? K : 8;
  if constexpr (dev::STRIP > 1) {
    static_assert(K == 2, "a CPU sums two strips in one pass and walks larger trees");
    const Operands<2> o = run_of<2>(s, f.item0, 2);
    dev::Raw raw[2];
    if (!fetch<D, P, 2, WIDE>(s, o, span, raw)) return false;
    P::template consumed<2, WIDE>(s, o, span);
    const Lift<D, WIDE> x = lift<D, WIDE>(s, raw[0], o.item[0]);
    const Lift<D, WIDE> y = lift<D, WIDE>(s, raw[1], o.item[1]);
    store<D>(s, f, span, [&](uint32_t i) { return Sum::of(x[i], y[i]); });
  } else {
    typename D::A sum[elements<D>()];
    const uint32_t left = K > N && f.items > N ? (uint32_t(f.items) + 1) / 2 : uint32_t(f.items);
    PL_ROLL
    for (uint32_t done = 0; done < f.items; done += left) {
      const Operands<N> o = balanced<N>(s, f.item0 + done, done ? f.items - left : left);
      dev::Raw raw[N];
      if (!fetch<D, P, N, WIDE>(s, o, span, raw)) return false;
      P::template consumed<N, WIDE>(s, o, span);
      typename D::A v[elements<D>()];
      add_tree<D, WIDE, N>(s, o, raw, v);
      PL_UNROLL
      for (uint32_t i = 0; i < elements<D>(); ++i) sum[i] = done ? Sum::of(sum[i], v[i]) : v[i];
    }
    store<D>(s, f, span, [&](uint32_t i) { return sum[i]; });
  }
  return true;
}

// Pushes or merges K operands in turn.
template <class D, bool HOT, bool WIDE, uint32_t K>
PL_FN void take(TableStep& s, Stack<D>& st, const Operands<K>& o, const Span& span, const dev::Raw (&raw)[K]) {
  const uint32_t n = extent<D>(span), op = s.a.op;
  PL_EACH
  for (uint32_t k = 0; k < K; ++k) {
    if (!(o.present >> k & 1)) break;
    const Lift<D, WIDE> x = lift<D, WIDE>(s, raw[k], o.item[k]);
    uint32_t merges = s.t.item[o.item[k]].merge;
    if (merges == 0) {
      st.grow();
      typename D::A* top = st.top();
      if constexpr (K > 1) {  // two leaves in a row are summed in one pass over the strip
        if (k + 1 < K && o.present >> (k + 1) & 1 && s.t.item[o.item[k + 1]].merge) {
          const Lift<D, WIDE> y = lift<D, WIDE>(s, raw[k + 1], o.item[k + 1]);
          with_op<HOT>(op, [&](auto c) {
            PL_UNROLL
            for (uint32_t i = 0; i < n; ++i) top[i] = decltype(c)::of(x[i], y[i]);
          });
          merges = s.t.item[o.item[k + 1]].merge;
          ++k;
        } else {
          PL_UNROLL
          for (uint32_t i = 0; i < n; ++i) top[i] = x[i];
        }
      } else {
        PL_UNROLL
        for (uint32_t i = 0; i < n; ++i) top[i] = x[i];
      }
    } else {
      typename D::A* top = st.top();
      with_op<HOT>(op, [&](auto c) {
        PL_UNROLL
        for (uint32_t i = 0; i < n; ++i) top[i] = decltype(c)::of(top[i], x[i]);
      });
    }
    PL_ROLL
    for (; merges > 1; --merges) st.template merge<HOT>(op, n);
  }
}

enum class Purpose { Reduce, Await, Copy };

// Any tree, B operands at a time. Await: only wait, the items stay in their slots for a later fold. Copy: one item that
// a peer has rounded already; its bytes are the result.
template <class D, class P, bool HOT, bool WIDE, uint32_t B>
PL_FN bool walk_tree(TableStep& s, const pl_fold& f, Purpose purpose, const Span& span) {
  Stack<D> st;
  PL_ROLL
  for (uint32_t i = 0; i < f.items; i += B) {
    const Operands<B> o = run_of<B>(s, f.item0 + i, f.items - i);
    dev::Raw raw[B];
    if (!fetch<D, P, B, WIDE>(s, o, span, raw)) return false;
    if (purpose == Purpose::Await) continue;
    P::template consumed<B, WIDE>(s, o, span);
    if (purpose == Purpose::Copy) {
      dev::user_copy<typename D::T>(output_at(s, span.in_tile), raw[0], span.bytes);
      return true;
    }
    take<D, HOT, WIDE, B>(s, st, o, span, raw);
  }
  if (purpose == Purpose::Await) return true;
  const typename D::A* top = st.top();
  store<D>(s, f, span, [&](uint32_t i) { return top[i]; });
  return true;
}

// A lone item that a peer sent in the caller's type is a result. A lone item of accumulators, or the rank's own input
// when it is alone, still has to be finished.
PL_FN Purpose purpose_of(const TableStep& s, const pl_fold& f) {
  if (f.dst == PL_DST_AWAIT) return Purpose::Await;
  const pl_item& it = s.t.item[f.item0];
  return f.dst == PL_DST_RESULT && f.items == 1 && it.from < PL_MAX_RANKS && !it.wire_f32 ? Purpose::Copy
                                                                                          : Purpose::Reduce;
}

template <class D, class P, bool HOT, uint32_t K>
PL_FN bool fold_chunk(TableStep& s, const pl_fold& f, uint64_t chunk) {
  const Range r = chunk_of(s, f.piece, chunk);
  if (r.empty()) return true;
  if (!P::await_chunk(s, f, chunk)) return false;
  const Purpose purpose = purpose_of(s, f);
  if (P::BULK && purpose == Purpose::Await) return true;
  bool wide = false;
  if (D::SHORT_FLOAT) PL_ROLL
  for (uint32_t i = 0; i < f.items; ++i) wide |= item_is_wide(s.t.item[f.item0 + i]);
  const bool sums = HOT || s.a.op == PL_SUM || s.a.op == PL_AVG;
  const bool tree = K > 1 && sums && f.canonical && f.items > 1 && purpose == Purpose::Reduce;
  if constexpr (K > 1) {
    if (tree && !wide && f.items <= K) {
      // A CPU sums two operands of a bulk protocol from where they lie: nothing is buffered, so one pass takes the
      // chunk.
      const uint32_t span = dev::HOST && P::BULK ? uint32_t(r.last - r.first) : dev::STRIP;
      return each_span<D>(s, r, span, [&](const Span& span) { return sum_tree<D, P, false, K>(s, f, span); });
    }
    // Accumulators take twice the registers; folds over them mostly have two operands.
    if constexpr (D::SHORT_FLOAT)
      if (tree && f.items == 2) {
        return each_span<D>(s, r, dev::STRIP, [&](const Span& span) { return sum_tree<D, P, true, 2>(s, f, span); });
      }
  }
  // On a CPU the data of a whole chunk is copied at once, and strips without accumulators have code of their own, so
  // that no loop over elements asks. On a GPU one copy of this code is enough.
  const bool whole = dev::HOST && P::BULK && purpose == Purpose::Copy;
  const uint32_t width = whole ? uint32_t(r.last - r.first) : dev::STRIP;
  if constexpr (dev::HOST && D::SHORT_FLOAT)
    if (!wide)
      return each_span<D>(s, r, width,
                          [&](const Span& span) { return walk_tree<D, P, HOT, false, 2>(s, f, purpose, span); });
  return each_span<D>(s, r, width, [&](const Span& span) {
    return walk_tree < D, P, HOT, D::SHORT_FLOAT, dev::HOST ? 2 : 1 > (s, f, purpose, span);
  });
}

}  // namespace PL_NAMESPACE

#endif
