/* When others do wrong: a rank is killed, makes another call, does not come, has left. The status says which it was,
 * the message names the rank, and it takes no longer than promised. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* A pair of ranks of this process. */
static void make_pair(peerlane_comm_t comms[2], int check, double deadline) {
  peerlane_config config;
  OK(peerlane_config_init(&config, sizeof config));
  config.check = check;
  config.deadline_seconds = deadline;
  OK(peerlane_comm_create_local(comms, 2, &config));
}

/* Both ranks have this error for good. */
static void stays_broken(peerlane_comm_t comms[2], peerlane_status expected) {
  float one = 1;
  int rank;
  for (rank = 0; rank < 2; rank++) {
    peerlane_status sticky = PEERLANE_SUCCESS;
    double patience = now() + 5; /* the other rank is told by message */
    do CHECK(peerlane_comm_async_error(comms[rank], &sticky) == PEERLANE_SUCCESS);
    while (sticky == PEERLANE_SUCCESS && now() < patience);
    CHECK(sticky == expected && peerlane_last_error()[0]);
    CHECK(peerlane_all_reduce(comms[rank], &one, &one, 1, PEERLANE_FLOAT32, PEERLANE_SUM, NULL) == expected);
    OK(peerlane_comm_destroy(comms[rank]));
  }
}

static void a_different_count_is_named(void) {
  peerlane_comm_t comms[2];
  float data[2][20];
  int rank;
  make_pair(comms, 1, 60);
  memset(data, 0, sizeof data);
  OK(peerlane_group_start());
  for (rank = 0; rank < 2; rank++)
    OK(peerlane_all_reduce(comms[rank], data[rank], data[rank], (size_t)(10 + rank), PEERLANE_FLOAT32, PEERLANE_SUM,
                           NULL));
  REFUSED(PEERLANE_ERROR_MISMATCH, "11", peerlane_group_end());
  stays_broken(comms, PEERLANE_ERROR_MISMATCH);
}

static void a_missing_rank_is_named_when_the_deadline_has_passed(void) {
  peerlane_comm_t comms[2];
  float data[100];
  double start, took;
  size_t i;
  make_pair(comms, 0, 0.3);
  for (i = 0; i < 100; i++) data[i] = 1;
  start = now();
  REFUSED(PEERLANE_ERROR_DEADLINE, "rank 0 waited for rank 1",
          peerlane_all_reduce(comms[0], data, data, 100, PEERLANE_FLOAT32, PEERLANE_SUM, NULL));
  took = now() - start;
  if (took < 0.29 || took > 10) FAIL("the deadline of 0.3 s took %g s", took);
  for (i = 0; i < 100; i++) CHECK(data[i] != data[i]); /* nothing that looks like a result */
  stays_broken(comms, PEERLANE_ERROR_DEADLINE);
}

/* `wait`: seconds for the goodbye to arrive before the call begins. Without it the call may already be waiting when it
 * arrives; then the deadline may be what ends it, and names the rank too. */
static void a_rank_that_left_is_named(unsigned wait) {
  peerlane_comm_t comms[2];
  float one = 1;
  peerlane_status status;
  make_pair(comms, 0, 3);
  OK(peerlane_comm_destroy(comms[1]));
  sleep(wait);
  status = peerlane_all_reduce(comms[0], &one, &one, 1, PEERLANE_FLOAT32, PEERLANE_SUM, NULL);
  if (status != PEERLANE_ERROR_RANK_LEFT) FAIL("%s: %s", peerlane_status_string(status), peerlane_last_error());
  CHECK(strstr(peerlane_last_error(), "rank 1"));
  OK(peerlane_comm_destroy(comms[0]));
}

enum { RANKS = 3, VICTIM = 1 };

static void calls_until_one_dies(int rank, const peerlane_unique_id* id, volatile double* died, double limit) {
  peerlane_comm_t comm;
  peerlane_status status = PEERLANE_SUCCESS;
  float data[500];
  int call;
  OK(peerlane_comm_create(&comm, RANKS, id, rank, NULL));
  for (call = 0; status == PEERLANE_SUCCESS; call++) {
    if (rank == VICTIM && call == 20) {
      *died = now();
      raise(SIGKILL);
    }
    fill(data, 500, PEERLANE_FLOAT32, rank, call);
    status = peerlane_all_reduce(comm, data, data, 500, PEERLANE_FLOAT32, PEERLANE_SUM, NULL);
    if (status == PEERLANE_SUCCESS) verify(data, 500, PEERLANE_FLOAT32, PEERLANE_SUM, RANKS, rank, call);
  }
  if (status != PEERLANE_ERROR_RANK_DIED || !strstr(peerlane_last_error(), "rank 1 died"))
    FAIL("rank %d: %s: %s", rank, peerlane_status_string(status), peerlane_last_error());
  if (now() - *died > limit) FAIL("rank %d knew after %g s", rank, now() - *died);
  OK(peerlane_comm_destroy(comm));
}

static void a_killed_rank_is_named(double limit) {
  volatile double* died = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  peerlane_unique_id id;
  pid_t children[RANKS];
  int rank, status;
  CHECK(died != MAP_FAILED);
  OK(peerlane_get_unique_id(&id));
  for (rank = 0; rank < RANKS; rank++) {
    children[rank] = fork();
    CHECK(children[rank] >= 0);
    if (children[rank] == 0) {
      calls_until_one_dies(rank, &id, died, limit);
      exit(0);
    }
  }
  for (rank = 0; rank < RANKS; rank++) {
    CHECK(waitpid(children[rank], &status, 0) == children[rank]);
    if (rank == VICTIM) CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    if (rank != VICTIM) CHECK(status == 0);
  }
  munmap((void*)died, 4096);
}

int main(int argc, char** argv) {
  a_killed_rank_is_named(argc > 1 ? strtod(argv[1], NULL) : 2);
  a_different_count_is_named();
  a_missing_rank_is_named_when_the_deadline_has_passed();
  a_rank_that_left_is_named(0);
  a_rank_that_left_is_named(1);
  return 0;
}
