// Weights from a seed, as `src/weights/random.rs` draws them on the host: the same bits.
#ifndef VERIFY_FILL_CUH
#define VERIFY_FILL_CUH

#include "simt.cuh"

// The output function of SplitMix64.
FN uint64_t mix(uint64_t value) {
  uint64_t z = value + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// A thread draws eight neighbours at a time: one division for all of them.
FN void fill(const verify_fill_args& a, const Block<256>& block) {
  block.each([&](uint32_t t) {
    const uint64_t stride = uint64_t(a.blocks) * 256 * 8;
    for (uint64_t i = (uint64_t(block.index) * 256 + t) * 8; i < a.count; i += stride) {
      uint64_t row = i / a.columns, column = i % a.columns;
      for (uint64_t j = i; j < i + 8 && j < a.count; ++j) {
        const uint64_t bits = mix(a.key + a.first + row * a.between + column) >> 40;
        const float unit = rounded_add(float(uint32_t(bits)) * (1.0f / 8388608.0f), -1.0f);
        const bf16 value = down(rounded_add(a.centre, rounded_mul(a.reach, unit)));
        if (a.wide)
          at<float>(a.out)[j] = up(value);
        else
          at<bf16>(a.out)[j] = value;
        if (++column == a.columns) column = 0, ++row;
      }
    }
  });
}

#endif
