// The add and the norm of rows that are spread over blocks: what a thread does with its packs once the all-reduce has
// them (unrolled.cuh), around what the blocks tell each other (spread.cuh).
//
// After one phase a thread has a pack of each of its units, and if that is one unit, in registers, r and gamma with it.
// After two phases it has a pack of every piece. What is done for each of them is long, and fetched anew by every
// launch, so it is a loop; and they stand where a loop can index: in the block's shared memory or, if the thread has
// more than one unit, in the caller's output and residual_out. What is there the thread itself has stored; what is in
// shared memory any thread can take, so a block has more threads than units, in groups, and the groups share the packs
// of each.
#ifndef PEERLANE_SPREAD_NORM_CUH
#define PEERLANE_SPREAD_NORM_CUH

#include "spread.cuh"

namespace PL_NAMESPACE {

constexpr uint32_t MOST_GROUPS = 4;

template <class D, class Steps>
struct SpreadNorm {
  Steps& steps;
  Step& s;
  SpreadRows<D> rows;
  const bool kept;  // each thread has one unit at most
  // KEPT of two phases: the number of this thread's group and of all, and the block's unit that is the thread's.
  uint32_t group = 0, groups = 1, unit;

  PL_FN explicit SpreadNorm(Steps& of)
      : steps(of), s(of.s), rows(of.s), kept(of.turns.once(of.u.widest)), unit(dev::tid()) {
    if (Steps::ONE || !kept) return;
    const uint32_t size = (of.u.step.block_units + dev::WARP - 1) / dev::WARP * dev::WARP;
    PL_EACH
    for (uint32_t g = 1; g < MOST_GROUPS; ++g) {
      groups += (g + 1) * size <= dev::threads();
      group += dev::tid() >= g * size;
    }
    unit -= group * size;
    if (group >= groups) unit = ~0u;
  }

  // Calls `f(row, j)` for the units whose packs are this thread's, or its group's.
  template <class F>
  PL_FN void each_unit(F f) const {
    const Units& units = steps.turns;
    if (Steps::ONE || !kept) {
      units.each(units.widest, [&](uint32_t row, uint32_t j) {
        f(row, j);
        return true;
      });
    } else if (unit < units.end - units.begin) {
      const uint32_t row = units.row_of(units.begin + unit);
      f(row, units.begin + unit - row * units.row_units);
    }
  }

  // Calls `use(at, span, raw)` for the packs of a unit, `raw` being what is at `from(span)`, asked for a pack ahead.
  template <class From, class Use>
  PL_FN void each_place(uint32_t row, uint32_t j, From from, Use use) {
    Span next;
    dev::Raw loaded;
    bool on = group < Steps::PLACES && steps.place(group, row, j, next);
    if (on) dev::pack_load(loaded, from(next));
    PL_ROLL
    for (uint32_t at = group; at < Steps::PLACES; at += groups) {
      const Span span = next;
      dev::Raw raw = loaded;
      const bool here = on;
      on = at + groups < Steps::PLACES && steps.place(at + groups, row, j, next);
      if (on) dev::pack_load(loaded, from(next));
      if (here) use(at, span, raw);
    }
  }

  PL_FN void add_unit(uint32_t row, uint32_t j) {
    const auto residual_of = [&](const Span& span) { return rows.residual(span); };
    each_place(row, j, residual_of, [&](uint32_t at, const Span& span, dev::Raw& r) {
      dev::Raw sum;
      if (kept)
        dev::kept<Steps::PLACES>(at, unit, sum);
      else
        dev::pack_load(sum, steps.output(span));
      rows.add(row, span, sum, r);
      if (kept) dev::keep<Steps::PLACES>(at, unit, r);
    });
  }

  PL_FN void norm_unit(uint32_t row, uint32_t j, float scale) {
    if constexpr (Steps::ONE) {
      const Span span = steps.operand(steps.u.phase[0], row, j, 0);
      if (!kept) {
        dev::pack_load(steps.r, residual_out_at(s, span.in_tile));
        dev::pack_load(steps.gamma, rows.gamma(row, span));
      }
      scale_pack<D, true>(steps.r, scale, steps.gamma, s.a.weight_bias, steps.output(span));
    } else {
      const auto gamma_of = [&](const Span& span) { return rows.gamma(row, span); };
      each_place(row, j, gamma_of, [&](uint32_t at, const Span& span, const dev::Raw& gamma) {
        dev::Raw r;
        if (kept)
          dev::kept<Steps::PLACES>(at, unit, r);
        else
          dev::pack_load(r, residual_out_at(s, span.in_tile));
        scale_pack<D, true>(r, scale, gamma, s.a.weight_bias, steps.output(span));
      });
    }
  }

  // Norms this block's packs; false, for all its threads alike, if a thread was not `ok` or another block's squares did
  // not come. A thread that is not has told so already: the others wait for what it has not posted.
  PL_FN bool run(bool ok) {
    const Units& units = steps.turns;
    if (units.none()) return ok;
    if constexpr (!Steps::ONE) {
      // The barrier puts the packs of all groups before what takes them.
      if (kept && dev::any_in_block(!ok)) return false;
      if (ok) each_unit([&](uint32_t row, uint32_t j) { add_unit(row, j); });
    }
    const uint32_t last = units.row_of(units.end - 1);
    uint32_t set = 0;
    PL_ROLL
    for (uint32_t from = units.row_of(units.begin); from <= last; from += dev::ROWS_AT_ONCE) {
      const uint32_t here = last - from < dev::ROWS_AT_ONCE ? last - from + 1 : dev::ROWS_AT_ONCE;
      if (!rows.gather(ok, from, here, set, dev::threads())) return false;
      each_unit([&](uint32_t row, uint32_t j) {
        if (row - from < here) norm_unit(row, j, rows.scale(row - from, set));
      });
      set ^= 1;
    }
    return true;
  }
};

}  // namespace PL_NAMESPACE

#endif
