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

// Arguments are fetched anew for every launch, line by line. What a sum of two ranks needs by sentinel is two lines:
// one that begins with what the driver needs, before the arguments (of GPUs of 9.0 at 0x210), and one around the end of
// pl_step. Where arguments begin elsewhere, none of this is wrong; it may take a line more.
constexpr uint64_t LINE = 64, FIRST_ARGUMENT = 0x210;
constexpr PL_FN uint64_t line_of(uint64_t offset) { return (FIRST_ARGUMENT + offset) / LINE; }
static_assert(line_of(offsetof(pl_step, geo.rotation)) == line_of(0), "the first line");
static_assert(line_of(offsetof(pl_step, host_staged)) == line_of(offsetof(pl_unrolled_1, phase[0].at[1])), "one line");
static_assert(line_of(offsetof(pl_step, rows)) == line_of(offsetof(pl_step, squares_half_bytes)), "one line");

// Fetches the further lines that a sum's phases need, while there is nothing else to do: later each of them is a wait.
template <uint32_t K, uint32_t PHASES>
PL_FN void fetch_arguments(const typename Fan<K>::Args& u) {
  using Args = typename Fan<K>::Args;
  constexpr uint64_t FROM = (line_of(offsetof(Args, widest)) + 1) * LINE - FIRST_ARGUMENT;
  constexpr uint64_t TO = PHASES == 1 ? offsetof(Args, phase[0].send_first) : offsetof(Args, phase[1].fold);
  static_assert(FROM % 8 == 0 && TO + 8 <= sizeof(Args), "whole words of the arguments");
  if constexpr (FROM < TO) {
    uint64_t words = 0;
    PL_EACH
    for (uint64_t at = FROM; at < TO; at += LINE) words ^= reinterpret_cast<const uint64_t*>(&u)[at / 8];
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
