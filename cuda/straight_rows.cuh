// The short path of rows: all-reduce, add and RMSNorm by the schedules of straight.cuh, where a thread has so little
// that all of it stays in registers, without a loop. Kernels of their own: what an all-reduce of rows of any shape
// needs besides (unrolled.cuh, spread_norm.cuh) would cost them registers. The host says which launches they are for
// (pl_unrolled_*.straight); what travels is the same either way, so ranks need not agree.
//
// What others wait for comes first: packs for peers, sums of squares for the rest of the row. What only this thread
// reads or writes, the caller's residual, gamma and residual_out, and words to arm again, comes behind that, while
// others answer.
//
// A launch of one phase has a warp more per block than it has work for. That warp has no pack and waits for nothing, so
// it is ahead of the others while they wait, and the instructions that they need next are there: fetched by each launch
// anew, they cost more than executing them. Between the entry and the end it takes part in no barrier (dev::any_of), or
// it would wait too. Where the blocks are a cluster it takes part in both of their meetings, and is ahead only between
// them.
#ifndef PEERLANE_STRAIGHT_ROWS_CUH
#define PEERLANE_STRAIGHT_ROWS_CUH

#include "add_rms_norm.cuh"
#include "cluster.cuh"
#include "spread.cuh"
#include "straight.cuh"

namespace PL_NAMESPACE {

// Threads for so many units: whole warps.
PL_FN uint32_t warps_of(uint32_t units) { return (units + dev::WARP - 1) / dev::WARP * dev::WARP; }

PL_FN const char* pack_at(const void* of, uint64_t pack) { return static_cast<const char*>(of) + pack * PL_PACK_BYTES; }

// One phase: a thread has one pack of a row at most, and a block packs of one row, of which it has the squares from the
// other blocks: through memory (spread.cuh), or where the row's blocks are a CLUSTER, from each other.
template <class D, uint32_t K, bool CLUSTER>
struct StraightSpread {
  using Steps = Straight<D, Sentinel<D>, K>;

  Step& s;
  const typename Fan<K>::Args& u;
  const uint32_t row;  // of this block
  Steps steps;
  SpreadRows<D> rows;

  PL_FN StraightSpread(Step& step, const typename Fan<K>::Args& args)
      : s(step),
        u(args),
        row(row_of(args.step, dev::block() * args.step.block_units)),
        steps(step, args, pack(), row * args.widest, row * uint32_t(step.packs)),
        rows(step) {}

  // Of the row; none: more than any has.
  PL_FN uint32_t pack() const {
    const bool any = dev::tid() < u.step.block_units && row < s.rows;
    return any ? dev::block() * u.step.block_units - row * u.step.row_units + dev::tid() : ~0u;
  }

  PL_FN void load() { steps.load_one(); }
  PL_FN bool run() {
    const auto& ph = u.phase[0];
    const bool here = steps.j < u.widest;
    steps.send_one();
    if constexpr (CLUSTER) {
      dev::cluster_arrive();
      rows.keep_no_neighbour();
    }
    dev::Raw residual, gamma, total, r, normed;
    dev::pack_load_if(here, residual, pack_at(s.a.residual, steps.in_tile));
    dev::pack_load_if(here, gamma, pack_at(s.a.gamma, steps.j));
    const uint32_t wanted = here ? ph.remote : 0;
    // Worked out before the wait.
    char* const word = CLUSTER ? nullptr : dev::in_register(rows.word(row, steps.in_tile));
    bool ok = steps.sum(ph, wanted, total);
    const bool has = here && ok;
    const float squares = add_words<D>(total, residual, r);
    if constexpr (CLUSTER) {
      dev::cluster_wait();
      tell_cluster_if(here, u.step, steps.j, ok, squares);
      dev::cluster_publish();
    } else if (has) {
      rows.post(word, rows.alone(row, steps.in_tile), squares);
    }
    dev::pack_store_if(has, residual_out_at(s, steps.in_tile), r);
    steps.template rearm<K + 1>(ph, ok ? wanted : 0);
    if (row >= s.rows) return ok;  // a block to spare
    const uint32_t least = warps_of(u.step.block_units),
                   workers = least < dev::LANE_THREADS ? dev::LANE_THREADS : least;
    if constexpr (CLUSTER) {
      dev::cluster_wait();
      if (dev::tid() < workers && PL_UNLIKELY(!rows.gather_kept(workers))) return false;
    } else if (dev::tid() < workers && PL_UNLIKELY(!rows.gather(ok, row, 1, 0, workers))) {
      return false;
    }
    // The warp without packs was not at the last barrier, and may read groups that are not there yet: it is here for
    // the instructions alone, and stores nothing of what it makes of them.
    scale_words<D>(r, rows.scale(0, 0), gamma, s.a.weight_bias, normed);
    dev::pack_store_if(here, steps.output(0), normed);
    return true;
  }
};

// Two phases: a row is one block's, so that its squares need no way through memory. Groups of threads share the pieces:
// each thread sends pack j of ROW_PACKS pieces and has them in the end, the last of the last group being the piece that
// this rank sums. So pack j of a piece is not the same thread's in both phases, and need not be:
// - A word is still armed again by the thread that has read it.
// - Where an output is the input, a pack may be written by another thread than the one that has sent it. All loads of
//   the input come before the barrier in begin() (dev::share), all stores behind it, and a row is one block's. Of the
//   residual a thread reads what it writes itself.
// - All packs of a row are one block's, so pack 0 of every piece is block 0's (clear_old_tags).
// - Who waits for results only, might find a peer late that itself waits for a third. So it waits twice (await_twice),
//   up to two deadlines: those that sum wait for that third one from the start, here and on every other rank, and name
//   it after one.
template <class D, uint32_t K>
struct StraightRow {
  using Steps = Straight<D, Sentinel<D>, K>;
  using Words = Sentinel<D>;
  static constexpr uint32_t LEAVES = K + 1;
  static constexpr uint32_t EACH = LEAVES < dev::ROW_PACKS ? LEAVES : dev::ROW_PACKS, GROUPS = LEAVES / EACH;

  Step& s;
  const typename Fan<K>::Args& u;
  const uint32_t row;
  uint32_t group, unit;  // pack `unit` of pieces group * EACH and on; none: more than any piece has
  Steps sums;            // of the piece that this rank sums, in the last group
  SpreadRows<D> rows;
  dev::Raw sent[EACH];

  PL_FN StraightRow(Step& step, const typename Fan<K>::Args& args)
      : s(step),
        u(args),
        row(dev::block()),
        group(dev::in_register(group_of(args.step.block_units))),
        unit(dev::in_register(unit_of(args.step.block_units))),
        sums(step, args, adds() ? unit : ~0u, row * Piece(args.phase[0].own_piece).packs, row * uint32_t(step.packs)),
        rows(step) {}

  static PL_FN uint32_t group_of(uint32_t units) {
    uint32_t group = 0;
    PL_EACH
    for (uint32_t g = 1; g < GROUPS; ++g) group += dev::tid() >= g * warps_of(units);
    return group;
  }
  PL_FN uint32_t unit_of(uint32_t units) const {
    const uint32_t at = dev::tid() - group * warps_of(units);
    return at < units && row < s.rows ? at : ~0u;
  }
  PL_FN uint32_t workers() const { return GROUPS * warps_of(u.step.block_units); }
  PL_FN bool adds() const { return group == GROUPS - 1; }

  // The send and the result behind place `i` of this thread, and whether it is the piece that this rank sums.
  PL_FN uint32_t place(uint32_t i) const { return group * EACH + i; }
  PL_FN bool own(uint32_t i) const { return i == EACH - 1 && adds(); }

  PL_FN Piece summed() const { return Piece(u.phase[0].own_piece); }
  PL_FN Piece input(uint32_t i) const { return own(i) ? summed() : Piece(u.phase[0].send_piece[place(i)]); }
  PL_FN Piece result(uint32_t i) const { return own(i) ? summed() : Piece(u.phase[1].copy_piece[place(i)]); }
  PL_FN uint64_t in_tile(const Piece& piece) const { return row * uint32_t(s.packs) + piece.first + unit; }
  PL_FN char* at(uint64_t slot, const Piece& piece) const {
    return reinterpret_cast<char*>(slot + Steps::place_of(s, row * piece.packs + unit));
  }

  PL_FN void load() {
    PL_EACH
    for (uint32_t i = 0; i < EACH; ++i) {
      const Piece piece = input(i);
      dev::pack_load_if(unit < piece.packs, sent[i], pack_at(s.a.input, in_tile(piece)));
    }
  }

  PL_FN void send() {
    PL_EACH
    for (uint32_t i = 0; i < EACH; ++i) {
      const Piece piece = input(i);
      const uint32_t k = own(i) ? 0 : place(i);
      dev::post_4x32_if(unit < piece.packs && !own(i), at(u.phase[0].to[k], piece), Steps::legal(sent[i]).words(0));
    }
    land_rearmed(s);
  }

  // The last group: the sum, to those who need it.
  PL_FN bool sum(dev::Raw& total) {
    const auto &scatter = u.phase[0], &collect = u.phase[1];
    sums.find_place();
    sums.place = dev::in_register(sums.place);  // or every poll works it out anew
    dev::same_view(sums.mine, sent[EACH - 1]);
    const uint32_t parts = sums.j < summed().packs ? scatter.remote : 0;
    if (PL_UNLIKELY(!sums.sum(scatter, parts, total))) return false;
    const dev::Raw words = Steps::legal(total);
    PL_EACH
    for (uint32_t k = 0; k < K; ++k) sums.post_if(sums.j < Piece(collect.send_piece[k]).packs, collect, K, k, words);
    sums.template rearm<LEAVES>(scatter, parts);
    return true;
  }

  // Results of peers.
  PL_FN bool gather(uint32_t wanted, char* const (&slots)[EACH], dev::Raw (&raw)[EACH]) {
    wanted = dev::in_register(wanted);
    return await_twice(
        s, [&] { return sums.poll(wanted, slots, raw); }, [&] { return missing_peer(wanted); });
  }
  PL_FN uint32_t missing_peer(uint32_t wanted) const {
    uint32_t from = s.a.rank;  // it has come since
    PL_ROLL
    for (uint32_t i = 0; i < EACH; ++i) {
      if (!bit(wanted, i)) continue;
      dev::Raw seen;
      dev::poll_4x32(at(u.phase[1].at[place(i)], result(i)), seen.words(0));
      if (Words::largest(seen) == Words::UNWRITTEN) from = u.phase[1].from[place(i)];
    }
    return from;
  }

  PL_FN bool run() {
    send();
    dev::Raw raw[EACH], residual[EACH], gamma[EACH];
    PL_EACH
    for (uint32_t i = 0; i < EACH; ++i) PL_EACH
    for (uint32_t w = 0; w < PL_PACK_BYTES / 4; ++w) *raw[i].words(w) = 0;
    rows.keep_no_neighbour();
    bool ok = true;
    if (adds()) ok = sum(raw[EACH - 1]);
    s.phase = 1;
    uint32_t has = 0, wanted = 0;
    char* slots[EACH];
    PL_EACH
    for (uint32_t i = 0; i < EACH; ++i) {
      const Piece piece = result(i);
      const bool here = unit < piece.packs && ok;
      dev::pack_load_if(here, residual[i], pack_at(s.a.residual, in_tile(piece)));
      dev::pack_load_if(here, gamma[i], pack_at(s.a.gamma, piece.first + unit));
      has |= uint32_t(here) << i;
      wanted |= uint32_t(here && !own(i)) << i;
      slots[i] = at(u.phase[1].at[own(i) ? 0 : place(i)], piece);
    }
    if (PL_UNLIKELY(!gather(wanted, slots, raw))) {
      ok = false;
      has = wanted = 0;
    }
    PL_EACH
    for (uint32_t i = 0; i < EACH; ++i)
      dev::keep_square_if(bit(has, i), result(i).first + unit, add_words<D>(raw[i], residual[i], raw[i]));
    const typename Words::Armed armed(s.epoch);
    PL_EACH
    for (uint32_t i = 0; i < EACH; ++i) {
      dev::pack_store_if(bit(has, i), residual_out_at(s, in_tile(result(i))), raw[i]);
      armed.post_if(bit(wanted, i), slots[i]);
    }
    if (dev::tid() < workers()) {
      // The barrier that the squares need besides.
      if (PL_UNLIKELY(dev::any_of(workers(), !ok))) return false;
      rows.gather_kept(workers());
    }
    const float scale = rows.scale(0, 0);
    PL_EACH
    for (uint32_t i = 0; i < EACH; ++i) {
      dev::Raw normed;
      scale_words<D>(raw[i], scale, gamma[i], s.a.weight_bias, normed);
      dev::pack_store_if(bit(has, i), static_cast<char*>(s.a.output) + in_tile(result(i)) * PL_PACK_BYTES, normed);
    }
    return true;
  }
};

template <class D, uint32_t K, uint32_t PHASES, bool CLUSTER>
struct StraightRowsOf {
  using Type = StraightSpread<D, K, CLUSTER>;
};
template <class D, uint32_t K, bool CLUSTER>
struct StraightRowsOf<D, K, 2, CLUSTER> {
  using Type = StraightRow<D, K>;
};

}  // namespace PL_NAMESPACE

#endif
