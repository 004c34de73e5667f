// Which experts a row goes to, and which rows an expert has: decided on the device, so that a graph can hold the whole
// pass.
#ifndef VERIFY_ROUTE_CUH
#define VERIFY_ROUTE_CUH

#include "simt.cuh"

// Experts that one lane looks after: e, e + 32, ...
constexpr uint32_t EXPERTS_OF_LANE = VERIFY_MOST_EXPERTS / 32;

// One row, one warp. Scores are sigmoids; a bias is added for the choice alone. Groups count by their best two; of the
// kept groups the best experts are taken, of equals the lower; they are listed in ascending order.
FN void route(const verify_route_args& a, const Block<32>& block) {
  SHARED(uint32_t, taken[VERIFY_MOST_KEPT]);
  SHARED(float, score_of[VERIFY_MOST_KEPT]);
  const float* logits = at<const float>(a.logits) + uint64_t(block.index) * a.experts;
  const float* bias = at<const float>(a.bias);
  const uint32_t size = a.experts / a.groups;
  const auto score = [&](uint32_t e) { return 1.0f / (1.0f + exponential(-logits[e])); };
  // What each expert is picked by, as a key; 0 for what is no expert.
  Block<32>::Own<uint64_t[EXPERTS_OF_LANE]> picking;
  block.each([&](uint32_t t) {
    UNROLL(16)
    for (uint32_t i = 0; i < EXPERTS_OF_LANE; ++i) {
      const uint32_t e = t + 32 * i;
      picking[t][i] = e < a.experts ? key_of(score(e) + bias[e], e) : 0;
    }
  });
  // The best of those experts that `counts`.
  const auto best = [&](auto counts) {
    Block<32>::Own<uint64_t> key;
    block.each([&](uint32_t t) {
      key[t] = 0;
      UNROLL(16)
      for (uint32_t i = 0; i < EXPERTS_OF_LANE; ++i)
        if (counts(t + 32 * i) && picking[t][i] > key[t]) key[t] = picking[t][i];
    });
    return block_max<32>(block, key);
  };

  // A bit for each group that is kept. Where none is left out there is nothing to compare.
  uint64_t kept = ~0ull;
  if (a.kept_groups < a.groups) {
    kept = 0;
    Block<32>::Own<uint64_t[2]> groups;  // the lane's groups: t and t + 32
    block.each([&](uint32_t t) { groups[t][0] = groups[t][1] = 0; });
    for (uint32_t g = 0; g < a.groups; ++g) {
      const uint64_t first = best([&](uint32_t e) { return e / size == g; });
      const uint64_t second = best([&](uint32_t e) { return e / size == g && e != index_of(first); });
      const uint64_t key = key_of(value_of(first) + value_of(second), g);
      block.each([&](uint32_t t) {
        if (g == t) groups[t][0] = key;
        if (g == t + 32) groups[t][1] = key;
      });
    }
    for (uint32_t k = 0; k < a.kept_groups; ++k) {
      Block<32>::Own<uint64_t> key;
      block.each([&](uint32_t t) {
        key[t] = 0;
        for (uint32_t i = 0; i < 2; ++i)
          if (groups[t][i] > key[t] && !(kept >> index_of(groups[t][i]) & 1)) key[t] = groups[t][i];
      });
      kept |= 1ull << index_of(block_max<32>(block, key));
    }
  }

  // One after the other; what is taken is struck out.
  for (uint32_t k = 0; k < a.kept; ++k) {
    const uint32_t expert = index_of(best([&](uint32_t e) { return kept >> (e / size) & 1; }));
    block.each([&](uint32_t t) {
      UNROLL(16)
      for (uint32_t i = 0; i < EXPERTS_OF_LANE; ++i)
        if (t + 32 * i == expert) picking[t][i] = 0;
      if (t == 0) taken[k] = expert, score_of[k] = score(expert);
    });
  }
  block.sync();
  float sum = 0.0f;
  for (uint32_t k = 0; k < a.kept; ++k) sum += score_of[k];
  block.each([&](uint32_t t) {
    if (t >= a.kept) return;
    uint32_t place = 0;
    for (uint32_t k = 0; k < a.kept; ++k) place += taken[k] < taken[t];
    const uint64_t to = uint64_t(block.index) * a.kept + place;
    at<uint32_t>(a.chosen)[to] = taken[t];
    at<float>(a.weights)[to] = score_of[t] / (sum + 1e-20f) * a.scale;
  });
}

// Sorts the pairs of all rows by expert; one block. A slot is an expert that has pairs, in ascending order; within a
// slot the pairs are too. Every thread counts for its own expert, so that nothing depends on who comes first.
FN void dispatch(const verify_dispatch_args& a, const Block<VERIFY_MOST_EXPERTS>& block) {
  SHARED(uint32_t, counts[VERIFY_MOST_EXPERTS]);
  const uint32_t* chosen = at<const uint32_t>(a.chosen);
  uint32_t* slots = at<uint32_t>(a.slots);
  uint32_t *expert_of = slots + 1, *first_of = slots + 1 + a.experts;
  block.each([&](uint32_t t) {
    uint32_t count = 0;
    if (t < a.experts) {
      UNROLL(8)
      for (uint32_t p = 0; p < a.pairs; ++p) count += chosen[p] == t;
    }
    counts[t] = count;
  });
  block.sync();
  block.each([&](uint32_t t) {
    if (t >= a.experts) return;
    uint32_t first = 0, slot = 0;
    UNROLL(8)
    for (uint32_t e = 0; e < t; ++e) first += counts[e], slot += counts[e] > 0;
    if (t == a.experts - 1) {
      const uint32_t used = slot + (counts[t] > 0);
      slots[0] = used;
      first_of[used] = a.pairs;
    }
    if (counts[t] == 0) return;
    expert_of[slot] = t;
    first_of[slot] = first;
    for (uint32_t p = 0; p < a.pairs; ++p)
      if (chosen[p] == t) at<uint32_t>(a.order)[first++] = p;
  });
}

#endif
