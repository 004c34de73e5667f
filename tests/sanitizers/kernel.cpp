// The CPU kernels over int32. A file of its own, so that a test may spoil the memory orders here
// and nowhere else
// (-D__ATOMIC_RELEASE=0 makes every release relaxed).
#include "all_reduce.cuh"
#include "ranks.h"

extern "C" void pl_sanitized_all_reduce(const pl_args* a) {
  using namespace PL_NAMESPACE;
  if (a->proto == PL_LL) return all_reduce<Int<int32_t>, Ll, false, 2>(*a);
  return all_reduce<Int<int32_t>, Flagged, false, 2>(*a);
}
