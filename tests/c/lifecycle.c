/* The end of communicators: any order, any thread, under a call, after an abort, inherited over fork(), not at all. */
#include <fcntl.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { RANKS = 3 };

static void destroyed_in_every_order(void) {
  static const int orders[6][RANKS] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  int order, i, rank;
  for (order = 0; order < 6; order++) {
    peerlane_comm_t comms[RANKS];
    float data[RANKS] = {1, 2, 3};
    OK(peerlane_comm_create_local(comms, RANKS, NULL));
    OK(peerlane_group_start());
    for (rank = 0; rank < RANKS; rank++)
      OK(peerlane_all_reduce(comms[rank], &data[rank], &data[rank], 1, PEERLANE_FLOAT32, PEERLANE_SUM, NULL));
    OK(peerlane_group_end());
    for (i = 0; i < RANKS; i++) {
      CHECK(data[i] == 6);
      OK(peerlane_comm_destroy(comms[orders[order][i]]));
    }
  }
}

static void* destroy_it(void* comm) {
  OK(peerlane_comm_destroy((peerlane_comm_t)comm));
  return NULL;
}

static void destroyed_by_another_thread(void) {
  peerlane_comm_t comms[RANKS];
  pthread_t threads[RANKS];
  int rank, value;
  OK(peerlane_comm_create_local(comms, RANKS, NULL));
  for (rank = 0; rank < RANKS; rank++) CHECK(pthread_create(&threads[rank], NULL, destroy_it, comms[rank]) == 0);
  for (rank = 0; rank < RANKS; rank++) CHECK(pthread_join(threads[rank], NULL) == 0);
  for (rank = 0; rank < RANKS; rank++)
    REFUSED(PEERLANE_ERROR_INVALID_HANDLE, "destroyed", peerlane_comm_rank(comms[rank], &value));
}

/* The call of rank 0 waits for the others, which never come. */
static void* lonely_call(void* comm) {
  static float data[100];
  peerlane_status status =
      peerlane_all_reduce((peerlane_comm_t)comm, data, data, 100, PEERLANE_FLOAT32, PEERLANE_SUM, NULL);
  CHECK(status == PEERLANE_ERROR_ABORTED);
  CHECK(strstr(peerlane_last_error(), "rank 1"));
  return NULL;
}

static void* race_of_calls(void* comm) {
  static const float data[1] = {3};
  float result[1];
  peerlane_status status;
  do {
    status = peerlane_all_reduce((peerlane_comm_t)comm, data, result, 1, PEERLANE_FLOAT32, PEERLANE_MAX, NULL);
  } while (status == PEERLANE_SUCCESS);
  CHECK(status == PEERLANE_ERROR_INVALID_HANDLE);
  return NULL;
}

static void destroyed_under_a_call(void) {
  peerlane_comm_t comms[RANKS], alone;
  pthread_t caller, racers[2];
  peerlane_status sticky;
  peerlane_stats stats;
  float data = 0;
  int rank, i;
  OK(peerlane_comm_create_local(comms, RANKS, NULL));
  CHECK(pthread_create(&caller, NULL, lonely_call, comms[0]) == 0);
  stats.size = sizeof stats;
  do OK(peerlane_comm_stats(comms[0], &stats));
  while (stats.calls == 0);
  OK(peerlane_comm_abort(comms[1]));
  OK(peerlane_comm_destroy(comms[0])); /* returns after the call that is under way */
  CHECK(pthread_join(caller, NULL) == 0);
  OK(peerlane_comm_abort(comms[1])); /* twice is no error */
  CHECK(peerlane_comm_async_error(comms[1], &sticky) == PEERLANE_SUCCESS);
  CHECK(sticky == PEERLANE_ERROR_ABORTED && strstr(peerlane_last_error(), "aborted"));
  for (i = 0; i < 2; i++)
    REFUSED(PEERLANE_ERROR_ABORTED, "rank 1",
            peerlane_all_reduce(comms[1], &data, &data, 1, PEERLANE_FLOAT32, PEERLANE_SUM, NULL));
  for (rank = 1; rank < RANKS; rank++) OK(peerlane_comm_destroy(comms[rank]));

  OK(peerlane_comm_create_local(&alone, 1, NULL));
  for (i = 0; i < 2; i++) CHECK(pthread_create(&racers[i], NULL, race_of_calls, alone) == 0);
  do OK(peerlane_comm_stats(alone, &stats));
  while (stats.calls < 100);
  OK(peerlane_comm_destroy(alone));
  for (i = 0; i < 2; i++) CHECK(pthread_join(racers[i], NULL) == 0);
}

static void* destroy_stream(void* stream) {
  OK(peerlane_stream_destroy((peerlane_stream_t)stream));
  return NULL;
}

/* A group on this thread names a stream and a communicator that other threads destroy before the group's end: they
 * wait. */
static void destroyed_under_a_group(void) {
  peerlane_comm_t comm;
  peerlane_stream_t stream;
  pthread_t destroyers[2];
  double data[500];
  int i, value;
  OK(peerlane_comm_create_local(&comm, 1, NULL));
  OK(peerlane_stream_create(&stream));
  for (i = 0; i < 500; i++) data[i] = i;
  OK(peerlane_group_start());
  OK(peerlane_all_reduce(comm, data, data, 500, PEERLANE_FLOAT64, PEERLANE_SUM, stream));
  CHECK(pthread_create(&destroyers[0], NULL, destroy_it, comm) == 0);
  CHECK(pthread_create(&destroyers[1], NULL, destroy_stream, stream) == 0);
  while (peerlane_comm_rank(comm, &value) == PEERLANE_SUCCESS) usleep(1000);
  while (peerlane_stream_synchronize(stream) == PEERLANE_SUCCESS) usleep(1000);
  OK(peerlane_group_end());
  for (i = 0; i < 2; i++) CHECK(pthread_join(destroyers[i], NULL) == 0);
  for (i = 0; i < 500; i++) CHECK(data[i] == i);
}

/* A child has its parent's handles, but not its communicators; it cannot end them and can make its own. */
static void inherited_over_fork(void) {
  peerlane_comm_t comms[2], own[2];
  float data[2] = {20, 22};
  int rank, status, value;
  pid_t child;
  OK(peerlane_comm_create_local(comms, 2, NULL));
  child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    REFUSED(PEERLANE_ERROR_INVALID_HANDLE, "parent process", peerlane_comm_rank(comms[0], &value));
    REFUSED(PEERLANE_ERROR_INVALID_HANDLE, "after fork()", peerlane_comm_destroy(comms[1]));
    OK(peerlane_comm_create_local(own, 2, NULL));
    for (rank = 0; rank < 2; rank++) {
      CHECK(own[rank] != comms[rank]);
      OK(peerlane_comm_destroy(own[rank]));
    }
    /* Not exit(): what only stacks of the parent's other threads point to would count as leaked here. */
    execlp("true", "true", (char*)NULL);
    FAIL("no program called true");
  }
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  OK(peerlane_group_start());
  for (rank = 0; rank < 2; rank++)
    OK(peerlane_all_reduce(comms[rank], &data[rank], &data[rank], 1, PEERLANE_FLOAT32, PEERLANE_SUM, NULL));
  OK(peerlane_group_end());
  CHECK(data[0] == 42 && data[1] == 42);
  for (rank = 0; rank < 2; rank++) OK(peerlane_comm_destroy(comms[rank]));
}

static int open_descriptors(void) {
  int count = 0, fd;
  for (fd = 0; fd < 1024; fd++) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

/* Created, used or not, destroyed, refused: descriptors do not add up. */
static void many_lives_leave_nothing(void) {
  int before = 0, round, rank;
  for (round = 0; round < 25; round++) {
    peerlane_comm_t comms[RANKS];
    peerlane_stream_t stream;
    peerlane_config config;
    OK(peerlane_comm_create_local(comms, RANKS, NULL));
    OK(peerlane_stream_create(&stream));
    for (rank = 0; rank < RANKS; rank++) OK(peerlane_comm_destroy(comms[rank]));
    OK(peerlane_stream_destroy(stream));
    OK(peerlane_config_init(&config, sizeof config));
    config.slab_bytes = 1; /* refused late, after the ranks have met */
    CHECK(peerlane_comm_create_local(comms, RANKS, &config) != PEERLANE_SUCCESS);
    if (round == 4) before = open_descriptors();
  }
  if (open_descriptors() != before) FAIL("%d descriptors after 25 lives, %d after 5", open_descriptors(), before);
}

int main(void) {
  peerlane_comm_t left_over[2];
  peerlane_stream_t stream;
  destroyed_in_every_order();
  destroyed_by_another_thread();
  destroyed_under_a_call();
  destroyed_under_a_group();
  many_lives_leave_nothing();
  inherited_over_fork();
  /* Exit without destroy: no hang, no crash, nothing left behind (the test looks). */
  OK(peerlane_comm_create_local(left_over, 2, NULL));
  OK(peerlane_stream_create(&stream));
  return 0;
}
