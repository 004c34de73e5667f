// The third back end of the kernels: see world.h for what it does to their stores. Included inside
// dev.cuh.
//
// EXPLORER_STRIP 1 compiles the kernels as for a GPU: packs in registers, several blocks and
// threads. More compiles them as for the CPU device: one thread, strips that are pointers into
// memory.
#include "world.h"

namespace PL_NAMESPACE {
namespace dev {

#define PL_FN inline
#define PL_COLD static inline
#define PL_UNROLL
#define PL_EACH
#define PL_ROLL

using explorer::world;

constexpr uint32_t STRIP = EXPLORER_STRIP;
constexpr bool HOST = STRIP > 1;

#if EXPLORER_STRIP == 1
inline uint32_t tid() { return world->now->tid; }
inline uint32_t threads() { return world->c->threads; }
inline uint32_t block() { return world->now->block; }
inline uint32_t blocks() { return world->c->blocks; }
#else
constexpr uint32_t tid() { return 0; }
constexpr uint32_t threads() { return 1; }
constexpr uint32_t block() { return 0; }
constexpr uint32_t blocks() { return 1; }
#endif

template <class To, class From>
inline To bit_cast(From v) {
  To r;
  memcpy(&r, &v, sizeof(To));
  return r;
}

inline uint32_t control() { return world->c->control; }

template <class T>
inline T load(const void* p) {
  world->before_load(p);
  return __atomic_load_n(static_cast<const T*>(p), __ATOMIC_RELAXED);
}

inline void post_4x32(void* p, const uint32_t* w) {
  const bool armed = (w[0] & w[1] & w[2] & w[3]) == 0xffffffffu;
  if (control() == CONTROL_NO_REARM && armed) return;
  if (control() == CONTROL_FORGETS && !world->in_slab(p)) return;
  for (int i = 0; i < 4; ++i) {
    const bool raw = control() == CONTROL_RAW_NAN && w[i] == 0xfffffffeu;
    world->post(static_cast<uint32_t*>(p) + i, raw ? 0xffffffffu : w[i], 4);
  }
}
inline void poll_4x32(const void* p, uint32_t* w) {
  for (int i = 0; i < 4; ++i) {
    w[i] = load<uint32_t>(static_cast<const uint32_t*>(p) + i);
    if (control() == CONTROL_NO_WAIT && w[i] == 0xffffffffu) w[i] = 0x7fffffffu;
    if (control() == CONTROL_ALL_IS_NEW && !world->in_slab(p)) w[i] ^= 0x00010000u;
  }
}
inline void post_4x32_if(uint32_t on, void* p, const uint32_t* w) {
  if (on) post_4x32(p, w);
}
inline void poll_4x32_if(uint32_t on, const void* p, uint32_t* w) {
  if (on) poll_4x32(p, w);
}
inline void post_64(void* p, uint64_t v) {
  if (control() == CONTROL_TORN_WORDS) {
    world->post(p, uint32_t(v), 4);
    world->post(static_cast<uint32_t*>(p) + 1, v >> 32, 4);
  } else {
    world->post(p, v, 8);
  }
}
inline uint64_t poll_64(const void* p) { return load<uint64_t>(p); }
inline void post_2x64(void* p, uint64_t x, uint64_t y) {
  if (control() == CONTROL_NO_CLEAR && (x | y) == 0) return;
  post_64(p, x);
  post_64(static_cast<uint64_t*>(p) + 1, y);
}
inline void post_2x64_if(uint32_t on, void* p, uint64_t x, uint64_t y) {
  if (on) post_2x64(p, x, y);
}
inline bool tag_matches(uint64_t word, uint32_t tag) {
  const uint32_t found = uint32_t(word >> 32);
  switch (control()) {
    case CONTROL_NO_WAIT:
      return true;
    case CONTROL_TAG_NOT_LESS:
      return found >= tag;
    case CONTROL_TAG_WRAPS:
      return int32_t(found - tag) >= 0;
    default:
      return found == tag;
  }
}
inline bool poll_tagged(const void* p, uint32_t* w, uint32_t tag) {
  const uint64_t x = poll_64(p), y = poll_64(static_cast<const uint64_t*>(p) + 1);
  w[0] = uint32_t(x), w[1] = uint32_t(y);
  if (control() == CONTROL_ANY_SQUARES && !world->in_slab(p)) return true;
  return tag_matches(x, tag) && tag_matches(y, tag);
}
inline bool poll_tagged_if(uint32_t on, const void* p, uint32_t* w, uint32_t tag) {
  return !on || poll_tagged(p, w, tag);
}
inline void flag_release(void* p, uint64_t v) { world->release(p, v); }
inline uint64_t flag_acquire(const void* p) {
  const uint64_t v = load<uint64_t>(p);
  if (control() == CONTROL_NONE || !world->is_data_flag(p)) return v;
  const uint64_t want = world->epoch();
  if (control() == CONTROL_NO_WAIT) return want;
  if (control() == CONTROL_FLAG_NOT_LESS && int32_t(uint32_t(v) - uint32_t(want)) >= 0) return want;
  return v;
}
inline void fence_system() { world->fence(); }

inline void sync_block() {
  if (control() != CONTROL_NO_BARRIER) world->meet_block(false);
}
inline bool any_in_block(bool x) { return world->meet_block(x); }
inline bool any_of(uint32_t threads, bool x) {
  if (control() == CONTROL_NO_BARRIER) return x;
  return world->meet_part(threads, x);
}
inline uint64_t share(uint64_t v) { return world->share(v); }
inline void need(uint64_t) {}

constexpr uint32_t LANES = 256;
inline float tree_over_lanes(const float* values, uint32_t items) {
  float x[LANES] = {};
  for (uint32_t i = 0; i < items; ++i) x[i % LANES] += values[i];
  for (uint32_t d = 16; d > 0; d /= 2)
    for (uint32_t l = 0; l < LANES; ++l)
      if (l % 32 < d) x[l] += x[l + d];
  for (uint32_t d = 128; d >= 32; d /= 2)
    for (uint32_t g = 0; g < d; g += 32) x[g] += x[g + d];
  return x[0];
}
// The threads of a block take the items in turn and leave what they come to where all can read it; the lanes and the
// tree over them are then each thread's own work. A row here has at most
// MAX_LANES items.
constexpr uint32_t BATCH = HOST ? 1 : 2, ITEMS_AT_ONCE = LANES;
template <class Load, class Use>
float sum_over_lanes(uint32_t items, Load load, Use use) {
  float* values = world->lanes();
  for (uint32_t first = tid(); first < items; first += threads() * BATCH) {
    for (uint32_t k = 0; k < BATCH; ++k)
      if (first + k * threads() < items) load(k, first + k * threads());
    for (uint32_t k = 0; k < BATCH; ++k)
      if (first + k * threads() < items) values[first + k * threads()] = use(k, first + k * threads());
  }
  world->point();
  sync_block();
  const float sum = tree_over_lanes(values, items);
  sync_block();  // the next sum writes there
  return sum;
}

// All lanes are left where the threads of the block find them, and the tree over them is each thread's own work.
constexpr uint32_t ROWS_AT_ONCE = 2, WORDS_AT_ONCE = 2, KEEPERS = 2, WARP = 1, LANE_THREADS = 1;
static_assert(2 * ROWS_AT_ONCE * LANES <= explorer::MAX_LANES, "two sets of results");
template <class Lanes>
void lanes_to_groups(uint32_t threads, uint32_t rows, uint32_t set, Lanes lanes) {
  float* all = world->lanes() + set * ROWS_AT_ONCE * LANES;
  for (uint32_t at = tid(); at < rows * (LANES / 2); at += threads) {
    float x[2] = {};
    lanes(at / (LANES / 2), at % (LANES / 2) * 2, x);
    memcpy(all + 2 * at, x, sizeof x);
  }
}
inline float sum_of_groups(uint32_t row, uint32_t set) {
  world->point();
  return tree_over_lanes(world->lanes() + (set * ROWS_AT_ONCE + row) * LANES, LANES);
}
// A row that is one block's has more packs of a unit per thread here than on a GPU, and still several groups of
// threads.
constexpr uint32_t MOST_SQUARES = explorer::MAX_SQUARES, ROW_PACKS = 4;
inline void keep_square_if(uint32_t on, uint32_t pack, float x) {
  world->point();
  if (on) world->squares()[pack] = x;
}
// All blocks of a rank are one cluster, where there is any.
constexpr bool CLUSTERS = true;
inline void cluster_arrive() { world->cluster_arrive(false); }
inline void cluster_publish() { world->cluster_arrive(true); }
inline void cluster_wait() {
  const bool published = world->now->published;
  if (control() != (published ? CONTROL_SQUARES_TOO_EARLY : CONTROL_BLOCKS_TOO_EARLY)) world->cluster_wait();
}
inline void keep_square_in_cluster_if(uint32_t on, uint32_t blocks, uint32_t pack, float x) {
  world->point();
  if (on) world->keep_in_cluster(blocks, pack, x);
}
inline void kept_squares(uint32_t pack, uint32_t* w) {
  world->point();
  memcpy(w, world->squares() + pack, 8);
}
inline void prefetch(const void*) {}
inline float square_root(float x) { return __builtin_sqrtf(x); }
inline uint32_t set_bits(uint32_t mask) { return uint32_t(__builtin_popcount(mask)); }
inline uint32_t in_register(uint32_t x) { return x; }
inline uint64_t in_register(uint64_t x) { return x; }
inline char* in_register(char* p) { return p; }
inline uint32_t lowest_bit(uint32_t mask) { return uint32_t(__builtin_ctz(mask)); }

template <class T>
inline T local(const T* p) {
  world->point();
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
template <class T>
inline void local_put(T* p, T v) {
  world->local_store();
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
inline uint32_t local_load32(const uint32_t* p) { return local(p); }
inline void local_store32(uint32_t* p, uint32_t v) {
  if (control() != CONTROL_NO_WORD_OF_REARMS) local_put(p, v);
}
inline uint64_t local_load64(const uint64_t* p) { return local(p); }
inline void local_store64(uint64_t* p, uint64_t v) { local_put(p, v); }
inline uint64_t enter(uint64_t* turn, uint64_t id) {
  world->local_store();
  const uint64_t old = *turn;
  *turn |= id;
  return old;
}
inline void leave(uint64_t* turn, uint64_t word) { local_put(turn, word); }
inline uint32_t claim(uint32_t* p, uint32_t v) {
  world->local_store();
  const uint32_t old = *p;
  if (old == 0) *p = v;
  return old;
}
inline uint32_t count_in(uint32_t* p) {
  world->local_store();
  const uint32_t old = *p;
  *p = (old + 1) % blocks();
  return old;
}
inline void count_out(uint64_t* turn, uint64_t v) {
  world->local_store();
  const uint64_t sum = *turn + v, epoch = ~((uint64_t(1) << PL_TURN_BITS) - 1);
  // The control leaves the epoch that stands there.
  *turn = control() == CONTROL_EPOCH_STANDS ? (sum & ~epoch) | (*turn & epoch) : sum;
}

inline uint64_t now_ns() { return world->clock(); }
inline void pause(uint32_t) { world->failed_poll(); }
inline void linger(uint32_t) {}
inline uint64_t launch_id(const pl_step& a) { return a.launch; }

// No 16-bit float but bfloat16 is explored: the rest of F16 is the same code.
inline float half_up(uint16_t) { return 0; }
inline uint16_t half_down(float) { return 0; }
inline uint16_t bfloat_down(float f) {
  const uint32_t u = bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline uint32_t half_down_pair(float, float) { return 0; }
inline uint32_t bfloat_down_pair(float low, float high) { return bfloat_down(low) | uint32_t(bfloat_down(high)) << 16; }
inline uint32_t half_add_pair(uint32_t, uint32_t) { return 0; }
inline uint32_t bfloat_add_pair(uint32_t x, uint32_t y) {
  constexpr uint32_t HIGH = 0xffff0000u;
  return bfloat_down_pair(bit_cast<float>(x << 16) + bit_cast<float>(y << 16),
                          bit_cast<float>(x & HIGH) + bit_cast<float>(y & HIGH));
}

inline void publish_bytes(void* p, const void* from, uint32_t bytes) {
  char* to = static_cast<char*>(p);
  const char* src = static_cast<const char*>(from);
  for (uint32_t at = 0; at < bytes; at += 4) {
    const uint32_t size = bytes - at < 4 ? bytes - at : 4;
    uint64_t v = 0;
    memcpy(&v, src + at, size);
    world->post(to + at, v, size, true);
  }
}

#if EXPLORER_STRIP == 1

struct Raw {
  uint32_t w[8] = {};
  void own() {}
  uint32_t word(uint32_t i) const { return w[i]; }
  uint32_t* words(uint32_t i) { return w + i; }
};
inline void same_view(Raw& to, const Raw& from) { to = from; }
template <uint32_t PLACES>
void keep(uint32_t place, uint32_t keeper, const Raw& r) {
  static_assert(PLACES <= explorer::MAX_KEPT, "places of a thread");
  world->point();
  memcpy(world->kept(keeper)[place], r.w, 16);
}
template <uint32_t PLACES>
void kept(uint32_t place, uint32_t keeper, Raw& r) {
  world->point();
  memcpy(r.w, world->kept(keeper)[place], 16);
}
template <class T>
struct In {
  const Raw& r;
  explicit In(const Raw& raw) : r(raw) {}
  T operator[](uint32_t i) const {
    T v;
    memcpy(&v, reinterpret_cast<const char*>(r.w) + i % (32 / sizeof(T)) * sizeof(T), sizeof(T));
    return v;
  }
};
template <class T, bool WHOLE>
inline void user_load(Raw& r, const void* p, uint32_t, uint32_t bytes) {
  memset(r.w, 0, 16);
  memcpy(r.w, p, bytes);
}
inline void partial_load(Raw& r, const void* p, bool wide) { memcpy(r.w, p, wide ? 32 : 16); }
inline void slab_load(Raw& r, const void* p, bool wide) {
  for (uint32_t i = 0; i < (wide ? 8 : 4); ++i) r.w[i] = load<uint32_t>(static_cast<const uint32_t*>(p) + i);
}
inline void slab_store(void* p, const Raw& r, uint32_t, bool wide) { publish_bytes(p, r.w, wide ? 32 : 16); }
template <class T>
inline void user_copy(void* to, const Raw& r, uint32_t bytes) {
  memcpy(to, r.w, bytes);
}
inline void pack_load(Raw& r, const void* p) { memcpy(r.w, p, 16); }
inline void pack_store(void* to, const Raw& r, uint32_t) { memcpy(to, r.w, 16); }
inline void pack_load_if(uint32_t on, Raw& r, const void* p) {
  memset(r.w, 0, 16);
  if (on) memcpy(r.w, p, 16);
}
inline void pack_store_if(uint32_t on, void* to, const Raw& r) {
  if (on) memcpy(to, r.w, 16);
}
template <class T>
struct Fill {
  Raw& r;
  explicit Fill(Raw& raw) : r(raw) {}
  void set(uint32_t i, T v) { memcpy(reinterpret_cast<char*>(r.w) + i % (32 / sizeof(T)) * sizeof(T), &v, sizeof(T)); }
};
template <class T>
struct Out {
  void* p;
  uint32_t bytes;
  Raw r;
  Out(void* to, uint32_t n) : p(to), bytes(n) {}
  void set(uint32_t i, T v) { Fill<T>(r).set(i, v); }
  void flush() { memcpy(p, r.w, bytes); }
  void flush_whole() { memcpy(p, r.w, 16); }
  void keep(Raw& to) const { to = r; }
  void flush_partial(bool wide) { memcpy(p, r.w, wide ? 32 : 16); }
};

#else

struct Raw {
  const unsigned char* p = nullptr;
  alignas(64) uint32_t buf[STRIP * 8];
  void own() { p = bytes(); }
  unsigned char* bytes() { return reinterpret_cast<unsigned char*>(buf); }
  uint32_t word(uint32_t i) const {
    uint32_t v;
    memcpy(&v, p + 4 * i, 4);
    return v;
  }
  uint32_t* words(uint32_t i) { return buf + i; }
};
inline void same_view(Raw& to, const Raw& from) { to.p = from.p; }
template <uint32_t PLACES>
void keep(uint32_t place, uint32_t keeper, const Raw& r);
template <uint32_t PLACES>
void kept(uint32_t place, uint32_t keeper, Raw& r);
template <class T>
struct In {
  const unsigned char* p;
  explicit In(const Raw& r) : p(r.p) {}
  T operator[](uint32_t i) const {
    T v;
    memcpy(&v, p + i * sizeof(T), sizeof(T));
    return v;
  }
};
template <class T, bool WHOLE>
inline void user_load(Raw& r, const void* p, uint32_t packs, uint32_t bytes) {
  r.p = static_cast<const unsigned char*>(p);
  if (WHOLE && bytes < packs * 16) {
    memcpy(r.bytes(), p, bytes);
    memset(r.bytes() + bytes, 0, packs * 16 - bytes);
    r.own();
  }
}
inline void partial_load(Raw& r, const void* p, bool) { r.p = static_cast<const unsigned char*>(p); }
inline void slab_load(Raw& r, const void* p, bool) {
  world->before_load(p);
  r.p = static_cast<const unsigned char*>(p);
}
inline void slab_store(void* p, const Raw& r, uint32_t bytes, bool) { publish_bytes(p, r.p, bytes); }
template <class T>
inline void user_copy(void* to, const Raw& r, uint32_t bytes) {
  memcpy(to, r.p, bytes);
}
inline void pack_load(Raw& r, const void* p) { r.p = static_cast<const unsigned char*>(p); }
inline void pack_store(void* to, const Raw& r, uint32_t bytes) { memcpy(to, r.p, bytes); }
inline void pack_load_if(uint32_t on, Raw& r, const void* p) {
  if (on) pack_load(r, p);
}
inline void pack_store_if(uint32_t on, void* to, const Raw& r) {
  if (on) memcpy(to, r.p, 16);
}
template <class T>
struct Out {
  unsigned char* p;
  Out(void* to, uint32_t) : p(static_cast<unsigned char*>(to)) {}
  void set(uint32_t i, T v) { memcpy(p + i * sizeof(T), &v, sizeof(T)); }
  void flush() {}
  void flush_whole() {}
  void keep(Raw&) const {}
  void flush_partial(bool) {}
};
template <class T>
struct Fill {
  unsigned char* p;
  explicit Fill(Raw& r) : p(r.bytes()) {}
  void set(uint32_t i, T v) { memcpy(p + i * sizeof(T), &v, sizeof(T)); }
};

#endif

}  // namespace dev
}  // namespace PL_NAMESPACE
