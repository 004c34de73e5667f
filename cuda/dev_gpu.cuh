// The GPU back end of dev.cuh, which includes it and says what each name means: words, flags, barriers, sums and the
// clock, in inline PTX. It is apart so that each back end can be read by itself.
#ifndef PEERLANE_DEV_GPU_CUH
#define PEERLANE_DEV_GPU_CUH

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
      : "l"(__cvta_generic_to_global(p)), "r"(on)
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
      "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(on)
      : "memory");
}
PL_FN void post_2x64_if(uint32_t on, void* p, uint64_t x, uint64_t y) {
  asm volatile(
      "{.reg .pred on; setp.ne.u32 on, %3, 0;\n"
      "@on st.relaxed.sys.global.v2.b64 [%0], {%1, %2};}" ::"l"(__cvta_generic_to_global(p)),
      "l"(x), "l"(y), "r"(on)
      : "memory");
}
PL_FN bool poll_tagged_if(uint32_t on, const void* p, uint32_t* w, uint32_t tag) {
  const uint64_t own = uint64_t(tag) << 32;
  uint64_t x = own | w[0], y = own | w[1];
  asm volatile(
      "{.reg .pred on; setp.ne.u32 on, %3, 0;\n"
      "@on ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];}"
      : "+l"(x), "+l"(y)
      : "l"(__cvta_generic_to_global(p)), "r"(on)
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

// Has `v` worked out here, by a store: what leads nowhere ptxas leaves out, volatile or not. Nobody reads the word, so
// it does not matter that threads store into it at the same time.
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

// Sums of squares of packs where a row is one block's or one cluster's, for any thread to have once a barrier has put
// them there. An odd number of them is followed by a 0.
constexpr uint32_t MOST_SQUARES = 1024, ROW_PACKS = 4;
constexpr uint32_t MOST_IN_CLUSTER = 8;  // what every GPU that has clusters takes
PL_FN float2* pairs_of_squares() {
  __shared__ float2 squares[MOST_SQUARES / 2];
  return squares;
}
PL_FN void keep_square_if(uint32_t on, uint32_t pack, float x) {
  const float* to = reinterpret_cast<const float*>(pairs_of_squares()) + pack;
  asm volatile(
      "{.reg .pred on; setp.ne.u32 on, %2, 0;\n"
      "@on st.shared.f32 [%0], %1;}" ::"r"(uint32_t(__cvta_generic_to_shared(to))),
      "f"(x), "r"(on)
      : "memory");
}
// Blocks that were launched as a cluster. They meet in two halves: who has arrived goes on, and waits for the others
// when it has to. `cluster_publish` arrives with all that the thread has stored, which others have behind their wait.
// GPUs before 9.0 have no clusters.
#if __CUDA_ARCH__ >= 900
constexpr bool CLUSTERS = true;
PL_FN void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
PL_FN void cluster_publish() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
PL_FN void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// keep_square_if, in every one of the cluster's blocks.
PL_FN void keep_square_in_cluster_if(uint32_t on, uint32_t blocks, uint32_t pack, float x) {
  const float* to = reinterpret_cast<const float*>(pairs_of_squares()) + pack;
  PL_EACH
  for (uint32_t block = 0; block < MOST_IN_CLUSTER; ++block)
    asm volatile(
        "{.reg .pred on; .reg .b32 to; setp.ne.u32 on, %3, 0;\n"
        "mapa.shared::cluster.u32 to, %0, %2;\n"
        "@on st.shared::cluster.f32 [to], %1;}" ::"r"(uint32_t(__cvta_generic_to_shared(to))),
        "f"(x), "r"(block < blocks ? block : 0), "r"(uint32_t(on != 0 && block < blocks))
        : "memory");
}
#else
constexpr bool CLUSTERS = false;
PL_FN void cluster_arrive() {}
PL_FN void cluster_publish() {}
PL_FN void cluster_wait() {}
PL_FN void keep_square_in_cluster_if(uint32_t, uint32_t, uint32_t, float) {}
#endif
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

}  // namespace dev
}  // namespace PL_NAMESPACE

#endif
