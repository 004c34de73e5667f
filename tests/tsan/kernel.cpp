// The CPU kernel of `flagged` over int32. A file of its own, so that a test may spoil the memory
// orders here and nowhere else (-D__ATOMIC_RELEASE=0 makes every release relaxed).
#include "all_reduce.cuh"
#include "ranks.h"

extern "C" void pl_tsan_all_reduce(const pl_args* a) {
  PL_NAMESPACE::all_reduce<PL_NAMESPACE::Int<int32_t>, PL_NAMESPACE::Flagged, false, 2>(*a);
}
