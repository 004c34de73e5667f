// What the kernels with unrolled loops share: the structs of launch.h by K, and the sum over a complete tree.
#ifndef PEERLANE_FAN_CUH
#define PEERLANE_FAN_CUH

#include "fold.cuh"
#include "step.cuh"

namespace PL_NAMESPACE {

// The structs of launch.h by K, the most sends of a phase.
template <uint32_t K>
struct Fan;
#define PL_FAN(K)                        \
  template <>                            \
  struct Fan<K> {                        \
    using Args = pl_unrolled_##K;        \
    using Phase = pl_unrolled_phase_##K; \
  };
PL_FAN(1)
PL_FAN(3)
PL_FAN(7)
PL_FAN(15)
#undef PL_FAN

// Arguments are fetched anew for every launch, line by line. What a sum of two ranks needs by sentinel is two lines, on
// GPUs of 9.0 and on those of 10.0 and 12.0, where arguments begin at different places. Elsewhere none of this is
// wrong; it may take a line more.
constexpr uint64_t LINE = 64, FIRST_ARGUMENT_90 = 0x210, FIRST_ARGUMENT_100 = 0x380;
constexpr PL_FN uint64_t line_of(uint64_t first, uint64_t offset) { return (first + offset) / LINE; }
constexpr bool one_line(uint64_t from, uint64_t to) {
  return line_of(FIRST_ARGUMENT_90, from) == line_of(FIRST_ARGUMENT_90, to) &&
         line_of(FIRST_ARGUMENT_100, from) == line_of(FIRST_ARGUMENT_100, to);
}
static_assert(one_line(0, offsetof(pl_step, geo.flag_chunks)), "the first line");
static_assert(one_line(offsetof(pl_step, host_staged), offsetof(pl_unrolled_1, phase[0].own_piece) - 1), "the second");
// And what loads come from in two phases of up to eight ranks.
static_assert(one_line(offsetof(pl_step, host_staged), offsetof(pl_unrolled_7, phase[0].present) - 1), "the same one");

// Fetches the further lines that a short sum's phases need, while there is nothing else to do: later each of them is a
// wait. A word in each: where lines begin elsewhere the steps still meet them all, but for the last.
template <uint32_t K, uint32_t PHASES>
PL_FN void fetch_arguments(const typename Fan<K>::Args& u) {
  using Args = typename Fan<K>::Args;
  constexpr uint64_t FROM = (line_of(FIRST_ARGUMENT_90, offsetof(Args, widest)) + 1) * LINE - FIRST_ARGUMENT_90;
  constexpr uint64_t PLACES_END = offsetof(Args, phase[0].at) + sizeof(Args::phase[0].at);
  constexpr uint64_t TO = PHASES == 1 ? PLACES_END : offsetof(Args, phase[1].send_first);
  // What is behind the first phase's pieces is for steps that are not short.
  constexpr uint64_t SKIP = offsetof(Args, phase[0].copy_piece), GO_ON = offsetof(Args, phase[1]);
  static_assert(FROM % 8 == 0, "whole words of the arguments");
  if constexpr (FROM < TO) {
    const auto* words_of = reinterpret_cast<const uint64_t*>(&u);
    uint64_t words = words_of[(TO - 1) / 8];
    PL_EACH
    for (uint64_t at = FROM; at < TO; at += LINE)
      if (at < SKIP || at + LINE > GO_ON) words ^= words_of[at / 8];
    dev::need(words);
  }
}

// Leaves of the complete tree that no rank fills hold -0, which added to any number leaves it as it is.
template <class D>
constexpr PL_FN uint32_t negative_zero() {
  return D::SHORT_FLOAT ? 0x80008000u : 0x80000000u;
}

// The sum of `COUNT` leaves of a complete tree.
template <uint32_t FIRST, uint32_t COUNT>
struct Along {
  template <class A, uint32_t N>
  static PL_FN A sum(const A (&x)[N]) {
    return Sum::of(Along<FIRST, COUNT / 2>::sum(x), Along<FIRST + COUNT / 2, COUNT / 2>::sum(x));
  }
};
template <uint32_t FIRST>
struct Along<FIRST, 1> {
  template <class A, uint32_t N>
  static PL_FN A sum(const A (&x)[N]) {
    return x[FIRST];
  }
};

PL_COLD float share_of(float sum, uint32_t ranks) { return Arith<float>::div(sum, ranks); }

}  // namespace PL_NAMESPACE

#endif
