// The kernels for GPUs: one per data type and protocol, and for the hot types one per fan-in.
//
// Names are what the host looks up:
//   pl_all_reduce_<dtype>_<protocol>_<fan-in>   bf16, f16, f32; sum and avg; fan-in 1, 3, 7 or 15: the smallest that is
//                                               at least pl_table.fan_in
//   pl_all_reduce_<dtype>_<protocol>_any        every type; the operation is a run-time switch; any fan-in
//   pl_all_reduce_add_rms_norm_<dtype>_<protocol>_<fan-in>   bf16, f16; fan-in 3, 7 or any
//   pl_add_rms_norm_<dtype>                     bf16, f16; its second half by itself, over what an all-reduce has put
//                                               into the output
//   pl_probe_lane                               measures; takes a pl_probe
// Every one but the last takes a pl_args by value.
//
// Launch shape: blockDim up to THREADS, a multiple of 32, no dynamic shared memory. All blocks of all ranks that share
// a GPU must be resident together, because a block waits for what other ranks' blocks send.
#include "all_reduce.cuh"
#include "probe.cuh"

namespace {

using namespace PL_NAMESPACE;

template <class D>
struct SentinelOf : Sentinel<D> {};
template <class D>
struct LlOf : Ll {};
template <class D>
struct FlaggedOf : Flagged {};

// A kernel with many operands in flight needs the registers: 65536 / THREADS each.
constexpr unsigned THREADS = 256;

}  // namespace

// `const __grid_constant__`: the table stays in constant memory. A plain by-value argument that is indexed at run time
// is copied to the stack of every thread.
#define PL_KERNEL(D, name, P, proto, HOT, K, suffix)                                    \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                              \
      pl_all_reduce_##name##_##proto##_##suffix(const __grid_constant__ pl_args args) { \
    PL_NAMESPACE::all_reduce<D, P<D>, HOT, K>(args);                                    \
  }

#define PL_HOT_PROTOCOL(D, name, P, proto)   \
  PL_KERNEL(D, name, P, proto, true, 2, 1)   \
  PL_KERNEL(D, name, P, proto, true, 4, 3)   \
  PL_KERNEL(D, name, P, proto, true, 8, 7)   \
  PL_KERNEL(D, name, P, proto, true, 16, 15) \
  PL_KERNEL(D, name, P, proto, false, 1, any)

#define PL_HOT(D, name)                          \
  PL_HOT_PROTOCOL(D, name, LlOf, ll)             \
  PL_HOT_PROTOCOL(D, name, SentinelOf, sentinel) \
  PL_HOT_PROTOCOL(D, name, FlaggedOf, flagged)

#define PL_OTHER(D, name)                     \
  PL_KERNEL(D, name, LlOf, ll, false, 1, any) \
  PL_KERNEL(D, name, FlaggedOf, flagged, false, 1, any)

// Most calls are over two to eight ranks, and the hot schedules of more have a fan-in of 7 at most.
#define PL_FUSED_KERNEL(D, name, P, proto, K, suffix)                                                \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                           \
      pl_all_reduce_add_rms_norm_##name##_##proto##_##suffix(const __grid_constant__ pl_args args) { \
    PL_NAMESPACE::all_reduce_add_rms_norm<D, P<D>, K>(args);                                         \
  }

#define PL_FUSED_PROTOCOL(D, name, P, proto) \
  PL_FUSED_KERNEL(D, name, P, proto, 4, 3)   \
  PL_FUSED_KERNEL(D, name, P, proto, 8, 7)   \
  PL_FUSED_KERNEL(D, name, P, proto, 1, any)

#define PL_FUSED(D, name)                                            \
  PL_FUSED_PROTOCOL(D, name, LlOf, ll)                               \
  PL_FUSED_PROTOCOL(D, name, SentinelOf, sentinel)                   \
  PL_FUSED_PROTOCOL(D, name, FlaggedOf, flagged)                     \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)           \
      pl_add_rms_norm_##name(const __grid_constant__ pl_args args) { \
    PL_NAMESPACE::add_rms_norm<D>(args);                             \
  }

PL_FUSED(Bf16, bf16)
PL_FUSED(F16, f16)
PL_HOT(Bf16, bf16)
PL_HOT(F16, f16)
PL_HOT(F32, f32)
PL_OTHER(F64, f64)
PL_OTHER(Int<int8_t>, i8)
PL_OTHER(Int<uint8_t>, u8)
PL_OTHER(Int<int32_t>, i32)
PL_OTHER(Int<uint32_t>, u32)
PL_OTHER(Int<int64_t>, i64)
PL_OTHER(Int<uint64_t>, u64)

extern "C" __global__ void __launch_bounds__(THREADS, 1) pl_probe_lane(const __grid_constant__ pl_probe p) {
  PL_NAMESPACE::probe(p);
}
