// Residual add and RMSNorm, for the first norm of a pass and for all-reduces that are not the library's: with the bits
// of the library's own (`cuda/add_rms_norm.cuh` there), so that fused and unfused passes can be compared.
#ifndef VERIFY_NORM_CUH
#define VERIFY_NORM_CUH

#include "simt.cuh"

// Of the squares of eight neighbours, as a balanced tree.
FN float pack_squares(const float* x) {
  float s[8];
  UNROLL(8)
  for (uint32_t i = 0; i < 8; ++i) s[i] = rounded_mul(x[i], x[i]);
  return rounded_add(rounded_add(rounded_add(s[0], s[1]), rounded_add(s[2], s[3])),
                     rounded_add(rounded_add(s[4], s[5]), rounded_add(s[6], s[7])));
}

// out = row / sqrt(mean(row^2) + eps) * gamma, one row of a multiple of eight elements. `load(p, x)` gives pack p of
// the row, the same both times it is asked.
template <class Load>
FN void norm_row(const Block<256>& block, uint32_t width, const bf16* gamma, float eps, bf16* out, Load load) {
  const uint32_t packs = width / 8;
  Block<256>::Own<float> squares;
  block.each([&](uint32_t t) {
    float sum = 0.0f;
    for (uint32_t p = t; p < packs; p += 256) {
      float x[8];
      load(p, x);
      sum = rounded_add(sum, pack_squares(x));
    }
    squares[t] = sum;
  });
  const float mean = rounded_div(block_sum(block, squares), float(width));
  const float scale = rounded_div(1.0f, rounded_sqrt(rounded_add(mean, eps)));
  block.each([&](uint32_t t) {
    for (uint32_t p = t; p < packs; p += 256) {
      float x[8];
      load(p, x);
      const Pack weights = load_weights(gamma + p * 8);
      UNROLL(8)
      for (uint32_t i = 0; i < 8; ++i) x[i] = rounded_mul(rounded_mul(x[i], scale), weights[i]);
      store_pack(out + p * 8, x);
    }
  });
}

// The values of a pack of memory.
FN void unpack(const bf16* from, float* x) {
  const Pack pack = load_pack(from);
  UNROLL(8)
  for (uint32_t i = 0; i < 8; ++i) x[i] = pack[i];
}

FN void add_norm(const verify_add_norm_args& a, const Block<256>& block) {
  const uint64_t first = uint64_t(block.index) * a.width;
  bf16* residual = at<bf16>(a.residual) + first;
  if (a.x != 0) {
    const bf16* x = at<const bf16>(a.x) + first;
    block.each([&](uint32_t t) {
      for (uint32_t p = t; p < a.width / 8; p += 256) {
        float sum[8], add[8];
        unpack(residual + p * 8, sum);
        unpack(x + p * 8, add);
        UNROLL(8)
        for (uint32_t i = 0; i < 8; ++i) sum[i] = rounded_add(add[i], sum[i]);
        store_pack(residual + p * 8, sum);
      }
    });
    // From here on a thread reads the packs that it has written itself.
  }
  norm_row(block, a.width, at<const bf16>(a.gamma), a.eps, at<bf16>(a.out) + first,
           [&](uint32_t p, float* x) { unpack(residual + p * 8, x); });
}

#endif
