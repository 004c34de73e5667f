/* Called wrong, every function returns a status and a message that says which argument, what it was and what to do; it
 * writes nothing and never crashes. The communicator works as before afterwards. */
#include <math.h>

#include "check.h"

#define INVALID PEERLANE_ERROR_INVALID_ARGUMENT
#define HANDLE PEERLANE_ERROR_INVALID_HANDLE

static peerlane_comm_t comm;
static peerlane_stream_t stream;
static float in[64], out[64];

static peerlane_status reduce(const void* input, void* output, size_t count, int dtype, int op) {
  return peerlane_all_reduce(comm, input, output, count, (peerlane_dtype)dtype, (peerlane_op)op, NULL);
}

static void bad_messages(void) {
  REFUSED(INVALID, "input", reduce(NULL, out, 1, PEERLANE_FLOAT32, PEERLANE_SUM));
  REFUSED(INVALID, "output", reduce(in, NULL, 1, PEERLANE_FLOAT32, PEERLANE_SUM));
  OK(reduce(NULL, NULL, 0, PEERLANE_FLOAT32, PEERLANE_SUM));
  REFUSED(INVALID, "'dtype': 10 is no data type", reduce(in, out, 1, 10, PEERLANE_SUM));
  REFUSED(INVALID, "'dtype': -1", reduce(in, out, 1, -1, PEERLANE_SUM));
  REFUSED(INVALID, "bfloat16 (9)", reduce(in, out, 1, 1000000, PEERLANE_SUM));
  REFUSED(INVALID, "'op': 5 is no operation", reduce(in, out, 1, PEERLANE_FLOAT32, 5));
  REFUSED(INVALID, "'op': -2147483648", reduce(in, out, 1, PEERLANE_FLOAT32, -2147483647 - 1));
  REFUSED(INVALID, "count", reduce(in, out, SIZE_MAX, PEERLANE_INT8, PEERLANE_SUM));
  REFUSED(INVALID, "count", reduce(in, out, SIZE_MAX / 4 + 2, PEERLANE_FLOAT32, PEERLANE_SUM));
  REFUSED(INVALID, "count", reduce(in, out, SIZE_MAX / 8 + 1, PEERLANE_FLOAT64, PEERLANE_SUM));
  REFUSED(INVALID, "address space", reduce((void*)(UINTPTR_MAX - 7), out, 4, PEERLANE_FLOAT32, PEERLANE_SUM));
  REFUSED(INVALID, "overlap", reduce(in, in + 1, 8, PEERLANE_FLOAT32, PEERLANE_SUM));
  REFUSED(INVALID, "overlap", reduce(in + 7, in, 8, PEERLANE_FLOAT32, PEERLANE_SUM));
  OK(reduce(in + 8, in, 8, PEERLANE_FLOAT32, PEERLANE_SUM));
  OK(reduce(in, in, 8, PEERLANE_FLOAT32, PEERLANE_SUM));
  REFUSED(INVALID, "aligned", reduce((char*)in + 1, out, 8, PEERLANE_FLOAT32, PEERLANE_SUM));
}

static void bad_handles(void) {
  peerlane_comm_t gone, fresh,
      garbage[] = {(peerlane_comm_t)1, (peerlane_comm_t)(uintptr_t)0xdeadbeefdeadbeefu, (peerlane_comm_t)(void*)&gone,
                   (peerlane_comm_t)UINTPTR_MAX};
  peerlane_stream_t spent;
  peerlane_status sticky = PEERLANE_ERROR_INTERNAL;
  peerlane_stats stats;
  int value = 77;
  size_t i;
  OK(peerlane_comm_create_local(&gone, 1, NULL));
  OK(peerlane_comm_destroy(gone));
  OK(peerlane_comm_create_local(&fresh, 1, NULL)); /* most likely in the destroyed one's place */
  CHECK(fresh != gone);
  stats.size = sizeof stats;
  REFUSED(HANDLE, "destroyed", peerlane_comm_rank(gone, &value));
  REFUSED(HANDLE, "destroyed", peerlane_comm_size(gone, &value));
  REFUSED(HANDLE, "destroyed", peerlane_comm_stats(gone, &stats));
  REFUSED(HANDLE, "destroyed", peerlane_comm_explain(gone, 1, PEERLANE_INT8, NULL, 0, NULL));
  REFUSED(HANDLE, "destroyed", peerlane_comm_probe(gone, NULL, 0, NULL));
  REFUSED(HANDLE, "destroyed", peerlane_comm_async_error(gone, &sticky));
  REFUSED(HANDLE, "destroyed", peerlane_comm_abort(gone));
  REFUSED(HANDLE, "destroyed", peerlane_comm_destroy(gone));
  REFUSED(HANDLE, "destroyed", peerlane_all_reduce(gone, in, out, 1, PEERLANE_INT8, PEERLANE_SUM, NULL));
  REFUSED(HANDLE, "NULL", peerlane_comm_destroy(NULL));
  REFUSED(HANDLE, "peerlane_comm_create", peerlane_comm_rank(NULL, &value));
  REFUSED(HANDLE, "NULL", peerlane_all_reduce(NULL, in, out, 1, PEERLANE_INT8, PEERLANE_SUM, NULL));
  for (i = 0; i < sizeof garbage / sizeof *garbage; i++) {
    REFUSED(HANDLE, "not a communicator", peerlane_comm_rank(garbage[i], &value));
    REFUSED(HANDLE, "argument 'comm'", peerlane_comm_destroy(garbage[i]));
    REFUSED(HANDLE, "not a stream", peerlane_stream_synchronize((peerlane_stream_t)garbage[i]));
  }
  REFUSED(HANDLE, "is a stream, not a communicator", peerlane_comm_destroy((peerlane_comm_t)stream));
  REFUSED(HANDLE, "is a communicator, not a stream", peerlane_stream_destroy((peerlane_stream_t)comm));
  REFUSED(HANDLE, "argument 'stream'",
          peerlane_all_reduce(comm, in, out, 1, PEERLANE_INT8, PEERLANE_SUM, (peerlane_stream_t)comm));
  REFUSED(HANDLE, "NULL", peerlane_stream_synchronize(NULL));
  REFUSED(HANDLE, "NULL", peerlane_stream_destroy(NULL));
  OK(peerlane_stream_create(&spent));
  OK(peerlane_stream_destroy(spent));
  REFUSED(HANDLE, "destroyed", peerlane_stream_synchronize(spent));
  REFUSED(HANDLE, "destroyed", peerlane_stream_destroy(spent));
  REFUSED(HANDLE, "destroyed", peerlane_all_reduce(comm, in, out, 1, PEERLANE_INT8, PEERLANE_SUM, spent));
  CHECK(value == 77 && sticky == PEERLANE_ERROR_INTERNAL);
  OK(peerlane_comm_destroy(fresh));
}

static void bad_creations(void) {
  peerlane_unique_id id, zero, damaged;
  peerlane_config config;
  peerlane_comm_t made = (peerlane_comm_t)99;
  OK(peerlane_get_unique_id(&id));
  memset(&zero, 0, sizeof zero);
  damaged = id;
  damaged.bytes[20] ^= 1;
  REFUSED(INVALID, "'id' is NULL", peerlane_get_unique_id(NULL));
  REFUSED(INVALID, "'comm' is NULL", peerlane_comm_create(NULL, 1, &id, 0, NULL));
  REFUSED(INVALID, "'id' is NULL", peerlane_comm_create(&made, 1, NULL, 0, NULL));
  REFUSED(INVALID, "zero", peerlane_comm_create(&made, 1, &zero, 0, NULL));
  REFUSED(INVALID, "checksum", peerlane_comm_create(&made, 1, &damaged, 0, NULL));
  REFUSED(INVALID, "'n' is 0", peerlane_comm_create(&made, 0, &id, 0, NULL));
  REFUSED(INVALID, "1 to 16", peerlane_comm_create(&made, 17, &id, 0, NULL));
  REFUSED(INVALID, "'n' is -3", peerlane_comm_create(&made, -3, &id, 0, NULL));
  REFUSED(INVALID, "'rank' is 1", peerlane_comm_create(&made, 1, &id, 1, NULL));
  REFUSED(INVALID, "'rank' is -1; ranks of 4 are 0 to 3", peerlane_comm_create(&made, 4, &id, -1, NULL));
  REFUSED(INVALID, "'comms' is NULL", peerlane_comm_create_local(NULL, 2, NULL));
  REFUSED(INVALID, "'n' is 99", peerlane_comm_create_local(&made, 99, NULL));

  REFUSED(INVALID, "'config' is NULL", peerlane_config_init(NULL, sizeof config));
  REFUSED(INVALID, "sizeof(peerlane_config)", peerlane_config_init(&config, 3));
  REFUSED(INVALID, "sizeof(peerlane_config)", peerlane_config_init(&config, (size_t)1 << 40));
#define WITH(field, value, status, text)                                  \
  OK(peerlane_config_init(&config, sizeof config));                       \
  config.field = value;                                                   \
  REFUSED(status, text, peerlane_comm_create(&made, 4, &id, 0, &config)); \
  REFUSED(status, text, peerlane_comm_create_local(&made, 4, &config))
  WITH(size, 0, INVALID, "peerlane_config_init");
  WITH(size, 99999, INVALID, "config->size");
  WITH(islands, "0-1,2", INVALID, "rank 3 is in no island");
  WITH(islands, "zwei", INVALID, "zwei");
  WITH(islands, "\xff", INVALID, "UTF-8");
  WITH(deadline_seconds, -1, INVALID, "config->deadline_seconds");
  WITH(deadline_seconds, NAN, INVALID, "seconds above 0");
  WITH(setup_deadline_seconds, INFINITY, INVALID, "config->setup_deadline_seconds");
  WITH(algorithm, 6, INVALID, "'config->algorithm': 6 is no algorithm");
  WITH(protocol, -2, INVALID, "'config->protocol': -2");
  WITH(direction, 2, INVALID, "'config->direction': 2");
  WITH(check, 7, INVALID, "'config->check' is 7");
  CHECK(made == (peerlane_comm_t)99);
}

/* A struct of a later version: longer. What this library does not know may be there, but not be set. */
static void structs_of_another_version(void) {
  struct {
    peerlane_config known;
    uint64_t later;
  } config;
  struct {
    peerlane_stats known;
    uint64_t later;
  } stats;
  peerlane_comm_t made = NULL;
  memset(&config, 0xff, sizeof config);
  OK(peerlane_config_init(&config.known, sizeof config));
  CHECK(config.known.size == sizeof config && config.later == 0 && config.known.algorithm == -1);
  OK(peerlane_comm_create_local(&made, 1, &config.known));
  memset(&stats, 0xff, sizeof stats);
  stats.known.size = sizeof stats;
  OK(peerlane_comm_stats(made, &stats.known));
  CHECK(stats.known.size == sizeof stats && stats.known.calls == 0 && stats.later == 0);
  stats.known.size = 8;
  REFUSED(INVALID, "sizeof(peerlane_stats)", peerlane_comm_stats(made, &stats.known));
  REFUSED(INVALID, "'stats' is NULL", peerlane_comm_stats(made, NULL));
  OK(peerlane_comm_destroy(made));
  config.later = 1;
  REFUSED(PEERLANE_ERROR_UNSUPPORTED, "update the library", peerlane_comm_create_local(&made, 1, &config.known));
}

static void bad_groups(void) {
  peerlane_unique_id id;
  peerlane_comm_t made = NULL;
  OK(peerlane_get_unique_id(&id));
  REFUSED(INVALID, "peerlane_group_start", peerlane_group_end());
  OK(peerlane_group_start());
  REFUSED(INVALID, "peerlane_group_end", peerlane_comm_destroy(comm));
  REFUSED(INVALID, "peerlane_group_end", peerlane_stream_destroy(stream));
  REFUSED(INVALID, "'rank' is 2", peerlane_comm_create(&made, 2, &id, 2, NULL));
  REFUSED(INVALID, "input", reduce(NULL, out, 1, PEERLANE_FLOAT32, PEERLANE_SUM));
  OK(peerlane_group_end());
  REFUSED(INVALID, "peerlane_group_start", peerlane_group_end());
  CHECK(made == NULL);
}

static void bad_outputs(void) {
  size_t length = 7;
  char text[4] = "abc";
  REFUSED(INVALID, "'rank' is NULL", peerlane_comm_rank(comm, NULL));
  REFUSED(INVALID, "'size' is NULL", peerlane_comm_size(comm, NULL));
  REFUSED(INVALID, "'error' is NULL", peerlane_comm_async_error(comm, NULL));
  REFUSED(INVALID, "'stream' is NULL", peerlane_stream_create(NULL));
  REFUSED(INVALID, "'capacity' is 5", peerlane_comm_explain(comm, 64, PEERLANE_INT8, NULL, 5, &length));
  REFUSED(INVALID, "'capacity' is 5", peerlane_comm_probe(comm, NULL, 5, &length));
  REFUSED(INVALID, "'dtype'", peerlane_comm_explain(comm, 64, (peerlane_dtype)44, text, sizeof text, &length));
  CHECK(length == 7 && strcmp(text, "abc") == 0);
  CHECK(strlen(peerlane_status_string((peerlane_status)12345)) > 0);
  CHECK(strlen(peerlane_status_string((peerlane_status)-1)) > 0);
}

/* A failure is remembered for this thread until the next call; the function's name stands in front. */
static void messages(void) {
  int value;
  REFUSED(HANDLE, "peerlane_comm_rank: invalid handle: NULL", peerlane_comm_rank(NULL, &value));
  CHECK(peerlane_version() == PEERLANE_VERSION);
  CHECK(strstr(peerlane_last_error(), "peerlane_comm_rank"));
  OK(peerlane_comm_rank(comm, &value));
  CHECK(peerlane_last_error()[0] == 0);
}

int main(void) {
  peerlane_stats stats;
  int i;
  OK(peerlane_comm_create_local(&comm, 1, NULL));
  OK(peerlane_stream_create(&stream));
  bad_messages();
  bad_handles();
  bad_creations();
  structs_of_another_version();
  bad_groups();
  bad_outputs();
  messages();
  for (i = 0; i < 64; i++) in[i] = (float)i;
  OK(peerlane_all_reduce(comm, in, out, 64, PEERLANE_FLOAT32, PEERLANE_SUM, stream));
  OK(peerlane_stream_synchronize(stream));
  for (i = 0; i < 64; i++) CHECK(out[i] == (float)i);
  stats.size = sizeof stats;
  OK(peerlane_comm_stats(comm, &stats));
  CHECK(stats.failed == 0); /* a refused call is not a failed one */
  OK(peerlane_stream_destroy(stream));
  OK(peerlane_comm_destroy(comm));
  return 0;
}
