// What stands between the projections of attention: the norms of both latents, rotary positions, the cache row.
#ifndef VERIFY_LATENTS_CUH
#define VERIFY_LATENTS_CUH

#include "norm.cuh"

// Neighbours are the pairs: element 2 i and 2 i + 1 turn by the pair's angle.
FN void turn_pair(const float* turns, uint32_t pair, const bf16* from, bf16* to) {
  const float cosine = turns[2 * pair], sine = turns[2 * pair + 1];
  const float x = up(from[2 * pair]), y = up(from[2 * pair + 1]);
  to[2 * pair] = down(rounded_add(rounded_mul(x, cosine), -rounded_mul(y, sine)));
  to[2 * pair + 1] = down(rounded_add(rounded_mul(y, cosine), rounded_mul(x, sine)));
}

FN const float* turns_of(uint64_t turns, const verify_batch& batch, uint32_t row, uint32_t rotary) {
  return at<const float>(turns) + uint64_t(at<const uint32_t>(batch.positions)[row]) * rotary;
}

// One row of the batch.
FN void latents(const verify_latents_args& a, const Block<256>& block) {
  const uint32_t row = block.index, width = a.kv_latent + a.rotary;
  const bf16* query = at<const bf16>(a.fused) + uint64_t(row) * (a.query_latent + width);
  const bf16* key = query + a.query_latent;
  bf16* cached = at<bf16>(a.cache) + uint64_t(at<const uint32_t>(a.batch.slots)[row]) * width;
  norm_row(block, a.query_latent, at<const bf16>(a.query_gamma), a.eps,
           at<bf16>(a.query_latents) + uint64_t(row) * a.query_latent,
           [&](uint32_t p, float* x) { unpack(query + p * 8, x); });
  norm_row(block, a.kv_latent, at<const bf16>(a.key_gamma), a.eps, cached,
           [&](uint32_t p, float* x) { unpack(key + p * 8, x); });
  const float* turns = turns_of(a.turns, a.batch, row, a.rotary);
  block.each([&](uint32_t t) {
    for (uint32_t pair = t; pair < a.rotary / 2; pair += 256)
      turn_pair(turns, pair, key + a.kv_latent, cached + a.kv_latent);
  });
}

// The heads' queries of one row.
FN void turn(const verify_turn_args& a, const Block<256>& block) {
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
