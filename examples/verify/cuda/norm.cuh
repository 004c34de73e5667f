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

// Packs of a row that a thread keeps between its two looks at them: rows of up to 8,192 elements are read once.
constexpr uint32_t HELD = 4;

FN void add_norm_held(const verify_add_norm_args& a, const Block<256>& block, bf16* residual, const bf16* x) {
  const uint32_t packs = a.width / 8;
  const bf16* gamma = at<const bf16>(a.gamma);
  bf16* out = at<bf16>(a.out) + uint64_t(block.index) * a.width;
  Block<256>::Own<Pack[HELD]> row, weights;
  Block<256>::Own<float> squares;
  block.each([&](uint32_t t) {
    Pack add[HELD];
    // Behind the end the last pack is loaded again, and not used: all loads are under way at once.
    UNROLL(4)
    for (uint32_t i = 0; i < HELD; ++i) {
      const uint32_t p = t + i * 256 < packs ? t + i * 256 : packs - 1;
      row[t][i] = load_pack(residual + p * 8);
      add[i] = load_pack((x != nullptr ? x : residual) + p * 8);
      weights[t][i] = load_weights(gamma + p * 8);
    }
    squares[t] = 0.0f;
    UNROLL(4)
    for (uint32_t i = 0; i < HELD; ++i) {
      const uint32_t p = t + i * 256;
      if (p >= packs) break;
      float sum[8];
      if (x != nullptr) {
        UNROLL(8)
        for (uint32_t e = 0; e < 8; ++e) sum[e] = rounded_add(add[i][e], row[t][i][e]);
        row[t][i] = pack_of(sum);
        store_pack(residual + p * 8, sum);
      }
      UNROLL(8)
      for (uint32_t e = 0; e < 8; ++e) sum[e] = row[t][i][e];
      squares[t] = rounded_add(squares[t], pack_squares(sum));
    }
  });
  const float mean = rounded_div(block_sum(block, squares), float(a.width));
  const float scale = rounded_div(1.0f, rounded_sqrt(rounded_add(mean, a.eps)));
  block.each([&](uint32_t t) {
    UNROLL(4)
    for (uint32_t i = 0; i < HELD; ++i) {
      const uint32_t p = t + i * 256;
      if (p >= packs) break;
      float y[8];
      UNROLL(8)
      for (uint32_t e = 0; e < 8; ++e) y[e] = rounded_mul(rounded_mul(row[t][i][e], scale), weights[t][i][e]);
      store_pack(out + p * 8, y);
    }
  });
}

FN void add_norm(const verify_add_norm_args& a, const Block<256>& block) {
  const uint64_t first = uint64_t(block.index) * a.width;
  bf16* residual = at<bf16>(a.residual) + first;
  const bf16* x = a.x != 0 ? at<const bf16>(a.x) + first : nullptr;
  if (a.width <= HELD * 256 * 8) {
    add_norm_held(a, block, residual, x);
    return;
  }
  if (x != nullptr) {
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
