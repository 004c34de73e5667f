// MLPs: the one that every row goes through, and beside it the experts that rows chose. What a pass reads of memory is
// mostly their weights, and at few rows each active expert's are read once. No sums by atomics: the order of additions
// is fixed, so that ranks and replays get the same bits.
#ifndef VERIFY_EXPERTS_CUH
#define VERIFY_EXPERTS_CUH

#include "mma.cuh"

FN float silu_times(float gate, float x) { return gate / (1.0f + exponential(-gate)) * x; }

// Inner elements that a block computes.
constexpr uint32_t INNER = 8;

// Up to 16 rows of x, and where the inner layer of each goes.
struct Rows {
  uint32_t count;
  uint32_t row[16], to[16];
};

// Eight inner elements, from `element` on, of the rows of `list`: silu(gate x) * (up x). The gate's weights are the
// upper half of a warp's outputs and the other factor's the lower one, so that both sums meet.
template <uint32_t GROUPS>
FN void inner_elements(const Block<256>& block, float* shared, const Rows& list, const bf16* x, uint32_t hidden,
                       const bf16* weights, uint32_t width, uint32_t element, bf16* out) {
  block.each_warp([&](uint32_t warp) {
    const uint32_t steps = (hidden + 31) / 32, each = (steps + 7) / 8 * 32;
    const uint32_t first = warp * each < hidden ? warp * each : hidden;
    const uint32_t end = first + each < hidden ? first + each : hidden;
    Strip<1, GROUPS> strip;
    strip.template add<4>(
        first, end,
        [&](uint32_t o, uint32_t k) {
          const uint32_t e = element + o % INNER < width ? element + o % INNER : width - 1;
          return load_stream(weights + (uint64_t(o / INNER) * width + e) * hidden + k);
        },
        [&](uint32_t j, uint32_t lane, uint32_t k, bool) {
          const uint32_t i = j * 8 + lane / 4;
          return load_pack(x + uint64_t(list.row[i < list.count ? i : 0]) * hidden + k);
        });
    strip.leave(shared, warp);
  });
  block.sync();
  block.each([&](uint32_t t) {
    const uint32_t e = t % INNER, i = t / INNER;
    if (i >= list.count || element + e >= width) return;
    const float gate = strip_sum<1, GROUPS>(shared, 0, 8, e, i), up = strip_sum<1, GROUPS>(shared, 0, 8, INNER + e, i);
    out[uint64_t(list.to[i]) * width + element + e] = down(silu_times(gate, up));
  });
  block.sync();  // before the next rows
}

FN void inner_elements(const Block<256>& block, float* shared, const Rows& list, const bf16* x, uint32_t hidden,
                       const bf16* weights, uint32_t width, uint32_t element, bf16* out) {
  if (list.count <= 8)
    inner_elements<1>(block, shared, list, x, hidden, weights, width, element, out);
  else
    inner_elements<2>(block, shared, list, x, hidden, weights, width, element, out);
}

// The rows that go to the expert of pair `pair`, where that is their first. A row chooses an expert once.
FN bool gather(const verify_gate_up_args& a, const Block<256>& block, uint32_t pair, Rows& list, uint32_t& expert) {
  SHARED(uint32_t, rows);
  SHARED(uint32_t, pair_of[16]);
  const uint32_t* chosen = at<const uint32_t>(a.chosen);
  expert = chosen[pair];
  block.each([&](uint32_t t) {
    if (t == 0) rows = 0;
  });
  block.sync();
  block.each([&](uint32_t t) {
    if (t >= a.pairs || chosen[t] != expert) return;
    set_bits(&rows, 1u << t / a.kept);
    pair_of[t / a.kept] = t;
  });
  block.sync();
  if ((rows & ((1u << pair / a.kept) - 1)) != 0) return false;
  block.each([&](uint32_t t) {
    if (t != 0) return;
    uint32_t count = 0;
    for (uint32_t row = 0; row < a.rows; ++row)
      if (rows >> row & 1) list.row[count] = row, list.to[count++] = pair_of[row];
    list.count = count;
  });
  block.sync();
  return true;
}

// Consecutive blocks are an MLP's tiles; the one for every row comes first.
FN void gate_up(const verify_gate_up_args& a, const Block<256>& block) {
  SHARED(float, shared[NARROW]);
  SHARED(Rows, list);
  const bf16* x = at<const bf16>(a.x);
  const uint32_t always_tiles = (a.always_width + INNER - 1) / INNER;
  if (block.index < always_tiles) {
    for (uint32_t row = 0; row < a.rows; row += 16) {
      block.each([&](uint32_t t) {
        if (t == 0) list.count = a.rows - row < 16 ? a.rows - row : 16;
        if (t < 16) list.row[t] = list.to[t] = row + t;
      });
      block.sync();
      inner_elements(block, shared, list, x, a.hidden, at<const bf16>(a.always), a.always_width, block.index * INNER,
                     at<bf16>(a.product));
    }
    return;
  }
  const uint32_t tiles = (a.width + INNER - 1) / INNER, index = block.index - always_tiles;
  const uint32_t slot = index / tiles, element = index % tiles * INNER;
  const uint64_t size = uint64_t(2) * a.width * a.hidden;
  if (a.slots == 0) {
    uint32_t expert;
    if (!gather(a, block, slot, list, expert)) return;
    inner_elements(block, shared, list, x, a.hidden, at<const bf16>(a.weights) + expert * size, a.width, element,
                   at<bf16>(a.inner));
    return;
  }
  const uint32_t *slots = at<const uint32_t>(a.slots), *order = at<const uint32_t>(a.order);
  if (slot >= slots[0]) return;
  const uint32_t expert = slots[1 + slot], end = slots[1 + a.experts + slot + 1];
  for (uint32_t pair = slots[1 + a.experts + slot]; pair < end; pair += 16) {
    block.each([&](uint32_t t) {
      if (t == 0) list.count = end - pair < 16 ? end - pair : 16;
      if (t < 16 && pair + t < end) list.to[t] = order[pair + t], list.row[t] = order[pair + t] / a.kept;
    });
    block.sync();
    inner_elements(block, shared, list, x, a.hidden, at<const bf16>(a.weights) + expert * size, a.width, element,
                   at<bf16>(a.inner));
  }
}

// The smallest power of two that is at least `n`, at most 32: lanes that share an output.
FN uint32_t lanes_for(uint32_t n) {
  uint32_t lanes = 1;
  while (lanes < n && lanes < 32) lanes *= 2;
  return lanes;
}

// Outputs of a row that a block computes, and experts whose weights are under way together.
constexpr uint32_t OUTPUTS = VERIFY_OUTPUTS, TOGETHER = 4;

// A part of weights . values: of packs where rows are multiples of eight elements (WIDE), else of elements.
template <bool WIDE>
struct Piece {
  Pack w, x;
  float narrow;
  FN void load(const bf16* weights, const bf16* values, uint32_t p) {
    if (WIDE)
      w = load_stream(weights + p * 8), x = load_pack(values + p * 8);
    else
      narrow = up(weights[p]) * up(values[p]);
  }
  FN float dot() const {
    if (!WIDE) return narrow;
    float sum = 0.0f;
    UNROLL(8)
    for (uint32_t j = 0; j < 8; ++j) sum += w[j] * x[j];
    return sum;
  }
};

// out[row, h] = always[h] . product[row] + sum of scale * (down[expert][h] . inner[pair]) over the row's experts, in
// ascending order. Rows that want the same weights are neighbours, so that the second finds them in the cache.
template <bool WIDE>
FN void down_rows(const verify_down_args& a, const Block<256>& block) {
  const uint32_t row = block.index % a.rows, first = block.index / a.rows * OUTPUTS;
  const uint32_t end = first + OUTPUTS < a.hidden ? first + OUTPUTS : a.hidden;
  const uint32_t each = WIDE ? 8 : 1, steps = a.width / each, always_steps = a.always_width / each;
  const uint32_t lanes = lanes_for(steps < always_steps ? always_steps : steps), together = 256 / lanes;
  const uint32_t* chosen = at<const uint32_t>(a.chosen) + uint64_t(row) * a.kept;
  const float* scales = at<const float>(a.scales) + uint64_t(row) * a.kept;
  const bf16* inner = at<const bf16>(a.inner) + uint64_t(row) * a.kept * a.width;
  const bf16* product = at<const bf16>(a.product) + uint64_t(row) * a.always_width;
  bf16* out = at<bf16>(a.out) + uint64_t(row) * a.hidden;
  for (uint32_t from = first; from < end; from += together) {
    Block<256>::Own<float> sum;
    block.each([&](uint32_t t) {
      sum[t] = 0.0f;
      const uint32_t h = from + t / lanes, lane = t % lanes;
      if (h >= end) return;
      const bf16* always = at<const bf16>(a.always) + uint64_t(h) * a.always_width;
      UNROLL(4)
      for (uint32_t p = lane; p < always_steps; p += lanes) {
        Piece<WIDE> piece;
        piece.load(always, product, p);
        sum[t] += piece.dot();
      }
      for (uint32_t k = 0; k < a.kept; k += TOGETHER) {
        for (uint32_t p = lane; p < steps; p += lanes) {
          // Behind the last expert the last one is loaded again, and counts nothing: no branch keeps loads apart.
          Piece<WIDE> pieces[TOGETHER];
          UNROLL(8)
          for (uint32_t i = 0; i < TOGETHER; ++i) {
            const uint32_t e = k + i < a.kept ? k + i : a.kept - 1;
            pieces[i].load(at<const bf16>(a.weights) + (uint64_t(chosen[e]) * a.hidden + h) * a.width,
                           inner + uint64_t(e) * a.width, p);
          }
          UNROLL(8)
          for (uint32_t i = 0; i < TOGETHER; ++i)
            if (k + i < a.kept) sum[t] += scales[k + i] * pieces[i].dot();
        }
      }
    });
    block.group_sum(sum, lanes);
    block.each([&](uint32_t t) {
      const uint32_t h = from + t / lanes;
      if (t % lanes == 0 && h < end) out[h] = down(sum[t]);
    });
  }
}

FN void down_outputs(const verify_down_args& a, const Block<256>& block) {
  if (a.width % 8 == 0 && a.always_width % 8 == 0)
    down_rows<true>(a, block);
  else
    down_rows<false>(a, block);
}

#endif
