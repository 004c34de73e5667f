/* Four processes add up what each of them has.
 *   cc all_reduce.c -o all_reduce $(pkg-config --cflags --libs peerlane) && ./all_reduce */
#include <peerlane.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void check(peerlane_status status) {
  if (status == PEERLANE_SUCCESS) return;
  fprintf(stderr, "%s: %s\n", peerlane_status_string(status), peerlane_last_error());
  exit(1);
}

int main(void) {
  enum { RANKS = 4, COUNT = 1000 };
  peerlane_unique_id id;
  check(peerlane_get_unique_id(&id)); /* the children inherit it; unrelated processes need a pipe or a file */
  int rank, failed = 0, status;
  pid_t child = 1;
  for (rank = -1; rank < RANKS - 1 && child > 0; rank++) child = fork();
  if (child != 0) { /* the parent is no rank: it waits for the ranks */
    if (child < 0) perror("fork");
    while (wait(&status) > 0) failed |= status;
    return child < 0 || failed;
  }
  peerlane_comm_t comm;
  check(peerlane_comm_create(&comm, RANKS, &id, rank, NULL));
  float data[COUNT];
  for (int i = 0; i < COUNT; i++) data[i] = rank + i;
  check(peerlane_all_reduce(comm, data, data, COUNT, PEERLANE_FLOAT32, PEERLANE_SUM, NULL));
  printf("rank %d: sum of element 10 is %g\n", rank, data[10]);
  check(peerlane_comm_destroy(comm));
  return data[10] == 46 ? 0 : 1; /* (0 + 10) + (1 + 10) + (2 + 10) + (3 + 10) */
}
