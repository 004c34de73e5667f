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
      return u.phases == 1 ? all_reduce_add_rms_norm_straight<D, 7, 1>(u)
                           : all_reduce_add_rms_norm_straight<D, 7, 2>(u);
  if constexpr (D::SHORT_FLOAT)
    if (u.step.rows)
      return u.phases == 1 ? all_reduce_add_rms_norm_unrolled<D, P, 7, 1>(u)
                           : all_reduce_add_rms_norm_unrolled<D, P, 7, 2>(u);
  u.phases == 1 ? all_reduce_unrolled<D, P, 7, 1>(u) : all_reduce_unrolled<D, P, 7, 2>(u);
}

void explore_unrolled(const pl_unrolled_7& u) {
  if (u.step.dtype == PL_BF16) return u.step.proto == PL_LL ? unrolled<Bf16, Ll>(u) : unrolled<Bf16, Sentinel<Bf16>>(u);
  return u.step.proto == PL_LL ? unrolled<F32, Ll>(u) : unrolled<F32, Sentinel<F32>>(u);
}
#endif

}  // namespace PL_NAMESPACE
