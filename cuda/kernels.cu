// The kernels for GPUs: one per data type and protocol, and for the hot types one per fan-in.
//
// Names are what the host looks up:
//   pl_unrolled_<K>_<dtype>_<protocol>_<phases> bf16, f16, f32; sum and avg by ll or sentinel, of tables that have the
//                                               form of pl_unrolled_<K>; K is 1, 3, 7 or 15; phases is one or two,
//                                               but for 15 by ll one alone: the tags do not fit the registers
//   pl_unrolled_<K>_<dtype>_delta_<phases>      bf16, f16, f32; sums alone, of a pack of each piece per thread at most;
//                                               K is 1, 3 or 7
//   pl_unrolled_<K>_norm_<dtype>_<protocol>_<phases>   the same with add + RMSNorm; bf16, f16; K is 1, 3 or 7
//   pl_unrolled_<K>_rows_<dtype>_<phases>       the same by sentinel, rows that are short enough (straight_rows.cuh)
//   pl_unrolled_<K>_rows_<dtype>_cluster        in one phase by blocks that are launched as clusters, on GPUs that have
//                                               them (cluster.cuh)
//   pl_all_reduce_<dtype>_<protocol>_<fan-in>   any table; bf16, f16, f32; sum and avg; the smallest fan-in that is at
//                                               least pl_table.fan_in: 7 or 15 for ll and sentinel, 1, 3, 7 or 15
//   pl_all_reduce_<dtype>_<protocol>_any        every type; the operation is a run-time switch; any fan-in
//   pl_all_reduce_add_rms_norm_<dtype>_<protocol>_<fan-in>   bf16, f16; fan-in 3, 7 or any
//   pl_add_rms_norm_<dtype>                     bf16, f16; its second half by itself, over what an all-reduce has put
//                                               into the output
//   pl_probe_lane                               measures
// Each takes one struct of launch.h by value: the unrolled ones their pl_unrolled_<K>, those that walk a table a
// pl_args, the norm by itself a pl_step, the probe a pl_probe.
//
// All but the probe may be launched programmatically (dev::after_predecessor).
//
// Launch shape: blockDim up to what the launch bounds below say, a multiple of 32, no dynamic shared memory. All blocks
// of all ranks that share a GPU must be resident together, because a block waits for what other ranks' blocks send.
#include "all_reduce.cuh"
#include "probe.cuh"
#include "unrolled.cuh"

namespace {

using namespace PL_NAMESPACE;

template <class D>
struct SentinelOf : Sentinel<D> {};
template <class D>
struct DeltaOf : Delta<D> {};
template <class D>
struct LlOf : Ll {};
template <class D>
struct FlaggedOf : Flagged {};

// A kernel with many operands in flight needs the registers: 65536 / THREADS each.
constexpr unsigned THREADS = 256;
// Those that have the short path (straight.cuh) need fewer.
constexpr unsigned SMALL_THREADS = 512;
// One with a norm has much to do for a pack, and few multiprocessors for the packs of a row.
constexpr unsigned ROW_THREADS = 512;
// On the short path a warp more, which has no pack (straight_rows.cuh).
constexpr unsigned SHORT_ROW_THREADS = ROW_THREADS + 32;
// Two phases of more ranks than two take fewer, two blocks of which fit on a multiprocessor. Where blocks are pinned,
// for a measurement of one channel, a kernel may then start on the multiprocessors of the one before it; by default a
// block counts as one (share.rs), and this gains nothing.
constexpr unsigned SHARED_ROW_THREADS = 256;
// Its largest, after two phases of eight ranks, would spill with more.
constexpr unsigned LARGEST_ROW_THREADS = 384;

}  // namespace

// `const __grid_constant__`: the table stays in constant memory. A plain by-value argument that is indexed at run time
// is copied to the stack of every thread.
#define PL_KERNEL(D, name, P, proto, HOT, K, suffix)                                    \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                              \
      pl_all_reduce_##name##_##proto##_##suffix(const __grid_constant__ pl_args args) { \
    PL_NAMESPACE::dev::after_predecessor(args.step.dependents);                         \
    PL_NAMESPACE::all_reduce<D, P<D>, HOT, K>(args);                                    \
  }

// Where a word protocol walks, it is over many hops or ragged edges, and a smaller fan-in brings nothing.
#define PL_HOT_WORDS(D, name, P, proto)      \
  PL_KERNEL(D, name, P, proto, true, 8, 7)   \
  PL_KERNEL(D, name, P, proto, true, 16, 15) \
  PL_KERNEL(D, name, P, proto, false, 1, any)

#define PL_HOT(D, name)                                                  \
  PL_HOT_WORDS(D, name, LlOf, ll)                                        \
  PL_HOT_WORDS(D, name, SentinelOf, sentinel)                            \
  PL_HOT_WORDS(D, name, FlaggedOf, flagged)                              \
  PL_KERNEL(D, name, FlaggedOf, flagged, true, 2, 1)                     \
  PL_KERNEL(D, name, FlaggedOf, flagged, true, 4, 3)                     \
  PL_UNROLLED_KERNELS(D, name, LlOf, ll, THREADS)                        \
  PL_UNROLLED_KERNELS(D, name, SentinelOf, sentinel, SMALL_THREADS)      \
  PL_UNROLLED_KERNEL(D, name, SentinelOf, sentinel, THREADS, 15, 2, two) \
  PL_DELTA_KERNELS(D, name)

#define PL_OTHER(D, name)                     \
  PL_KERNEL(D, name, LlOf, ll, false, 1, any) \
  PL_KERNEL(D, name, FlaggedOf, flagged, false, 1, any)

#define PL_UNROLLED_KERNEL(D, name, P, proto, THREADS, K, PHASES, phases)                        \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                       \
      pl_unrolled_##K##_##name##_##proto##_##phases(const __grid_constant__ pl_unrolled_##K u) { \
    PL_NAMESPACE::dev::after_predecessor(u.step.dependents);                                     \
    PL_NAMESPACE::all_reduce_unrolled<D, P<D>, K, PHASES>(u);                                    \
  }
#define PL_UNROLLED_KERNELS(D, name, P, proto, SMALL)        \
  PL_UNROLLED_KERNEL(D, name, P, proto, SMALL, 1, 1, one)    \
  PL_UNROLLED_KERNEL(D, name, P, proto, SMALL, 3, 1, one)    \
  PL_UNROLLED_KERNEL(D, name, P, proto, SMALL, 7, 1, one)    \
  PL_UNROLLED_KERNEL(D, name, P, proto, THREADS, 15, 1, one) \
  PL_UNROLLED_KERNEL(D, name, P, proto, SMALL, 1, 2, two)    \
  PL_UNROLLED_KERNEL(D, name, P, proto, SMALL, 3, 2, two)    \
  PL_UNROLLED_KERNEL(D, name, P, proto, SMALL, 7, 2, two)

// What they remember takes registers, in two phases of eight ranks too many for more threads.
#define PL_DELTA_KERNELS(D, name)                                       \
  PL_UNROLLED_KERNEL(D, name, DeltaOf, delta, SMALL_THREADS, 1, 1, one) \
  PL_UNROLLED_KERNEL(D, name, DeltaOf, delta, SMALL_THREADS, 3, 1, one) \
  PL_UNROLLED_KERNEL(D, name, DeltaOf, delta, SMALL_THREADS, 7, 1, one) \
  PL_UNROLLED_KERNEL(D, name, DeltaOf, delta, SMALL_THREADS, 1, 2, two) \
  PL_UNROLLED_KERNEL(D, name, DeltaOf, delta, SMALL_THREADS, 3, 2, two) \
  PL_UNROLLED_KERNEL(D, name, DeltaOf, delta, THREADS, 7, 2, two)

#define PL_UNROLLED_NORM_KERNEL(D, name, P, proto, K, PHASES, phases, THREADS)                        \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                            \
      pl_unrolled_##K##_norm_##name##_##proto##_##phases(const __grid_constant__ pl_unrolled_##K u) { \
    PL_NAMESPACE::dev::after_predecessor(u.step.dependents);                                          \
    PL_NAMESPACE::all_reduce_add_rms_norm_unrolled<D, P<D>, K, PHASES>(u);                            \
  }
#define PL_UNROLLED_NORM_KERNELS(D, name, P, proto, THREADS, LARGEST) \
  PL_UNROLLED_NORM_KERNEL(D, name, P, proto, 1, 1, one, THREADS)      \
  PL_UNROLLED_NORM_KERNEL(D, name, P, proto, 3, 1, one, THREADS)      \
  PL_UNROLLED_NORM_KERNEL(D, name, P, proto, 7, 1, one, THREADS)      \
  PL_UNROLLED_NORM_KERNEL(D, name, P, proto, 1, 2, two, THREADS)      \
  PL_UNROLLED_NORM_KERNEL(D, name, P, proto, 3, 2, two, THREADS)      \
  PL_UNROLLED_NORM_KERNEL(D, name, P, proto, 7, 2, two, LARGEST)

#define PL_ROWS_KERNEL(D, name, K, PHASES, suffix, THREADS, BLOCKS, CLUSTER)                \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                             \
      pl_unrolled_##K##_rows_##name##_##suffix(const __grid_constant__ pl_unrolled_##K u) { \
    PL_NAMESPACE::dev::after_predecessor(u.step.dependents);                                \
    PL_NAMESPACE::all_reduce_add_rms_norm_straight<D, K, PHASES, CLUSTER>(u);               \
  }
#define PL_ROWS_KERNELS(D, name)                                     \
  PL_ROWS_KERNEL(D, name, 1, 1, one, SHORT_ROW_THREADS, 1, false)    \
  PL_ROWS_KERNEL(D, name, 3, 1, one, SHORT_ROW_THREADS, 1, false)    \
  PL_ROWS_KERNEL(D, name, 7, 1, one, SHORT_ROW_THREADS, 1, false)    \
  PL_ROWS_KERNEL(D, name, 1, 1, cluster, SHORT_ROW_THREADS, 1, true) \
  PL_ROWS_KERNEL(D, name, 3, 1, cluster, SHORT_ROW_THREADS, 1, true) \
  PL_ROWS_KERNEL(D, name, 7, 1, cluster, SHORT_ROW_THREADS, 1, true) \
  PL_ROWS_KERNEL(D, name, 1, 2, two, SHORT_ROW_THREADS, 1, false)    \
  PL_ROWS_KERNEL(D, name, 3, 2, two, SHARED_ROW_THREADS, 2, false)   \
  PL_ROWS_KERNEL(D, name, 7, 2, two, SHARED_ROW_THREADS, 2, false)

// Most calls are over two to eight ranks, and the hot schedules of more have a fan-in of 7 at most.
#define PL_FUSED_KERNEL(D, name, P, proto, K, suffix)                                                \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                           \
      pl_all_reduce_add_rms_norm_##name##_##proto##_##suffix(const __grid_constant__ pl_args args) { \
    PL_NAMESPACE::dev::after_predecessor(args.step.dependents);                                      \
    PL_NAMESPACE::all_reduce_add_rms_norm<D, P<D>, K>(args);                                         \
  }

#define PL_FUSED_PROTOCOL(D, name, P, proto) \
  PL_FUSED_KERNEL(D, name, P, proto, 4, 3)   \
  PL_FUSED_KERNEL(D, name, P, proto, 8, 7)   \
  PL_FUSED_KERNEL(D, name, P, proto, 1, any)

#define PL_FUSED(D, name)                                                                   \
  PL_FUSED_PROTOCOL(D, name, LlOf, ll)                                                      \
  PL_FUSED_PROTOCOL(D, name, SentinelOf, sentinel)                                          \
  PL_FUSED_PROTOCOL(D, name, FlaggedOf, flagged)                                            \
  PL_UNROLLED_NORM_KERNELS(D, name, LlOf, ll, THREADS, THREADS)                             \
  PL_UNROLLED_NORM_KERNELS(D, name, SentinelOf, sentinel, ROW_THREADS, LARGEST_ROW_THREADS) \
  PL_ROWS_KERNELS(D, name)                                                                  \
  extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1)                              \
      pl_add_rms_norm_##name(const __grid_constant__ pl_step step) {                        \
    PL_NAMESPACE::dev::after_predecessor(step.dependents);                                  \
    PL_NAMESPACE::add_rms_norm<D>(step);                                                    \
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
