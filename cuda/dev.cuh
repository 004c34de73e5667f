// The seam between the kernels and what runs them: a GPU, a CPU thread, or a test that explores interleavings.
//
// This is the only file that spells inline PTX, memory orders or compiler intrinsics. Every access to memory that a
// peer also touches goes through it. A back end supplies, in this namespace:
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
//   need                   has a value worked out, where it is not used yet
//   any_of                 the first so many of them, a multiple of WARP
//   LANES BATCH ITEMS_AT_ONCE sum_over_lanes   a sum over a block's items in an order that does not depend on its shape
//   ROWS_AT_ONCE WORDS_AT_ONCE lanes_to_groups sum_of_groups   the same sum where a row's items are not one block's;
//                          how many pairs of words a lane's thread asks for at once
//   keep kept KEEPERS WARP   packs of a block by number and thread; what a block has a multiple of
//   keep_square_if kept_squares MOST_SQUARES ROW_PACKS   sums of squares of a row's packs, where it is one block's;
//                          how many packs of a unit a thread then has
//   prefetch               a line that is going to be read
//   after_predecessor      (on a GPU alone) what a kernel begins with
//   local_*, enter, leave, claim, count_in, count_out, arrive_in_order   words of the rank's own memory that its blocks
//   (and its host) share now_ns pause linger launch_id square_root set_bits lowest_bit in_register
//
// -DPL_DEV_BACKEND='"file"' replaces the CPU back end by the one in that file.
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

namespace PL_NAMESPACE {
namespace dev {

#define PL_FN __device__ __forceinline__
#define PL_COLD static __device__ __noinline__
#define PL_UNROLL _Pragma("unroll")
#define PL_EACH _Pragma("unroll")
#define PL_ROLL _Pragma("unroll 1")

constexpr uint32_t STRIP = 1;
constexpr bool HOST = false;

PL_FN uint32_t tid() { return threadIdx.x; }
PL_FN uint32_t threads() { return blockDim.x; }
PL_FN uint32_t block() { return blockIdx.x; }
PL_FN uint32_t blocks() { return gridDim.x; }

template <class To, class From>
PL_FN To bit_cast(From v) {
  To r;
  memcpy(&r, &v, sizeof(To));
  return r;
}

// PTX promises atomicity to 64 bits: a vector access is a set of scalar accesses in any order. Hence every 32-bit word
// (sentinel) or 64-bit word (ll) proves its own arrival, and the vector form is only there to fill the bus.
PL_FN void post_4x32(void* p, const uint32_t* w) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(w[0]),
               "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}
PL_FN void poll_4x32(const void* p, uint32_t* w) {
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(__cvta_generic_to_global(p))
               : "memory");
}
// The same where `on`; a poll that is not on leaves `w` as it is. A predicate instead of a branch: loads behind a
// branch are not in flight together.
PL_FN void poll_4x32_if(uint32_t on, const void* p, uint32_t* w) {
  asm volatile(
      "{.reg .pred on; setp.ne.u32 on, %5, 0;\n"
      "@on ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3])
      : "l"(__cvta_generic_to_global(p)), "r"(uint32_t(on))
      : "memory");
}
PL_FN void post_2x64(void* p, uint64_t x, uint64_t y) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "l"(x), "l"(y)
               : "memory");
}
// Two words of `ll`: their data to w[0] and w[1]. True if both carry the tag.
PL_FN bool poll_tagged(const void* p, uint32_t* w, uint32_t tag) {
  uint64_t x, y;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(x), "=l"(y)
               : "l"(__cvta_generic_to_global(p))
               : "memory");
  w[0] = uint32_t(x), w[1] = uint32_t(y);
  return ((uint32_t(x >> 32) ^ tag) | (uint32_t(y >> 32) ^ tag)) == 0;
}
PL_FN void post_4x32_if(uint32_t on, void* p, const uint32_t* w) {
  asm volatile(
      "{.reg .pred on; setp.ne.u32 on, %5, 0;\n"
      "@on st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};}" ::"l"(__cvta_generic_to_global(p)),
      "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(uint32_t(on))
      : "memory");
}
PL_FN void post_2x64_if(bool on, void* p, uint64_t x, uint64_t y) {
  asm volatile(
      "{.reg .pred on; setp.ne.u32 on, %3, 0;\n"
      "@on st.relaxed.sys.global.v2.b64 [%0], {%1, %2};}" ::"l"(__cvta_generic_to_global(p)),
      "l"(x), "l"(y), "r"(uint32_t(on))
      : "memory");
}
PL_FN bool poll_tagged_if(bool on, const void* p, uint32_t* w, uint32_t tag) {
  const uint64_t own = uint64_t(tag) << 32;
  uint64_t x = own | w[0], y = own | w[1];
  asm volatile(
      "{.reg .pred on; setp.ne.u32 on, %3, 0;\n"
      "@on ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];}"
      : "+l"(x), "+l"(y)
      : "l"(__cvta_generic_to_global(p)), "r"(uint32_t(on))
      : "memory");
  w[0] = uint32_t(x), w[1] = uint32_t(y);
  return ((uint32_t(x >> 32) ^ tag) | (uint32_t(y >> 32) ^ tag)) == 0;
}
PL_FN void post_64(void* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
}
PL_FN uint64_t poll_64(const void* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}
PL_FN void flag_release(void* p, uint64_t v) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
}
PL_FN uint64_t flag_acquire(const void* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}
PL_FN void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// What a kernel does first. Launched programmatically it starts while the kernel before it still runs: it waits here
// until that one has ended and its writes are visible, before it touches anything but its arguments. Then it lets the
// next one start, if `dependents`: only once all blocks of this kernel run, and so behind the one before. The other way
// round every kernel of a graph would become resident at once, and peers' kernels on this GPU would find no room.
// Launched as usual, neither does anything; GPUs before 9.0 have no such launches.
PL_FN void after_predecessor(bool dependents) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (dependents) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

PL_FN void sync_block() { __syncthreads(); }
PL_FN bool any_in_block(bool x) { return __syncthreads_or(x) != 0; }
PL_FN bool any_of(uint32_t threads, bool x) {
  uint32_t any;
  asm volatile(
      "{.reg .pred mine, any; setp.ne.u32 mine, %1, 0;\n"
      "bar.red.or.pred any, 1, %2, mine; selp.u32 %0, 1, 0, any;}"
      : "=r"(any)
      : "r"(uint32_t(x)), "r"(threads)
      : "memory");
  return any != 0;
}
// Thread 0's value, to all threads of the block. Once per launch: a second call would need a barrier before the store.
PL_FN uint64_t share(uint64_t v) {
  __shared__ uint64_t word;
  if (threadIdx.x == 0) word = v;
  __syncthreads();
  return word;
}

// Has `v` worked out here, though nobody uses it: the compiler would leave it out.
PL_FN void need(uint64_t v) {
  __shared__ uint64_t word;
  asm volatile("st.shared.u64 [%0], %1;" ::"l"(__cvta_generic_to_shared(&word)), "l"(v) : "memory");
}

// The sum of what `use(k, i)` returns for every item i, to all threads, in an order that depends on their number alone:
// lane l of LANES adds items l, l + LANES, ... in turn; within each 32 lanes the sums are combined at distances 16, 8,
// 4, 2, 1, then the eight groups at 4, 2, 1. All threads share the items, whatever their number: thread t takes items
// t, t + threads, ... and leaves what they come to where the lanes' threads find it. BATCH calls of `load(k, i)`, k
// below BATCH, come before the `use(k, i)` of the same items, so that their loads are in flight together. blockDim is a
// multiple of 32.
constexpr uint32_t LANES = 256, BATCH = 2, ITEMS_AT_ONCE = 8 * LANES;
template <class Load, class Use>
PL_FN float sum_over_lanes(uint32_t items, Load load, Use use) {
  constexpr uint32_t GROUPS = LANES / 32;
  __shared__ float values[ITEMS_AT_ONCE], lanes[LANES], groups[GROUPS];
  PL_ROLL
  for (uint32_t from = 0; from < items; from += ITEMS_AT_ONCE) {
    const uint32_t here = items - from < ITEMS_AT_ONCE ? items - from : ITEMS_AT_ONCE;
    PL_ROLL
    for (uint32_t first = threadIdx.x; first < here; first += blockDim.x * BATCH) {
      PL_EACH
      for (uint32_t k = 0; k < BATCH; ++k)
        if (first + k * blockDim.x < here) load(k, from + first + k * blockDim.x);
      PL_EACH
      for (uint32_t k = 0; k < BATCH; ++k)
        if (first + k * blockDim.x < here) values[first + k * blockDim.x] = use(k, from + first + k * blockDim.x);
    }
    __syncthreads();
    const bool last = from + here == items;
    PL_ROLL
    for (uint32_t lane = threadIdx.x; lane < LANES; lane += blockDim.x) {
      float x = from == 0 ? 0.0f : lanes[lane];
      PL_ROLL
      for (uint32_t i = lane; i < here; i += LANES) x += values[i];
      if (!last) {
        lanes[lane] = x;
        continue;
      }
      PL_EACH
      for (uint32_t d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
      if (lane % 32 == 0) groups[lane / 32] = x;
    }
    __syncthreads();  // and the next items, or the next sum's, write over `values`
  }
  float x[GROUPS];
  PL_EACH
  for (uint32_t g = 0; g < GROUPS; ++g) x[g] = groups[g];
  PL_EACH
  for (uint32_t d = GROUPS / 2; d > 0; d /= 2) PL_EACH
  for (uint32_t g = 0; g < d; ++g) x[g] += x[g + d];
  return x[0];
}

// The same order where the items of a row are not in this block alone, by its first `threads` threads: `lanes(row, l,
// x)` puts what lanes l and l + 1 come to into x, which is 0 before; each 32 lanes are combined, and after a barrier
// any thread can have the sum. Two sets of results take turns, so that one barrier a call is enough: before a thread
// writes to the set of the call before last, it has met all others behind their last look at it.
constexpr uint32_t LANE_THREADS = LANES / 2;              // as many as have something to do for a row
constexpr uint32_t ROWS_AT_ONCE = 16, WORDS_AT_ONCE = 4;  // a row of up to 8192 elements in one round trip
PL_FN float* groups_of_rows(uint32_t set) {
  __shared__ float groups[2][ROWS_AT_ONCE * (LANES / 32)];
  return groups[set];
}
template <class Lanes>
PL_FN void lanes_to_groups(uint32_t threads, uint32_t rows, uint32_t set, Lanes lanes) {
  float* groups = groups_of_rows(set);
  PL_ROLL
  for (uint32_t at = threadIdx.x; at < rows * (LANES / 2); at += threads) {
    float x[2] = {0.0f, 0.0f};
    lanes(at / (LANES / 2), at % (LANES / 2) * 2, x);
    PL_EACH
    for (uint32_t d = 8; d > 0; d /= 2) PL_EACH
    for (uint32_t i = 0; i < 2; ++i) x[i] += __shfl_xor_sync(0xffffffffu, x[i], d);  // 2 * d lanes away
    if (at % 16 == 0) groups[at / 16] = x[0] + x[1];
  }
}
PL_FN float sum_of_groups(uint32_t row, uint32_t set) {
  constexpr uint32_t GROUPS = LANES / 32;
  const float* groups = groups_of_rows(set) + row * GROUPS;
  float x[GROUPS];
  PL_EACH
  for (uint32_t g = 0; g < GROUPS; ++g) x[g] = groups[g];
  PL_EACH
  for (uint32_t d = GROUPS / 2; d > 0; d /= 2) PL_EACH
  for (uint32_t g = 0; g < d; ++g) x[g] += x[g + d];
  return x[0];
}

// Sums of squares of packs where a row is one block's, for any thread to have once a barrier has put them there. An odd
// number of them is followed by a 0.
constexpr uint32_t MOST_SQUARES = 1024, ROW_PACKS = 4;
PL_FN float2* pairs_of_squares() {
  __shared__ float2 squares[MOST_SQUARES / 2];
  return squares;
}
PL_FN void keep_square_if(uint32_t on, uint32_t pack, float x) {
  const float* to = reinterpret_cast<const float*>(pairs_of_squares()) + pack;
  asm volatile(
      "{.reg .pred on; setp.ne.u32 on, %2, 0;\n"
      "@on st.shared.f32 [%0], %1;}" ::"r"(uint32_t(__cvta_generic_to_shared(to))),
      "f"(x), "r"(uint32_t(on))
      : "memory");
}
// Those of `pack` and of the next one, `pack` being even.
PL_FN void kept_squares(uint32_t pack, uint32_t* w) {
  const float2 pair = pairs_of_squares()[pack / 2];
  w[0] = bit_cast<uint32_t>(pair.x), w[1] = bit_cast<uint32_t>(pair.y);
}

// Fetches a line that is going to be read.
PL_FN void prefetch(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(p))); }

// The abort word is also written by the host, so its loads have system scope.
PL_FN uint32_t local_load32(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}
PL_FN void local_store32(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(v) : "memory");
}
PL_FN uint64_t local_load64(const uint64_t* p) { return poll_64(p); }
PL_FN void local_store64(uint64_t* p, uint64_t v) { post_64(p, v); }
// Begins a launch's turn on a channel: adds the bits of `id` and returns the word before; or puts that word back. GPU
// scope, relaxed: see begin() in step.cuh. A fence here costs every step half a microsecond and more.
PL_FN uint64_t enter(uint64_t* turn, uint64_t id) {
  uint64_t old;
  asm volatile("atom.relaxed.gpu.global.or.b64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(__cvta_generic_to_global(turn)), "l"(id)
               : "memory");
  return old;
}
PL_FN void leave(uint64_t* turn, uint64_t word) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(turn)), "l"(word) : "memory");
}
// Puts `v` where 0 stands; returns what stood there. GPU scope: these words never leave the rank's own memory.
PL_FN uint32_t claim(uint32_t* p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], 0, %2;"
               : "=r"(old)
               : "l"(__cvta_generic_to_global(p)), "r"(v)
               : "memory");
  return old;
}
// Counts this block in and returns how many were before it; the last one leaves 0. Relaxed, as above.
PL_FN uint32_t count_in(uint32_t* p) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(__cvta_generic_to_global(p)), "r"(gridDim.x - 1)
               : "memory");
  return old;
}
// Adds to a channel's word, without waiting for what stood there.
PL_FN void count_out(uint64_t* turn, uint64_t v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(turn)), "l"(v) : "memory");
}

// Counts blocks that go on: the last one sees what all others did, and `local_release64` tells them.
PL_FN bool arrive_in_order(uint32_t* p) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(old)
               : "l"(__cvta_generic_to_global(p))
               : "memory");
  return old == gridDim.x - 1;
}
PL_FN void local_release64(uint64_t* p, uint64_t v) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
}

PL_FN uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
PL_FN void pause(uint32_t) {}
PL_FN void linger(uint32_t cycles) {
  const uint32_t begun = uint32_t(clock64());
  PL_ROLL
  while (uint32_t(clock64()) - begun < cycles) {
  }
}
// %gridid is unique per launch, replays included; an argument would repeat in a graph that is instantiated twice.
PL_FN uint64_t launch_id(const pl_step&) {
  uint64_t id;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(id));
  return id;
}

// The same value, which the compiler knows nothing about.
PL_FN uint32_t in_register(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
PL_FN uint64_t in_register(uint64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}
PL_FN char* in_register(char* p) { return reinterpret_cast<char*>(in_register(uint64_t(p))); }
PL_FN uint32_t lowest_bit(uint32_t mask) { return __ffs(mask) - 1; }
PL_FN uint32_t set_bits(uint32_t mask) { return __popc(mask); }

// Rounded to nearest, as IEEE 754 demands and every CPU does; the approximation (rsqrt) is a GPU's own.
PL_FN float square_root(float x) {
  float r;
  asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

PL_FN float half_up(uint16_t h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
PL_FN uint16_t half_down(float f) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
PL_FN uint32_t half_down_pair(float low, float high) {
  uint32_t w;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
  return w;
}
PL_FN uint32_t bfloat_down_pair(float low, float high) {
  uint32_t w;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
  return w;
}
PL_FN uint16_t bfloat_down(float f) {
  uint16_t h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
// Sums of pairs, rounded. Rounded to fp32 first they would be the same: of p bits, the sum of two numbers can be
// rounded to 2p + 2 bits before it is rounded to p, and fp32 has 24; and what is subnormal in the type is exact in
// both. A NaN is the canonical one either way. One instruction for two elements, where the detour over fp32 takes six.
PL_FN uint32_t half_add_pair(uint32_t x, uint32_t y) {
  uint32_t w;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(w) : "r"(x), "r"(y));
  return w;
}
PL_FN uint32_t bfloat_add_pair(uint32_t x, uint32_t y) {
#if __CUDA_ARCH__ >= 900
  uint32_t w;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(w) : "r"(x), "r"(y));
  return w;
#else
  constexpr uint32_t HIGH = 0xffff0000u;
  return bfloat_down_pair(bit_cast<float>(x << 16) + bit_cast<float>(y << 16),
                          bit_cast<float>(x & HIGH) + bit_cast<float>(y & HIGH));
#endif
}

// One pack in registers: 4 words, or 8 when 16-bit floats travel as fp32.
struct Raw {
  uint32_t w[8];
  PL_FN void own() {}
  PL_FN uint32_t word(uint32_t i) const { return w[i]; }
  PL_FN uint32_t* words(uint32_t i) { return w + i; }
};

PL_FN void same_view(Raw& to, const Raw& from) { to = from; }

// Packs that a block keeps where a loop can index them: registers have no index, and the stack is memory far away. Up
// to KEEPERS threads have any.
constexpr uint32_t KEEPERS = 256, WARP = 32;
template <uint32_t PLACES>
PL_FN uint4& place_of(uint32_t place, uint32_t keeper) {
  __shared__ uint4 packs[PLACES * KEEPERS];
  return packs[place * KEEPERS + keeper];
}
template <uint32_t PLACES>
PL_FN void keep(uint32_t place, uint32_t keeper, const Raw& r) {
  place_of<PLACES>(place, keeper) = make_uint4(r.w[0], r.w[1], r.w[2], r.w[3]);
}
template <uint32_t PLACES>
PL_FN void kept(uint32_t place, uint32_t keeper, Raw& r) {
  const uint4 v = place_of<PLACES>(place, keeper);
  r.w[0] = v.x, r.w[1] = v.y, r.w[2] = v.z, r.w[3] = v.w;
}

// Element access by shifts, so that an unrolled loop never needs the array's address (which would put it on the stack).
template <class T>
PL_FN T element(const uint32_t* w, uint32_t i) {
  if (sizeof(T) == 1) return bit_cast<T>(uint8_t(w[i / 4] >> (8 * (i % 4))));
  if (sizeof(T) == 2) return bit_cast<T>(uint16_t(w[i / 2] >> (16 * (i % 2))));
  if (sizeof(T) == 4) return bit_cast<T>(w[i]);
  return bit_cast<T>(uint64_t(w[(2 * i) % 8]) | uint64_t(w[(2 * i + 1) % 8]) << 32);
}
template <class T>
PL_FN void set_element(uint32_t* w, uint32_t i, T v) {
  if (sizeof(T) == 1) {
    uint32_t x = uint32_t(bit_cast<uint8_t>(v)) << (8 * (i % 4));
    w[i / 4] = i % 4 ? w[i / 4] | x : x;
  } else if (sizeof(T) == 2) {
    uint32_t x = uint32_t(bit_cast<uint16_t>(v)) << (16 * (i % 2));
    w[i / 2] = i % 2 ? w[i / 2] | x : x;
  } else if (sizeof(T) == 4) {
    w[i] = bit_cast<uint32_t>(v);
  } else {
    uint64_t x = bit_cast<uint64_t>(v);
    w[(2 * i) % 8] = uint32_t(x);
    w[(2 * i + 1) % 8] = uint32_t(x >> 32);
  }
}
template <class T>
struct In {
  const Raw& r;
  PL_FN explicit In(const Raw& raw) : r(raw) {}
  PL_FN T operator[](uint32_t i) const { return element<T>(r.w, i); }
};

PL_FN bool aligned(const void* p) { return (uint64_t(p) & 15) == 0; }

// A strip of the caller's memory; the part behind `bytes` reads as zeros. WHOLE has a meaning on a CPU only.
template <class T, bool WHOLE>
PL_FN void user_load(Raw& r, const void* p, uint32_t, uint32_t bytes) {
  if (bytes == 16 && aligned(p)) {
    const uint4 v = *static_cast<const uint4*>(p);
    r.w[0] = v.x, r.w[1] = v.y, r.w[2] = v.z, r.w[3] = v.w;
  } else {
    PL_UNROLL
    for (uint32_t i = 0; i < 16 / sizeof(T); ++i)
      set_element<T>(r.w, i, i * sizeof(T) < bytes ? static_cast<const T*>(p)[i] : T(0));
  }
}
// The rank's own accumulators: whole packs of 16 or 32 bytes, aligned.
PL_FN void partial_load(Raw& r, const void* p, bool wide) {
  const uint4 v = *static_cast<const uint4*>(p);
  r.w[0] = v.x, r.w[1] = v.y, r.w[2] = v.z, r.w[3] = v.w;
  if (wide) {
    const uint4 u = static_cast<const uint4*>(p)[1];
    r.w[4] = u.x, r.w[5] = u.y, r.w[6] = u.z, r.w[7] = u.w;
  }
}
// Relaxed loads pass the cache of the SM, which is not coherent with a peer's memory (pull).
PL_FN void slab_load(Raw& r, const void* p, bool wide) {
  poll_4x32(p, r.w);
  if (wide) poll_4x32(static_cast<const char*>(p) + 16, r.w + 4);
}
PL_FN void slab_store(void* p, const Raw& r, uint32_t, bool wide) {
  post_4x32(p, r.w);
  if (wide) post_4x32(static_cast<char*>(p) + 16, r.w + 4);
}
template <class T>
PL_FN void user_copy(void* to, const Raw& r, uint32_t bytes) {
  if (bytes == 16 && aligned(to)) {
    *static_cast<uint4*>(to) = make_uint4(r.w[0], r.w[1], r.w[2], r.w[3]);
  } else {
    PL_UNROLL
    for (uint32_t i = 0; i < 16 / sizeof(T); ++i)
      if (i * sizeof(T) < bytes) static_cast<T*>(to)[i] = element<T>(r.w, i);
  }
}

// Whole packs of the caller's memory, aligned.
PL_FN void pack_load(Raw& r, const void* p) { partial_load(r, p, false); }
// The same where `on`; a pack that is not loaded is zero. Predicates, as in poll_4x32_if.
PL_FN void pack_load_if(uint32_t on, Raw& r, const void* p) {
  r.w[0] = r.w[1] = r.w[2] = r.w[3] = 0;
  asm volatile(
      "{.reg .pred on; setp.ne.u32 on, %5, 0;\n"
      "@on ld.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "+r"(r.w[0]), "+r"(r.w[1]), "+r"(r.w[2]), "+r"(r.w[3])
      : "l"(__cvta_generic_to_global(p)), "r"(uint32_t(on))
      : "memory");
}
PL_FN void pack_store_if(uint32_t on, void* p, const Raw& r) {
  asm volatile(
      "{.reg .pred on; setp.ne.u32 on, %5, 0;\n"
      "@on st.global.v4.b32 [%0], {%1, %2, %3, %4};}" ::"l"(__cvta_generic_to_global(p)),
      "r"(r.w[0]), "r"(r.w[1]), "r"(r.w[2]), "r"(r.w[3]), "r"(uint32_t(on))
      : "memory");
}
PL_FN void pack_store(void* to, const Raw& r, uint32_t) {
  *static_cast<uint4*>(to) = make_uint4(r.w[0], r.w[1], r.w[2], r.w[3]);
}

// Elements gathered in registers, then written; `bytes` of a short tail.
template <class T>
struct Out {
  void* p;
  uint32_t bytes;
  Raw r;
  PL_FN Out(void* to, uint32_t n) : p(to), bytes(n) {}
  PL_FN void set(uint32_t i, T v) { set_element<T>(r.w, i, v); }
  PL_FN void flush() { user_copy<T>(p, r, bytes); }
  PL_FN void flush_whole() { pack_store(p, r, bytes); }
  PL_FN void keep(Raw& to) const { to = r; }
  PL_FN void flush_partial(bool wide) {
    static_cast<uint4*>(p)[0] = make_uint4(r.w[0], r.w[1], r.w[2], r.w[3]);
    if (wide) static_cast<uint4*>(p)[1] = make_uint4(r.w[4], r.w[5], r.w[6], r.w[7]);
  }
};
// The same into a strip that is about to be sent.
template <class T>
struct Fill {
  Raw& r;
  PL_FN explicit Fill(Raw& raw) : r(raw) {}
  PL_FN void set(uint32_t i, T v) { set_element<T>(r.w, i, v); }
};

}  // namespace dev
}  // namespace PL_NAMESPACE

#else  // one CPU thread runs the whole grid

#include <sched.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace PL_NAMESPACE {
namespace dev {

#define PL_FN inline __attribute__((always_inline))
#define PL_COLD static __attribute__((noinline, cold))
#define PL_UNROLL _Pragma("GCC ivdep")
#define PL_EACH
#define PL_ROLL

// 64 packs: 1 KiB of data, 2 KiB of fp32 accumulators, so a whole postfix stack stays in L1.
constexpr uint32_t STRIP = 64;
constexpr bool HOST = true;

constexpr uint32_t tid() { return 0; }
constexpr uint32_t threads() { return 1; }
constexpr uint32_t block() { return 0; }
constexpr uint32_t blocks() { return 1; }

template <class To, class From>
PL_FN To bit_cast(From v) {
  To r;
  __builtin_memcpy(&r, &v, sizeof(To));
  return r;
}

// __atomic builtins, not std::atomic: no inline function of the standard library may end up in an AVX2 object.
PL_FN void post_4x32(void* p, const uint32_t* w) {
  for (int i = 0; i < 4; ++i) __atomic_store_n(static_cast<uint32_t*>(p) + i, w[i], __ATOMIC_RELAXED);
}
PL_FN void poll_4x32(const void* p, uint32_t* w) {
  for (int i = 0; i < 4; ++i) w[i] = __atomic_load_n(static_cast<const uint32_t*>(p) + i, __ATOMIC_RELAXED);
}
PL_FN void poll_4x32_if(uint32_t on, const void* p, uint32_t* w) {
  if (on) poll_4x32(p, w);
}
PL_FN void post_4x32_if(uint32_t on, void* p, const uint32_t* w) {
  if (on) post_4x32(p, w);
}
PL_FN void post_64(void* p, uint64_t v) { __atomic_store_n(static_cast<uint64_t*>(p), v, __ATOMIC_RELAXED); }
PL_FN uint64_t poll_64(const void* p) { return __atomic_load_n(static_cast<const uint64_t*>(p), __ATOMIC_RELAXED); }
PL_FN void post_2x64(void* p, uint64_t x, uint64_t y) {
  post_64(p, x);
  post_64(static_cast<uint64_t*>(p) + 1, y);
}
PL_FN void post_2x64_if(bool on, void* p, uint64_t x, uint64_t y) {
  if (on) post_2x64(p, x, y);
}
PL_FN bool poll_tagged(const void* p, uint32_t* w, uint32_t tag) {
  const uint64_t x = poll_64(p), y = poll_64(static_cast<const uint64_t*>(p) + 1);
  w[0] = uint32_t(x), w[1] = uint32_t(y);
  return uint32_t(x >> 32) == tag && uint32_t(y >> 32) == tag;
}
PL_FN bool poll_tagged_if(bool on, const void* p, uint32_t* w, uint32_t tag) { return !on || poll_tagged(p, w, tag); }
PL_FN void flag_release(void* p, uint64_t v) { __atomic_store_n(static_cast<uint64_t*>(p), v, __ATOMIC_RELEASE); }
PL_FN uint64_t flag_acquire(const void* p) {
  return __atomic_load_n(static_cast<const uint64_t*>(p), __ATOMIC_ACQUIRE);
}
// Acquire and release are enough: nothing here stores a word and then decides by loading another one.
PL_FN void fence_system() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }

PL_FN void sync_block() {}
PL_FN bool any_in_block(bool x) { return x; }
PL_FN uint64_t share(uint64_t v) { return v; }
PL_FN void need(uint64_t) {}

// The same sum as on a GPU. Items come in order, which is each lane's order too.
constexpr uint32_t LANES = 256, BATCH = 1, ITEMS_AT_ONCE = ~0u;
template <class Load, class Use>
PL_FN float sum_over_lanes(uint32_t items, Load load, Use use) {
  float x[LANES] = {};
  for (uint32_t i = 0; i < items; ++i) {
    load(0, i);
    x[i % LANES] += use(0, i);
  }
  for (uint32_t d = 16; d > 0; d /= 2)
    for (uint32_t g = 0; g < LANES; g += 32)
      for (uint32_t l = g; l < g + d; ++l) x[l] += x[l + d];
  for (uint32_t d = LANES / 2; d >= 32; d /= 2)
    for (uint32_t g = 0; g < d; g += 32) x[g] += x[g + d];
  return x[0];
}

// One thread has all of a row: rows are spread on GPUs alone.
constexpr uint32_t ROWS_AT_ONCE = 1, WORDS_AT_ONCE = 1, KEEPERS = 1, WARP = 1, LANE_THREADS = 1;
bool any_of(uint32_t threads, bool x);
template <class Lanes>
void lanes_to_groups(uint32_t threads, uint32_t rows, uint32_t set, Lanes lanes);
float sum_of_groups(uint32_t row, uint32_t set);
template <uint32_t PLACES>
void keep(uint32_t place, uint32_t keeper, const struct Raw& raw);
template <uint32_t PLACES>
void kept(uint32_t place, uint32_t keeper, struct Raw& raw);
constexpr uint32_t MOST_SQUARES = 2, ROW_PACKS = 1;
void keep_square_if(uint32_t on, uint32_t pack, float x);
void kept_squares(uint32_t pack, uint32_t* w);

PL_FN void prefetch(const void*) {}

PL_FN uint32_t local_load32(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
PL_FN void local_store32(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
PL_FN uint64_t local_load64(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
PL_FN void local_store64(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
PL_FN uint64_t enter(uint64_t* turn, uint64_t id) { return __atomic_fetch_or(turn, id, __ATOMIC_ACQ_REL); }
PL_FN void leave(uint64_t* turn, uint64_t word) { __atomic_store_n(turn, word, __ATOMIC_RELEASE); }
PL_FN uint32_t claim(uint32_t* p, uint32_t v) {
  uint32_t old = 0;
  __atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return old;
}
PL_FN uint32_t count_in(uint32_t*) { return 0; }
PL_FN void count_out(uint64_t* turn, uint64_t v) { __atomic_fetch_add(turn, v, __ATOMIC_RELEASE); }
PL_FN bool arrive_in_order(uint32_t*) { return true; }
PL_FN void local_release64(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

PL_FN uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}
PL_FN void pause(uint32_t yield) {
  if (yield) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}
PL_FN void linger(uint32_t) {}
PL_FN uint64_t launch_id(const pl_step& a) { return a.launch; }

PL_FN uint32_t in_register(uint32_t x) { return x; }
PL_FN uint64_t in_register(uint64_t x) { return x; }
PL_FN char* in_register(char* p) { return p; }
PL_FN uint32_t lowest_bit(uint32_t mask) { return __builtin_ctz(mask); }
PL_FN uint32_t set_bits(uint32_t mask) { return uint32_t(__builtin_popcount(mask)); }
#if defined(__x86_64__)
PL_FN float square_root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }
#else
PL_FN float square_root(float x) { return __builtin_sqrtf(x); }
#endif

// The caller's thread may flush subnormals to zero or round another way (-ffast-math sets that for a whole process);
// the ranks' bits must not depend on it.
#if defined(__x86_64__)
struct IeeeMode {
  uint32_t saved;
  IeeeMode() : saved(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~IeeeMode() { _mm_setcsr(saved); }
};
#elif defined(__aarch64__)
struct IeeeMode {
  uint64_t saved;
  IeeeMode() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" ::"r"(uint64_t(0)));
  }
  ~IeeeMode() { __asm__ volatile("msr fpcr, %0" ::"r"(saved)); }
};
#else
struct IeeeMode {
  IeeeMode() {}
  ~IeeeMode() {}
};
#endif

// Conversions without a branch, so that loops over them vectorise on any instruction set.
PL_FN float half_up(uint16_t h) {
  const uint32_t mag = h & 0x7fffu, sign = uint32_t(h & 0x8000u) << 16;
  const uint32_t normal = (mag << 13) + (112u << 23);
  const uint32_t tiny = bit_cast<uint32_t>(float(int32_t(mag)) * 0x1p-24f);
  const uint32_t huge = normal + (112u << 23);  // infinity and NaN: exponent 31 becomes 255
  const uint32_t v = mag < 0x400u ? tiny : (mag >= 0x7c00u ? huge : normal);
  return bit_cast<float>(v | sign);
}
PL_FN uint16_t half_down(float f) {
  const uint32_t u = bit_cast<uint32_t>(f), a = u & 0x7fffffffu, sign = (u >> 16) & 0x8000u;
  // In [0.5, 1) an fp32 ulp is 2^-24, the spacing of f16 subnormals: the adder rounds for us.
  const uint32_t tiny = bit_cast<uint32_t>(bit_cast<float>(a) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (a - (112u << 23) + 0xfffu + ((a >> 13) & 1u)) >> 13;
  uint32_t v = a < 0x38800000u ? tiny : normal;
  v = a >= 0x477ff000u ? 0x7c00u : v;  // from 65520 up it rounds to infinity
  v = a > 0x7f800000u ? 0x7fffu : (v | sign);
  return uint16_t(v);
}
PL_FN uint16_t bfloat_down(float f) {
  const uint32_t u = bit_cast<uint32_t>(f);
  const uint32_t v = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : v);
}
PL_FN uint32_t half_down_pair(float low, float high) { return half_down(low) | uint32_t(half_down(high)) << 16; }
PL_FN uint32_t bfloat_down_pair(float low, float high) { return bfloat_down(low) | uint32_t(bfloat_down(high)) << 16; }
uint32_t half_add_pair(uint32_t x, uint32_t y);  // where packs are registers
uint32_t bfloat_add_pair(uint32_t x, uint32_t y);

// A strip is a pointer to where the data lies; `own()` points it at its buffer, to be written.
struct Raw {
  const unsigned char* p = nullptr;
  alignas(64) uint32_t buf[STRIP * 8];
  void own() { p = bytes(); }
  unsigned char* bytes() { return reinterpret_cast<unsigned char*>(buf); }
  uint32_t word(uint32_t i) const {
    uint32_t v;
    __builtin_memcpy(&v, p + 4 * i, 4);
    return v;
  }
  uint32_t* words(uint32_t i) { return buf + i; }
};
inline void same_view(Raw& to, const Raw& from) { to.p = from.p; }
template <class T>
struct In {
  const unsigned char* p;
  explicit In(const Raw& r) : p(r.p) {}
  T operator[](uint32_t i) const {
    T v;
    __builtin_memcpy(&v, p + i * sizeof(T), sizeof(T));
    return v;
  }
};

// WHOLE: word protocols send whole packs, so a short tail is copied and padded with zeros.
template <class T, bool WHOLE>
PL_FN void user_load(Raw& r, const void* p, uint32_t packs, uint32_t bytes) {
  r.p = static_cast<const unsigned char*>(p);
  if (WHOLE && bytes < packs * 16) {
    memcpy(r.bytes(), p, bytes);
    memset(r.bytes() + bytes, 0, packs * 16 - bytes);
    r.own();
  }
}
PL_FN void partial_load(Raw& r, const void* p, bool) { r.p = static_cast<const unsigned char*>(p); }
PL_FN void slab_load(Raw& r, const void* p, bool) { r.p = static_cast<const unsigned char*>(p); }
PL_FN void slab_store(void* p, const Raw& r, uint32_t bytes, bool) { memcpy(p, r.p, bytes); }
template <class T>
PL_FN void user_copy(void* to, const Raw& r, uint32_t bytes) {
  memcpy(to, r.p, bytes);
}
PL_FN void pack_load_if(uint32_t on, Raw& r, const void* p) {
  if (on) r.p = static_cast<const unsigned char*>(p);
}
PL_FN void pack_store_if(uint32_t on, void* p, const Raw& r) {
  if (on) __builtin_memcpy(p, r.p, PL_PACK_BYTES);
}
PL_FN void pack_load(Raw& r, const void* p) { r.p = static_cast<const unsigned char*>(p); }
PL_FN void pack_store(void* to, const Raw& r, uint32_t bytes) { memcpy(to, r.p, bytes); }
template <class T>
struct Out {
  unsigned char* p;
  Out(void* to, uint32_t) : p(static_cast<unsigned char*>(to)) {}
  void set(uint32_t i, T v) { __builtin_memcpy(p + i * sizeof(T), &v, sizeof(T)); }
  void flush() {}
  void flush_whole() {}
  void keep(Raw&) const {}
  void flush_partial(bool) {}
};
template <class T>
struct Fill {
  unsigned char* p;
  explicit Fill(Raw& r) : p(r.bytes()) {}
  void set(uint32_t i, T v) { __builtin_memcpy(p + i * sizeof(T), &v, sizeof(T)); }
};

}  // namespace dev
}  // namespace PL_NAMESPACE

#endif
#endif
