/* One process: ranks as threads, several ranks driven by one thread in groups, streams, ids and groups together. */
#include <pthread.h>

#include "check.h"

enum { RANKS = 4, MOST = 1024 };

typedef struct {
  peerlane_comm_t comm;
  int rank;
} member;

static void* one_rank(void* argument) {
  member* me = (member*)argument;
  int call;
  for (call = 0; call < 60; call++)
    reduce_and_verify(me->comm, RANKS, me->rank, (size_t)(call * 17), call % 10, call % 5, call, call % 2);
  return NULL;
}

static void each_rank_has_a_thread(void) {
  peerlane_comm_t comms[RANKS];
  pthread_t threads[RANKS];
  member members[RANKS];
  int rank;
  OK(peerlane_comm_create_local(comms, RANKS, NULL));
  for (rank = 0; rank < RANKS; rank++) {
    int number = -1;
    OK(peerlane_comm_rank(comms[rank], &number));
    CHECK(number == rank);
    members[rank].comm = comms[rank];
    members[rank].rank = rank;
    CHECK(pthread_create(&threads[rank], NULL, one_rank, &members[rank]) == 0);
  }
  for (rank = 0; rank < RANKS; rank++) CHECK(pthread_join(threads[rank], NULL) == 0);
  for (rank = 0; rank < RANKS; rank++) OK(peerlane_comm_destroy(comms[rank]));
}

/* Two calls of every rank, the second on the result of the first. */
static void grouped_calls(peerlane_comm_t comms[RANKS], peerlane_stream_t streams[RANKS], int call) {
  float* data[RANKS];
  size_t i;
  int rank;
  OK(peerlane_group_start());
  for (rank = 0; rank < RANKS; rank++) {
    peerlane_stream_t stream = streams ? streams[rank] : NULL;
    data[rank] = (float*)exactly(MOST * sizeof(float));
    fill(data[rank], MOST, PEERLANE_FLOAT32, rank, call);
    OK(peerlane_group_start());
    OK(peerlane_all_reduce(comms[rank], data[rank], data[rank], MOST, PEERLANE_FLOAT32, PEERLANE_SUM, stream));
    OK(peerlane_all_reduce(comms[rank], data[rank], data[rank], MOST, PEERLANE_FLOAT32, PEERLANE_SUM, stream));
    OK(peerlane_group_end());
  }
  CHECK(data[0][0] == (float)element(0, 0, call)); /* nothing has started yet */
  OK(peerlane_group_end());
  for (rank = 0; rank < RANKS; rank++) {
    if (streams) OK(peerlane_stream_synchronize(streams[rank]));
    for (i = 0; i < MOST; i++) CHECK(data[rank][i] == (float)(RANKS * reduced(RANKS, i, call, PEERLANE_SUM) / 4));
    free(data[rank]);
  }
}

static void one_thread_drives_all_ranks(void) {
  peerlane_comm_t comms[RANKS];
  peerlane_stream_t streams[RANKS];
  int rank, call;
  OK(peerlane_comm_create_local(comms, RANKS, NULL));
  for (rank = 0; rank < RANKS; rank++) OK(peerlane_stream_create(&streams[rank]));
  for (call = 0; call < 6; call++) grouped_calls(comms, call % 2 ? streams : NULL, call);
  for (rank = 0; rank < RANKS; rank++) {
    OK(peerlane_comm_destroy(comms[rank]));
    OK(peerlane_stream_destroy(streams[rank]));
  }
}

/* Two communicators, all ranks of both by one thread in one group: their handles appear at its end. */
static void one_thread_creates_all_ranks(void) {
  peerlane_unique_id ids[2];
  peerlane_comm_t comms[2][RANKS];
  peerlane_config config;
  char islands[16] = "0-1,2-3";
  int which, rank;
  memset(comms, 0, sizeof comms);
  OK(peerlane_config_init(&config, sizeof config));
  config.islands = islands;
  for (which = 0; which < 2; which++) OK(peerlane_get_unique_id(&ids[which]));
  OK(peerlane_group_start());
  for (rank = RANKS - 1; rank >= 0; rank--)
    for (which = 0; which < 2; which++)
      OK(peerlane_comm_create(&comms[which][rank], RANKS, &ids[which], rank, &config));
  REFUSED(PEERLANE_ERROR_INVALID_ARGUMENT, "'rank' is 4",
          peerlane_comm_create(&comms[0][0], RANKS, &ids[0], RANKS, &config));
  memset(islands, '#', sizeof islands); /* the library has its own copies */
  memset(ids, 0, sizeof ids);
  for (which = 0; which < 2; which++)
    for (rank = 0; rank < RANKS; rank++) CHECK(comms[which][rank] == NULL);
  OK(peerlane_group_end());
  for (which = 0; which < 2; which++)
    for (rank = 0; rank < RANKS; rank++) {
      int number = -1;
      OK(peerlane_comm_rank(comms[which][rank], &number));
      CHECK(number == rank);
    }
  grouped_calls(comms[0], NULL, 1);
  grouped_calls(comms[1], NULL, 2);
  for (which = 0; which < 2; which++)
    for (rank = 0; rank < RANKS; rank++) OK(peerlane_comm_destroy(comms[which][rank]));
}

static void calls_queue_behind_each_other_on_a_stream(void) {
  peerlane_comm_t comm;
  peerlane_stream_t stream;
  double* data = (double*)exactly(MOST * sizeof(double));
  size_t i;
  int round;
  OK(peerlane_comm_create_local(&comm, 1, NULL));
  OK(peerlane_stream_create(&stream));
  for (i = 0; i < MOST; i++) data[i] = (double)i;
  for (round = 0; round < 20; round++)
    OK(peerlane_all_reduce(comm, data, data, MOST, PEERLANE_FLOAT64, PEERLANE_SUM, stream));
  OK(peerlane_stream_synchronize(stream));
  for (i = 0; i < MOST; i++) CHECK(data[i] == (double)i);
  OK(peerlane_stream_destroy(stream));
  OK(peerlane_comm_destroy(comm));
  free(data);
}

int main(void) {
  each_rank_has_a_thread();
  one_thread_drives_all_ranks();
  one_thread_creates_all_ranks();
  calls_queue_behind_each_other_on_a_stream();
  return 0;
}
