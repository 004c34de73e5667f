/* Four processes: fork before anything, create, reduce, check, destroy; every dtype and operation. */
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { RANKS = 4 };

static void rank_main(int rank, const peerlane_unique_id* id, size_t largest) {
  const size_t counts[] = {0, 1, 3, 64, 1021, largest};
  peerlane_comm_t comm = NULL;
  peerlane_config config;
  peerlane_stats stats;
  peerlane_status sticky = PEERLANE_ERROR_INTERNAL;
  int value = -1, call = 0, dtype, op;
  size_t c, length = 0;
  char text[200];

  OK(peerlane_config_init(&config, sizeof config));
  config.islands = "0-1,2-3";
  config.check = 1;
  OK(peerlane_comm_create(&comm, RANKS, id, rank, &config));
  OK(peerlane_comm_rank(comm, &value));
  CHECK(value == rank);
  OK(peerlane_comm_size(comm, &value));
  CHECK(value == RANKS);

  for (dtype = PEERLANE_INT8; dtype <= PEERLANE_BFLOAT16; dtype++)
    for (op = PEERLANE_SUM; op <= PEERLANE_AVG; op++)
      for (c = 0; c < sizeof counts / sizeof *counts; c++, call++)
        reduce_and_verify(comm, RANKS, rank, counts[c], dtype, op, call, call % 2);

  memset(&stats, 0xff, sizeof stats);
  stats.size = sizeof stats;
  OK(peerlane_comm_stats(comm, &stats));
  CHECK(stats.calls == (uint64_t)call && stats.failed == 0 && stats.tree_hash != 0);
  CHECK(stats.steps >= (uint64_t)call * 5 / 6); /* one call in six is empty */
  CHECK(stats.by_algorithm[15] == 0);
  OK(peerlane_comm_async_error(comm, &sticky));
  CHECK(sticky == PEERLANE_SUCCESS);

  OK(peerlane_comm_explain(comm, 14336, PEERLANE_BFLOAT16, NULL, 0, &length));
  CHECK(length > 20);
  OK(peerlane_comm_explain(comm, 14336, PEERLANE_BFLOAT16, text, 10, NULL));
  CHECK(strlen(text) == 9);

  OK(peerlane_comm_probe(comm, text, sizeof text, &length));
  CHECK(length == 0 && text[0] == 0); /* nobody has asked for it */

  OK(peerlane_comm_destroy(comm));
}

int main(int argc, char** argv) {
  size_t largest = argc > 1 ? strtoul(argv[1], NULL, 10) : 40000;
  int pipes[RANKS][2], children[RANKS], rank, failed = 0;
  for (rank = 0; rank < RANKS; rank++) CHECK(pipe(pipes[rank]) == 0);
  for (rank = 0; rank < RANKS; rank++) {
    children[rank] = fork();
    CHECK(children[rank] >= 0);
    if (children[rank] == 0) {
      peerlane_unique_id id;
      int other;
      if (rank == 0) {
        OK(peerlane_get_unique_id(&id));
        for (other = 1; other < RANKS; other++) CHECK(write(pipes[other][1], &id, sizeof id) == sizeof id);
      } else {
        CHECK(read(pipes[rank][0], &id, sizeof id) == sizeof id);
      }
      rank_main(rank, &id, largest);
      return 0;
    }
  }
  for (rank = 0; rank < RANKS; rank++) {
    int status = 0;
    CHECK(waitpid(children[rank], &status, 0) == children[rank]);
    if (status != 0) fprintf(stderr, "rank %d ended with wait status %#x\n", rank, status), failed = 1;
  }
  return failed;
}
