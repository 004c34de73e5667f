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

// What a step needs first of its arguments is one line: they are fetched anew for every launch, line by line. On GPUs
// of 9.0 they begin at 0x210.
constexpr uint64_t line_of(uint64_t offset) { return (0x210 + offset) / 64; }
static_assert(line_of(offsetof(pl_step, state)) == line_of(offsetof(pl_unrolled_1, widest)), "one line");

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
