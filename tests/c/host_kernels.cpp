// The kernels that C clients need, compiled for the host: what the stand-in driver runs in place of a GPU's. Sums of
// fp32 only, which is what the clients call and what set-up tests with; all types together take a minute to compile.
#define PL_NAMESPACE client
#include <stdio.h>
#include <stdlib.h>

#include "all_reduce.cuh"
#include "probe.cuh"

using namespace PL_NAMESPACE;

extern "C" void pl_host_all_reduce(const pl_args* a) {
  dev::IeeeMode mode;
  if (a->dtype != PL_F32) {
    fprintf(stderr, "tests/c/host_kernels.cpp has no type %u\n", a->dtype);
    abort();
  }
  switch (a->proto) {
    case PL_LL:
      return all_reduce<F32, Ll, false, 2>(*a);
    case PL_SENTINEL:
      return all_reduce<F32, Sentinel<F32>, false, 2>(*a);
    default:
      return all_reduce<F32, Flagged, false, 2>(*a);
  }
}

// Looked up by set-up, whether a client calls it or not.
extern "C" void pl_host_add_rms_norm(const pl_args* a) {
  dev::IeeeMode mode;
  if (a->dtype != PL_BF16) {
    fprintf(stderr, "tests/c/host_kernels.cpp has no norm of type %u\n", a->dtype);
    abort();
  }
  add_rms_norm<Bf16>(*a);
}

extern "C" void pl_host_probe(const pl_probe* p) { probe(*p); }
