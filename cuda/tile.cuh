// Where things are: the step's constants, a piece's chunks, the packs of a thread, addresses in slabs.
#ifndef PEERLANE_TILE_CUH
#define PEERLANE_TILE_CUH

#include "dtype.cuh"

namespace PL_NAMESPACE {

PL_FN uint32_t larger(uint32_t x, uint32_t y) { return x > y ? x : y; }
PL_FN uint32_t smaller(uint32_t x, uint32_t y) { return x < y ? x : y; }
// Not 0 if bit `k` of a mask is set. What is compared with 0 is one instruction of a GPU; as a bool a compiler makes it
// a shift, and three.
PL_FN uint32_t bit(uint32_t mask, uint32_t k) { return mask & uint32_t(1) << k; }

// Why a thread gives up, for the record.
struct Verdict {
  uint32_t phase = 0;
  uint32_t reason = PL_REASON_NONE;  // none: it follows somebody else
  uint32_t peer = 0;                 // whom the verdict is about
  uint32_t differs = 0;              // of a mismatch: a bit per field, see step.cuh
};

// One launch on one thread.
struct Step {
  const pl_step& a;
  uint32_t phase = 0;
  uint64_t epoch = 0;
  uint64_t packs;  // of the tile
  uint64_t rows;   // tiles of the step if they are rows; 0: the tile is the whole message
  // Thread 0, see begin(): the id of this launch, how many of its blocks had begun before this one, and by how much the
  // channel's epoch goes on.
  uint32_t id, entered, advance;

  PL_FN Step(const pl_step& args, uint64_t tile_packs, uint64_t tile_rows)
      : a(args), packs(tile_packs), rows(tile_rows), id(0), entered(0), advance(1) {}
};

// A step that walks a table.
struct TableStep : Step {
  const pl_table& t;
  uint64_t chunks;  // an upper bound of the chunks of any piece
  uint64_t whole;   // packs / cut_den
  uint32_t rest;    // packs % cut_den

  PL_FN TableStep(const pl_args& args, uint64_t tile_packs, uint64_t tile_rows)
      : Step(args.step, tile_packs, tile_rows), t(args.table) {
    whole = packs / t.cut_den;
    rest = uint32_t(packs % t.cut_den);
    if (rows) {
      chunks = rows;
      return;
    }
    if (a.parts) {
      chunks = packs / a.chunk_packs + 1;
      return;
    }
    uint32_t widest = 0;
    PL_ROLL
    for (uint32_t p = 0; p < t.pieces; ++p) {
      const uint32_t w = t.cut_num[p + 1] - t.cut_num[p];
      widest = w > widest ? w : widest;
    }
    // The floors in a piece's two cuts change its size by less than one pack.
    chunks = packs * widest / t.cut_den / a.chunk_packs + 1;
  }
};

// Where pieces are parts, a pack's place in the tile is that in its part, with the part's number above it.
constexpr uint32_t PART_SHIFT = 48;
PL_FN uint64_t in_part(uint64_t pack) { return pack & ((uint64_t(1) << PART_SHIFT) - 1); }

// Packs [first, last) of a piece; `piece0` is where the piece starts in the tile.
struct Range {
  uint64_t piece0, first, last;
  PL_FN bool empty() const { return first >= last; }
};

// Packs that one thread handles at once.
struct Span {
  uint64_t in_piece, in_tile;
  uint32_t packs, elems, bytes;  // elems and bytes without the padding of a short last pack
};

// packs * cut_num / cut_den, as whole * cut_num + rest * cut_num / cut_den: the same integer, and the division has 32
// bits (both factors are below 2^16). A 64-bit division is a hundred instructions, and a phase needs several.
PL_FN uint64_t cut(const TableStep& s, uint32_t p) {
  const uint32_t num = s.t.cut_num[p];
  return s.whole * num + s.rest * num / s.t.cut_den;
}

PL_FN Range chunk_of(const TableStep& s, uint32_t piece, uint64_t chunk) {
  Range r;
  if (s.rows) {
    // Chunk k is all that the piece has of row k. A slot holds the piece's packs of one row after another; in the
    // message they lie a row apart. `piece0` may wrap around on the way, its sum with a pack of the chunk does not.
    const uint64_t start = cut(s, piece), size = cut(s, piece + 1) - start;
    r.first = chunk * size;
    r.last = r.first + size;
    r.piece0 = chunk * s.packs + start - r.first;
    return r;
  }
  r.piece0 = s.a.parts ? uint64_t(piece) << PART_SHIFT : cut(s, piece);
  const uint64_t size = s.a.parts ? s.packs : cut(s, piece + 1) - r.piece0;
  r.first = chunk * s.a.chunk_packs;
  r.last = r.first + s.a.chunk_packs < size ? r.first + s.a.chunk_packs : size;
  return r;
}

// Pack j of a piece belongs to the same thread in every phase: block b takes chunks (or rows) b, b + blocks, ..., its
// threads take turns inside. So what a phase reads of the scratch or the output was written by the same thread, and
// phases need no synchronisation among threads.
template <class D, class F>
PL_FN bool each_span(const Step& s, const Range& r, uint32_t width, F f) {
  constexpr uint32_t E = elements<D>();
  PL_ROLL
  for (uint64_t j = r.first + uint64_t(dev::tid()) * width; j < r.last; j += uint64_t(dev::threads()) * width) {
    Span span;
    span.in_piece = j;
    span.in_tile = r.piece0 + j;
    span.packs = dev::STRIP == 1 ? 1 : uint32_t(r.last - j < width ? r.last - j : width);
    const uint64_t left = s.a.count - in_part(span.in_tile) * E;
    span.elems = uint32_t(left < uint64_t(span.packs) * E ? left : uint64_t(span.packs) * E);
    span.bytes = span.elems * uint32_t(sizeof(typename D::T));
    if (!f(span)) return false;
  }
  return true;
}

// How many elements a loop over a strip visits: on a GPU the constant of a pack (a short tail is padded), on a CPU what
// is there.
template <class D>
PL_FN uint32_t extent(const Span& span) {
  return dev::STRIP == 1 ? elements<D>() : span.elems;
}
// The same, padding included, for strips that travel as whole packs.
template <class D>
PL_FN uint32_t whole_extent(const Span& span) {
  return dev::STRIP == 1 ? elements<D>() : span.packs * elements<D>();
}

// Bytes of a pack as accumulators: only 16-bit floats widen.
template <class D>
constexpr PL_FN uint32_t partial_pack_bytes() {
  return D::SHORT_FLOAT ? 32 : 16;
}

PL_FN char* slab(const pl_step& a, uint32_t rank) { return reinterpret_cast<char*>(a.base[rank]); }

PL_FN char* slot_data(const Step& s, uint32_t rank, uint32_t slot) {
  const pl_geometry& g = s.a.geo;
  return slab(s.a, rank) + g.data + (s.epoch & g.rotation) * g.half_bytes + slot * g.slot_bytes;
}
PL_FN char* slot_flag(const Step& s, uint32_t rank, uint32_t slot, uint64_t chunk) {
  const pl_geometry& g = s.a.geo;
  return slab(s.a, rank) + g.flags + (s.epoch & 1) * g.flags_half_bytes + (uint64_t(slot) * g.flag_chunks + chunk) * 64;
}
PL_FN uint64_t buffer_offset(uint64_t pack, uint64_t part_bytes) {
  return in_part(pack) * PL_PACK_BYTES + (pack >> PART_SHIFT) * part_bytes;
}
PL_FN const char* input_at(const Step& s, uint64_t pack) {
  return static_cast<const char*>(s.a.input) + buffer_offset(pack, s.a.input_part);
}
PL_FN char* output_at(const Step& s, uint64_t pack) {
  return static_cast<char*>(s.a.output) + buffer_offset(pack, s.a.output_part);
}
PL_FN char* residual_out_at(const Step& s, uint64_t pack) {
  return static_cast<char*>(s.a.residual_out) + pack * PL_PACK_BYTES;
}
template <class D>
PL_FN char* partial_at(const Step& s, uint64_t pack) {
  return static_cast<char*>(s.a.partial) + pack * partial_pack_bytes<D>();
}

}  // namespace PL_NAMESPACE

#endif
