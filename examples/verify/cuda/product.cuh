// Products of few rows with large weights, where cuBLAS would take several launches: a pass is a chain of kernels, and
// as long as its weights take to be read once. What stands between two products is done by the one that reads it.
//
// A block computes some columns of the result for all rows. Eight warps share them: `splits` warps take a part each of
// the inner dimension of the same columns, and their sums are added in a fixed order.
#ifndef VERIFY_PRODUCT_CUH
#define VERIFY_PRODUCT_CUH

#include "latents.cuh"
#include "mma.cuh"

constexpr uint32_t FEW = VERIFY_FEW_ROWS;

// Part `part` of `parts` of an inner dimension, in steps of what a warp multiplies at a time.
struct Span {
  uint32_t first, end;
  FN Span(uint32_t inner, uint32_t part, uint32_t parts) {
    const uint32_t steps = (inner + 31) / 32, each = (steps + parts - 1) / parts * 32;
    first = part * each < inner ? part * each : inner;
    end = first + each < inner ? first + each : inner;
  }
};

// The rows of x as they are.
struct Plain {
  const bf16* x;
  uint64_t stride;
  FN Pack load(uint32_t, uint32_t, uint32_t row, uint32_t k, bool) const { return load_pack(x + row * stride + k); }
  FN void leave() const {}
};

// The columns of block `tile`, for up to 8 GROUPS rows; a warp takes 16 TILES columns. `source(warp)` gives x as
// Strip::add wants it, and is told when the warp is done; `put(row, column, sum)`.
template <uint32_t TILES, uint32_t GROUPS, class Source, class Put>
FN void product_tile(const Block<256>& block, float* shared, const bf16* weights, uint32_t tile, uint32_t rows,
                     uint32_t inner, uint32_t columns, uint32_t splits, Source source, Put put) {
  constexpr uint32_t strip_width = 16 * TILES;
  const uint32_t wide = 8 / splits * strip_width, from = tile * wide;
  block.each_warp([&](uint32_t warp) {
    const Span span(inner, warp % splits, splits);
    const uint32_t column = from + warp / splits * strip_width;
    auto x = source(warp);
    Strip<TILES, GROUPS> strip;
    strip.template add<GROUPS == 1 ? 4 : 2>(
        span.first, span.end,
        [&](uint32_t o, uint32_t k) {
          // Behind the last column the last one is read again, and nothing is put.
          const uint32_t c = column + o < columns ? column + o : columns - 1;
          return load_stream(weights + uint64_t(c) * inner + k);
        },
        [&](uint32_t j, uint32_t lane, uint32_t k, bool counts) {
          const uint32_t row = j * 8 + lane / 4;
          return x.load(j, lane, row < rows ? row : rows - 1, k, counts);
        });
    strip.leave(shared, warp);
    x.leave();
  });
  block.sync();
  block.each([&](uint32_t t) {
    for (uint32_t i = t; i < wide * rows; i += 256) {
      const uint32_t row = i / wide, c = i % wide;
      if (from + c < columns)
        put(row, from + c, strip_sum<TILES, GROUPS>(shared, c / strip_width * splits, splits, c % strip_width, row));
    }
  });
}

FN void few_rows(const verify_few_rows_args& a, const Block<256>& block) {
  SHARED(float, shared[WIDEST]);
  const auto source = [&](uint32_t) { return Plain{at<const bf16>(a.x), a.inner}; };
  const auto put = [&](uint32_t row, uint32_t column, float sum) {
    const uint64_t to = uint64_t(row) * a.columns + column;
    if (a.wide)
      at<float>(a.out)[to] = sum;
    else
      at<bf16>(a.out)[to] = down(sum);
  };
  const bf16* weights = at<const bf16>(a.weights);
  if (a.rows <= 8)
    product_tile<2, 1>(block, shared, weights, block.index, a.rows, a.inner, a.columns, a.splits, source, put);
  else
    product_tile<2, 2>(block, shared, weights, block.index, a.rows, a.inner, a.columns, a.splits, source, put);
}

// fp32 rows before their norm: multiplied with its weights here; the squares, of which the scale of a row's results is
// made, are summed along the way.
template <uint32_t GROUPS>
struct Unnormed {
  const float* x;
  const bf16* gamma;
  uint64_t stride;
  float* squares;  // of this warp's rows
  Lanes<float> own[GROUPS];

  FN Unnormed(const float* from, const bf16* weights, uint64_t between, float* to)
      : x(from), gamma(weights), stride(between), squares(to) {
    each_lane([&](uint32_t lane) {
      UNROLL(2)
      for (uint32_t j = 0; j < GROUPS; ++j) own[j][lane] = 0.0f;
    });
  }
  FN Pack load(uint32_t j, uint32_t lane, uint32_t row, uint32_t k, bool counts) {
    float y[8], sum = 0.0f;
    load_floats(x + row * stride + k, y);
    const Pack weights = load_weights(gamma + k);
    UNROLL(8)
    for (uint32_t e = 0; e < 8; ++e) sum += y[e] * y[e], y[e] *= weights[e];
    if (counts) own[j][lane] += sum;
    return pack_of(y);
  }
  FN void leave() {
    UNROLL(2)
    for (uint32_t j = 0; j < GROUPS; ++j) {
      quad_sum(own[j]);
      each_lane([&](uint32_t lane) {
        if (lane % 4 == 0) squares[j * 8 + lane / 4] = own[j][lane];
      });
    }
  }
};

template <uint32_t GROUPS>
FN void query_up_tile(const verify_query_up_args& a, const Block<256>& block, float* shared, float* squares) {
  const uint32_t stride = a.query_latent + a.kv_latent + a.rotary;
  const auto source = [&](uint32_t warp) {
    return Unnormed<GROUPS>(at<const float>(a.fused), at<const bf16>(a.query_gamma), stride, squares + warp * FEW);
  };
  const auto put = [&](uint32_t row, uint32_t column, float sum) {
    float square = 0.0f;
    for (uint32_t s = 0; s < a.splits; ++s) square += squares[s * FEW + row];
    const float mean = rounded_div(square, float(a.query_latent));
    const float scale = rounded_div(1.0f, rounded_sqrt(mean + a.eps));
    at<bf16>(a.out)[uint64_t(row) * a.columns + column] = down(sum * scale);
  };
  product_tile<1, GROUPS>(block, shared, at<const bf16>(a.weights), block.index, a.batch.rows, a.query_latent,
                          a.columns, a.splits, source, put);
}

FN void query_up(const verify_query_up_args& a, const Block<256>& block) {
  SHARED(float, shared[NARROW]);
  SHARED(float, squares[8 * FEW]);
  const uint32_t tiles = a.blocks - a.batch.rows;
  if (block.index >= tiles) {
    const uint32_t row = block.index - tiles, stride = a.query_latent + a.kv_latent + a.rotary;
    const float* key = at<const float>(a.fused) + uint64_t(row) * stride + a.query_latent;
    cache_row(block, a.batch, row, key, a.kv_latent, a.rotary, a.key_gamma, a.turns, a.eps, a.cache);
  } else if (a.batch.rows <= 8) {
    query_up_tile<1>(a, block, shared, squares);
  } else {
    query_up_tile<2>(a, block, shared, squares);
  }
}

// Every head's query carried into the space of cache rows, and its rotary part turned by the first block of the head.
FN void queries(const verify_queries_args& a, const Block<256>& block) {
  SHARED(float, shared[WIDEST]);
  const uint32_t tiles = a.blocks / a.heads, head = block.index / tiles, tile = block.index % tiles;
  const uint32_t from = a.plain + a.rotary, to = a.latent + a.rotary;
  const bf16* q = at<const bf16>(a.q) + uint64_t(head) * from;
  bf16* out = at<bf16>(a.out) + uint64_t(head) * to;
  const auto source = [&](uint32_t) { return Plain{q, uint64_t(a.heads) * from}; };
  const auto put = [&](uint32_t row, uint32_t column, float sum) {
    out[uint64_t(row) * a.heads * to + column] = down(sum);
  };
  const bf16* weights = at<const bf16>(a.key_up) + uint64_t(head) * a.latent * a.plain;
  if (a.batch.rows <= 8)
    product_tile<2, 1>(block, shared, weights, tile, a.batch.rows, a.plain, a.latent, a.splits, source, put);
  else
    product_tile<2, 2>(block, shared, weights, tile, a.batch.rows, a.plain, a.latent, a.splits, source, put);
  if (tile != 0) return;
  const uint32_t pairs = a.rotary / 2;
  block.each([&](uint32_t t) {
    for (uint32_t i = t; i < a.batch.rows * pairs; i += 256) {
      const uint32_t row = i / pairs;
      turn_pair(turns_of(a.turns, a.batch, row, a.rotary), i % pairs, q + uint64_t(row) * a.heads * from + a.plain,
                out + uint64_t(row) * a.heads * to + a.latent);
    }
  });
}

// A matrix of each head, turned: [heads, rows, columns] into [heads, columns, rows].
FN void turn_over(const verify_turn_over_args& a, const Block<256>& block) {
  block.each([&](uint32_t t) {
    const uint64_t size = uint64_t(a.rows) * a.columns, count = size * a.heads;
    for (uint64_t i = uint64_t(block.index) * 256 + t; i < count; i += uint64_t(a.blocks) * 256) {
      const uint64_t head = i / size, column = i % size / a.rows, row = i % a.rows;
      at<bf16>(a.out)[i] = at<const bf16>(a.in)[head * size + row * a.columns + column];
    }
  });
}

#endif
