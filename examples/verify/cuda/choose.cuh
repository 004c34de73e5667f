// What a pass ends with: the token that each row chooses, and how many of a sequence's drafted tokens a greedy verifier
// accepts.
#ifndef VERIFY_CHOOSE_CUH
#define VERIFY_CHOOSE_CUH

#include "simt.cuh"

// The key of a row's largest logit, the lower token of equals: the maximum over ranks is the choice over the
// vocabulary.
FN void choose(const verify_choose_args& a, const Block<512>& block) {
  const float* logits = at<const float>(a.logits) + uint64_t(block.index) * a.width;
  Block<512>::Own<uint64_t> key;
  block.each([&](uint32_t t) {
    key[t] = 0;
    UNROLL(4)
    for (uint32_t i = t; i < a.width; i += 512) {
      const uint64_t mine = key_of(logits[i], a.first + i);
      if (mine > key[t]) key[t] = mine;
    }
  });
  const uint64_t largest = block_max<512>(block, key);
  block.each([&](uint32_t t) {
    if (t == 0) at<uint64_t>(a.keys)[block.index] = largest;
  });
}

// From row 0 along the rows whose token is what the row before them chose, and one more token that the last of them
// chose. A row's parent is the last row before it that it sees.
FN void accept(const verify_accept_args& a, const Block<32>& block) {
  block.each([&](uint32_t t) {
    for (uint32_t s = t; s < a.batch.sequences; s += 32) {
      const verify_block rows = at<const verify_block>(a.batch.blocks)[s];
      const uint32_t* tokens = at<const uint32_t>(a.batch.tokens) + rows.row;
      const uint64_t* visible = at<const uint64_t>(a.batch.visible) + rows.row;
      const uint64_t* keys = at<const uint64_t>(a.keys) + rows.row;
      uint32_t last = 0, accepted = 1;
      for (uint32_t row = 1; row < rows.rows; ++row) {
        uint64_t ancestors = visible[row] & ((1ull << row) - 1);
        uint32_t parent = 64;
        for (uint32_t i = 0; i < row; ++i)
          if (ancestors >> i & 1) parent = i;
        if (parent == last && tokens[row] == index_of(keys[last])) last = row, ++accepted;
      }
      at<uint32_t>(a.accepted)[s] = accepted;
    }
  });
}

FN void stamp(const verify_stamp_args& a, const Block<32>& block) {
  block.each([&](uint32_t t) {
    if (t == 0) *at<uint64_t>(a.out) = clock_ns();
  });
}

#endif
