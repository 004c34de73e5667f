/* Eight processes on GPUs, as an engine in C would use them: a context and a stream of the client's own, creation,
 * eager calls of every collective, captures that are replayed, destruction, and a replay after it. With "kill" the last
 * rank is killed in the middle of replays, and the others learn who died.
 *
 * The driver is looked up by hand, so that the client builds without CUDA's headers. */
#include <dlfcn.h>
#include <math.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { RANKS = 8, GPUS = 2, COUNT = 3001, CALLS = 3, REPLAYS = 3, PART = COUNT / RANKS };

static void* driver;

/* Calls a function of the driver: cu("name", types of the arguments, arguments). */
#define CU(name, types, ...)                                 \
  do {                                                       \
    int(*cu_function) types;                                 \
    int cu_code = -1;                                        \
    *(void**)&cu_function = dlsym(driver, name);             \
    if (cu_function) cu_code = cu_function(__VA_ARGS__);     \
    if (cu_code != 0) FAIL("%s returned %d", name, cu_code); \
  } while (0)

typedef void* handle;
typedef unsigned long long address;

static address allocate(size_t bytes) {
  address at = 0;
  CU("cuMemAlloc_v2", (address*, size_t), &at, bytes);
  return at;
}

static void bring(handle stream, address to, const void* from, size_t bytes) {
  CU("cuMemcpyHtoDAsync_v2", (address, const void*, size_t, handle), to, from, bytes, stream);
  CU("cuStreamSynchronize", (handle), stream);
}

static void fetch(handle stream, void* to, address from, size_t bytes) {
  CU("cuMemcpyDtoHAsync_v2", (void*, address, size_t, handle), to, from, bytes, stream);
  CU("cuStreamSynchronize", (handle), stream);
}

/* The other collectives: a broadcast, then an all-reduce in two halves. */
static void others(peerlane_comm_t comm, address input, address output, address part, handle stream, int root) {
  OK(peerlane_broadcast(comm, (void*)input, (void*)output, COUNT, PEERLANE_FLOAT32, root, stream, -1));
  OK(peerlane_reduce_scatter(comm, (void*)input, (void*)part, PART, PEERLANE_FLOAT32, PEERLANE_SUM, stream, -1));
  OK(peerlane_all_gather(comm, (void*)part, (void*)input, PART, PEERLANE_FLOAT32, stream, -1));
}

static void others_get_exact_results(peerlane_comm_t comm, int rank, address input, address output, handle stream) {
  static float data[COUNT], copied[COUNT], summed[COUNT];
  const address part = allocate(PART * sizeof(float));
  handle graph = NULL, exec = NULL;
  int call;
  for (call = 0; call < 2 * CALLS; call++) {
    fill(data, COUNT, PEERLANE_FLOAT32, rank, call);
    bring(stream, input, data, sizeof data);
    if (call == CALLS) {
      CU("cuStreamBeginCapture_v2", (handle, int), stream, 1);
      others(comm, input, output, part, stream, 0);
      CU("cuStreamEndCapture", (handle, handle*), stream, &graph);
      CU("cuGraphInstantiateWithFlags", (handle*, handle, address), &exec, graph, 0);
    }
    if (exec)
      CU("cuGraphLaunch", (handle, handle), exec, stream);
    else
      others(comm, input, output, part, stream, 0);
    fetch(stream, copied, output, sizeof copied);
    fetch(stream, summed, input, sizeof summed);
    fill(data, COUNT, PEERLANE_FLOAT32, 0, call);
    CHECK(memcmp(copied, data, sizeof data) == 0);
    verify(summed, RANKS * PART, PEERLANE_FLOAT32, PEERLANE_SUM, RANKS, rank, call);
  }
  CU("cuGraphExecDestroy", (handle), exec);
  CU("cuGraphDestroy", (handle), graph);
  REFUSED(PEERLANE_ERROR_INVALID_ARGUMENT, "'root' is 8",
          peerlane_broadcast(comm, (void*)input, (void*)output, 1, PEERLANE_FLOAT32, RANKS, stream, -1));
  REFUSED(PEERLANE_ERROR_INVALID_ARGUMENT, "'channel' is 4",
          peerlane_all_gather(comm, (void*)input, (void*)output, 1, PEERLANE_FLOAT32, stream, 4));
}

/* Replays until the communicator fails, and says how. */
static void until_death(peerlane_comm_t comm, handle graph, handle stream, int dead) {
  char expected[32];
  peerlane_status sticky = PEERLANE_SUCCESS;
  snprintf(expected, sizeof expected, "rank %d died", dead);
  while (sticky == PEERLANE_SUCCESS) {
    CU("cuGraphLaunch", (handle, handle), graph, stream);
    CU("cuStreamSynchronize", (handle), stream);
    if (peerlane_comm_async_error(comm, &sticky) != PEERLANE_SUCCESS) FAIL("%s", peerlane_last_error());
  }
  if (sticky != PEERLANE_ERROR_RANK_DIED || strcmp(peerlane_last_error(), expected) != 0)
    FAIL("status %d, '%s' instead of '%s'", (int)sticky, peerlane_last_error(), expected);
}

static void rank_main(int rank, const peerlane_unique_id* id, int lane, int kills, int ready) {
  static float data[COUNT], result[COUNT];
  const size_t bytes = sizeof data;
  peerlane_comm_t comm = NULL;
  peerlane_config config;
  handle context = NULL, stream = NULL, graph = NULL, exec = NULL;
  address input, output;
  char text[4096];
  size_t length = 0;
  int device = 0, call, i;

  driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver) FAIL("%s", dlerror());
  CU("cuInit", (unsigned), 0);
  CU("cuDeviceGet", (int*, int), &device, rank % GPUS);
  CU("cuDevicePrimaryCtxRetain", (handle*, int), &context, device);
  CU("cuCtxSetCurrent", (handle), context);
  CU("cuStreamCreate", (handle*, unsigned), &stream, 1); /* non-blocking */
  input = allocate(bytes);
  output = allocate(bytes);

  OK(peerlane_config_init(&config, sizeof config));
  config.device = PEERLANE_CUDA; /* that of the current context */
  config.lane = lane;
  OK(peerlane_comm_create(&comm, RANKS, id, rank, &config));

  for (call = 0; call < CALLS; call++) {
    fill(data, COUNT, PEERLANE_FLOAT32, rank, call);
    bring(stream, input, data, bytes);
    OK(peerlane_all_reduce(comm, (void*)input, (void*)output, COUNT, PEERLANE_FLOAT32, PEERLANE_SUM, stream));
    fetch(stream, result, output, bytes);
    verify(result, COUNT, PEERLANE_FLOAT32, PEERLANE_SUM, RANKS, rank, call);
  }

  others_get_exact_results(comm, rank, input, output, stream);

  CU("cuStreamBeginCapture_v2", (handle, int), stream, 1); /* thread local */
  for (call = 0; call < CALLS; call++)
    OK(peerlane_all_reduce(comm, (void*)input, (void*)output, COUNT, PEERLANE_FLOAT32, PEERLANE_SUM, stream));
  CU("cuStreamEndCapture", (handle, handle*), stream, &graph);
  CU("cuGraphInstantiateWithFlags", (handle*, handle, address), &exec, graph, 0);
  for (call = CALLS; call < CALLS + REPLAYS; call++) {
    fill(data, COUNT, PEERLANE_FLOAT32, rank, call);
    bring(stream, input, data, bytes);
    CU("cuGraphLaunch", (handle, handle), exec, stream);
    fetch(stream, result, output, bytes);
    verify(result, COUNT, PEERLANE_FLOAT32, PEERLANE_SUM, RANKS, rank, call);
  }

  /* Whether anything was measured is the environment's choice; the text is the same either way: whole, or cut. */
  OK(peerlane_comm_probe(comm, text, sizeof text, &length));
  CHECK(strlen(text) == (length < sizeof text ? length : sizeof text - 1));
  CHECK(length == 0 || strstr(text, "\"latency_ns\":[[null,"));
  CHECK((length != 0) == (getenv("PEERLANE_PROBE") != NULL));

  CHECK(write(ready, "", 1) == 1);
  if (kills) until_death(comm, exec, stream, RANKS - 1);
  OK(peerlane_comm_destroy(comm));
  if (!kills) {
    /* The graph is the client's and outlives the communicator: it fills its output and returns. */
    CU("cuGraphLaunch", (handle, handle), exec, stream);
    fetch(stream, result, output, bytes);
    for (i = 0; i < COUNT; i++) CHECK(isnan(result[i]));
  }
  CU("cuGraphExecDestroy", (handle), exec);
  CU("cuGraphDestroy", (handle), graph);
  CU("cuStreamDestroy_v2", (handle), stream);
}

int main(int argc, char** argv) {
  const int lane = argc > 1 ? atoi(argv[1]) : PEERLANE_LANE_AUTO;
  const int kills = argc > 2 && strcmp(argv[2], "kill") == 0;
  int children[RANKS], ready[2], rank, failed = 0;
  char byte;
  peerlane_unique_id id;
  CHECK(pipe(ready) == 0);
  OK(peerlane_get_unique_id(&id)); /* before fork() is fine */
  for (rank = 0; rank < RANKS; rank++) {
    children[rank] = fork();
    CHECK(children[rank] >= 0);
    if (children[rank] == 0) {
      rank_main(rank, &id, lane, kills, ready[1]);
      return 0;
    }
  }
  close(ready[1]);
  /* Every rank replays, or one has failed and closed its end of the pipe. */
  for (rank = 0; rank < RANKS && read(ready[0], &byte, 1) == 1; rank++) continue;
  if (kills && rank == RANKS) {
    usleep(50000);
    CHECK(kill(children[RANKS - 1], SIGKILL) == 0);
  }
  for (rank = 0; rank < RANKS; rank++) {
    int status = 0;
    CHECK(waitpid(children[rank], &status, 0) == children[rank]);
    if (kills && rank == RANKS - 1 && WIFSIGNALED(status)) continue;
    if (status != 0) fprintf(stderr, "rank %d ended with wait status %#x\n", rank, status), failed = 1;
  }
  return failed;
}
