// The seam between the kernels and what runs them. A kernel is written for one block of THREADS threads, phase by
// phase: a phase is what every thread, or every warp, does without hearing of the others; what crosses is in shared
// memory, or in the sums and maxima of a warp. nvcc makes threads of that and g++ loops, so that tests run these very
// kernels on a CPU.
//
//   FN                     how a function is declared
//   SHARED(type, name)     a variable of the block
//   UNROLL(n)              before a loop
//   Block<THREADS>         index: which block of the grid
//     Own<T>               a variable of every thread: own[t]
//     each, each_warp      a phase: f(thread), f(warp)
//     sync                 between a phase that writes shared memory and one that reads it
//     group_sum, group_max over WIDTH neighbours, to all of them; the same order of additions everywhere
//   block_sum, block_max   over all threads: what stands outside phases is the same for the whole block
//   Pack, load_pack        eight bf16 in 16 bytes
//   load_floats            eight fp32 in 32 bytes
//   publish, count_up      how the last block of a launch comes to see what the others have left
//   rounded_*              operations that are never contracted into others
#ifndef VERIFY_SIMT_CUH
#define VERIFY_SIMT_CUH

#include <stdint.h>

#include "launch.h"

typedef uint16_t bf16;  // its bits

#ifdef __CUDACC__

#include <cuda_bf16.h>

#define FN __device__ __forceinline__
#define SHARED(type, name) __shared__ __align__(128) type name
#define UNROLL(n) _Pragma(UNROLL_TEXT(unroll n))
#define UNROLL_TEXT(x) #x

template <class T>
struct OwnVariable {
  T v;
  FN T& operator[](uint32_t) { return v; }
  FN const T& operator[](uint32_t) const { return v; }
};

FN float up(bf16 bits) { return __uint_as_float(uint32_t(bits) << 16); }
FN bf16 down(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
FN float exponential(float x) { return __expf(x); }
FN float rounded_mul(float x, float y) { return __fmul_rn(x, y); }
FN float rounded_add(float x, float y) { return __fadd_rn(x, y); }
FN float rounded_div(float x, float y) { return __fdiv_rn(x, y); }
FN float rounded_sqrt(float x) { return __fsqrt_rn(x); }
FN uint32_t bits_of(float x) { return __float_as_uint(x); }
FN float float_of(uint32_t bits) { return __uint_as_float(bits); }
FN uint64_t clock_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

struct Pack {
  uint4 w;
  // `i` is a constant wherever this is called in an unrolled loop.
  FN float operator[](uint32_t i) const {
    const uint32_t word = i < 4 ? (i < 2 ? w.x : w.y) : (i < 6 ? w.z : w.w);
    return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
  }
};
FN Pack load_pack(const bf16* p) { return Pack{*reinterpret_cast<const uint4*>(p)}; }
// A weight: read once, and never written while a kernel runs.
FN Pack load_weights(const bf16* p) { return Pack{__ldg(reinterpret_cast<const uint4*>(p))}; }
// What is read once: past the first cache, which the activations need, and 128 bytes at a time into the second.
FN Pack load_stream(const bf16* p) {
  Pack pack;
  asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(pack.w.x), "=r"(pack.w.y), "=r"(pack.w.z), "=r"(pack.w.w)
      : "l"(p));
  return pack;
}
FN void load_floats(const float* p, float* x) {
  const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
FN Pack pack_of(const float* x) {
  uint32_t w[4];
  UNROLL(4)
  for (uint32_t i = 0; i < 4; ++i) w[i] = uint32_t(down(x[2 * i])) | uint32_t(down(x[2 * i + 1])) << 16;
  return Pack{make_uint4(w[0], w[1], w[2], w[3])};
}
FN void store_pack(bf16* p, const float* x) { *reinterpret_cast<uint4*>(p) = pack_of(x).w; }

// What blocks of one launch leave for each other: made visible, counted, and read past the first cache.
FN void publish() { __threadfence(); }
FN uint32_t count_up(uint32_t* counter) { return atomicAdd(counter, 1); }
FN float load_published(const float* p) { return __ldcg(p); }
// Of a shared variable, by any threads of the block at once.
FN void set_bits(uint32_t* word, uint32_t bits) { atomicOr(word, bits); }

template <uint32_t THREADS>
struct Block {
  template <class T>
  using Own = OwnVariable<T>;
  uint32_t index;
  FN Block() : index(blockIdx.x) {}
  template <class F>
  FN void each(F f) const {
    f(threadIdx.x);
  }
  template <class F>
  FN void each_warp(F f) const {
    f(threadIdx.x / 32);
  }
  FN void sync() const { __syncthreads(); }
  FN void group_sum(Own<float>& x, uint32_t width) const {
    for (uint32_t d = width / 2; d > 0; d /= 2) x.v = rounded_add(x.v, __shfl_xor_sync(0xffffffffu, x.v, d));
  }
  FN void group_max(Own<float>& x, uint32_t width) const {
    for (uint32_t d = width / 2; d > 0; d /= 2) x.v = fmaxf(x.v, __shfl_xor_sync(0xffffffffu, x.v, d));
  }
  FN void warp_max(Own<uint64_t>& x) const {
    const uint32_t high = __reduce_max_sync(0xffffffffu, uint32_t(x.v >> 32));
    const uint32_t low = __reduce_max_sync(0xffffffffu, uint32_t(x.v >> 32) == high ? uint32_t(x.v) : 0);
    x.v = uint64_t(high) << 32 | low;
  }
};

#else  // one CPU thread runs the grid, block by block

#include <math.h>
#include <string.h>
#include <time.h>

#define FN inline
#define SHARED(type, name) alignas(128) static thread_local type name
#define UNROLL(n)

FN float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
FN float up(bf16 bits) { return float_of(uint32_t(bits) << 16); }
FN uint32_t bits_of(float x) {
  uint32_t word;
  memcpy(&word, &x, 4);
  return word;
}
FN bf16 down(float x) {
  const uint32_t word = bits_of(x);
  if (x != x) return 0x7fff;
  return bf16((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}
FN float exponential(float x) { return expf(x); }
// The build forbids contraction.
FN float rounded_mul(float x, float y) { return x * y; }
FN float rounded_add(float x, float y) { return x + y; }
FN float rounded_div(float x, float y) { return x / y; }
FN float rounded_sqrt(float x) { return sqrtf(x); }
FN uint64_t clock_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}

struct Pack {
  bf16 v[8];
  float operator[](uint32_t i) const { return up(v[i]); }
};
FN Pack load_pack(const bf16* p) {
  Pack pack;
  // A GPU takes 16 bytes at an address that is a multiple of 16, and nothing else.
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) __builtin_trap();
  memcpy(pack.v, p, sizeof pack.v);
  return pack;
}
FN Pack load_weights(const bf16* p) { return load_pack(p); }
FN Pack load_stream(const bf16* p) { return load_pack(p); }
FN void load_floats(const float* p, float* x) {
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) __builtin_trap();
  memcpy(x, p, 32);
}
FN Pack pack_of(const float* x) {
  Pack pack;
  for (uint32_t i = 0; i < 8; ++i) pack.v[i] = down(x[i]);
  return pack;
}
FN void store_pack(bf16* p, const float* x) {
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) __builtin_trap();
  memcpy(p, pack_of(x).v, 16);
}

// One block runs after the other.
FN void publish() {}
FN uint32_t count_up(uint32_t* counter) { return (*counter)++; }
FN float load_published(const float* p) { return *p; }
FN void set_bits(uint32_t* word, uint32_t bits) { *word |= bits; }

template <uint32_t THREADS>
struct Block {
  template <class T>
  struct Own {
    T v[THREADS];
    T& operator[](uint32_t t) { return v[t]; }
    const T& operator[](uint32_t t) const { return v[t]; }
  };
  uint32_t index;
  explicit Block(uint32_t at) : index(at) {}
  template <class F>
  void each(F f) const {
    for (uint32_t t = 0; t < THREADS; ++t) f(t);
  }
  template <class F>
  void each_warp(F f) const {
    for (uint32_t w = 0; w < THREADS / 32; ++w) f(w);
  }
  void sync() const {}
  // A butterfly, as the GPU's: all threads take their neighbour's value before any has changed its own.
  template <class T, class F>
  void butterfly(Own<T>& x, uint32_t width, F f) const {
    for (uint32_t d = width / 2; d > 0; d /= 2) {
      const Own<T> before = x;
      for (uint32_t t = 0; t < THREADS; ++t) x[t] = f(before[t], before[t ^ d]);
    }
  }
  void group_sum(Own<float>& x, uint32_t width) const {
    butterfly(x, width, [](float a, float b) { return a + b; });
  }
  void group_max(Own<float>& x, uint32_t width) const {
    butterfly(x, width, [](float a, float b) { return a > b ? a : b; });
  }
  void warp_max(Own<uint64_t>& x) const {
    butterfly(x, 32, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
  }
};

#endif

// What follows gives one value for the whole block: every thread of a GPU holds it, and so may branch on it together.

// The sum over 256 threads, in the order of the library's own norm: within each warp at distances 16, 8, 4, 2, 1, then
// the eight warps at 4, 2, 1.
FN float block_sum(const Block<256>& block, Block<256>::Own<float>& x) {
  SHARED(float, of_warps[8]);
  block.group_sum(x, 32);
  block.sync();  // whoever read the last sum is done
  block.each([&](uint32_t t) {
    if (t % 32 == 0) of_warps[t / 32] = x[t];
  });
  block.sync();
  const float a = rounded_add(of_warps[0], of_warps[4]), b = rounded_add(of_warps[1], of_warps[5]);
  const float c = rounded_add(of_warps[2], of_warps[6]), d = rounded_add(of_warps[3], of_warps[7]);
  return rounded_add(rounded_add(a, c), rounded_add(b, d));
}

// The largest of all threads' values.
template <uint32_t THREADS>
FN uint64_t block_max(const Block<THREADS>& block, typename Block<THREADS>::template Own<uint64_t>& x) {
  SHARED(uint64_t, of_warps[THREADS / 32]);
  block.warp_max(x);
  block.sync();
  block.each([&](uint32_t t) {
    if (t % 32 == 0) of_warps[t / 32] = x[t];
  });
  block.sync();
  uint64_t largest = of_warps[0];
  UNROLL(4)
  for (uint32_t w = 1; w < THREADS / 32; ++w) largest = of_warps[w] > largest ? of_warps[w] : largest;
  return largest;
}

// Addresses travel as numbers.
template <class T>
FN T* at(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// Orders as floats do, and among equals the lower index is the larger key; a key is never 0.
FN uint64_t key_of(float value, uint32_t index) {
  const uint32_t bits = bits_of(value);
  const uint32_t ordered = bits >> 31 == 0 ? bits | 0x80000000u : ~bits;
  return uint64_t(ordered) << 32 | uint64_t(~index);
}
FN uint32_t index_of(uint64_t key) { return ~uint32_t(key); }
FN float value_of(uint64_t key) {
  const uint32_t ordered = uint32_t(key >> 32);
  return float_of(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}

#endif
