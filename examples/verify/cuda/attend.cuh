// Attention in the latent space: all heads read the same cache row, so 16 queries (a row and a head each) of a sequence
// read each tile of keys once, as one matrix product. The keys of a sequence are cut into chunks of a fixed size, a
// block each; the grid is that of the longest context, and blocks behind the end of theirs return. `merge` puts the
// chunks together.
#ifndef VERIFY_ATTEND_CUH
#define VERIFY_ATTEND_CUH

#include "product.cuh"

constexpr uint32_t CHUNK = VERIFY_CHUNK, QUERIES = VERIFY_QUERIES;
// Rows of shared memory are longer by 16 bytes, so that rows of one matrix begin in different banks.
constexpr uint32_t SCORE_ROW = CHUNK + 4, WEIGHT_ROW = CHUNK + 8;

constexpr float NOTHING_SEEN = -3.0e38f;

// Where a block's queries and its part of the result are.
struct Tile {
  verify_block rows;
  uint32_t length;   // keys of the sequence, those of this batch included
  uint32_t queries;  // of the sequence
  uint32_t sequence, tile, chunk;

  FN Tile(const verify_attend_args& a, uint32_t index) {
    chunk = index % a.chunks, tile = index / a.chunks % a.tiles, sequence = index / a.chunks / a.tiles;
    rows = at<const verify_block>(a.batch.blocks)[sequence];
    length = rows.context + rows.rows;
    queries = rows.rows * a.heads;
  }
  FN bool empty() const { return chunk * CHUNK >= length || tile * QUERIES >= queries; }
};

FN uint64_t part_of(const verify_attend_args& a, uint32_t sequence, uint32_t tile, uint32_t chunk) {
  return (uint64_t(sequence) * a.tiles + tile) * a.chunks + chunk;
}

FN void attend(const verify_attend_args& a, const Block<256>& block) {
  SHARED(float, score[QUERIES * SCORE_ROW]);
  SHARED(bf16, weight[QUERIES * WEIGHT_ROW]);
  const Tile tile(a, block.index);
  if (tile.empty()) return;
  const uint32_t first = tile.chunk * CHUNK, keys = tile.length - first < CHUNK ? tile.length - first : CHUNK;
  const bf16* cache = at<const bf16>(a.cache) + (uint64_t(tile.rows.cache) + first) * a.width;
  const uint64_t part = part_of(a, tile.sequence, tile.tile, tile.chunk);

  // A sequence's queries stand one after the other; in the place of those missing in the last tile is the last one.
  const uint32_t here = tile.queries - tile.tile * QUERIES < QUERIES ? tile.queries - tile.tile * QUERIES : QUERIES;
  const bf16* queries = at<const bf16>(a.queries) + (uint64_t(tile.rows.row) * a.heads + tile.tile * QUERIES) * a.width;

  // A warp takes 16 keys. Rows behind the sequence's end are somebody else's or zero: numbers, and masked below.
  block.each_warp([&](uint32_t warp) {
    if (warp * 16 >= keys) return;
    Strip<1, 2> strip;
    strip.add<3>(
        0, a.width, [&](uint32_t o, uint32_t k) { return load_pack(cache + uint64_t(warp * 16 + o) * a.width + k); },
        [&](uint32_t j, uint32_t lane, uint32_t k, bool) {
          const uint32_t q = j * 8 + lane / 4;
          return load_pack(queries + uint64_t(q < here ? q : here - 1) * a.width + k);
        });
    each_lane([&](uint32_t lane) {
      UNROLL(2)
      for (uint32_t j = 0; j < 2; ++j) UNROLL(4)
      for (uint32_t r = 0; r < 4; ++r)
        score[(j * 8 + lane % 4 * 2 + r % 2) * SCORE_ROW + warp * 16 + lane / 4 + r / 2 * 8] =
            strip.sums[0][j][lane][r];
    });
  });
  block.sync();

  // 16 threads for each query.
  Block<256>::Own<float> largest, total;
  const uint64_t* visible = at<const uint64_t>(a.batch.visible) + tile.rows.row;
  const auto sees = [&](uint32_t t, uint32_t key) {
    const uint32_t q = tile.tile * QUERIES + t / 16;
    if (q >= tile.queries || key >= tile.length) return false;
    return key < tile.rows.context || (visible[q / a.heads] >> (key - tile.rows.context) & 1) != 0;
  };
  block.each([&](uint32_t t) {
    float x = NOTHING_SEEN;
    for (uint32_t k = t % 16; k < CHUNK; k += 16)
      if (sees(t, first + k)) x = fmaxf(x, score[t / 16 * SCORE_ROW + k] * a.scale);
    largest[t] = x;
  });
  block.group_max(largest, 16);
  block.each([&](uint32_t t) {
    float sum = 0.0f;
    for (uint32_t k = t % 16; k < CHUNK; k += 16) {
      float x = 0.0f;
      if (sees(t, first + k)) x = exponential(score[t / 16 * SCORE_ROW + k] * a.scale - largest[t]);
      const bf16 rounded = down(x);
      weight[t / 16 * WEIGHT_ROW + k] = rounded;
      sum += up(rounded);
    }
    total[t] = sum;
  });
  block.group_sum(total, 16);
  block.each([&](uint32_t t) {
    if (t % 16 != 0) return;
    float* stats = at<float>(a.stats) + (part * QUERIES + t / 16) * 2;
    stats[0] = largest[t], stats[1] = total[t];
  });
  block.sync();

  // A warp takes 32 columns of the latent at a time. Keys behind the end have no weight; behind the cache's end are
  // rows of zeros.
  block.each_warp([&](uint32_t warp) {
    for (uint32_t c = warp * 32; c < a.latent; c += 8 * 32) {
      Lanes<float[4]> sums[4];
      each_lane([&](uint32_t lane) {
        UNROLL(4)
        for (uint32_t j = 0; j < 4; ++j) UNROLL(4)
        for (uint32_t r = 0; r < 4; ++r) sums[j][lane][r] = 0.0f;
      });
      for (uint32_t k = 0; k < keys; k += 64) {
        Lanes<Pack> low[4], high[4];
        Lanes<Quad> left[4];
        each_lane([&](uint32_t lane) {
          UNROLL(4)
          for (uint32_t d = 0; d < 4; ++d) {
            const bf16* from = cache + uint64_t(k + d * 16 + lane / 4) * a.width + c + lane % 4 * 8;
            low[d][lane] = load_pack(from);
            high[d][lane] = load_pack(from + 8 * uint64_t(a.width));
          }
          UNROLL(4)
          for (uint32_t d = 0; d < 4; ++d) {
            const bf16* w = weight + lane / 4 * WEIGHT_ROW + k + d * 16 + lane % 4 * 2;
            left[d][lane] =
                Quad{{load_two(w), load_two(w + 8 * WEIGHT_ROW), load_two(w + 8), load_two(w + 8 * WEIGHT_ROW + 8)}};
          }
        });
        UNROLL(4)
        for (uint32_t d = 0; d < 4; ++d) multiply_over(sums, left[d], low[d], high[d]);
      }
      each_lane([&](uint32_t lane) {
        UNROLL(2)
        for (uint32_t half = 0; half < 2; ++half) {
          const uint32_t q = lane / 4 + half * 8;
          float* out = at<float>(a.parts) + (part * QUERIES + q) * a.latent + c + lane % 4 * 8;
          UNROLL(4)
          for (uint32_t j = 0; j < 4; ++j)
            if (q < here) out[2 * j] = sums[j][lane][2 * half], out[2 * j + 1] = sums[j][lane][2 * half + 1];
        }
      });
    }
  });
}

// Where the parts of a row's and head's query are.
struct Parts {
  const float *stats, *parts;
  uint32_t chunks, latent;

  template <class Args>
  FN Parts(const Args& a, uint32_t row, uint32_t head) {
    const uint32_t sequence = at<const uint32_t>(a.batch.sequence)[row];
    const verify_block rows = at<const verify_block>(a.batch.blocks)[sequence];
    const uint32_t query = (row - rows.row) * a.heads + head;
    const uint64_t part = (uint64_t(sequence) * a.tiles + query / QUERIES) * a.chunks;
    chunks = (rows.context + rows.rows + CHUNK - 1) / CHUNK, latent = a.latent;
    stats = at<const float>(a.stats) + (part * QUERIES + query % QUERIES) * 2;
    parts = at<const float>(a.parts) + (part * QUERIES + query % QUERIES) * latent;
  }
  FN float largest(uint32_t chunk) const { return stats[chunk * QUERIES * 2]; }
  FN float total(uint32_t chunk) const { return stats[chunk * QUERIES * 2 + 1]; }
  FN const float* values(uint32_t chunk) const { return parts + uint64_t(chunk) * QUERIES * latent; }

  // What each chunk's values are multiplied with: its share of the sum of exponentials.
  template <class Use>
  FN void shares(Use use) const {
    float most = NOTHING_SEEN, sum = 0.0f;
    for (uint32_t c = 0; c < chunks; ++c) most = fmaxf(most, largest(c));
    for (uint32_t c = 0; c < chunks; ++c) sum += total(c) * exponential(largest(c) - most);
    for (uint32_t c = 0; c < chunks; ++c) use(c, exponential(largest(c) - most) / sum);
  }
};

// One query: the chunks' results put together.
FN void merge(const verify_attend_args& a, const Block<128>& block) {
  const Parts parts(a, block.index / a.heads, block.index % a.heads);
  bf16* out = at<bf16>(a.out) + uint64_t(block.index) * a.latent;
  block.each([&](uint32_t t) {
    for (uint32_t i = t; i < a.latent; i += 128) {
      float sum = 0.0f;
      parts.shares([&](uint32_t c, float share) { sum += parts.values(c)[i] * share; });
      out[i] = down(sum);
    }
  });
}

// A head's values from what its queries saw. Few chunks of few rows are put together here, by every block of the head:
// that is less than a launch.
FN void values(const verify_values_args& a, const Block<256>& block) {
  constexpr uint32_t ROW = VERIFY_MOST_CACHE_WIDTH + 8;
  SHARED(float, shared[WIDEST]);
  SHARED(bf16, merged[FEW * ROW]);
  SHARED(float, share[FEW * VERIFY_FEW_CHUNKS]);
  const uint32_t tiles = a.blocks / a.heads, head = block.index / tiles, tile = block.index % tiles;
  const uint32_t rows = a.batch.rows, packs = a.latent / 8;
  block.each([&](uint32_t t) {
    if (t >= rows) return;
    Parts(a, t, head).shares([&](uint32_t c, float of_chunk) { share[t * VERIFY_FEW_CHUNKS + c] = of_chunk; });
  });
  block.sync();
  block.each([&](uint32_t t) {
    for (uint32_t i = t; i < rows * packs; i += 256) {
      const uint32_t row = i / packs, p = i % packs;
      const Parts parts(a, row, head);
      float sum[8] = {};
      UNROLL(4)
      for (uint32_t c = 0; c < parts.chunks; ++c) {
        const float* from = parts.values(c) + p * 8;
        const float of_chunk = share[row * VERIFY_FEW_CHUNKS + c];
        UNROLL(8)
        for (uint32_t e = 0; e < 8; ++e) sum[e] += from[e] * of_chunk;
      }
      store_pack(merged + row * ROW + p * 8, sum);
    }
  });
  block.sync();
  const auto source = [&](uint32_t) { return Plain{merged, ROW}; };
  const auto put = [&](uint32_t row, uint32_t column, float sum) {
    at<bf16>(a.out)[(uint64_t(row) * a.heads + head) * a.value + column] = down(sum);
  };
  const bf16* weights = at<const bf16>(a.value_up) + uint64_t(head) * a.value * a.latent;
  if (rows <= 8)
    product_tile<2, 1>(block, shared, weights, tile, rows, a.latent, a.value, a.splits, source, put);
  else
    product_tile<2, 2>(block, shared, weights, tile, rows, a.latent, a.value, a.splits, source, put);
}

#endif
