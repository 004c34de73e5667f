/* Measures MPI_Allreduce for `peerlane bench --rival mpi`: the same sizes, types, operations,
 * batches and statistic as the tool's own ranks, and results checked against the same numbers.
 *
 * Rank 0 reads orders from standard input, one a line:
 *   TYPE OP COUNT ITERS BATCHES WARMUP CHECKS SEED DATA
 * and answers each on standard output with one line of JSON:
 *   {"time_us":12.5,"wrong":0}    median over the batches of the mean call time, averaged over the
 * ranks
 *   {"none":"MPI has no half"}    no such type or operation
 * The first line says who speaks: {"name":"Open MPI","version":"4.1.4","ranks":8}. End of input
 * ends the program. */

#include <inttypes.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_RANKS = 16, NAME = 16 };
enum kind { SUM, PROD, MAX, MIN };

/* One order; travels from rank 0 to the others as bytes, for all run on one machine. */
struct order {
  char type[NAME], op[NAME];
  uint64_t count, iters, batches, warmup, checks, seed, data;
  int quit;
};

static int rank, ranks;

/* ---- the numbers: as in src/bin/peerlane/bench/payload.rs ---- */

static uint64_t mix(uint64_t x) {
  x ^= x >> 32;
  x *= UINT64_C(0xd6e8feb86659fd93);
  x ^= x >> 29;
  x *= UINT64_C(0x9e3779b97f4a7c15);
  return x ^ x >> 32;
}

struct payload {
  enum kind kind;
  int is_signed;
  uint64_t keys[MAX_RANKS + 1];
};

static struct payload payload_of(uint64_t seed, uint64_t data, enum kind kind, int is_signed) {
  struct payload p = {.kind = kind, .is_signed = is_signed};
  uint64_t base = mix(mix(seed) ^ data);
  for (int r = 0; r <= MAX_RANKS; r++) p.keys[r] = mix(base + (uint64_t)r + 1);
  return p;
}

static int64_t value(const struct payload *p, int r, uint64_t i) {
  uint64_t own = mix(p->keys[r] ^ i), shared;
  int64_t factor = 1;
  switch (p->kind) {
    case SUM:
      return (int64_t)(own & 7) - (p->is_signed ? 4 : 0);
    case MAX:
    case MIN:
      return (int64_t)(own & 127) - (p->is_signed ? 64 : 0);
    case PROD:
      break;
  }
  shared = mix(p->keys[MAX_RANKS] ^ i);
  if ((shared & 0xffff) % (uint64_t)ranks == (uint64_t)r) factor *= 2 + (int64_t)(shared >> 32 & 1);
  if ((shared >> 16 & 0xffff) % (uint64_t)ranks == (uint64_t)r) factor *= 3 + 2 * (int64_t)(shared >> 33 & 1);
  return p->is_signed && (own & 1) ? -factor : factor;
}

static int64_t expected(const struct payload *p, uint64_t i) {
  int64_t result = value(p, 0, i);
  for (int r = 1; r < ranks; r++) {
    int64_t v = value(p, r, i);
    switch (p->kind) {
      case SUM:
        result += v;
        break;
      case PROD:
        result *= v;
        break;
      case MAX:
        result = v > result ? v : result;
        break;
      case MIN:
        result = v < result ? v : result;
        break;
    }
  }
  return result;
}

/* ---- types ---- */

#define DEFINE_TYPE(name, ctype)                                                         \
  static void fill_##name(const struct payload *p, void *buffer, uint64_t count) {       \
    ctype *x = buffer;                                                                   \
    for (uint64_t i = 0; i < count; i++) x[i] = (ctype)value(p, rank, i);                \
  }                                                                                      \
  static uint64_t wrong_##name(const struct payload *p, const void *b, uint64_t count) { \
    const ctype *x = b;                                                                  \
    uint64_t wrong = 0;                                                                  \
    for (uint64_t i = 0; i < count; i++) {                                               \
      ctype right = (ctype)expected(p, i);                                               \
      wrong += memcmp(&x[i], &right, sizeof right) != 0;                                 \
    }                                                                                    \
    return wrong;                                                                        \
  }

DEFINE_TYPE(int8, int8_t)
DEFINE_TYPE(uint8, uint8_t)
DEFINE_TYPE(int32, int32_t)
DEFINE_TYPE(uint32, uint32_t)
DEFINE_TYPE(int64, int64_t)
DEFINE_TYPE(uint64, uint64_t)
DEFINE_TYPE(float, float)
DEFINE_TYPE(double, double)

struct type {
  const char *name;
  size_t size;
  int is_signed;
  MPI_Datatype mpi;
  void (*fill)(const struct payload *, void *, uint64_t);
  uint64_t (*wrong)(const struct payload *, const void *, uint64_t);
};

static const struct type *find_type(const char *name) {
  static struct type types[] = {
      {"int8", 1, 1, 0, fill_int8, wrong_int8},    {"uint8", 1, 0, 0, fill_uint8, wrong_uint8},
      {"int32", 4, 1, 0, fill_int32, wrong_int32}, {"uint32", 4, 0, 0, fill_uint32, wrong_uint32},
      {"int64", 8, 1, 0, fill_int64, wrong_int64}, {"uint64", 8, 0, 0, fill_uint64, wrong_uint64},
      {"float", 4, 1, 0, fill_float, wrong_float}, {"double", 8, 1, 0, fill_double, wrong_double},
  };
  /* MPI's handles need not be constants. */
  const MPI_Datatype handles[] = {MPI_INT8_T,  MPI_UINT8_T,  MPI_INT32_T, MPI_UINT32_T,
                                  MPI_INT64_T, MPI_UINT64_T, MPI_FLOAT,   MPI_DOUBLE};
  for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
    types[t].mpi = handles[t];
    if (!strcmp(types[t].name, name)) return &types[t];
  }
  return NULL;
}

static int find_op(const char *name, enum kind *kind, MPI_Op *op) {
  const char *names[] = {"sum", "prod", "max", "min"};
  const MPI_Op ops[] = {MPI_SUM, MPI_PROD, MPI_MAX, MPI_MIN};
  for (int k = 0; k < 4; k++)
    if (!strcmp(names[k], name)) {
      *kind = (enum kind)k;
      *op = ops[k];
      return 1;
    }
  return 0;
}

/* ---- orders ---- */

/* Waits for the next order asleep: ranks that spin here would take the cores from the ranks that
 * the tool measures meanwhile. */
static void next_order(struct order *order) {
  MPI_Request request;
  int done = 0;
  if (rank == 0) {
    char line[512];
    memset(order, 0, sizeof *order);
    if (!fgets(line, sizeof line, stdin)) {
      order->quit = 1;
    } else if (sscanf(line,
                      "%15s %15s %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64,
                      order->type, order->op, &order->count, &order->iters, &order->batches, &order->warmup,
                      &order->checks, &order->seed, &order->data) != 9) {
      fprintf(stderr, "peerlane-rival-mpi: not an order: %s", line);
      MPI_Abort(MPI_COMM_WORLD, 2);
    }
  }
  MPI_Ibcast(order, sizeof *order, MPI_BYTE, 0, MPI_COMM_WORLD, &request);
  for (;;) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done) return;
    nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
  }
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void *allocate(size_t bytes) {
  void *p = aligned_alloc(64, (bytes + 64) / 64 * 64);
  if (!p) {
    fprintf(stderr, "peerlane-rival-mpi: no memory for %zu bytes\n", bytes);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  return p;
}

static void measure(const struct order *o, const struct type *type, enum kind kind, MPI_Op op) {
  size_t bytes = o->count * type->size;
  void *in = allocate(bytes), *out = allocate(bytes);
  double *mean_us = allocate((o->batches + 1) * sizeof *mean_us);
  int count = (int)o->count;
  uint64_t wrong = 0, total = 0, data = o->data;
  struct payload p;

  for (uint64_t c = 0; c < o->checks; c++) {
    p = payload_of(o->seed, data++, kind, type->is_signed);
    type->fill(&p, in, o->count);
    memset(out, 0xa5, bytes);
    MPI_Allreduce(in, out, count, type->mpi, op, MPI_COMM_WORLD);
    wrong += type->wrong(&p, out, o->count);
  }

  p = payload_of(o->seed, data, kind, type->is_signed);
  type->fill(&p, in, o->count);
  memset(out, 0xa5, bytes);
  for (uint64_t w = 0; w < o->warmup; w++) MPI_Allreduce(in, out, count, type->mpi, op, MPI_COMM_WORLD);
  for (uint64_t b = 0; b < o->batches; b++) {
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    for (uint64_t i = 0; i < o->iters; i++) MPI_Allreduce(in, out, count, type->mpi, op, MPI_COMM_WORLD);
    mean_us[b] = (MPI_Wtime() - start) / (double)o->iters * 1e6;
  }
  if (o->checks) wrong += type->wrong(&p, out, o->count);

  MPI_Reduce(rank ? mean_us : MPI_IN_PLACE, mean_us, (int)o->batches, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  MPI_Reduce(&wrong, &total, 1, MPI_UINT64_T, MPI_SUM, 0, MPI_COMM_WORLD);
  if (rank == 0) {
    uint64_t n = o->batches;
    qsort(mean_us, n, sizeof *mean_us, ascending);
    printf("{\"time_us\":%.6f,\"wrong\":%" PRIu64 "}\n", (mean_us[(n - 1) / 2] + mean_us[n / 2]) / 2 / ranks, total);
  }
  free(in);
  free(out);
  free(mean_us);
}

int main(int argc, char **argv) {
  struct order order;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (ranks > MAX_RANKS) {
    if (rank == 0) fprintf(stderr, "peerlane-rival-mpi: at most %d ranks\n", MAX_RANKS);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  if (rank == 0) {
    char text[MPI_MAX_LIBRARY_VERSION_STRING], version[32] = "unknown";
    int length;
    MPI_Get_library_version(text, &length);
    /* "Open MPI v4.1.4, package: ..." */
    int known = sscanf(text, "Open MPI v%31[0-9a-z.]", version) == 1;
    printf("{\"name\":\"%s\",\"version\":\"%s\",\"ranks\":%d}\n", known ? "Open MPI" : "MPI", version, ranks);
    fflush(stdout);
  }
  for (next_order(&order); !order.quit; next_order(&order)) {
    enum kind kind;
    MPI_Op op;
    const struct type *type = find_type(order.type);
    const char *missing = !type                            ? order.type
                          : !find_op(order.op, &kind, &op) ? order.op
                          : order.count > INT32_MAX        ? "count that large"
                          : !order.iters || !order.batches ? "result of no calls"
                                                           : NULL;
    if (!missing)
      measure(&order, type, kind, op);
    else if (rank == 0)
      printf("{\"none\":\"MPI has no %s\"}\n", missing);
    fflush(stdout);
  }
  MPI_Finalize();
  return 0;
}
