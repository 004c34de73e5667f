// The seam between the kernels and what runs them: a GPU, a CPU thread, or a test that explores interleavings.
//
// This file says what a back end supplies, by its main names, and selects one: that of a GPU (dev_gpu.cuh,
// dev_gpu_packs.cuh) where nvcc compiles, else that of a CPU (dev_cpu.cuh). These are the only files that spell inline
// PTX, memory orders or compiler intrinsics. Every access to memory that a peer also touches goes through them. A back
// end supplies, in this namespace:
//
//   PL_FN PL_COLD          how a function is declared; one that is hardly ever called, and then apart from the others:
//                          the instructions of a step are fetched anew by every launch, and what stands between those
//                          that are executed is fetched with them
//   PL_LIKELY PL_UNLIKELY  which way a branch goes
//   PL_UNROLL PL_EACH PL_ROLL   loops over the elements of a strip, over the operands of a fold, and all others: on a
//                          GPU the first two must be unrolled to stay in registers, the third must not, for its size
//   STRIP                  packs that one thread handles at once: 1 keeps them in registers, more lets loops vectorise
//   tid threads block blocks   where this thread stands; on a CPU constants, so that strided loops fold away
//   post_*, poll_*         word stores to a slab and polls of one's own slab: relaxed, system scope, each word whole;
//                          those that end in _if do so only if their first argument is not 0
//   Raw In Out             a strip of wire data, element access to it, and an output strip
//   pack_load pack_store   whole packs of the caller's memory, aligned; those that end in _if as above
//   user_load slab_load slab_store   a strip from the caller's memory; from and to a slab, ordered by flags
//   flag_release flag_acquire fence_system   bulk data is published by a release and read after an acquire
//   sync_block any_in_block share     the threads of a block among each other
//   need                   has a value worked out, of which nothing else comes
//   any_of                 the first so many of them, a multiple of WARP
//   LANES BATCH ITEMS_AT_ONCE sum_over_lanes   a sum over a block's items in an order that does not depend on its shape
//   ROWS_AT_ONCE WORDS_AT_ONCE lanes_to_groups sum_of_groups   the same sum where a row's items are not one block's;
//                          how many pairs of words a lane's thread asks for at once
//   keep kept KEEPERS WARP   packs of a block by number and thread; what a block has a multiple of
//   keep_square_if kept_squares MOST_SQUARES ROW_PACKS   sums of squares of a row's packs, where it is one block's or
//                          one cluster's;
//                          how many packs of a unit a thread then has
//   CLUSTERS cluster_arrive cluster_publish cluster_wait keep_square_in_cluster_if   whether blocks may be launched
//                          together; two halves of a barrier; a square into each one's memory
//   prefetch               a line that is going to be read
//   after_predecessor      (on a GPU alone) what a kernel begins with
//   local_* enter leave claim count_in count_out arrive_in_order   words of the rank's own memory that its blocks (and
//                          its host) share
//   now_ns pause linger launch_id   time, and a number of the launch
//   square_root set_bits lowest_bit in_register bit_cast half_* bfloat_*   arithmetic, and conversions
//
// -DPL_DEV_BACKEND='"file"' replaces both by the back end in that file.
#ifndef PEERLANE_DEV_CUH
#define PEERLANE_DEV_CUH

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "launch.h"

// Two objects compiled for different instruction sets must not share inline functions: the linker would keep either
// one's copy, and a CPU without AVX2 would run into an illegal instruction. So each has a namespace of its own.
#ifndef PL_NAMESPACE
#define PL_NAMESPACE peerlane
#endif

#define PL_LIKELY(x) (__builtin_expect(!!(x), 1))
#define PL_UNLIKELY(x) (__builtin_expect(!!(x), 0))

#if defined(PL_DEV_BACKEND)
#include PL_DEV_BACKEND
#elif defined(__CUDACC__)
#include "dev_gpu.cuh"
#include "dev_gpu_packs.cuh"
#else
#include "dev_cpu.cuh"
#endif

#endif
