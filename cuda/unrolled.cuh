// The usual path: schedules of one or two phases by a word protocol, with the loops over peers unrolled.
//
// It does what the walk over the table does (all_reduce.cuh), pack for pack and in the same order, but what depends on
// the table alone has been worked out by the host: where a slot is, which packs a piece has, which leaf of the sum an
// operand is. At these sizes the time of a step is the latency of its chain of instructions, and a walk has a thousand.
// Where a thread has one pack of each piece at most, straight.cuh has it shorter still.
//
// The rules of the walk hold here too. Phase-major: in a phase all sends come first, then all waits. Pack j of every
// piece belongs to the same thread in all phases, so phases need no synchronisation among threads; pack 0 belongs to
// block 0, on which clear_old_tags relies.
//
// The host hands over only what needs no care at its edges: whole packs, aligned buffers, sums and averages.
#ifndef PEERLANE_UNROLLED_CUH
#define PEERLANE_UNROLLED_CUH

#include "add_rms_norm.cuh"
#include "spread_norm.cuh"
#include "straight_rows.cuh"

namespace PL_NAMESPACE {

// Which packs this thread takes. Without rows the grid takes turns over a piece. Rows are tiles, and one block's each:
// that is for CPUs, GPUs spread them (spread.cuh).
template <bool ROWS>
struct Turns {
  uint32_t row, rows, row_step;  // ROWS
  uint32_t first, step;          // of a piece

  template <class Args>
  PL_FN Turns(const Step& s, const Args&)
      : row(ROWS ? dev::block() : 0),
        rows(ROWS ? uint32_t(s.rows) : 1),
        row_step(ROWS ? dev::blocks() : 1),
        first((ROWS ? dev::tid() : dev::block() * dev::threads() + dev::tid()) * dev::STRIP),
        step((ROWS ? dev::threads() : dev::blocks() * dev::threads()) * dev::STRIP) {}

  // Whether this thread takes any.
  PL_FN bool any(uint32_t widest) const { return first < widest && row < rows; }

  // Whether no thread takes more than one pack of a piece, so that a result need not be fetched back from memory.
  PL_FN bool once(uint32_t widest) const { return widest <= step && rows <= row_step; }

  // Calls `f(row, j)` until it returns false.
  template <class F>
  PL_FN bool each(uint32_t widest, F f) const {
    PL_ROLL
    for (uint32_t r = row; r < rows; r += row_step) PL_ROLL
    for (uint32_t j = first; j < widest; j += step)
      if (!f(r, j)) return false;
    return true;
  }
};

// On a GPU rows are spread over blocks.
template <bool ROWS, bool SPREAD>
struct TurnsOf {
  using Type = Turns<ROWS>;
};
template <>
struct TurnsOf<true, true> {
  using Type = Units;
};

// Packs from j on of a piece that has `packs` of them (per row), `first` where it begins in the tile.
template <class D, bool ROWS>
PL_FN Span span_of(const Step& s, uint32_t row, uint32_t j, uint32_t first, uint32_t packs) {
  Span span;
  span.in_piece = ROWS ? row * packs + j : j;
  span.in_tile = ROWS ? row * uint32_t(s.packs) + first + j : first + j;
  span.packs = dev::STRIP == 1 || packs - j > dev::STRIP ? dev::STRIP : packs - j;
  span.elems = span.packs * elements<D>();
  span.bytes = span.packs * PL_PACK_BYTES;
  return span;
}

// PHASES 1: the one phase sends the whole tile and sums it, so every piece is the tile. PHASES 2: any of this form.
template <class D, class P, uint32_t K, uint32_t PHASES, bool ROWS>
struct Unrolled {
  using Phase = typename Fan<K>::Phase;
  static constexpr uint32_t LEAVES = K + 1;
  static constexpr bool ONE = PHASES == 1, SPREAD = ROWS && !dev::HOST;

  Step& s;
  const typename Fan<K>::Args& u;
  const typename TurnsOf<ROWS, SPREAD>::Type turns;
  uint64_t half = 0;   // offset of the buffer that the step uses
  dev::Raw carried;    // the result of the last sum, where there is but one
  dev::Raw source[K];  // what the next sends carry; [0] for all if they have one source
  dev::Raw r, gamma;   // SPREAD of one phase: the residual, and then r, and gamma of the last pack

  PL_FN Unrolled(Step& step, const typename Fan<K>::Args& args) : s(step), u(args), turns(step, args) {}

  // Pieces are never parts here, so a pack's address is its place in the tile.
  PL_FN const char* input(const Span& span) const {
    return static_cast<const char*>(s.a.input) + span.in_tile * PL_PACK_BYTES;
  }
  PL_FN char* output(const Span& span) const { return static_cast<char*>(s.a.output) + span.in_tile * PL_PACK_BYTES; }

  PL_FN Span sent(const Phase& ph, uint32_t row, uint32_t j, uint32_t k) const {
    return span_of<D, ROWS>(s, row, j, ONE ? 0 : ph.send_first[k], ONE ? u.widest : ph.send_packs[k]);
  }
  PL_FN Span operand(const Phase& ph, uint32_t row, uint32_t j, uint32_t k) const {
    return span_of<D, ROWS>(s, row, j, ONE ? 0 : ph.item_first[k], ONE ? u.widest : ph.item_packs[k]);
  }
  PL_FN bool one_source(const Phase& ph) const { return ONE || ph.one_source; }
  PL_FN bool sends_result(const Phase& ph) const { return !ONE && ph.result; }

  PL_FN void load(const Phase& ph, uint32_t row, uint32_t j) {
    const bool kept = !dev::HOST && sends_result(ph) && turns.once(u.widest);
    if (one_source(ph)) {
      if (kept) {
        dev::same_view(source[0], carried);
      } else if (ONE || j < ph.send_packs[0]) {  // where all send the tile, it is the rank's own operand too
        load_pack(source[0], ph, row, j, 0);
      }
      return;
    }
    PL_EACH
    for (uint32_t k = 0; k < K; ++k)
      if (j < ph.send_packs[k]) load_pack(source[k], ph, row, j, k);
  }
  PL_FN void load_pack(dev::Raw& raw, const Phase& ph, uint32_t row, uint32_t j, uint32_t k) {
    const Span span = sent(ph, row, j, k);
    dev::pack_load(raw, sends_result(ph) ? output(span) : input(span));
  }

  PL_FN void send(const Phase& ph, uint32_t row, uint32_t j) {
    // Two loops: which source it is would otherwise be an index into registers.
    if (!dev::HOST && one_source(ph)) {
      uint32_t words[PL_PACK_BYTES / 4];
      PL_EACH
      for (uint32_t w = 0; w < PL_PACK_BYTES / 4; ++w) words[w] = P::legal(source[0].word(w));
      PL_EACH
      for (uint32_t k = 0; k < K; ++k)
        P::put_pack_if(j < ph.send_packs[k], s, destination(ph, k, sent(ph, row, j, k)), words);
    } else if (one_source(ph)) {
      PL_EACH
      for (uint32_t k = 0; k < K; ++k)
        if (j < ph.send_packs[k]) send_to(ph, row, j, k, source[0]);
    } else {
      PL_EACH
      for (uint32_t k = 0; k < K; ++k)
        if (j < ph.send_packs[k]) send_to(ph, row, j, k, source[k]);
    }
  }
  PL_FN void send_to(const Phase& ph, uint32_t row, uint32_t j, uint32_t k, const dev::Raw& raw) {
    const Span span = sent(ph, row, j, k);
    char* to = destination(ph, k, span);
    if constexpr (P::REMEMBERS)
      P::put_at(to, P::sent(s, s.phase * K + k) + span.in_piece * P::PACK_BYTES, span, raw);
    else
      P::put_at(s, to, span, raw, false);
  }
  PL_FN char* destination(const Phase& ph, uint32_t k, const Span& span) const {
    return reinterpret_cast<char*>(ph.to[k] + half) + span.in_piece * P::PACK_BYTES;
  }

  PL_FN char* slot(const Phase& ph, uint32_t k, const Span& span) const {
    return reinterpret_cast<char*>(ph.at[k] + half) + span.in_piece * P::PACK_BYTES;
  }

  // Waits for the operands in `wanted`; the others stay as they are.
  template <class SpanOf>
  PL_FN bool gather(const Phase& ph, uint32_t wanted, SpanOf span, dev::Raw (&raw)[LEAVES]) {
    return await(
        s,
        [&] {
          bool all = true;
          PL_EACH
          for (uint32_t k = 0; k < LEAVES; ++k) {
            const Span at = span(k);
            all &= P::poll_if(bit(wanted, k), s, slot(ph, k, at), at, raw[k]);
          }
          return all && P::complete(raw);
        },
        [&] { return missing_peer(ph, wanted, span); });
  }
  // Looked for once a wait has ended in vain: a mask kept up to date would be paid by every poll.
  template <class SpanOf>
  PL_FN uint32_t missing_peer(const Phase& ph, uint32_t wanted, SpanOf span) {
    PL_ROLL
    for (uint32_t k = 0; k < LEAVES; ++k) {
      dev::Raw seen;
      const Span at = span(k);
      if ((wanted >> k & 1) && !P::template arrived_at<false>(s, slot(ph, k, at), at, seen, false)) return ph.from[k];
    }
    return ph.from[dev::lowest_bit(wanted)];  // it has come since
  }
  template <class SpanOf>
  PL_FN void consumed(const Phase& ph, uint32_t read, SpanOf span) {
    PL_EACH
    for (uint32_t k = 0; k < LEAVES; ++k)
      if (read >> k & 1) P::consumed_at(s, slot(ph, k, span(k)), span(k));
  }

  // Leaves that do not arrive, before the wait: the rank's own pack, and those of nobody.
  PL_FN void set_leaves(const dev::Raw& mine, uint32_t own, dev::Raw (&raw)[LEAVES]) {
    PL_EACH
    for (uint32_t k = 0; k < LEAVES; ++k) {
      const bool here = own >> k & 1;
      if (dev::HOST) {
        if (here) dev::same_view(raw[k], mine);
        continue;
      }
      PL_EACH
      for (uint32_t w = 0; w < PL_PACK_BYTES / 4; ++w)
        *raw[k].words(w) = here ? P::legal(mine.word(w)) : negative_zero<D>();
    }
  }

  // All operands of one piece, along the balanced tree: see add_tree in fold.cuh.
  PL_FN bool sum(const Phase& ph, uint32_t row, uint32_t j) {
    const Span span = operand(ph, row, j, 0);
    const auto same = [&](uint32_t) { return span; };
    dev::Raw raw[LEAVES], mine;
    const uint32_t own = ph.present & ~ph.remote;
    if (ONE && !dev::HOST && turns.once(u.widest))
      dev::same_view(mine, source[0]);
    else if (own)
      dev::pack_load(mine, input(span));
    set_leaves(mine, own, raw);
    if constexpr (SPREAD && ONE) load_early(row, span);
    if (!gather(ph, ph.remote, same, raw)) return false;
    consumed(ph, ph.remote, same);
    dev::Out<typename D::T> out(output(span), span.bytes);
    typename D::A total[dev::STRIP * elements<D>()];
    const uint32_t n = extent<D>(span);
    PL_UNROLL
    for (uint32_t i = 0; i < n; ++i) {
      typename D::A x[LEAVES];
      PL_EACH
      for (uint32_t k = 0; k < LEAVES; ++k)  // on a GPU an absent one is a register, on a CPU it would be no address
        x[k] = !dev::HOST || ph.present >> k & 1 ? D::up(dev::In<typename D::T>(raw[k])[i]) : -0.0f;
      total[i] = Along<0, LEAVES>::sum(x);
    }
    // Averages are rare, and a division is long.
    if (PL_UNLIKELY(s.a.op == PL_AVG)) PL_UNROLL
    for (uint32_t i = 0; i < n; ++i) total[i] = share_of(total[i], s.a.n);
    PL_UNROLL
    for (uint32_t i = 0; i < n; ++i) out.set(i, D::down(total[i]));
    out.keep(carried);
    if constexpr (!SPREAD)
      out.flush_whole();
    else if constexpr (ONE)
      SpreadRows<D>(s).add(row, span, carried, r);
    else if (PL_LIKELY(turns.once(u.widest)))
      dev::keep<PLACES>(SUMMED, dev::tid(), carried);
    else
      out.flush_whole();
    return true;
  }

  // Every operand is the result of its piece: the bytes as they came.
  PL_FN bool copy(const Phase& ph, uint32_t row, uint32_t j) {
    const auto own = [&](uint32_t k) { return operand(ph, row, j, k); };
    uint32_t wanted = 0;
    PL_EACH
    for (uint32_t k = 0; k < LEAVES; ++k) wanted |= uint32_t(j < ph.item_packs[k]) << k;
    dev::Raw raw[LEAVES];
    set_leaves(raw[0], 0, raw);
    if constexpr (SPREAD) prefetch_unit(row, j);
    if (!gather(ph, wanted, own, raw)) return false;
    consumed(ph, wanted, own);
    if constexpr (SPREAD)
      if (PL_LIKELY(turns.once(u.widest))) {
        PL_EACH
        for (uint32_t k = 0; k < LEAVES; ++k) dev::keep<PLACES>(k, dev::tid(), raw[k]);
        return true;
      }
    PL_EACH
    for (uint32_t k = 0; k < LEAVES; ++k)
      if (wanted >> k & 1) dev::pack_store(output(own(k)), raw[k], own(k).bytes);
    return true;
  }

  PL_FN bool fold(const Phase& ph, uint32_t row, uint32_t j) {
    if (ONE || ph.fold == PL_FOLD_SUM) return j >= (ONE ? u.widest : ph.item_packs[0]) || sum(ph, row, j);
    return ph.fold == PL_FOLD_NONE || copy(ph, row, j);
  }

  // The first packs that this thread sends, before it is known whether the step may run.
  PL_FN void load_first() {
    if (turns.any(u.widest)) load(u.phase[0], turns.row, turns.first);
  }

  // `loaded`: it is the first phase, whose first packs are there.
  PL_FN bool run_phase(const Phase& ph, bool loaded) {
    turns.each(u.widest, [&](uint32_t row, uint32_t j) {
      if (!loaded || j != turns.first || row != turns.row) load(ph, row, j);
      send(ph, row, j);
      return true;
    });
    if (loaded) {
      if constexpr (P::REMEMBERS)
        land_rearmed_once(s, dev::local_load32(&s.a.channel->rearming));
      else
        land_rearmed(s);
    }
    return turns.each(u.widest, [&](uint32_t row, uint32_t j) { return fold(ph, row, j); });
  }
  PL_FN bool run() {
    half = (s.epoch & s.a.geo.rotation) * s.a.geo.half_bytes;
    if constexpr (ONE) {
      return run_phase(u.phase[0], true);
    } else {
      PL_ROLL
      for (uint32_t p = 0; p < u.phases; ++p) {
        s.phase = p;
        if (!run_phase(u.phase[p], p == 0)) return false;
      }
      return true;
    }
  }

  // SPREAD. What is read of the caller's memory is asked for before a wait for peers: of two phases the second, which
  // no peer holds up by that.
  PL_FN void load_early(uint32_t row, const Span& span) {
    const SpreadRows<D> rows(s);
    dev::pack_load(r, rows.residual(span));
    dev::pack_load(gamma, rows.gamma(row, span));
  }
  PL_FN void prefetch_unit(uint32_t row, uint32_t j) {
    const SpreadRows<D> rows(s);
    PL_ROLL
    for (uint32_t at = 0; at < PLACES; ++at) {
      Span span;
      if (!place(at, row, j, span)) continue;
      dev::prefetch(rows.residual(span));
      dev::prefetch(rows.gamma(row, span));
    }
  }
  // The packs of a unit that a thread has in the end: of two phases it sums at most one, in the first, and gets one of
  // every other piece in the second.
  static constexpr uint32_t SUMMED = LEAVES, PLACES = LEAVES + 1;
  PL_FN bool place(uint32_t at, uint32_t row, uint32_t j, Span& span) const {
    const Phase& ph = u.phase[at == SUMMED ? 0 : 1];
    const uint32_t k = at == SUMMED ? 0 : at;
    span = operand(ph, row, j, k);
    return j < ph.item_packs[k];
  }

  // Over the packs of this block, as fill_own in all_reduce.cuh: every piece is the result of one phase.
  PL_FN void fill_own() {
    PL_ROLL
    for (uint32_t p = 0; p < u.phases; ++p) {
      const Phase& ph = u.phase[p];
      const uint32_t pieces = ph.fold == PL_FOLD_NONE ? 0 : ph.fold == PL_FOLD_SUM ? 1 : LEAVES;
      PL_ROLL
      for (uint32_t k = 0; k < pieces; ++k)
        turns.each(ph.item_packs[k], [&](uint32_t row, uint32_t j) {
          const Span span = span_of<D, ROWS>(s, row, j, ph.item_first[k], ph.item_packs[k]);
          fill_span<D>(s, span);
          return true;
        });
    }
  }
};

// What a block does that was refused (epoch 0) or has failed. Apart from the step that runs, which it would make
// longer.
template <class D, class P, uint32_t K, uint32_t PHASES, bool ROWS>
PL_COLD void fail_unrolled(const typename Fan<K>::Args& u, uint64_t epoch, uint32_t entered, uint32_t advance) {
  if constexpr (ROWS && PHASES == 1)
    if (epoch == 0 && dev::CLUSTERS && u.step.cluster != 0) {
      const uint32_t first = dev::block() * u.step.block_units;
      refuse_in_cluster(u.step, first - row_of(u.step, first) * u.step.row_units);
    }
  Step s(u.step, (ROWS ? u.step.width : u.step.count) / elements<D>(), ROWS ? u.step.rows : 0);
  Unrolled<D, P, K, PHASES, ROWS>(s, u).fill_own();
  if (epoch != 0) end_failed<D>(u.step, epoch, entered, advance);
}

template <class D, class P, uint32_t K, uint32_t PHASES, bool ROWS, class Run>
PL_FN void run_step(Step& s, const typename Fan<K>::Args& u, Run run) {
  const auto fail = [&] { fail_unrolled<D, P, K, PHASES, ROWS>(u, s.epoch, s.entered, s.advance); };
  const auto meanwhile = [&] {
    if (dev::tid() >= dev::WARP) fetch_arguments<K, PHASES>(u);  // the first warp would hold up its first thread
  };
  if (PL_UNLIKELY(begin(s, meanwhile) == Entry::Refused)) return fail();
  end(s, run(), fail);
}

template <class D, class P, uint32_t K, uint32_t PHASES>
PL_FN void all_reduce_straight(const typename Fan<K>::Args& u) {
  Step s(u.step, 0, 0);
  Straight<D, P, K> steps(s, u);
  PHASES == 1 ? steps.load_one() : steps.load_two();
  run_step<D, P, K, PHASES, false>(s, u, [&] { return PHASES == 1 ? steps.run_one() : steps.run_two(); });
}

// One step: sums and averages of floats, by a word protocol. On a GPU delta has the short path alone.
template <class D, class P, uint32_t K, uint32_t PHASES>
PL_FN void all_reduce_unrolled(const typename Fan<K>::Args& u) {
  if constexpr (dev::STRIP == 1 && P::REMEMBERS) {
    all_reduce_straight<D, P, K, PHASES>(u);
  } else {
    if constexpr (dev::STRIP == 1 && P::HAS_STRAIGHT)
      if (PL_LIKELY(u.straight)) return all_reduce_straight<D, P, K, PHASES>(u);
    if (u.step.count == 0) return;  // an empty call is no step
    Step s(u.step, u.step.count / elements<D>(), 0);
    Unrolled<D, P, K, PHASES, false> steps(s, u);
    steps.load_first();
    run_step<D, P, K, PHASES, false>(s, u, [&] { return may_run(s) && steps.run(); });
  }
}

// The same with add + RMSNorm: on a GPU see spread.cuh, on a CPU all_reduce_add_rms_norm in all_reduce.cuh.
template <class D, class P, uint32_t K, uint32_t PHASES>
PL_FN void all_reduce_add_rms_norm_unrolled(const typename Fan<K>::Args& u) {
  if (u.step.rows == 0) return;
  Step s(u.step, u.step.width / elements<D>(), u.step.rows);
  Unrolled<D, P, K, PHASES, true> steps(s, u);
  steps.load_first();
  run_step<D, P, K, PHASES, true>(s, u, [&] {
    bool ok = may_run(s) && steps.run();
    if constexpr (!dev::HOST)
      ok = SpreadNorm<D, decltype(steps)>(steps).run(ok);
    else if (PL_LIKELY(ok))
      add_rms_norm<D>(u.step);
    return ok;
  });
}

// Where the host says so; sums by sentinel alone.
template <class D, uint32_t K, uint32_t PHASES, bool CLUSTER = false>
PL_FN void all_reduce_add_rms_norm_straight(const typename Fan<K>::Args& u) {
  if constexpr (CLUSTER && !dev::CLUSTERS)
    return;  // empty on GPUs without them; the host never launches it (cluster.rs)
  Step s(u.step, u.step.width / elements<D>(), u.step.rows);
  typename StraightRowsOf<D, K, PHASES, CLUSTER>::Type steps(s, u);
  steps.load();
  run_step<D, Sentinel<D>, K, PHASES, true>(s, u, [&] { return steps.run(); });
}

}  // namespace PL_NAMESPACE

#endif
