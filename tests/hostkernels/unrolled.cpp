// The kernels with unrolled loops as host functions, one per K.
#include "unrolled.cuh"

namespace PL_NAMESPACE {

template <class D, class P, uint32_t K>
void run(const typename Fan<K>::Args& u) {
  if constexpr (D::SHORT_FLOAT)
    if (u.step.rows != 0)
      return u.phases == 1 ? all_reduce_add_rms_norm_unrolled<D, P, K, 1>(u)
                           : all_reduce_add_rms_norm_unrolled<D, P, K, 2>(u);
  u.phases == 1 ? all_reduce_unrolled<D, P, K, 1>(u) : all_reduce_unrolled<D, P, K, 2>(u);
}

template <class D, uint32_t K>
void by_protocol(const typename Fan<K>::Args& u) {
  if (u.step.proto == PL_LL) return run<D, Ll, K>(u);
  if constexpr (K <= 7)
    if (u.step.sent)
      return u.phases == 1 ? all_reduce_unrolled<D, Delta<D>, K, 1>(u) : all_reduce_unrolled<D, Delta<D>, K, 2>(u);
  run<D, Sentinel<D>, K>(u);
}

template <uint32_t K>
void dispatch(const void* args) {
  const auto& u = *static_cast<const typename Fan<K>::Args*>(args);
  dev::IeeeMode mode;
  switch (u.step.dtype) {
    case PL_BF16:
      return by_protocol<Bf16, K>(u);
    case PL_F16:
      return by_protocol<F16, K>(u);
    default:
      return by_protocol<F32, K>(u);
  }
}

}  // namespace PL_NAMESPACE

extern "C" {
void hostkernels_run_unrolled_1(const void* args) { PL_NAMESPACE::dispatch<1>(args); }
void hostkernels_run_unrolled_3(const void* args) { PL_NAMESPACE::dispatch<3>(args); }
void hostkernels_run_unrolled_7(const void* args) { PL_NAMESPACE::dispatch<7>(args); }
void hostkernels_run_unrolled_15(const void* args) { PL_NAMESPACE::dispatch<15>(args); }
}
