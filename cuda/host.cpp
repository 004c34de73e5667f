// The kernels for the CPU device: one thread runs the whole grid. Compiled once per instruction set; the baseline
// object also chooses among them.
#include "all_reduce.cuh"
#if !defined(PL_HOST_AVX2)
#include "probe.cuh"
#endif

namespace PL_NAMESPACE {

// Two operands at once: the pair of leaves that most trees consist of is summed in one pass over a strip.
constexpr uint32_t OPERANDS = 2;

template <class D, bool SENTINEL_IS_LEGAL>
struct Run {
  static void protocol(const pl_args& a) {
    switch (a.step.proto) {
      case PL_LL:
        return all_reduce<D, Ll, false, OPERANDS>(a);
      case PL_FLAGGED:
        return all_reduce<D, Flagged, false, OPERANDS>(a);
      default:
        return sentinel(a);
    }
  }
  static void sentinel(const pl_args& a) {
    if constexpr (SENTINEL_IS_LEGAL) all_reduce<D, Sentinel<D>, false, OPERANDS>(a);
  }
};

template <class D>
void run(const pl_args& a) {
  Run<D, D::WORDS_HAVE_NAN>::protocol(a);
}

template <class D>
void run_or_fuse(const pl_args& a) {
  if (a.step.rows == 0) return run<D>(a);
  switch (a.step.proto) {
    case PL_LL:
      return all_reduce_add_rms_norm<D, Ll, OPERANDS>(a);
    case PL_FLAGGED:
      return all_reduce_add_rms_norm<D, Flagged, OPERANDS>(a);
    default:
      return all_reduce_add_rms_norm<D, Sentinel<D>, OPERANDS>(a);
  }
}

void dispatch(const pl_args& a) {
  dev::IeeeMode mode;
  switch (a.step.dtype) {
    case PL_I8:
      return run<Int<int8_t>>(a);
    case PL_U8:
      return run<Int<uint8_t>>(a);
    case PL_I32:
      return run<Int<int32_t>>(a);
    case PL_U32:
      return run<Int<uint32_t>>(a);
    case PL_I64:
      return run<Int<int64_t>>(a);
    case PL_U64:
      return run<Int<uint64_t>>(a);
    case PL_F16:
      return run_or_fuse<F16>(a);
    case PL_F32:
      return run<F32>(a);
    case PL_F64:
      return run<F64>(a);
    case PL_BF16:
      return run_or_fuse<Bf16>(a);
    default:
      return;
  }
}

void norm(const pl_step& a) {
  dev::IeeeMode mode;
  if (a.dtype == PL_F16) return add_rms_norm<F16>(a);
  add_rms_norm<Bf16>(a);
}

}  // namespace PL_NAMESPACE

#if defined(PL_HOST_AVX2)
extern "C" void pl_host_all_reduce_avx2(const pl_args* a) { PL_NAMESPACE::dispatch(*a); }
extern "C" void pl_host_add_rms_norm_avx2(const pl_step* a) { PL_NAMESPACE::norm(*a); }
#else
#if defined(__x86_64__)
extern "C" void pl_host_all_reduce_avx2(const pl_args* a);
extern "C" void pl_host_add_rms_norm_avx2(const pl_step* a);
static bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }
#endif

// Runs one step for one rank, on the calling thread; with rows, the fused one. The caller (src/device/cpu/kernel.rs)
// has checked data type, operation and protocol.
extern "C" void pl_host_all_reduce(const pl_args* a) {
#if defined(__x86_64__)
  if (has_avx2()) return pl_host_all_reduce_avx2(a);
#endif
  PL_NAMESPACE::dispatch(*a);
}

// Add + RMSNorm by itself, over sums that are in the output.
extern "C" void pl_host_add_rms_norm(const pl_step* a) {
#if defined(__x86_64__)
  if (has_avx2()) return pl_host_add_rms_norm_avx2(a);
#endif
  PL_NAMESPACE::norm(*a);
}

// One launch of the probe for one rank.
extern "C" void pl_host_probe(const pl_probe* p) { PL_NAMESPACE::probe(*p); }
#endif
