// The rows' tokens' rows of the embedding.
#ifndef VERIFY_EMBED_CUH
#define VERIFY_EMBED_CUH

#include "norm.cuh"

FN void embed(const verify_embed_args& a, const Block<256>& block) {
  const uint32_t row = block.index;
  const bf16* from = at<const bf16>(a.table) + uint64_t(at<const uint32_t>(a.batch.tokens)[row]) * a.width;
  bf16* to = at<bf16>(a.out) + uint64_t(row) * a.width;
  block.each([&](uint32_t t) {
    for (uint32_t p = t; p < a.width / 8; p += 256) {
      float x[8];
      unpack(from + p * 8, x);
      store_pack(to + p * 8, x);
    }
  });
}

#endif
