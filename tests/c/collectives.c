/* Broadcast, all-gather and reduce-scatter: exact results in place and out, from one thread in groups, on streams, and
 * between processes, mixed with all-reduces; called wrong they are refused with a message and touch nothing. */
#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define INVALID PEERLANE_ERROR_INVALID_ARGUMENT
#define HANDLE PEERLANE_ERROR_INVALID_HANDLE

typedef enum { BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, KINDS } kind;

/* One rank's part of one collective, on buffers of exactly the size that the header names. */
typedef struct {
  kind what;
  int n, rank, root, dtype, op, call, in_place;
  size_t count, part; /* elements and bytes of a rank's part */
  char *input, *output, *owned[2];
} job;

static job prepare(kind what, int n, int rank, int call, size_t count) {
  job j;
  size_t all;
  memset(&j, 0, sizeof j);
  j.what = what;
  j.n = n;
  j.rank = rank;
  j.call = call;
  j.count = count;
  j.root = call % n;
  j.dtype = call % 10;
  j.op = call % (n == 3 ? 4 : 5); /* an average over three is not exact */
  j.in_place = call / 10 % 2;
  j.part = count * DTYPE_SIZE[j.dtype];
  all = (size_t)n * j.part;
  if (what == BROADCAST) {
    j.output = j.owned[0] = exactly(j.part);
    memset(j.output, 0xa5, j.part);
    if (j.in_place) j.input = j.output;
    if (!j.in_place && rank == j.root) j.input = j.owned[1] = exactly(j.part); /* nobody looks at another's */
    if (rank == j.root) fill(j.input, count, j.dtype, rank, call);
  } else if (what == ALL_GATHER) {
    j.output = j.owned[0] = exactly(all);
    memset(j.output, 0xa5, all);
    j.input = j.in_place ? j.output + (size_t)rank * j.part : (j.owned[1] = exactly(j.part));
    fill(j.input, count, j.dtype, rank, call);
  } else {
    size_t inputs = what == REDUCE_SCATTER ? (size_t)n : 1, own = what == REDUCE_SCATTER ? (size_t)rank : 0;
    j.input = j.owned[0] = exactly(inputs * j.part);
    fill(j.input, inputs * count, j.dtype, rank, call);
    j.output = j.in_place ? j.input + own * j.part : (j.owned[1] = exactly(j.part));
  }
  return j;
}

static void start(const job* j, peerlane_comm_t comm, void* stream) {
  const peerlane_dtype dtype = (peerlane_dtype)j->dtype;
  const peerlane_op op = (peerlane_op)j->op;
  if (j->what == BROADCAST)
    OK(peerlane_broadcast(comm, j->input, j->output, j->count, dtype, j->root, stream, -1));
  else if (j->what == ALL_GATHER)
    OK(peerlane_all_gather(comm, j->input, j->output, j->count, dtype, stream, -1));
  else if (j->what == REDUCE_SCATTER)
    OK(peerlane_reduce_scatter(comm, j->input, j->output, j->count, dtype, op, stream, -1));
  else
    OK(peerlane_all_reduce(comm, j->input, j->output, j->count, dtype, op, stream));
}

static void expect(const job* j, const char* data, size_t i, int quarters) {
  char expected[8];
  put(expected, 0, j->dtype, quarters);
  if (memcmp(data + i * DTYPE_SIZE[j->dtype], expected, DTYPE_SIZE[j->dtype]))
    FAIL("kind %d, rank %d of %d: element %zu is wrong (dtype %d, op %d, call %d, %zu elements)", j->what, j->rank,
         j->n, i, j->dtype, j->op, j->call, j->count);
}

/* What came of it; frees the buffers. */
static void finish(const job* j) {
  size_t i, first = j->what == REDUCE_SCATTER ? (size_t)j->rank * j->count : 0;
  int rank;
  for (i = 0; i < j->count; i++) {
    if (j->what == BROADCAST)
      expect(j, j->output, i, 4 * element(j->root, i, j->call));
    else if (j->what == ALL_GATHER)
      for (rank = 0; rank < j->n; rank++)
        expect(j, j->output, (size_t)rank * j->count + i, 4 * element(rank, i, j->call));
    else
      expect(j, j->output, i, reduced(j->n, first + i, j->call, j->op));
  }
  if (j->what == REDUCE_SCATTER && j->in_place) /* the other parts of the input are the caller's */
    for (i = 0; i < (size_t)j->n * j->count; i++)
      if (i < first || i >= first + j->count) expect(j, j->input, i, 4 * element(j->rank, i, j->call));
  free(j->owned[0]);
  free(j->owned[1]);
}

static void one_thread_drives_all_ranks(int n, int on_streams) {
  enum { CALLS = 44, MOST_RANKS = 4 };
  static job jobs[MOST_RANKS][CALLS];
  peerlane_comm_t comms[MOST_RANKS];
  peerlane_stream_t streams[MOST_RANKS];
  int rank, call;
  OK(peerlane_comm_create_local(comms, n, NULL));
  for (rank = 0; rank < n; rank++) OK(peerlane_stream_create(&streams[rank]));
  OK(peerlane_group_start());
  for (rank = 0; rank < n; rank++)
    for (call = 0; call < CALLS; call++) {
      jobs[rank][call] = prepare((kind)(call % KINDS), n, rank, call, (size_t)(call * 13));
      start(&jobs[rank][call], comms[rank], on_streams ? streams[rank] : NULL);
    }
  OK(peerlane_group_end());
  for (rank = 0; rank < n; rank++) {
    peerlane_status sticky = PEERLANE_ERROR_INTERNAL;
    OK(peerlane_stream_synchronize(streams[rank]));
    OK(peerlane_comm_async_error(comms[rank], &sticky));
    CHECK(sticky == PEERLANE_SUCCESS);
    for (call = 0; call < CALLS; call++) finish(&jobs[rank][call]);
    OK(peerlane_stream_destroy(streams[rank]));
  }
  for (rank = 0; rank < n; rank++) OK(peerlane_comm_destroy(comms[rank]));
}

static void one_process(int n, int rank, const peerlane_unique_id* id, size_t largest) {
  const size_t counts[] = {0, 1, 37, largest};
  peerlane_comm_t comm = NULL;
  peerlane_config config;
  peerlane_stats stats;
  uint64_t by_algorithm = 0, by_protocol = 0, bytes = 0, served = 0;
  int call;
  size_t i;
  OK(peerlane_config_init(&config, sizeof config));
  config.check = 1;
  OK(peerlane_comm_create(&comm, n, id, rank, &config));
  for (call = 0; call < 160; call++) {
    job j = prepare((kind)(call % KINDS), n, rank, call, counts[call / KINDS % 4]);
    start(&j, comm, NULL);
    finish(&j);
    bytes += j.part;
    served += j.part != 0;
  }
  stats.size = sizeof stats;
  OK(peerlane_comm_stats(comm, &stats));
  for (i = 0; i < 16; i++) by_algorithm += stats.by_algorithm[i];
  for (i = 0; i < 8; i++) by_protocol += stats.by_protocol[i];
  CHECK(stats.calls == 160 && stats.failed == 0 && stats.steps >= served);
  CHECK(by_algorithm == served && by_protocol == served && stats.bytes == bytes);
  OK(peerlane_comm_destroy(comm));
}

static void processes(int n, size_t largest) {
  int children[4], rank;
  peerlane_unique_id id;
  OK(peerlane_get_unique_id(&id));
  for (rank = 0; rank < n; rank++) {
    children[rank] = fork();
    CHECK(children[rank] >= 0);
    if (children[rank] == 0) {
      one_process(n, rank, &id, largest);
      exit(0);
    }
  }
  for (rank = 0; rank < n; rank++) {
    int status = 0;
    CHECK(waitpid(children[rank], &status, 0) == children[rank]);
    if (status != 0) FAIL("rank %d ended with wait status %#x", rank, status);
  }
}

static void called_wrong(void) {
  static float in[64], out[64];
  peerlane_comm_t comms[2];
  int rank, i;
  for (i = 0; i < 64; i++) in[i] = out[i] = (float)i;
  OK(peerlane_comm_create_local(comms, 2, NULL));
#define BROADCAST_OF(in, out, count, dtype, root, stream, channel) \
  peerlane_broadcast(comms[0], in, out, count, (peerlane_dtype)(dtype), root, stream, channel)
#define GATHER_OF(in, out, count, dtype, channel) \
  peerlane_all_gather(comms[0], in, out, count, (peerlane_dtype)(dtype), NULL, channel)
#define SCATTER_OF(in, out, count, dtype, op, channel) \
  peerlane_reduce_scatter(comms[0], in, out, count, (peerlane_dtype)(dtype), (peerlane_op)(op), NULL, channel)
  REFUSED(INVALID, "peerlane_broadcast: invalid argument: 'root' is 2; ranks of 2 are 0 to 1",
          BROADCAST_OF(in, out, 1, PEERLANE_FLOAT32, 2, NULL, -1));
  REFUSED(INVALID, "'root' is -1", BROADCAST_OF(in, out, 1, PEERLANE_FLOAT32, -1, NULL, -1));
  REFUSED(INVALID, "'dtype': 10", BROADCAST_OF(in, out, 1, 10, 0, NULL, -1));
  REFUSED(INVALID, "'channel' is 1", BROADCAST_OF(in, out, 1, PEERLANE_FLOAT32, 0, NULL, 1));
  REFUSED(INVALID, "input is null", BROADCAST_OF(NULL, out, 1, PEERLANE_FLOAT32, 0, NULL, -1));
  REFUSED(INVALID, "output is null", BROADCAST_OF(in, NULL, 1, PEERLANE_FLOAT32, 1, NULL, -1));
  REFUSED(INVALID, "overlap", BROADCAST_OF(out, out + 1, 8, PEERLANE_FLOAT32, 0, NULL, -1));
  REFUSED(INVALID, "aligned", BROADCAST_OF((char*)in + 1, out, 8, PEERLANE_FLOAT32, 0, NULL, -1));
  REFUSED(HANDLE, "argument 'stream'", BROADCAST_OF(in, out, 8, PEERLANE_FLOAT32, 0, comms[0], -1));
  REFUSED(HANDLE, "NULL", peerlane_broadcast(NULL, in, out, 1, PEERLANE_INT8, 0, NULL, -1));
  REFUSED(INVALID, "'dtype': -1", GATHER_OF(in, out, 1, -1, -1));
  REFUSED(INVALID, "'channel' is 4", GATHER_OF(in, out, 1, PEERLANE_FLOAT32, 4));
  REFUSED(INVALID, "output is null", GATHER_OF(in, NULL, 1, PEERLANE_FLOAT32, -1));
  REFUSED(INVALID, "overlap", GATHER_OF(out + 8, out, 8, PEERLANE_FLOAT32, -1)); /* the other rank's part */
  REFUSED(INVALID, "2 parts", GATHER_OF(in, out, SIZE_MAX / 8, PEERLANE_FLOAT32, -1));
  REFUSED(HANDLE, "NULL", peerlane_all_gather(NULL, in, out, 1, PEERLANE_INT8, NULL, -1));
  REFUSED(INVALID, "'op': 5", SCATTER_OF(in, out, 1, PEERLANE_FLOAT32, 5, -1));
  REFUSED(INVALID, "'dtype': 11", SCATTER_OF(in, out, 1, 11, PEERLANE_SUM, -1));
  REFUSED(INVALID, "'channel' is -2", SCATTER_OF(in, out, 1, PEERLANE_FLOAT32, PEERLANE_SUM, -2));
  REFUSED(INVALID, "input is null", SCATTER_OF(NULL, out, 1, PEERLANE_FLOAT32, PEERLANE_SUM, -1));
  REFUSED(INVALID, "overlap", SCATTER_OF(out, out + 8, 8, PEERLANE_FLOAT32, PEERLANE_SUM, -1));
  REFUSED(INVALID, "count", SCATTER_OF(in, out, SIZE_MAX, PEERLANE_FLOAT64, PEERLANE_SUM, -1));
  REFUSED(HANDLE, "NULL", peerlane_reduce_scatter(NULL, in, out, 1, PEERLANE_INT8, PEERLANE_SUM, NULL, -1));
  for (i = 0; i < 64; i++) CHECK(in[i] == (float)i && out[i] == (float)i);

  /* The communicator is as good as before; ended, it fails every later call and leaves nothing old in its output. */
  OK(peerlane_group_start());
  for (rank = 0; rank < 2; rank++)
    OK(peerlane_all_gather(comms[rank], in, out + 32 * rank, 16, PEERLANE_FLOAT32, NULL, -1));
  OK(peerlane_group_end());
  for (i = 0; i < 64; i++) CHECK(out[i] == (float)(i % 16));
  OK(peerlane_comm_abort(comms[1]));
  REFUSED(PEERLANE_ERROR_ABORTED, "abort", GATHER_OF(in, out, 32, PEERLANE_FLOAT32, -1));
  for (i = 0; i < 64; i++) CHECK(isnan(out[i]));
  REFUSED(PEERLANE_ERROR_ABORTED, "abort", BROADCAST_OF(in, out, 1, PEERLANE_FLOAT32, 0, NULL, -1));
  REFUSED(PEERLANE_ERROR_ABORTED, "abort", SCATTER_OF(in, out, 1, PEERLANE_FLOAT32, PEERLANE_MAX, -1));
  for (rank = 0; rank < 2; rank++) OK(peerlane_comm_destroy(comms[rank]));
}

static void what_the_ranks_called_is_said(void) {
  static float data[2][8];
  peerlane_comm_t comms[2];
  peerlane_config config;
  int rank;
  OK(peerlane_config_init(&config, sizeof config));
  config.check = 1;
  OK(peerlane_comm_create_local(comms, 2, &config));
  OK(peerlane_group_start());
  for (rank = 0; rank < 2; rank++)
    OK(peerlane_broadcast(comms[rank], data[rank], data[rank], 8, PEERLANE_FLOAT32, rank, NULL, -1));
  REFUSED(PEERLANE_ERROR_MISMATCH, "broadcast from rank", peerlane_group_end());
  for (rank = 0; rank < 2; rank++) OK(peerlane_comm_destroy(comms[rank]));
}

int main(int argc, char** argv) {
  size_t largest = argc > 1 ? strtoul(argv[1], NULL, 10) : 40000;
  int n;
  processes(3, largest);
  for (n = 1; n <= 4; n++) {
    one_thread_drives_all_ranks(n, 0);
    one_thread_drives_all_ranks(n, 1);
  }
  called_wrong();
  what_the_ranks_called_is_said();
  return 0;
}
