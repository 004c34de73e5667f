// Data types, their accumulators and the operations. The same expressions on GPU and CPU, no contraction, no flush to
// zero, IEEE division: the same bits.
#ifndef PEERLANE_DTYPE_CUH
#define PEERLANE_DTYPE_CUH

#include "dev.cuh"

namespace PL_NAMESPACE {

// A type T on the wire is unsigned bits for floats (so that a NaN's payload survives a move) and the integer itself
// otherwise. `up` widens to the accumulator, `down` rounds once, to nearest even, and writes every NaN as the one
// canonical NaN: which payload survives an addition differs between a GPU and a CPU.
struct Bf16 {
  using T = uint16_t;
  using A = float;
  static constexpr bool SHORT_FLOAT = true, WORDS_HAVE_NAN = true;
  static constexpr T FAILED = 0x7fff;
  static PL_FN A up(T v) { return dev::bit_cast<float>(uint32_t(v) << 16); }
  static PL_FN T down(A v) { return dev::bfloat_down(v); }
  // A word of a pack: the elements from `v` on.
  static PL_FN uint32_t down_word(const A* v) { return dev::bfloat_down_pair(v[0], v[1]); }
  // down(up(x) + up(y)) of both elements of a word.
  static PL_FN uint32_t add_word(uint32_t x, uint32_t y) { return dev::bfloat_add_pair(x, y); }
};
struct F16 {
  using T = uint16_t;
  using A = float;
  static constexpr bool SHORT_FLOAT = true, WORDS_HAVE_NAN = true;
  static constexpr T FAILED = 0x7fff;
  static PL_FN A up(T v) { return dev::half_up(v); }
  static PL_FN T down(A v) { return dev::half_down(v); }
  static PL_FN uint32_t down_word(const A* v) { return dev::half_down_pair(v[0], v[1]); }
  static PL_FN uint32_t add_word(uint32_t x, uint32_t y) { return dev::half_add_pair(x, y); }
};
struct F32 {
  using T = uint32_t;
  using A = float;
  static constexpr bool SHORT_FLOAT = false, WORDS_HAVE_NAN = true;
  static constexpr T FAILED = 0x7fffffffu;
  static PL_FN A up(T v) { return dev::bit_cast<float>(v); }
  static PL_FN T down(A v) { return v == v ? dev::bit_cast<T>(v) : FAILED; }
  static PL_FN uint32_t down_word(const A* v) { return down(*v); }
};
struct F64 {
  using T = uint64_t;
  using A = double;
  static constexpr bool SHORT_FLOAT = false, WORDS_HAVE_NAN = false;
  static constexpr T FAILED = 0x7fffffffffffffffull;
  static PL_FN A up(T v) { return dev::bit_cast<double>(v); }
  static PL_FN T down(A v) { return v == v ? dev::bit_cast<T>(v) : FAILED; }
};
template <class I>
struct Int {
  using T = I;
  using A = I;
  static constexpr bool SHORT_FLOAT = false, WORDS_HAVE_NAN = false;
  static constexpr T FAILED = 0;
  static PL_FN A up(T v) { return v; }
  static PL_FN T down(A v) { return v; }
};

template <class D>
constexpr PL_FN uint32_t elements() {
  return PL_PACK_BYTES / sizeof(typename D::T);
}

// Integers wrap: in unsigned arithmetic, because a signed overflow is undefined.
template <class A>
struct Arith;
template <class A, class U>
struct WrapArith {
  static PL_FN A add(A x, A y) { return A(U(U(x) + U(y))); }
  static PL_FN A mul(A x, A y) { return A(U(U(x) * U(y))); }
  static PL_FN A min(A x, A y) { return y < x ? y : x; }
  static PL_FN A max(A x, A y) { return x < y ? y : x; }
  static PL_FN A div(A x, uint32_t n) { return A(x / A(n)); }
};
template <>
struct Arith<int8_t> : WrapArith<int8_t, uint32_t> {};
template <>
struct Arith<uint8_t> : WrapArith<uint8_t, uint32_t> {};
template <>
struct Arith<int32_t> : WrapArith<int32_t, uint32_t> {};
template <>
struct Arith<uint32_t> : WrapArith<uint32_t, uint32_t> {};
template <>
struct Arith<int64_t> : WrapArith<int64_t, uint64_t> {};
template <>
struct Arith<uint64_t> : WrapArith<uint64_t, uint64_t> {};

// min and max ignore a NaN beside a number. Where the operands compare equal their bits differ only for the two zeros:
// OR of the bits is then the smaller (-0), AND the larger (+0).
template <class A, class U>
struct FloatArith {
  static PL_FN A add(A x, A y) { return x + y; }
  static PL_FN A mul(A x, A y) { return x * y; }
  static PL_FN A min(A x, A y) {
    const U bx = dev::bit_cast<U>(x), by = dev::bit_cast<U>(y);
    const U less = x < y ? bx : by;
    const U same = x == y ? U(bx | by) : less;
    const U left = y == y ? same : bx;
    return dev::bit_cast<A>(x == x ? left : by);
  }
  static PL_FN A max(A x, A y) {
    const U bx = dev::bit_cast<U>(x), by = dev::bit_cast<U>(y);
    const U more = x > y ? bx : by;
    const U same = x == y ? U(bx & by) : more;
    const U left = y == y ? same : bx;
    return dev::bit_cast<A>(x == x ? left : by);
  }
  static PL_FN A div(A x, uint32_t n) { return x / A(n); }
};
template <>
struct Arith<float> : FloatArith<float, uint32_t> {};
template <>
struct Arith<double> : FloatArith<double, uint64_t> {};

struct Sum {
  template <class A>
  static PL_FN A of(A x, A y) {
    return Arith<A>::add(x, y);
  }
};
struct Prod {
  template <class A>
  static PL_FN A of(A x, A y) {
    return Arith<A>::mul(x, y);
  }
};
struct Min {
  template <class A>
  static PL_FN A of(A x, A y) {
    return Arith<A>::min(x, y);
  }
};
struct Max {
  template <class A>
  static PL_FN A of(A x, A y) {
    return Arith<A>::max(x, y);
  }
};

// The run-time operation, decided once per strip, outside of the loop over its elements. HOT code is for sum and avg.
template <bool HOT, class F>
PL_FN void with_op(uint32_t op, F f) {
  if (HOT) {
    f(Sum{});
    return;
  }
  switch (op) {
    case PL_PROD:
      f(Prod{});
      return;
    case PL_MAX:
      f(Max{});
      return;
    case PL_MIN:
      f(Min{});
      return;
    default:
      f(Sum{});
      return;
  }
}

}  // namespace PL_NAMESPACE

#endif
