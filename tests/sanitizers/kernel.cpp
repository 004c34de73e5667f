// The CPU kernels, each protocol over two element sizes. A file of its own, so that a test may spoil the memory orders
// here and nowhere else (-D__ATOMIC_RELEASE=0 makes every release relaxed).
#include "all_reduce.cuh"
#include "ranks.h"

namespace {
using namespace PL_NAMESPACE;

template <class D>
void run(const pl_args& a) {
  if constexpr (D::WORDS_HAVE_NAN)
    if (a.step.proto == PL_SENTINEL) return all_reduce<D, Sentinel<D>, false, 2>(a);
  if (a.step.proto == PL_LL) return all_reduce<D, Ll, false, 2>(a);
  all_reduce<D, Flagged, false, 2>(a);
}
}  // namespace

extern "C" void pl_sanitized_all_reduce(const pl_args* a) {
  switch (a->step.dtype) {
    case PL_U8:
      return run<Int<uint8_t>>(*a);
    case PL_BF16:
      return run<Bf16>(*a);
    case PL_F32:
      return run<F32>(*a);
    default:
      return run<Int<int32_t>>(*a);
  }
}
