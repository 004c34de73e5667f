// The rest of the GPU back end: packs in registers, their loads and stores, and conversions of elements. It is apart
// from dev_gpu.cuh, whose words it uses, because it moves and converts data and orders nothing.
#ifndef PEERLANE_DEV_GPU_PACKS_CUH
#define PEERLANE_DEV_GPU_PACKS_CUH

namespace PL_NAMESPACE {
namespace dev {

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
      : "l"(__cvta_generic_to_global(p)), "r"(on)
      : "memory");
}
PL_FN void pack_store_if(uint32_t on, void* p, const Raw& r) {
  asm volatile(
      "{.reg .pred on; setp.ne.u32 on, %5, 0;\n"
      "@on st.global.v4.b32 [%0], {%1, %2, %3, %4};}" ::"l"(__cvta_generic_to_global(p)),
      "r"(r.w[0]), "r"(r.w[1]), "r"(r.w[2]), "r"(r.w[3]), "r"(on)
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

#endif
