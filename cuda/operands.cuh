// Which items of a fold are handled at once.
#ifndef PEERLANE_OPERANDS_CUH
#define PEERLANE_OPERANDS_CUH

#include "wait.cuh"

namespace PL_NAMESPACE {

// K operands; `item` is valid for absent ones too (they name the fold's first item), so that an unrolled loop may read
// the table without a branch.
template <uint32_t K>
struct Operands {
  uint32_t item[K];
  uint32_t present = 0, remote = 0;  // bit k: operand k exists; a peer has sent it

  PL_FN void set(const TableStep& s, uint32_t k, uint32_t index, bool exists) {
    item[k] = index;
    present |= uint32_t(exists) << k;
    remote |= uint32_t(exists && s.t.item[index].from < PL_MAX_RANKS) << k;
  }
};

// The item of the lowest operand in `mask`, without an index into registers.
template <uint32_t K>
PL_FN uint32_t missing_item(const Operands<K>& o, uint32_t mask) {
  uint32_t index = o.item[0];
  PL_EACH
  for (uint32_t k = K; k-- > 0;)
    if (mask >> k & 1) index = o.item[k];
  return index;
}

// Items item0 .. item0 + items, in order.
template <uint32_t K>
PL_FN Operands<K> run_of(const TableStep& s, uint32_t item0, uint32_t items) {
  Operands<K> o;
  PL_EACH
  for (uint32_t k = 0; k < K; ++k) o.set(s, k, item0 + (k < items ? k : 0), k < items);
  return o;
}

// The leaves of the balanced tree over `items` <= K, at their places in the complete tree over K = 2^d: a node with m
// leaves gives ceil(m/2) to its left half and the rest to its right half, which fit, since m <= K gives ceil(m/2) <=
// K/2. So one tree that the compiler unrolls serves every number of items; a node without a right half is its left
// half.
template <uint32_t K>
PL_FN Operands<K> balanced(const TableStep& s, uint32_t item0, uint32_t items) {
  Operands<K> o;
  uint32_t next = item0;
  PL_EACH
  for (uint32_t k = 0; k < K; ++k) {
    uint32_t m = items;
    PL_EACH
    for (uint32_t half = K / 2; half > 0; half /= 2) m = k & half ? m / 2 : (m + 1) / 2;
    o.set(s, k, m ? next : item0, m != 0);
    next += m;
  }
  return o;
}

}  // namespace PL_NAMESPACE

#endif
