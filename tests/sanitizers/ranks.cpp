// Ranks as threads over the CPU kernels, for sanitizers. Usage: ranks TABLES, a file of cases: a header (struct Case),
// then n tables. Slabs, scratch and the callers' buffers are blocks of their own, of exactly the bytes they need. Exits
// with 3 if a sum is wrong or a byte before a result has changed, 4 if the file is not what it should be; a sanitizer
// has an exit code of its own.
#include "ranks.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace {

constexpr uint64_t COUNTS[] = {701, 5, 251};
constexpr uint64_t HALF = 256 << 10, FLAGS_HALF = 16 << 10, FLAGS = 4096;
constexpr uint64_t DATA = FLAGS + 2 * FLAGS_HALF, SLAB = DATA + 2 * HALF;
constexpr unsigned char UNTOUCHED = 0xa5;

// `shift`: where a buffer begins in its block, so how far it is from an aligned address. `missing`: bytes that a buffer
// is short of what the call says, for the control.
struct Case {
  uint32_t n, steps, protocol, one_half, dtype, shift, missing;
};

struct Rank {
  Case c;
  uint32_t rank;
  const pl_table* table;
  char* const* slabs;
  bool wrong = false;
};

uint32_t size_of(uint32_t dtype) { return dtype == PL_U8 ? 1 : dtype == PL_BF16 ? 2 : 4; }

// Small, so that sums are exact in every type.
uint32_t element(uint32_t rank, uint32_t step, uint64_t i) { return uint32_t(rank * 5 + step * 3 + i) % 13; }

// A small number as the bits of a type; an i32 fills its word.
uint32_t bits(uint32_t dtype, uint32_t v) {
  const float f = float(v);
  uint32_t u;
  memcpy(&u, &f, 4);
  return dtype == PL_F32 ? u : dtype == PL_BF16 ? u >> 16 : dtype == PL_U8 ? v : v * 0x01000193u;
}

// The bytes that a call of `count` elements keeps as accumulators: whole packs of them.
uint64_t partial_bytes(uint32_t dtype, uint64_t count) {
  const uint64_t per_pack = 16 / size_of(dtype);
  return (count + per_pack - 1) / per_pack * (dtype == PL_BF16 ? 32 : 16);
}

char* buffer(const Case& c, uint64_t bytes) {
  char* block = static_cast<char*>(malloc(c.shift + bytes - c.missing));
  memset(block, UNTOUCHED, c.shift);
  return block;
}

// Calls of changing size, in place and not.
void* run(void* arg) {
  Rank& r = *static_cast<Rank*>(arg);
  const uint32_t size = size_of(r.c.dtype);
  pl_args* a = static_cast<pl_args*>(calloc(1, sizeof(pl_args)));
  pl_state state = {};
  pl_channel channel = {};
  channel.turn = 1ull << PL_TURN_BITS;
  a->table = *r.table;
  a->step.n = r.table->n;
  a->step.rank = r.table->rank;
  a->step.geo.data = DATA;
  a->step.geo.half_bytes = r.c.one_half ? 0 : HALF;
  a->step.geo.rotation = 1;
  a->step.geo.slot_bytes = HALF / r.table->slots / 128 * 128;
  a->step.geo.flags = FLAGS;
  a->step.geo.flags_half_bytes = r.c.one_half ? 0 : FLAGS_HALF;
  a->step.geo.calls = 2048;
  a->step.geo.flag_chunks = uint32_t(FLAGS_HALF / 64 / r.table->flag_slots);
  for (uint32_t p = 0; p < r.c.n; ++p) a->step.base[p] = uint64_t(r.slabs[p]);
  a->step.state = &state;
  a->step.channel = &channel;
  // With one half a flag may be overwritten before it is seen: then the wait is for ever, and the race comes later.
  a->step.deadline_ns = r.c.one_half ? 1000000000ull : 60000000000ull;
  a->step.dtype = r.c.dtype;
  a->step.op = PL_SUM;
  a->step.proto = r.c.protocol;
  a->step.yield = 1;
  for (uint32_t k = 0; k < r.c.steps && !r.wrong; ++k) {
    a->step.count = COUNTS[k % 3];
    const uint64_t bytes = a->step.count * size;
    char* out = buffer(r.c, bytes);
    const bool in_place = k & 1;
    char* from = in_place ? out : buffer(r.c, bytes);
    void* partial = malloc(partial_bytes(r.c.dtype, a->step.count));
    a->step.chunk_packs = 30;
    a->step.input = from + r.c.shift;
    a->step.output = out + r.c.shift;
    a->step.partial = partial;
    a->step.launch = k + 1;
    for (uint64_t i = 0; i < a->step.count - r.c.missing; ++i) {
      const uint32_t v = bits(r.c.dtype, element(r.rank, k, i));
      memcpy(from + r.c.shift + i * size, &v, size);
    }
    pl_sanitized_all_reduce(a);
    for (uint64_t i = 0; i < a->step.count; ++i) {
      uint32_t sum = 0, got = 0;
      for (uint32_t p = 0; p < r.c.n; ++p) sum += element(p, k, i);
      memcpy(&got, out + r.c.shift + i * size, size);
      r.wrong |= got != bits(r.c.dtype, sum);
    }
    for (uint32_t i = 0; i < r.c.shift; ++i) r.wrong |= static_cast<unsigned char>(out[i]) != UNTOUCHED;
    r.wrong |= state.abort != 0;
    if (!in_place) free(from);
    free(out), free(partial);
  }
  free(a);
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  FILE* f = argc == 2 ? fopen(argv[1], "rb") : nullptr;
  if (f == nullptr) return 4;
  bool wrong = false;
  Case c;
  while (fread(&c, sizeof c, 1, f) == 1) {
    if (c.n == 0 || c.n > PL_MAX_RANKS) return 4;
    pl_table tables[PL_MAX_RANKS];
    if (fread(tables, sizeof(pl_table), c.n, f) != c.n) return 4;
    char* slabs[PL_MAX_RANKS];
    for (uint32_t i = 0; i < c.n; ++i) {
      slabs[i] = static_cast<char*>(aligned_alloc(64, SLAB));
      memset(slabs[i], 0, DATA);
      memset(slabs[i] + DATA, c.protocol == PL_SENTINEL ? 0xff : 0, SLAB - DATA);
    }
    Rank ranks[PL_MAX_RANKS];
    pthread_t threads[PL_MAX_RANKS];
    for (uint32_t i = 0; i < c.n; ++i) {
      ranks[i].c = c, ranks[i].rank = i, ranks[i].table = &tables[i], ranks[i].slabs = slabs;
      if (pthread_create(&threads[i], nullptr, run, &ranks[i]) != 0) return 4;
    }
    for (uint32_t i = 0; i < c.n; ++i) {
      pthread_join(threads[i], nullptr);
      wrong |= ranks[i].wrong;
    }
    for (uint32_t i = 0; i < c.n; ++i) free(slabs[i]);
  }
  fclose(f);
  return wrong ? 3 : 0;
}
