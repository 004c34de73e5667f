// Attention in the latent space: all heads read the same cache row, so 16 queries (a row and a head each) of a sequence
// read each tile of keys once, as one matrix product. The keys of a sequence are cut into chunks of a fixed size, a
// block each; the grid is that of the longest context, and blocks behind the end of theirs return. `merge` puts the
// chunks together.
#ifndef VERIFY_ATTEND_CUH
#define VERIFY_ATTEND_CUH

#include "simt.cuh"

constexpr uint32_t CHUNK = VERIFY_CHUNK, QUERIES = VERIFY_QUERIES;
// Rows of shared memory are longer by 16 bytes, so that rows of one matrix begin in different banks.
constexpr uint32_t QUERY_ROW = VERIFY_MOST_CACHE_WIDTH + 8, SCORE_ROW = CHUNK + 4, WEIGHT_ROW = CHUNK + 8;

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
  SHARED(bf16, query[QUERIES * QUERY_ROW]);
  SHARED(float, score[QUERIES * SCORE_ROW]);
  SHARED(bf16, weight[QUERIES * WEIGHT_ROW]);
  const Tile tile(a, block.index);
  if (tile.empty()) return;
  const uint32_t first = tile.chunk * CHUNK;
  const bf16* keys = at<const bf16>(a.cache) + (uint64_t(tile.rows.cache) + first) * a.width;
  const uint64_t part = part_of(a, tile.sequence, tile.tile, tile.chunk);

  // A sequence's queries stand one after the other; what is missing in the last tile is zero.
  const uint32_t packs = a.width / 8;
  const bf16* queries = at<const bf16>(a.queries) + (uint64_t(tile.rows.row) * a.heads + tile.tile * QUERIES) * a.width;
  block.each([&](uint32_t t) {
    for (uint32_t i = t; i < QUERIES * packs; i += 256) {
      const uint32_t q = i / packs, p = i % packs;
      float x[8] = {};
      if (tile.tile * QUERIES + q < tile.queries) {
        const Pack pack = load_pack(queries + uint64_t(q) * a.width + p * 8);
        UNROLL(8)
        for (uint32_t j = 0; j < 8; ++j) x[j] = pack[j];
      }
      store_pack(query + q * QUERY_ROW + p * 8, x);
    }
  });
  block.sync();

  // A warp takes 16 keys. Rows behind the sequence's end are somebody else's or zero: numbers, and masked below.
  block.each_warp([&](uint32_t warp) {
    for (uint32_t k = warp * 16; k < CHUNK && first + k < tile.length; k += 8 * 16) {
      Sums sums;
      UNROLL(4)
      for (uint32_t e = 0; e < a.width; e += 16) {
        Left left;
        Right<true> right;
        left.load(query + e, QUERY_ROW);
        right.load(keys + uint64_t(k) * a.width + e, a.width);
        sums.add(left, right);
      }
      sums.store(score + k, SCORE_ROW);
    }
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

  // A warp takes 16 columns of the latent at a time.
  block.each_warp([&](uint32_t warp) {
    for (uint32_t c = warp * 16; c < a.latent; c += 8 * 16) {
      Sums sums;
      UNROLL(4)
      for (uint32_t k = 0; k < CHUNK; k += 16) {
        if (first + k >= tile.length) break;
        Left left;
        Right<false> right;
        left.load(weight + k, WEIGHT_ROW);
        right.load(keys + uint64_t(k) * a.width + c, a.width);
        sums.add(left, right);
      }
      sums.store(at<float>(a.parts) + part * QUERIES * a.latent + c, a.latent);
    }
  });
}

// One query: the chunks' results, each weighted with its share of the sum of exponentials.
FN void merge(const verify_attend_args& a, const Block<128>& block) {
  const uint32_t row = block.index / a.heads, head = block.index % a.heads;
  const uint32_t sequence = at<const uint32_t>(a.batch.sequence)[row];
  const verify_block rows = at<const verify_block>(a.batch.blocks)[sequence];
  const uint32_t query = (row - rows.row) * a.heads + head;
  const uint32_t chunks = (rows.context + rows.rows + CHUNK - 1) / CHUNK;
  const uint64_t part = part_of(a, sequence, query / QUERIES, 0);
  const float* stats = at<const float>(a.stats) + (part * QUERIES + query % QUERIES) * 2;
  const float* parts = at<const float>(a.parts) + (part * QUERIES + query % QUERIES) * a.latent;
  bf16* out = at<bf16>(a.out) + uint64_t(block.index) * a.latent;
  block.each([&](uint32_t t) {
    float largest = NOTHING_SEEN;
    for (uint32_t c = 0; c < chunks; ++c) largest = fmaxf(largest, stats[c * QUERIES * 2]);
    float total = 0.0f;
    for (uint32_t c = 0; c < chunks; ++c)
      total += stats[c * QUERIES * 2 + 1] * exponential(stats[c * QUERIES * 2] - largest);
    for (uint32_t i = t; i < a.latent; i += 128) {
      float sum = 0.0f;
      for (uint32_t c = 0; c < chunks; ++c)
        sum += parts[uint64_t(c) * QUERIES * a.latent + i] * exponential(stats[c * QUERIES * 2] - largest);
      out[i] = down(sum / total);
    }
  });
}

#endif
