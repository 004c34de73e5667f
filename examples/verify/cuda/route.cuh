// Which experts a row goes to, and which rows an expert has: decided on the device, so that a graph can hold the whole
// pass.
#ifndef VERIFY_ROUTE_CUH
#define VERIFY_ROUTE_CUH

#include "product.cuh"

// Experts that one lane looks after: e, e + 32, ...
constexpr uint32_t EXPERTS_OF_LANE = VERIFY_MOST_EXPERTS / 32;

// Eight rows from `first_row` on, one by each warp. A logit is the sum of PARTS parts. Scores are sigmoids; a bias is
// added for the choice alone. Groups count by their best two; of the kept groups the best experts are taken, of equals
// the lower; they are listed in ascending order.
template <uint32_t PARTS>
FN void route_rows(const verify_route_args& a, const Block<256>& block, uint32_t first_row) {
  typedef Block<256> B;
  SHARED(uint32_t, taken[8 * VERIFY_MOST_KEPT]);
  SHARED(float, score_of[8 * VERIFY_MOST_KEPT]);
  const float *logits = at<const float>(a.logits), *bias = at<const float>(a.bias);
  const uint32_t size = a.experts / a.groups;
  const auto row_of = [&](uint32_t t) { return first_row + t / 32; };
  // Of each expert its score, its group, and what it is picked by, as a key; 0 for what is no expert.
  B::Own<float[EXPERTS_OF_LANE]> scores;
  B::Own<uint32_t[EXPERTS_OF_LANE]> group;
  B::Own<uint64_t[EXPERTS_OF_LANE]> picking;
  block.each([&](uint32_t t) {
    UNROLL(4)
    for (uint32_t from = 0; from < EXPERTS_OF_LANE; from += 4) {
      UNROLL(4)
      for (uint32_t i = from; i < from + 4; ++i) scores[t][i] = 0.0f, group[t][i] = 0, picking[t][i] = 0;
      if (32 * from >= a.experts) continue;
      // All loads first; behind the last expert or row the last one is loaded again.
      float parts[4][PARTS], offset[4];
      const uint32_t row = row_of(t) < a.rows ? row_of(t) : a.rows - 1;
      UNROLL(4)
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t e = t % 32 + 32 * (from + i), expert = e < a.experts ? e : a.experts - 1;
        UNROLL(4)
        for (uint32_t p = 0; p < PARTS; ++p)
          parts[i][p] = load_published(logits + (uint64_t(p) * a.rows + row) * a.experts + expert);
        offset[i] = bias[expert];
      }
      UNROLL(4)
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t e = t % 32 + 32 * (from + i);
        float logit = 0.0f;
        UNROLL(4)
        for (uint32_t p = 0; p < PARTS; ++p) logit += parts[i][p];
        scores[t][from + i] = 1.0f / (1.0f + exponential(-logit));
        group[t][from + i] = e / size;
        if (e < a.experts) picking[t][from + i] = key_of(scores[t][from + i] + offset[i], e);
      }
    }
  });
  // The best of those experts that `counts`, in all lanes of the row's warp.
  const auto best = [&](B::Own<uint64_t>& key, auto counts) {
    block.each([&](uint32_t t) {
      key[t] = 0;
      UNROLL(16)
      for (uint32_t i = 0; i < EXPERTS_OF_LANE; ++i)
        if (picking[t][i] > key[t] && counts(t, i)) key[t] = picking[t][i];
    });
    block.warp_max(key);
  };

  // Where no group is left out there is nothing to compare.
  if (a.kept_groups < a.groups) {
    B::Own<uint64_t> kept;       // a bit for each group
    B::Own<uint64_t[2]> groups;  // the lane's groups: lane and lane + 32
    block.each([&](uint32_t t) { kept[t] = groups[t][0] = groups[t][1] = 0; });
    for (uint32_t g = 0; g < a.groups; ++g) {
      B::Own<uint64_t> first, second;
      best(first, [&](uint32_t t, uint32_t i) { return group[t][i] == g; });
      best(second, [&](uint32_t t, uint32_t i) { return group[t][i] == g && picking[t][i] != first[t]; });
      block.each([&](uint32_t t) {
        const uint64_t key = key_of(value_of(first[t]) + value_of(second[t]), g);
        if (g == t % 32) groups[t][0] = key;
        if (g == t % 32 + 32) groups[t][1] = key;
      });
    }
    for (uint32_t k = 0; k < a.kept_groups; ++k) {
      B::Own<uint64_t> key;
      block.each([&](uint32_t t) { key[t] = groups[t][0] > groups[t][1] ? groups[t][0] : groups[t][1]; });
      block.warp_max(key);
      block.each([&](uint32_t t) {
        kept[t] |= 1ull << (index_of(key[t]) & 63);
        for (uint32_t i = 0; i < 2; ++i)
          if (groups[t][i] == key[t]) groups[t][i] = 0;
      });
    }
    block.each([&](uint32_t t) {
      UNROLL(16)
      for (uint32_t i = 0; i < EXPERTS_OF_LANE; ++i)
        if (!(kept[t] >> (group[t][i] & 63) & 1)) picking[t][i] = 0;
    });
  }

  // One after the other; what is taken is struck out.
  for (uint32_t k = 0; k < a.kept; ++k) {
    B::Own<uint64_t> key;
    best(key, [](uint32_t, uint32_t) { return true; });
    block.each([&](uint32_t t) {
      const uint32_t expert = index_of(key[t]);
      UNROLL(16)
      for (uint32_t i = 0; i < EXPERTS_OF_LANE; ++i) {
        if (t % 32 + 32 * i != expert || row_of(t) >= a.rows) continue;
        picking[t][i] = 0;
        taken[t / 32 * VERIFY_MOST_KEPT + k] = expert;
        score_of[t / 32 * VERIFY_MOST_KEPT + k] = scores[t][i];
      }
    });
  }
  block.sync();
  block.each([&](uint32_t t) {
    const uint32_t lane = t % 32;
    if (lane >= a.kept || row_of(t) >= a.rows) return;
    const uint32_t* experts = taken + t / 32 * VERIFY_MOST_KEPT;
    const float* of_row = score_of + t / 32 * VERIFY_MOST_KEPT;
    uint32_t place = 0;
    float sum = 0.0f;
    for (uint32_t k = 0; k < a.kept; ++k) place += experts[k] < experts[lane], sum += of_row[k];
    const uint64_t to = uint64_t(row_of(t)) * a.kept + place;
    at<uint32_t>(a.chosen)[to] = experts[lane];
    at<float>(a.weights)[to] = of_row[lane] / (sum + 1e-20f) * a.scale;
  });
  block.sync();
}

FN void route(const verify_route_args& a, const Block<256>& block) { route_rows<1>(a, block, block.index * 8); }

// Part `part` of the hidden dimension for 16 experts.
template <uint32_t GROUPS>
FN void router_tile(const verify_router_args& a, const Block<256>& block, float* shared, uint32_t tile, uint32_t part) {
  const verify_route_args& r = a.route;
  const bf16 *gate = at<const bf16>(a.gate), *x = at<const bf16>(a.x);
  block.each_warp([&](uint32_t warp) {
    const Span span(a.hidden, part * 8 + warp, VERIFY_ROUTER_PARTS * 8);
    Strip<1, GROUPS> strip;
    strip.template add<4>(
        span.first, span.end,
        [&](uint32_t o, uint32_t k) {
          const uint32_t e = tile * 16 + o < r.experts ? tile * 16 + o : r.experts - 1;
          return load_weights(gate + uint64_t(e) * a.hidden + k);
        },
        [&](uint32_t j, uint32_t lane, uint32_t k, bool) {
          const uint32_t row = j * 8 + lane / 4;
          return load_pack(x + uint64_t(row < r.rows ? row : r.rows - 1) * a.hidden + k);
        });
    strip.leave(shared, warp);
  });
  block.sync();
  block.each([&](uint32_t t) {
    const uint32_t row = t / 16, e = tile * 16 + t % 16;
    if (row < r.rows && e < r.experts)
      at<float>(r.logits)[(uint64_t(part) * r.rows + row) * r.experts + e] =
          strip_sum<1, GROUPS>(shared, 0, 8, t % 16, row);
  });
}

// Logits and choice of few rows in one launch: the block that is done last finds what the others have left.
FN void router(const verify_router_args& a, const Block<256>& block) {
  SHARED(float, shared[NARROW]);
  SHARED(uint32_t, before);
  const uint32_t tiles = a.blocks / VERIFY_ROUTER_PARTS;
  if (a.route.rows <= 8)
    router_tile<1>(a, block, shared, block.index % tiles, block.index / tiles);
  else
    router_tile<2>(a, block, shared, block.index % tiles, block.index / tiles);
  publish();
  block.sync();
  block.each([&](uint32_t t) {
    if (t == 0) before = count_up(at<uint32_t>(a.arrived));
  });
  block.sync();
  if (before + 1 != a.blocks) return;
  publish();
  block.each([&](uint32_t t) {
    if (t == 0) *at<uint32_t>(a.arrived) = 0;
  });
  for (uint32_t row = 0; row < a.route.rows; row += 8) route_rows<VERIFY_ROUTER_PARTS>(a.route, block, row);
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
