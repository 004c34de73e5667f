// The routed experts at few rows: what a pass reads of memory is mostly their weights, and each active expert's are
// read once. No sums by atomics: the order of additions is fixed, so that ranks and replays get the same bits.
#ifndef VERIFY_EXPERTS_CUH
#define VERIFY_EXPERTS_CUH

#include "simt.cuh"

FN float silu_times(float gate, float x) { return gate / (1.0f + exponential(-gate)) * x; }

// Two rows of weights (an inner element's gate and its factor) times N rows of x, by each warp of the block. A lane
// takes packs l, l + 32, ...; results are in all lanes.
template <uint32_t N, class X, class Use>
FN void two_dots(const Block<256>& block, uint32_t packs, const bf16* const* weights, uint32_t between, X x, Use use) {
  Block<256>::Own<float[2 * N]> sums;
  block.each([&](uint32_t t) {
    const uint32_t warp = t / 32;
    UNROLL(8)
    for (uint32_t i = 0; i < 2 * N; ++i) sums[t][i] = 0.0f;
    const bf16* rows = weights[warp];
    if (rows == nullptr) return;
    UNROLL(4)
    for (uint32_t p = t % 32; p < packs; p += 32) {
      const Pack gate = load_weights(rows + p * 8), factor = load_weights(rows + between + p * 8);
      UNROLL(4)
      for (uint32_t i = 0; i < N; ++i) {
        const Pack value = load_pack(x(i) + p * 8);
        UNROLL(8)
        for (uint32_t j = 0; j < 8; ++j) {
          sums[t][2 * i] += gate[j] * value[j];
          sums[t][2 * i + 1] += factor[j] * value[j];
        }
      }
    }
  });
  UNROLL(8)
  for (uint32_t i = 0; i < N; ++i) {
    Block<256>::Own<float> gate, factor;
    block.each([&](uint32_t t) { gate[t] = sums[t][2 * i], factor[t] = sums[t][2 * i + 1]; });
    block.group_sum(gate, 32);
    block.group_sum(factor, 32);
    block.each([&](uint32_t t) {
      if (t % 32 == 0 && weights[t / 32] != nullptr) use(t / 32, i, gate[t], factor[t]);
    });
  }
}

// silu(gate x) * (up x) of the pairs of one slot, eight inner elements a block.
FN void gate_up(const verify_gate_up_args& a, const Block<256>& block) {
  SHARED(const bf16*, weights[8]);
  const uint32_t* slots = at<const uint32_t>(a.slots);
  const uint32_t slot = block.index / a.tiles, first_element = block.index % a.tiles * 8;
  if (slot >= slots[0]) return;
  const uint32_t expert = slots[1 + slot];
  const uint32_t first = slots[1 + a.experts + slot], end = slots[1 + a.experts + slot + 1];
  const uint32_t* order = at<const uint32_t>(a.order);
  block.each([&](uint32_t t) {
    if (t >= 8) return;
    const uint64_t row = uint64_t(expert) * 2 * a.width + first_element + t;
    weights[t] = first_element + t < a.width ? at<const bf16>(a.weights) + row * a.hidden : nullptr;
  });
  block.sync();
  for (uint32_t pair = first; pair < end;) {
    const auto x = [&](uint32_t i) { return at<const bf16>(a.x) + uint64_t(order[pair + i] / a.kept) * a.hidden; };
    const auto use = [&](uint32_t warp, uint32_t i, float gate, float factor) {
      at<bf16>(a.out)[uint64_t(order[pair + i]) * a.width + first_element + warp] = down(silu_times(gate, factor));
    };
    const uint32_t between = a.width * a.hidden, left = end - pair;
    if (left >= 4) {
      two_dots<4>(block, a.hidden / 8, weights, between, x, use);
      pair += 4;
    } else if (left >= 2) {
      two_dots<2>(block, a.hidden / 8, weights, between, x, use);
      pair += 2;
    } else {
      two_dots<1>(block, a.hidden / 8, weights, between, x, use);
      pair += 1;
    }
  }
}

// The smallest power of two that is at least `n`, at most 32: lanes that share an output.
FN uint32_t lanes_for(uint32_t n) {
  uint32_t lanes = 1;
  while (lanes < n && lanes < 32) lanes *= 2;
  return lanes;
}

// Outputs of a row that a block computes.
constexpr uint32_t OUTPUTS = 64;

// out[row, h] += sum of scale * (down[expert][h] . inner[pair]) over the row's experts, in ascending order. WIDE: inner
// rows are multiples of eight elements, so a lane takes a pack at a time, else an element.
template <bool WIDE>
FN void down_rows(const verify_down_args& a, const Block<256>& block) {
  const uint32_t row = block.index / a.tiles, first = block.index % a.tiles * OUTPUTS;
  const uint32_t end = first + OUTPUTS < a.hidden ? first + OUTPUTS : a.hidden;
  const uint32_t steps = WIDE ? a.width / 8 : a.width, lanes = lanes_for(steps), together = 256 / lanes;
  const uint32_t* chosen = at<const uint32_t>(a.chosen) + uint64_t(row) * a.kept;
  const float* scales = at<const float>(a.scales) + uint64_t(row) * a.kept;
  const bf16* inner = at<const bf16>(a.inner) + uint64_t(row) * a.kept * a.width;
  bf16* out = at<bf16>(a.out) + uint64_t(row) * a.hidden;
  for (uint32_t from = first; from < end; from += together) {
    Block<256>::Own<float> sum;
    block.each([&](uint32_t t) {
      sum[t] = 0.0f;
      const uint32_t h = from + t / lanes;
      if (h >= end) return;
      UNROLL(8)
      for (uint32_t k = 0; k < a.kept; ++k) {
        const bf16* weights = at<const bf16>(a.weights) + (uint64_t(chosen[k]) * a.hidden + h) * a.width;
        const bf16* values = inner + uint64_t(k) * a.width;
        float dot = 0.0f;
        for (uint32_t p = t % lanes; p < steps; p += lanes) {
          if (WIDE) {
            const Pack w = load_weights(weights + p * 8), x = load_pack(values + p * 8);
            UNROLL(8)
            for (uint32_t j = 0; j < 8; ++j) dot += w[j] * x[j];
          } else {
            dot += up(weights[p]) * up(values[p]);
          }
        }
        sum[t] += scales[k] * dot;
      }
    });
    block.group_sum(sum, lanes);
    block.each([&](uint32_t t) {
      const uint32_t h = from + t / lanes;
      if (t % lanes == 0 && h < end) out[h] = down(up(out[h]) + sum[t]);
    });
  }
}

FN void down_add(const verify_down_args& a, const Block<256>& block) {
  if (a.width % 8 == 0)
    down_rows<true>(a, block);
  else
    down_rows<false>(a, block);
}

// Between the two products of an MLP whose products are cuBLAS's.
FN void gate(const verify_gate_args& a, const Block<256>& block) {
  block.each([&](uint32_t t) {
    const uint64_t count = uint64_t(a.rows) * a.width;
    for (uint64_t i = uint64_t(block.index) * 256 + t; i < count; i += uint64_t(a.blocks) * 256) {
      const uint64_t row = i / a.width, column = i % a.width;
      const bf16* in = at<const bf16>(a.in) + row * 2 * a.width + column;
      at<bf16>(a.out)[i] = down(silu_times(up(in[0]), up(in[a.width])));
    }
  });
}

#endif
