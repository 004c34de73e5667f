// Ranks as threads over the CPU kernels, for sanitizers. Usage: ranks TABLES, a file of cases: a
// header {n, steps, protocol, one_half}, then n tables. Buffers have exactly the bytes of their
// call. Exits with 3 if a sum is wrong, 4 if the file is not what it should be; a sanitizer has an
// exit code of its own.
#include "ranks.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace {

constexpr uint64_t COUNT = 700, HALF = 256 << 10, FLAGS_HALF = 16 << 10, FLAGS = 4096;
constexpr uint64_t DATA = FLAGS + 2 * FLAGS_HALF, SLAB = DATA + 2 * HALF;

struct Case {
  uint32_t n, steps, protocol, one_half;
};

struct Rank {
  Case c;
  uint32_t rank;
  const pl_table* table;
  char* slabs;
  bool wrong = false;
};

int32_t element(uint32_t rank, uint32_t step, uint64_t i) { return int32_t(rank * 1000003 + step * 7919 + i * 31); }

// Calls of changing size, in place and not.
void* run(void* arg) {
  Rank& r = *static_cast<Rank*>(arg);
  pl_args* a = static_cast<pl_args*>(calloc(1, sizeof(pl_args)));
  pl_state state = {};
  pl_channel channel = {};
  channel.epoch = 1;
  void* partial = aligned_alloc(64, 2 * 8 * COUNT / 64 * 64);
  a->table = *r.table;
  a->geo.data = DATA;
  a->geo.half_bytes = r.c.one_half ? 0 : HALF;
  a->geo.rotation = 1;
  a->geo.slot_bytes = HALF / r.table->slots / 128 * 128;
  a->geo.flags = FLAGS;
  a->geo.flags_half_bytes = r.c.one_half ? 0 : FLAGS_HALF;
  a->geo.calls = 2048;
  a->geo.flag_chunks = uint32_t(FLAGS_HALF / 64 / r.table->flag_slots);
  for (uint32_t p = 0; p < r.c.n; ++p) a->base[p] = uint64_t(r.slabs + p * SLAB);
  a->state = &state;
  a->channel = &channel;
  a->partial = partial;
  a->deadline_ns = 5000000000ull;
  a->dtype = PL_I32;
  a->op = PL_SUM;
  a->proto = r.c.protocol;
  a->yield = 1;
  for (uint32_t k = 0; k < r.c.steps && !r.wrong; ++k) {
    a->count = k % 3 == 0 ? COUNT : k % 3 == 1 ? 5 : 250;
    int32_t* out = static_cast<int32_t*>(malloc(a->count * 4));
    const bool in_place = k & 1;
    int32_t* from = in_place ? out : static_cast<int32_t*>(malloc(a->count * 4));
    a->chunk_packs = 30;
    a->input = from;
    a->output = out;
    a->launch = k + 1;
    for (uint64_t i = 0; i < a->count; ++i) from[i] = element(r.rank, k, i);
    pl_sanitized_all_reduce(a);
    for (uint64_t i = 0; i < a->count; ++i) {
      uint32_t want = 0;
      for (uint32_t p = 0; p < r.c.n; ++p) want += uint32_t(element(p, k, i));
      r.wrong |= uint32_t(out[i]) != want;
    }
    r.wrong |= state.abort != 0;
    if (!in_place) free(from);
    free(out);
  }
  free(a), free(partial);
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
    char* slabs = static_cast<char*>(aligned_alloc(64, c.n * SLAB));
    memset(slabs, 0, c.n * SLAB);
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
    free(slabs);
  }
  fclose(f);
  return wrong ? 3 : 0;
}
