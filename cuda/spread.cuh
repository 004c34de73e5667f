// Rows of the fused add + RMSNorm spread over blocks.
//
// A row's norm needs all of it, but one multiprocessor takes long over a row's sends and polls. So the packs of all
// rows are handed out over all blocks, and what the packs of a row have in common, the sum of their squares, the blocks
// tell each other: whoever has r of a pack posts its sum of squares, a float, and every block that has packs of a row
// gathers the floats of all its packs and adds them in the order of add_rms_norm.cuh. Until then r stays in registers.
// (Where a row's blocks are a cluster, they have them through shared memory: cluster.cuh.)
//
// The floats lie in the rank's own memory (pl_step.squares), a word of 64 bits each: the float, and above it the low
// half of the epoch as its tag. Why that is right:
// - A word is stored and loaded whole, so one with this step's tag holds this step's float. No order among words is
//   needed, hence no fence and no barrier between blocks.
// - All blocks of a launch are resident, and each posts all that it has before it waits for a word. So the words come
//   unless a wait for a peer has failed, and then the sticky word ends the wait for them.
// - A word is written once in a launch, read in the same one, and launches of a channel run one after the other: what
//   a launch reads has been written by an earlier one, with another tag, or by itself.
// - A tag does not recur: clear_old_tags in step.cuh clears these words as well. For that, and only for that, there are
//   two halves, by the parity of the epoch: the blocks of the step that clears one are writing to the other.
// What travels between ranks, and where to, does not depend on how a rank hands its packs out.
#ifndef PEERLANE_SPREAD_CUH
#define PEERLANE_SPREAD_CUH

#include "add_rms_norm.cuh"
#include "step.cuh"

namespace PL_NAMESPACE {

// A division by `row_units`; the host has seen to it that it is exact.
PL_FN uint32_t row_of(const pl_step& a, uint32_t unit) {
  return a.row_magic == 0 ? unit : uint32_t(uint64_t(unit) * a.row_magic >> 32);
}

// Which packs this thread takes. A unit is pack j of every piece of a row; units are numbered row after row, and a
// block has a run of them, so that it has to do with few rows. A row may have more numbers than units: then it begins
// with a block.
struct Units {
  const pl_step& step;
  uint32_t widest, row_units;
  uint32_t begin, end;  // of this block
  uint32_t row, first;  // this thread's first unit: pack `first` of row `row`
  bool alone;           // no thread of the block has another; after two phases their packs fit what the block keeps

  template <class Args>
  PL_FN Units(const Step& s, const Args& u) : step(u.step), widest(u.widest), row_units(u.step.row_units) {
    const uint32_t all = uint32_t(s.rows) * row_units;
    begin = dev::block() * u.step.block_units;
    begin = begin < all ? begin : all;
    end = all - begin < u.step.block_units ? all : begin + u.step.block_units;
    row = row_of(begin + dev::tid());
    first = begin + dev::tid() - row * row_units;
    alone = end - begin <= dev::threads() && (u.phases == 1 || end - begin <= dev::KEEPERS);
  }

  PL_FN uint32_t row_of(uint32_t unit) const { return PL_NAMESPACE::row_of(step, unit); }
  PL_FN bool none() const { return begin == end; }
  PL_FN bool any(uint32_t) const { return begin + dev::tid() < end && first < widest; }
  PL_FN bool once(uint32_t) const { return alone; }

  // Calls `f(row, j)` for the units whose pack j is in a piece of `packs` packs, until it returns false.
  template <class F>
  PL_FN bool each(uint32_t packs, F f) const {
    PL_ROLL
    for (uint32_t unit = begin + dev::tid(); unit < end; unit += dev::threads()) {
      const uint32_t r = row_of(unit), j = unit - r * row_units;
      if (j < packs && !f(r, j)) return false;
    }
    return true;
  }
};

// In the place of a pack's squares, that they will not come: a NaN that no arithmetic makes of 16-bit floats.
constexpr uint32_t NO_SQUARES = 0x7fc0dead;

// The packs of rows between the sum and the norm.
template <class D>
struct SpreadRows {
  static constexpr uint32_t AT_ONCE = dev::WORDS_AT_ONCE;

  Step& s;

  PL_FN explicit SpreadRows(Step& step) : s(step) {}

  PL_FN uint64_t tag() const { return uint64_t(uint32_t(s.epoch)) << 32; }
  // The word of a pack. Rows begin at even words, since two neighbours are one load.
  PL_FN char* word(uint32_t row, uint64_t in_tile) const {
    const uint64_t half = (s.epoch & 1) * s.a.squares_half_bytes;
    return static_cast<char*>(s.a.squares) + half + (in_tile + row * (uint32_t(s.packs) & 1)) * 8;
  }
  PL_FN const char* residual(const Span& span) const {
    return static_cast<const char*>(s.a.residual) + span.in_tile * PL_PACK_BYTES;
  }
  PL_FN const char* gamma(uint32_t row, const Span& span) const {
    return static_cast<const char*>(s.a.gamma) + (span.in_tile - row * s.packs) * PL_PACK_BYTES;
  }

  // r of one pack, to memory and over its residual; and its squares' sum to whom it may concern.
  PL_FN void add(uint32_t row, const Span& span, const dev::Raw& sum, dev::Raw& r) {
    const float squares = add_pack<D, true>(sum, r, residual_out_at(s, span.in_tile), r);
    post(word(row, span.in_tile), alone(row, span.in_tile), squares);
  }
  // Whether the word of a pack, the last of an odd row, has no neighbour.
  PL_FN bool alone(uint32_t row, uint64_t in_tile) const { return in_tile + 1 == (row + 1) * s.packs && (s.packs & 1); }
  PL_FN void post(char* word, bool alone, float squares) {
    dev::post_64(word, tag() | dev::bit_cast<uint32_t>(squares));
    if (PL_UNLIKELY(alone)) dev::post_64(word + 8, tag());
  }

  // Adds to lanes `lane` and `lane + 1` of a row what `fetch(p, w)` puts into w: of packs p + k * LANES and their
  // neighbours. Those that are not there are 0, which changes no sum of squares. False if `fetch` is.
  template <class Fetch>
  PL_FN bool add_lanes(uint32_t lane, float (&x)[2], Fetch fetch) {
    PL_ROLL
    for (uint32_t p = lane; p < uint32_t(s.packs); p += AT_ONCE * dev::LANES) {
      uint32_t w[AT_ONCE][2] = {};
      if (!fetch(p, w)) return false;
      PL_EACH
      for (uint32_t k = 0; k < AT_ONCE; ++k) {
        x[0] += dev::bit_cast<float>(w[k][0]);
        x[1] += dev::bit_cast<float>(w[k][1]);
      }
    }
    return true;
  }
  // What they come to.
  PL_FN bool lanes(uint32_t row, uint32_t lane, float (&x)[2]) {
    const uint32_t packs = uint32_t(s.packs);
    const char* words = word(row, row * s.packs);
    return add_lanes(lane, x, [&](uint32_t p, uint32_t(&w)[AT_ONCE][2]) {
      const auto poll = [&] {
        bool all = true;
        PL_EACH
        for (uint32_t k = 0; k < AT_ONCE; ++k) {
          const uint32_t at = p + k * dev::LANES;
          all &= dev::poll_tagged_if(at < packs, words + at * 8, w[k], uint32_t(s.epoch));
        }
        return all;
      };
      return await_twice(s, poll, [&] { return s.a.rank; });
    });
  }
  // Gathers `rows` rows from `from` on, by the first `threads` threads of the block. False, for all of them alike, if
  // one was not `ok` or something did not come. `set` goes 0, 1, 0, ... from call to call.
  PL_FN bool gather(bool& ok, uint32_t from, uint32_t rows, uint32_t set, uint32_t threads) {
    dev::lanes_to_groups(threads, rows, set,
                         [&](uint32_t row, uint32_t lane, float(&x)[2]) { ok = ok && lanes(from + row, lane, x); });
    return !dev::any_of(threads, !ok);
  }
  // The same of one row whose squares stand in this block's shared memory. False if one of them is NO_SQUARES.
  PL_FN bool gather_kept(uint32_t threads) {
    bool missing = false;
    dev::lanes_to_groups(threads, 1, 0, [&](uint32_t, uint32_t lane, float(&x)[2]) {
      add_lanes(lane, x, [&](uint32_t p, uint32_t(&w)[AT_ONCE][2]) {
        PL_EACH
        for (uint32_t k = 0; k < AT_ONCE; ++k) {
          if (p + k * dev::LANES < s.packs) dev::kept_squares(p + k * dev::LANES, w[k]);
          missing = missing || w[k][0] == NO_SQUARES || w[k][1] == NO_SQUARES;
        }
        return true;
      });
    });
    return !dev::any_of(threads, missing);
  }
  // The neighbour there that an odd row's last pack does not have.
  PL_FN void keep_no_neighbour() {
    if (dev::tid() == 0) dev::keep_square_if(s.packs & 1, uint32_t(s.packs), 0.0f);
  }
  PL_FN float scale(uint32_t row, uint32_t set) const {
    return 1.0f / dev::square_root(dev::sum_of_groups(row, set) / float(uint32_t(s.a.width)) + s.a.eps);
  }
};

}  // namespace PL_NAMESPACE

#endif
