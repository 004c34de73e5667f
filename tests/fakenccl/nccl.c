/* A stand-in libnccl.so.2 over the stand-in CUDA driver: the few functions that `peerlane bench --rival nccl` and
 * `peerlane-verify --all-reduce nccl` call.
 * Ranks are of one process or of several; they meet in a file of /dev/shm whose name is in the unique id. It is strict
 * where NCCL is: several ranks of a thread need a group, and ranks that share a GPU need NCCL_MULTI_RANK_GPU_ENABLE=1.
 *
 * FAKENCCL_VERSION is what ncclGetVersion says (default 23007); FAKENCCL_WRONG=1 makes one element of every result
 * wrong. */
#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum { MAX_RANKS = 16, SLOT = 4 << 20 };
enum { INT32 = 2, UINT64 = 5, FLOAT32 = 7, BFLOAT16 = 9, SUM = 0, MAX = 2 };

typedef struct {
  char text[128];
} ncclUniqueId;

typedef struct {
  atomic_int attached, arrived, generation;
  int gpu[MAX_RANKS];
} shared;

typedef struct {
  int size, rank;
  shared* meeting;
  unsigned char* slots;
} comm;

/* The parameter of a launch; the driver copies it. */
typedef struct {
  comm* owner;
  const void* input;
  void* output;
  size_t count;
  int dtype, op, wrong;
} arguments;

static __thread int group_depth;
static void* kernel;
static int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                     void**);

static void* driver(const char* name) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return library ? dlsym(library, name) : NULL;
}

static void barrier(comm* c) {
  shared* m = c->meeting;
  int now = atomic_load(&m->generation);
  if (atomic_fetch_add(&m->arrived, 1) + 1 == c->size) {
    atomic_store(&m->arrived, 0);
    atomic_fetch_add(&m->generation, 1);
  } else {
    while (atomic_load(&m->generation) == now) sched_yield();
  }
}

static float from_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

/* Exact for the small whole numbers of the benchmark. */
static uint16_t to_bf16(float value) {
  uint32_t wide;
  memcpy(&wide, &value, sizeof wide);
  return (uint16_t)(wide >> 16);
}

static double element(const void* data, size_t i, int dtype) {
  if (dtype == INT32) return ((const int32_t*)data)[i];
  if (dtype == FLOAT32) return ((const float*)data)[i];
  return from_bf16(((const uint16_t*)data)[i]);
}

static void put(void* data, size_t i, int dtype, double value) {
  if (dtype == INT32)
    ((int32_t*)data)[i] = (int32_t)value;
  else if (dtype == FLOAT32)
    ((float*)data)[i] = (float)value;
  else
    ((uint16_t*)data)[i] = to_bf16((float)value);
}

static size_t bytes_of(int dtype) { return dtype == BFLOAT16 ? 2 : dtype == UINT64 ? 8 : 4; }

/* Of numbers that no double holds. */
static void largest(const comm* c, uint64_t* output, size_t count) {
  for (size_t i = 0; i < count; i++) {
    output[i] = 0;
    for (int r = 0; r < c->size; r++) {
      const uint64_t next = ((const uint64_t*)(c->slots + (size_t)r * SLOT))[i];
      if (next > output[i]) output[i] = next;
    }
  }
}

static void run(const void* parameter) {
  const arguments* a = parameter;
  comm* c = a->owner;
  memcpy(c->slots + (size_t)c->rank * SLOT, a->input, a->count * bytes_of(a->dtype));
  barrier(c);
  if (a->dtype == UINT64) {
    largest(c, a->output, a->count);
    barrier(c);
    return;
  }
  for (size_t i = 0; i < a->count; i++) {
    double result = element(c->slots, i, a->dtype);
    for (int r = 1; r < c->size; r++) {
      double next = element(c->slots + (size_t)r * SLOT, i, a->dtype);
      if (a->op == SUM)
        result += next;
      else if (next > result)
        result = next;
    }
    put(a->output, i, a->dtype, result);
  }
  if (a->wrong && a->count > 0) put(a->output, 0, a->dtype, element(a->output, 0, a->dtype) + 1);
  barrier(c);
}

int ncclGetVersion(int* version) {
  const char* wanted = getenv("FAKENCCL_VERSION");
  *version = wanted ? atoi(wanted) : 23007;
  return SUCCESS;
}

const char* ncclGetErrorString(int code) {
  switch (code) {
    case SUCCESS:
      return "no error";
    case INVALID_ARGUMENT:
      return "invalid argument";
    case INVALID_USAGE:
      return "invalid usage";
    default:
      return "unhandled system error";
  }
}

int ncclGetUniqueId(ncclUniqueId* id) {
  uint64_t number;
  if (getrandom(&number, sizeof number, 0) != sizeof number) return SYSTEM_ERROR;
  memset(id, 0, sizeof *id);
  snprintf(id->text, sizeof id->text, "/fakenccl-%016llx", (unsigned long long)number);
  return SUCCESS;
}

int ncclGroupStart(void) {
  group_depth++;
  return SUCCESS;
}

int ncclGroupEnd(void) {
  if (group_depth == 0) return INVALID_USAGE;
  group_depth--;
  return SUCCESS;
}

static int find_kernel(void) {
  if (kernel) return SUCCESS;
  int (*load)(void**, const void*) = driver("cuModuleLoadData");
  int (*get)(void**, void*, const char*) = driver("cuModuleGetFunction");
  unsigned (*enlist)(const char*, void (*)(const void*), size_t) = driver("fakecuda_register_kernel");
  launch = driver("cuLaunchKernel");
  void* module;
  if (!load || !get || !enlist || !launch) return SYSTEM_ERROR;
  if (enlist("fakenccl_all_reduce", run, sizeof(arguments))) return SYSTEM_ERROR;
  if (load(&module, "an image") || get(&kernel, module, "fakenccl_all_reduce")) return SYSTEM_ERROR;
  return SUCCESS;
}

int ncclCommInitRank(comm** out, int size, ncclUniqueId id, int rank) {
  int (*current)(int*) = driver("cuCtxGetDevice");
  int gpu;
  /* NCCL takes the current GPU; without a context there is none. */
  if (group_depth == 0 || !current || current(&gpu)) return INVALID_USAGE;
  if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size) return INVALID_ARGUMENT;
  if (find_kernel()) return SYSTEM_ERROR;
  size_t bytes = 4096 + (size_t)size * SLOT;
  int fd = shm_open(id.text, O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, (off_t)bytes)) return SYSTEM_ERROR;
  unsigned char* at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (at == MAP_FAILED) return SYSTEM_ERROR;
  comm* c = malloc(sizeof *c);
  *c = (comm){size, rank, (shared*)at, at + 4096};
  c->meeting->gpu[rank] = gpu + 1;
  const char* sharing = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  for (int r = 0; r < size; r++) {
    if (r != rank && c->meeting->gpu[r] == gpu + 1 && (!sharing || strcmp(sharing, "1"))) return INVALID_USAGE;
  }
  if (atomic_fetch_add(&c->meeting->attached, 1) + 1 == size) shm_unlink(id.text);
  *out = c;
  return SUCCESS;
}

int ncclCommDestroy(comm* c) {
  munmap(c->meeting, 4096 + (size_t)c->size * SLOT);
  free(c);
  return SUCCESS;
}

int ncclCommGetAsyncError(comm* c, int* code) {
  (void)c;
  *code = SUCCESS;
  return SUCCESS;
}

int ncclAllReduce(const void* input, void* output, size_t count, int dtype, int op, comm* c, void* stream) {
  if (group_depth == 0) return INVALID_USAGE;
  if (dtype != INT32 && dtype != FLOAT32 && dtype != BFLOAT16 && (dtype != UINT64 || op != MAX))
    return INVALID_ARGUMENT;
  if ((op != SUM && op != MAX) || count * bytes_of(dtype) > SLOT) return INVALID_ARGUMENT;
  const char* wrong = getenv("FAKENCCL_WRONG");
  arguments a = {c, input, output, count, dtype, op, wrong && !strcmp(wrong, "1")};
  void* parameters[] = {&a};
  return launch(kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL) ? SYSTEM_ERROR : SUCCESS;
}
