// What stands between the projections of attention: the norms of both latents, rotary positions, the cache row.
#ifndef VERIFY_LATENTS_CUH
#define VERIFY_LATENTS_CUH

#include "norm.cuh"

// Neighbours are the pairs: element 2 i and 2 i + 1 turn by the pair's angle.
FN float value_of(float x) { return x; }
FN float value_of(bf16 x) { return up(x); }
template <class T>
FN void turn_pair(const float* turns, uint32_t pair, const T* from, bf16* to) {
  const float cosine = turns[2 * pair], sine = turns[2 * pair + 1];
  const float x = value_of(from[2 * pair]), y = value_of(from[2 * pair + 1]);
  to[2 * pair] = down(rounded_add(rounded_mul(x, cosine), -rounded_mul(y, sine)));
  to[2 * pair + 1] = down(rounded_add(rounded_mul(y, cosine), rounded_mul(x, sine)));
}

FN const float* turns_of(uint64_t turns, const verify_batch& batch, uint32_t row, uint32_t rotary) {
  return at<const float>(turns) + uint64_t(at<const uint32_t>(batch.positions)[row]) * rotary;
}

// The normed latent and the turned key of one row of the batch.
FN void cache_row(const Block<256>& block, const verify_batch& batch, uint32_t row, const float* key, uint32_t latent,
                  uint32_t rotary, uint64_t gamma, uint64_t turns, float eps, uint64_t cache) {
  bf16* cached = at<bf16>(cache) + uint64_t(at<const uint32_t>(batch.slots)[row]) * (latent + rotary);
  norm_row(block, latent, at<const bf16>(gamma), eps, cached,
           [&](uint32_t p, float* x) { load_floats(key + p * 8, x); });
  const float* of_row = turns_of(turns, batch, row, rotary);
  block.each([&](uint32_t t) {
    for (uint32_t pair = t; pair < rotary / 2; pair += 256) turn_pair(of_row, pair, key + latent, cached + latent);
  });
}

// One row of the batch.
FN void latents(const verify_latents_args& a, const Block<256>& block) {
  const uint32_t row = block.index, stride = a.query_latent + a.kv_latent + a.rotary;
  const float* query = at<const float>(a.fused) + uint64_t(row) * stride;
  norm_row(block, a.query_latent, at<const bf16>(a.query_gamma), a.eps,
           at<bf16>(a.query_latents) + uint64_t(row) * a.query_latent,
           [&](uint32_t p, float* x) { load_floats(query + p * 8, x); });
  cache_row(block, a.batch, row, query + a.query_latent, a.kv_latent, a.rotary, a.key_gamma, a.turns, a.eps, a.cache);
}

// The heads' queries of one row.
FN void rotate(const verify_rotate_args& a, const Block<256>& block) {
  const uint32_t row = block.index, pairs = a.rotary / 2;
  const uint32_t from = a.plain + a.rotary, to = a.latent + a.rotary;
  const bf16* q = at<const bf16>(a.q) + uint64_t(row) * a.heads * from + a.plain;
  bf16* out = at<bf16>(a.out) + uint64_t(row) * a.heads * to + a.latent;
  const float* turns = turns_of(a.turns, a.batch, row, a.rotary);
  block.each([&](uint32_t t) {
    for (uint32_t i = t; i < a.heads * pairs; i += 256) {
      const uint32_t head = i / pairs;
      turn_pair(turns, i % pairs, q + uint64_t(head) * from, out + uint64_t(head) * to);
    }
  });
}

#endif
