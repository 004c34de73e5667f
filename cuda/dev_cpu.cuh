// The CPU back end of dev.cuh, which includes it and says what each name means: one CPU thread runs the whole grid. It
// is apart so that each back end can be read by itself.
#ifndef PEERLANE_DEV_CPU_CUH
#define PEERLANE_DEV_CPU_CUH

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
PL_FN void post_2x64_if(uint32_t on, void* p, uint64_t x, uint64_t y) {
  if (on) post_2x64(p, x, y);
}
PL_FN bool poll_tagged(const void* p, uint32_t* w, uint32_t tag) {
  const uint64_t x = poll_64(p), y = poll_64(static_cast<const uint64_t*>(p) + 1);
  w[0] = uint32_t(x), w[1] = uint32_t(y);
  return uint32_t(x >> 32) == tag && uint32_t(y >> 32) == tag;
}
PL_FN bool poll_tagged_if(uint32_t on, const void* p, uint32_t* w, uint32_t tag) {
  return !on || poll_tagged(p, w, tag);
}
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
constexpr bool CLUSTERS = false;
PL_FN void cluster_arrive() {}
PL_FN void cluster_publish() {}
PL_FN void cluster_wait() {}
PL_FN void keep_square_in_cluster_if(uint32_t, uint32_t, uint32_t, float) {}

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
