// The shipped kernels over the explorer's back end, once per shape (PL_NAMESPACE).
#include "all_reduce.cuh"
#include "unrolled.cuh"

namespace PL_NAMESPACE {

template <class D, class P>
void hot(const pl_args& a) {
  if constexpr (D::SHORT_FLOAT)
    if (a.step.rows) {
#if EXPLORER_STRIP == 1
      if (a.table.fan_in <= 3) return all_reduce_add_rms_norm<D, P, 4>(a);
      return all_reduce_add_rms_norm<D, P, 8>(a);
#else
      return all_reduce_add_rms_norm<D, P, 2>(a);
#endif
    }
#if EXPLORER_STRIP == 1
  // As the host chooses: the smallest kernel that holds the table's fan-in.
  if (a.table.fan_in <= 3) return all_reduce<D, P, true, 4>(a);
  return all_reduce<D, P, true, 8>(a);
#else
  return all_reduce<D, P, false, 2>(a);
#endif
}

template <class D>
void short_words(const pl_args& a) {
  switch (a.step.proto) {
    case PL_LL:
      return hot<D, Ll>(a);
    case PL_SENTINEL:
      return hot<D, Sentinel<D>>(a);
    default:
      return hot<D, Flagged>(a);
  }
}

template <class D>
void integers(const pl_args& a) {
  constexpr uint32_t K = EXPLORER_STRIP == 1 ? 1 : 2;
  if (a.step.proto == PL_LL) return all_reduce<D, Ll, false, K>(a);
  return all_reduce<D, Flagged, false, K>(a);
}

void explore(const pl_args& a) {
  switch (a.step.dtype) {
    case PL_BF16:
      return short_words<Bf16>(a);
    case PL_F32:
      return short_words<F32>(a);
    default:
      return integers<Int<int32_t>>(a);
  }
}

#if EXPLORER_STRIP == 1
template <class D, class P>
void unrolled(const pl_unrolled_7& u) {
  // As the host chooses: by the table's phases, and rows that are short enough with kernels of their own.
  if constexpr (D::SHORT_FLOAT && P::HAS_STRAIGHT)
    if (u.step.rows && u.straight)
      return u.step.cluster  ? all_reduce_add_rms_norm_straight<D, 7, 1, true>(u)
             : u.phases == 1 ? all_reduce_add_rms_norm_straight<D, 7, 1>(u)
                             : all_reduce_add_rms_norm_straight<D, 7, 2>(u);
  if constexpr (D::SHORT_FLOAT)
    if (u.step.rows)
      return u.phases == 1 ? all_reduce_add_rms_norm_unrolled<D, P, 7, 1>(u)
                           : all_reduce_add_rms_norm_unrolled<D, P, 7, 2>(u);
  u.phases == 1 ? all_reduce_unrolled<D, P, 7, 1>(u) : all_reduce_unrolled<D, P, 7, 2>(u);
}

// The same step for the kernels of two ranks.
pl_unrolled_1 of_two(const pl_unrolled_7& u) {
  pl_unrolled_1 v = {};
  v.step = u.step;
  v.phases = u.phases, v.straight = u.straight, v.widest = u.widest;
  for (uint32_t p = 0; p < PL_UNROLLED_PHASES; ++p) {
    const auto& from = u.phase[p];
    auto& to = v.phase[p];
    to.to[0] = from.to[0], to.send_first[0] = from.send_first[0], to.send_packs[0] = from.send_packs[0];
    to.send_piece[0] = from.send_piece[0], to.own_piece = from.own_piece;
    to.fold = from.fold, to.one_source = from.one_source, to.result = from.result;
    uint32_t leaf = 0;
    for (uint32_t k = 0; k < 8 && leaf < 2; ++k) {
      if (from.fold == PL_FOLD_SUM && !(from.present >> k & 1)) continue;
      to.present |= (from.present >> k & 1) << leaf, to.remote |= (from.remote >> k & 1) << leaf;
      to.at[leaf] = from.at[k], to.from[leaf] = from.from[k];
      to.item_first[leaf] = from.item_first[k], to.item_packs[leaf] = from.item_packs[k];
      if (leaf == 0) to.copy_piece[0] = from.copy_piece[k];
      ++leaf;
    }
    if (from.fold == PL_FOLD_SUM) {
      to.item_first[0] = from.item_first[0], to.item_packs[0] = from.item_packs[0];
    }
  }
  return v;
}

template <class D, uint32_t K>
void by_delta(const typename Fan<K>::Args& u) {
  u.phases == 1 ? all_reduce_unrolled<D, Delta<D>, K, 1>(u) : all_reduce_unrolled<D, Delta<D>, K, 2>(u);
}

template <class D>
void unrolled_words(const pl_unrolled_7& u) {
  if (u.step.proto == PL_LL) return unrolled<D, Ll>(u);
  if (!u.step.sent) return unrolled<D, Sentinel<D>>(u);
  u.step.n == 2 ? by_delta<D, 1>(of_two(u)) : by_delta<D, 7>(u);
}

void explore_unrolled(const pl_unrolled_7& u) {
  u.step.dtype == PL_BF16 ? unrolled_words<Bf16>(u) : unrolled_words<F32>(u);
}
#endif

}  // namespace PL_NAMESPACE
