// Residual add and RMSNorm over rows: what follows the all-reduce in a transformer layer.
//
//   r      = round(s + residual)                                     s: the sum over the ranks, rounded
//   normed = round((r * (1 / sqrt(mean(r^2) + eps))) * (gamma + weight_bias))
//
// All in fp32, each operation rounded by itself; r takes part as rounded. The order in which the squares are summed
// depends on the width alone: eight neighbours as a balanced tree make a pack's sum; lane l of 256 virtual lanes adds
// packs l, l + 256, ... in turn; the lanes are summed as a tree (dev::sum_over_lanes). So the bits depend neither on
// the shape of the launch nor on whether it runs fused, by itself, or on a CPU.
//
// In here a row belongs to one block; spread.cuh has rows over several. `output` holds s when this begins and the
// normed row when it ends; residual_out may be the residual, or the all-reduce's input. A pack of s and of the residual
// is read before anything is written there: residual_out by the thread that reads it, the normed row behind the
// barriers of dev::sum_over_lanes.
#ifndef PEERLANE_ADD_RMS_NORM_CUH
#define PEERLANE_ADD_RMS_NORM_CUH

#include "dtype.cuh"

namespace PL_NAMESPACE {

// Where the packs of a row are.
struct NormRow {
  const char *residual, *gamma;
  char *output, *residual_out;

  PL_FN NormRow(const pl_step& a, uint64_t first_pack) {
    const uint64_t at = first_pack * PL_PACK_BYTES;
    residual = static_cast<const char*>(a.residual) + at;
    gamma = static_cast<const char*>(a.gamma);
    output = static_cast<char*>(a.output) + at;
    residual_out = static_cast<char*>(a.residual_out) + at;
  }
};

template <class D>
PL_FN void load_pack(dev::Raw& raw, const char* row, uint32_t pack) {
  dev::user_load<typename D::T, false>(raw, row + uint64_t(pack) * PL_PACK_BYTES, 1, PL_PACK_BYTES);
}

// The sum of the squares of one pack.
PL_FN float sum_of_eight(const float (&x)[8]) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}
template <class D>
PL_FN float scaled(typename D::T x, float scale, typename D::T gamma, float bias) {
  return (D::up(x) * scale) * (D::up(gamma) + bias);
}

// Where packs are registers, two elements a word: r of one pack, and the sum of its squares.
template <class D>
PL_FN float add_words(const dev::Raw& sum, const dev::Raw& residual, dev::Raw& r) {
  static_assert(elements<D>() == 8, "rows of 16-bit floats");
  PL_EACH
  for (uint32_t w = 0; w < PL_PACK_BYTES / 4; ++w) *r.words(w) = D::add_word(sum.word(w), residual.word(w));
  const dev::In<typename D::T> x(r);
  float square[8];
  PL_UNROLL
  for (uint32_t i = 0; i < 8; ++i) square[i] = D::up(x[i]) * D::up(x[i]);
  return sum_of_eight(square);
}
template <class D>
PL_FN void scale_words(const dev::Raw& r, float scale, const dev::Raw& gamma, float bias, dev::Raw& normed) {
  const dev::In<typename D::T> x(r), g(gamma);
  float value[8];
  PL_UNROLL
  for (uint32_t i = 0; i < 8; ++i) value[i] = scaled<D>(x[i], scale, g[i], bias);
  PL_EACH
  for (uint32_t w = 0; w < PL_PACK_BYTES / 4; ++w) *normed.words(w) = D::down_word(value + 2 * w);
}

// r of one pack, to memory and to `r`; returns the sum of its squares. ALIGNED: all pointers are, to packs.
template <class D, bool ALIGNED = false>
PL_FN float add_pack(const dev::Raw& sum, const dev::Raw& residual, char* to, dev::Raw& r) {
  static_assert(elements<D>() == 8, "rows of 16-bit floats");
  const dev::In<typename D::T> x(sum), y(residual);
  float square[8];
  typename D::T rounded[8];
  PL_UNROLL
  for (uint32_t i = 0; i < 8; ++i) {
    rounded[i] = D::down(D::up(x[i]) + D::up(y[i]));
    const float value = D::up(rounded[i]);
    square[i] = value * value;
  }
  dev::Out<typename D::T> out(to, PL_PACK_BYTES);
  PL_UNROLL
  for (uint32_t i = 0; i < 8; ++i) out.set(i, rounded[i]);
  ALIGNED ? out.flush_whole() : out.flush();
  if constexpr (dev::BATCH > 1) {
    dev::Fill<typename D::T> keep(r);
    PL_UNROLL
    for (uint32_t i = 0; i < 8; ++i) keep.set(i, rounded[i]);
  }
  return sum_of_eight(square);
}

template <class D, bool ALIGNED = false>
PL_FN void scale_pack(const dev::Raw& r, float scale, const dev::Raw& gamma, float bias, char* to) {
  const dev::In<typename D::T> x(r), g(gamma);
  dev::Out<typename D::T> out(to, PL_PACK_BYTES);
  PL_UNROLL
  for (uint32_t i = 0; i < 8; ++i) out.set(i, D::down(scaled<D>(x[i], scale, g[i], bias)));
  ALIGNED ? out.flush_whole() : out.flush();
}

// A thread has loads of up to BATCH packs in flight, gamma's among them: waiting for each alone, a row of 7168 would
// take several times as long. Where one batch of all threads holds the row, r and gamma stay in registers from the
// first pass to the second.
template <class D>
PL_FN void add_rms_norm_row(const pl_step& a, uint64_t row) {
  constexpr uint32_t BATCH = dev::BATCH;
  const uint32_t packs = uint32_t(a.width) / elements<D>(), stride = dev::threads();
  const bool kept = BATCH > 1 && packs <= BATCH * stride && packs <= dev::ITEMS_AT_ONCE;
  const NormRow at(a, row * packs);
  dev::Raw sum[BATCH], r[BATCH], gamma[BATCH];
  const float squares = dev::sum_over_lanes(
      packs,
      [&](uint32_t k, uint32_t p) {
        load_pack<D>(sum[k], at.output, p);
        load_pack<D>(r[k], at.residual, p);
        if (kept) load_pack<D>(gamma[k], at.gamma, p);
      },
      [&](uint32_t k, uint32_t p) {
        return add_pack<D>(sum[k], r[k], at.residual_out + uint64_t(p) * PL_PACK_BYTES, r[k]);
      });
  const float scale = 1.0f / dev::square_root(squares / float(a.width) + a.eps);
  PL_ROLL
  for (uint32_t first = dev::tid(); first < packs; first += stride * BATCH) {
    PL_EACH
    for (uint32_t k = 0; k < BATCH; ++k) {
      const uint32_t p = first + k * stride;
      if (kept || p >= packs) continue;
      load_pack<D>(gamma[k], at.gamma, p);
      load_pack<D>(r[k], at.residual_out, p);
    }
    PL_EACH
    for (uint32_t k = 0; k < BATCH; ++k) {
      const uint32_t p = first + k * stride;
      if (p < packs) scale_pack<D>(r[k], scale, gamma[k], a.weight_bias, at.output + uint64_t(p) * PL_PACK_BYTES);
    }
  }
}

// Every row of this block. By itself it is the second half of the unfused form.
template <class D>
PL_FN void add_rms_norm(const pl_step& a) {
  PL_ROLL
  for (uint64_t row = dev::block(); row < a.rows; row += dev::blocks()) add_rms_norm_row<D>(a, row);
}

}  // namespace PL_NAMESPACE

#endif
