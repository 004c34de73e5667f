// Matrix products of a warp. A lane holds rows and columns as the GPU's own 16 x 8 x 16 product of bf16 wants them, and
// code around it is written lane by lane, so that tests run the very same addressing on a CPU.
//
//   Lanes<T>      a variable of every lane: own[lane]; each_lane(f) runs f(lane)
//   multiply      sums [16, 8] += left [16, 32] right [8, 32]^T. Lane 4 g + c holds elements 8 c to 8 c + 7 of rows g
//   and
//                 g + 8 of the left matrix and of row g of the right one: 16 bytes each, straight from memory. The
//                 GPU's product wants other elements in a lane, but which k is which does not matter as long as both
//                 sides agree.
//   multiply_over sums [16, 32] += left [16, 16] right [16, 32]: lane 4 g + c holds elements 8 c to 8 c + 7 of rows g
//   and
//                 g + 8 of the right matrix, whose rows are k here, so they are turned in registers.
//
// Of `multiply`, sums 0 and 1 of lane 4 g + c are (g, 2 c) and (g, 2 c + 1), sums 2 and 3 those of row g + 8.
#ifndef VERIFY_MMA_CUH
#define VERIFY_MMA_CUH

#include "simt.cuh"

// The left side of `multiply_over`: (g, 2 c), (g + 8, 2 c), (g, 2 c + 8), (g + 8, 2 c + 8), each with its right
// neighbour.
struct Quad {
  uint32_t w[4];
};

#ifdef __CUDACC__

template <class T>
using Lanes = OwnVariable<T>;
template <class F>
FN void each_lane(F f) {
  f(threadIdx.x % 32);
}
FN Pack zero_pack() { return Pack{make_uint4(0, 0, 0, 0)}; }
FN uint32_t load_two(const bf16* p) { return *reinterpret_cast<const uint32_t*>(p); }

FN void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
FN void multiply(Lanes<float[4]>& sums, const Lanes<Pack>& low, const Lanes<Pack>& high, const Lanes<Pack>& right) {
  const uint4 l = low.v.w, h = high.v.w, r = right.v.w;
  mma(sums.v, l.x, h.x, l.y, h.y, r.x, r.y);
  mma(sums.v, l.z, h.z, l.w, h.w, r.z, r.w);
}

// An 8 x 8 matrix of which lane 4 g + c holds (g, 2 c) and (g, 2 c + 1), turned.
FN uint32_t turned(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// `sums[j]` of lane 4 g + c: columns 8 c + 2 j and the next of row g, then of row g + 8.
FN void multiply_over(Lanes<float[4]> (&sums)[4], const Lanes<Quad>& left, const Lanes<Pack>& low,
                      const Lanes<Pack>& high) {
  const uint4 l = low.v.w, h = high.v.w;
  const uint32_t lows[4] = {l.x, l.y, l.z, l.w}, highs[4] = {h.x, h.y, h.z, h.w};
  const Quad& q = left.v;
  UNROLL(4)
  for (uint32_t j = 0; j < 4; ++j) mma(sums[j].v, q.w[0], q.w[1], q.w[2], q.w[3], turned(lows[j]), turned(highs[j]));
}
// Over the four lanes that share g.
FN void quad_sum(Lanes<float>& x) {
  x.v = rounded_add(x.v, __shfl_xor_sync(0xffffffffu, x.v, 1));
  x.v = rounded_add(x.v, __shfl_xor_sync(0xffffffffu, x.v, 2));
}

#else

template <class T>
struct Lanes {
  T v[32];
  T& operator[](uint32_t lane) { return v[lane]; }
  const T& operator[](uint32_t lane) const { return v[lane]; }
};
template <class F>
FN void each_lane(F f) {
  for (uint32_t lane = 0; lane < 32; ++lane) f(lane);
}
FN Pack zero_pack() { return Pack{}; }
FN uint32_t load_two(const bf16* p) { return uint32_t(p[1]) << 16 | p[0]; }

FN void multiply(Lanes<float[4]>& sums, const Lanes<Pack>& low, const Lanes<Pack>& high, const Lanes<Pack>& right) {
  float left[16][32], other[8][32];
  each_lane([&](uint32_t lane) {
    for (uint32_t e = 0; e < 8; ++e) {
      left[lane / 4][lane % 4 * 8 + e] = low[lane][e];
      left[8 + lane / 4][lane % 4 * 8 + e] = high[lane][e];
      other[lane / 4][lane % 4 * 8 + e] = right[lane][e];
    }
  });
  each_lane([&](uint32_t lane) {
    for (uint32_t i = 0; i < 4; ++i) {
      const float *a = left[lane / 4 + i / 2 * 8], *b = other[lane % 4 * 2 + i % 2];
      float sum = 0.0f;
      for (uint32_t k = 0; k < 32; ++k) sum += a[k] * b[k];
      sums[lane][i] += sum;
    }
  });
}
FN void multiply_over(Lanes<float[4]> (&sums)[4], const Lanes<Quad>& left, const Lanes<Pack>& low,
                      const Lanes<Pack>& high) {
  float a[16][16], b[16][32];
  each_lane([&](uint32_t lane) {
    for (uint32_t i = 0; i < 4; ++i)
      for (uint32_t e = 0; e < 2; ++e)
        a[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8 + e] = up(bf16(left[lane].w[i] >> 16 * e));
    for (uint32_t e = 0; e < 8; ++e) {
      b[lane / 4][lane % 4 * 8 + e] = low[lane][e];
      b[8 + lane / 4][lane % 4 * 8 + e] = high[lane][e];
    }
  });
  each_lane([&](uint32_t lane) {
    for (uint32_t j = 0; j < 4; ++j)
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t row = lane / 4 + i / 2 * 8, column = lane % 4 * 8 + 2 * j + i % 2;
        for (uint32_t k = 0; k < 16; ++k) sums[j][lane][i] += a[row][k] * b[k][column];
      }
  });
}
FN void quad_sum(Lanes<float>& x) {
  for (uint32_t d = 1; d < 4; d *= 2) {
    const Lanes<float> before = x;
    each_lane([&](uint32_t lane) { x[lane] = before[lane] + before[lane ^ d]; });
  }
}

#endif

// 16 TILES outputs by 8 GROUPS rows of x: what one warp computes.
template <uint32_t TILES, uint32_t GROUPS>
struct Strip {
  Lanes<float[4]> sums[TILES][GROUPS];

  FN Strip() {
    each_lane([&](uint32_t lane) {
      UNROLL(4)
      for (uint32_t i = 0; i < TILES; ++i) UNROLL(4)
      for (uint32_t j = 0; j < GROUPS; ++j) UNROLL(4)
      for (uint32_t r = 0; r < 4; ++r) sums[i][j][lane][r] = 0.0f;
    });
  }

  // Adds the products of elements `first` to `end`, multiples of eight. `weights(o, k)` loads a pack, and
  // `x(j, lane, k, counts)` one of row 8 j + lane / 4. Loads of DEEP steps are under way at a time, without branches:
  // behind the end a load reads the beginning again, and its x counts as zero.
  template <uint32_t DEEP, class Weights, class X>
  FN void add(uint32_t first, uint32_t end, Weights weights, X x) {
    for (uint32_t k = first; k < end; k += 32 * DEEP) {
      Lanes<Pack> low[DEEP][TILES], high[DEEP][TILES], right[DEEP][GROUPS];
      each_lane([&](uint32_t lane) {
        UNROLL(8)
        for (uint32_t d = 0; d < DEEP; ++d) {
          const uint32_t at = k + d * 32 + lane % 4 * 8, from = at < end ? at : first;
          UNROLL(4)
          for (uint32_t i = 0; i < TILES; ++i) {
            low[d][i][lane] = weights(i * 16 + lane / 4, from);
            high[d][i][lane] = weights(i * 16 + 8 + lane / 4, from);
          }
          UNROLL(4)
          for (uint32_t j = 0; j < GROUPS; ++j) right[d][j][lane] = x(j, lane, from, at < end);
        }
        UNROLL(8)
        for (uint32_t d = 0; d < DEEP; ++d) UNROLL(4)
        for (uint32_t j = 0; j < GROUPS; ++j)
          if (k + d * 32 + lane % 4 * 8 >= end) right[d][j][lane] = zero_pack();
      });
      UNROLL(8)
      for (uint32_t d = 0; d < DEEP; ++d) UNROLL(4)
      for (uint32_t i = 0; i < TILES; ++i) UNROLL(4)
      for (uint32_t j = 0; j < GROUPS; ++j) multiply(sums[i][j], low[d][i], high[d][i], right[d][j]);
    }
  }

  // Leaves the sums of warp `warp` where `strip_sum` finds them.
  FN void leave(float* shared, uint32_t warp) const {
    each_lane([&](uint32_t lane) {
      UNROLL(4)
      for (uint32_t i = 0; i < TILES; ++i) UNROLL(4)
      for (uint32_t j = 0; j < GROUPS; ++j) UNROLL(4)
      for (uint32_t r = 0; r < 4; ++r)
        shared[(((warp * TILES + i) * GROUPS + j) * 4 + r) * 32 + lane] = sums[i][j][lane][r];
    });
  }
};

// Floats of shared memory that eight warps' strips take.
template <uint32_t TILES, uint32_t GROUPS>
constexpr uint32_t STRIPS = 8 * TILES* GROUPS * 4 * 32;
constexpr uint32_t NARROW = STRIPS<1, 2>, WIDEST = STRIPS<2, 2>;

// The sum for an output and a row, of `splits` warps from `warp` on that shared the elements between them.
template <uint32_t TILES, uint32_t GROUPS>
FN float strip_sum(const float* shared, uint32_t warp, uint32_t splits, uint32_t output, uint32_t row) {
  const uint32_t r = output % 16 / 8 * 2 + row % 2, lane = output % 8 * 4 + row % 8 / 2;
  const float* first = shared + (((warp * TILES + output / 16) * GROUPS + row / 8) * 4 + r) * 32 + lane;
  float sum = 0.0f;
  for (uint32_t s = 0; s < splits; ++s) sum += first[s * TILES * GROUPS * 4 * 32];
  return sum;
}

#endif
