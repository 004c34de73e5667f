/* All-reduce, residual add and RMSNorm from C: fused and unfused give the same bits, in every aliasing form, and
 * results that are known exactly; what is wrong with the arguments is said. */
#include "check.h"

enum { RANKS = 3, ROWS = 5, WIDTH = 16, COUNT = ROWS * WIDTH };

typedef struct {
  uint16_t input[COUNT], residual[COUNT], gamma[WIDTH], normed[COUNT], residual_out[COUNT];
} matrices;

typedef enum { APART, NORMED_OVER_INPUT, RESIDUAL_IN_PLACE, BOTH, RESIDUAL_OVER_INPUT, FORMS } form;

/* Exact small numbers: the sum over the ranks plus the residual is +4 or -4 everywhere in row 0, so that its mean
 * square is 16 and its norm 1 or -1. The other rows are uneven. */
static void prepare(matrices* m, int rank) {
  int i;
  memset(m, 0x5a, sizeof *m);
  for (i = 0; i < COUNT; i++) {
    int row = i / WIDTH, sign = i % 2 ? -1 : 1;
    put(m->input, (size_t)i, PEERLANE_BFLOAT16, row ? 4 * (i % 7) + rank : 4 * sign);
    put(m->residual, (size_t)i, PEERLANE_BFLOAT16, row ? 4 * (i % 5) : 4 * sign);
  }
  for (i = 0; i < WIDTH; i++) put(m->gamma, (size_t)i, PEERLANE_BFLOAT16, 4 + i);
}

static peerlane_add_rms_norm arguments(matrices* m, form how, int unfused) {
  peerlane_add_rms_norm a;
  memset(&a, 0, sizeof a);
  a.size = sizeof a;
  a.input = m->input;
  a.residual = m->residual;
  a.gamma = m->gamma;
  a.normed = how == NORMED_OVER_INPUT || how == BOTH ? m->input : m->normed;
  a.residual_out = how == RESIDUAL_IN_PLACE || how == BOTH ? m->residual
                   : how == RESIDUAL_OVER_INPUT            ? m->input
                                                           : m->residual_out;
  a.rows = ROWS;
  a.width = WIDTH;
  a.dtype = PEERLANE_BFLOAT16;
  a.unfused = unfused;
  return a;
}

static void every_form_has_the_same_bits(void) {
  peerlane_comm_t comms[RANKS];
  matrices* all = exactly(RANKS * sizeof *all);
  uint16_t normed[COUNT], residual[COUNT];
  int how, unfused, rank, i, first = 1;
  OK(peerlane_comm_create_local(comms, RANKS, NULL));
  for (how = APART; how < FORMS; how++)
    for (unfused = 0; unfused < 2; unfused++) {
      OK(peerlane_group_start());
      for (rank = 0; rank < RANKS; rank++) {
        peerlane_add_rms_norm a;
        prepare(&all[rank], rank);
        a = arguments(&all[rank], (form)how, unfused); /* read before the call returns */
        OK(peerlane_all_reduce_add_rms_norm(comms[rank], &a, NULL, -1));
      }
      OK(peerlane_group_end());
      for (rank = 0; rank < RANKS; rank++) {
        peerlane_add_rms_norm a = arguments(&all[rank], (form)how, unfused);
        if (first) {
          memcpy(normed, a.normed, sizeof normed);
          memcpy(residual, a.residual_out, sizeof residual);
          first = 0;
        }
        if (memcmp(normed, a.normed, sizeof normed) || memcmp(residual, a.residual_out, sizeof residual))
          FAIL("rank %d, form %d, unfused %d: other bits", rank, how, unfused);
      }
    }
  for (i = 0; i < WIDTH; i++) {
    uint16_t want[2];
    int sign = i % 2 ? -1 : 1;
    put(want, 0, PEERLANE_BFLOAT16, sign * 16);
    put(want, 1, PEERLANE_BFLOAT16, sign * (4 + i));
    if (residual[i] != want[0] || normed[i] != want[1]) FAIL("element %d is not what it must be", i);
  }
  for (rank = 0; rank < RANKS; rank++) OK(peerlane_comm_destroy(comms[rank]));
  free(all);
}

static void mistakes_are_named(void) {
  peerlane_comm_t comm;
  matrices* m = exactly(sizeof *m);
  matrices before;
  struct {
    peerlane_add_rms_norm known;
    uint64_t later;
  } newer;
  peerlane_add_rms_norm a;
  OK(peerlane_comm_create_local(&comm, 1, NULL));
  prepare(m, 0);
  before = *m;
#define WRONG(text, change)                                                                               \
  do {                                                                                                    \
    a = arguments(m, APART, 0);                                                                           \
    change;                                                                                               \
    REFUSED(PEERLANE_ERROR_INVALID_ARGUMENT, text, peerlane_all_reduce_add_rms_norm(comm, &a, NULL, -1)); \
  } while (0)
  REFUSED(PEERLANE_ERROR_INVALID_ARGUMENT, "'arguments' is NULL",
          peerlane_all_reduce_add_rms_norm(comm, NULL, NULL, -1));
  WRONG("'arguments->size' is 8", a.size = 8);
  WRONG("'arguments->unfused' is 2", a.unfused = 2);
  WRONG("'arguments->dtype': 77", a.dtype = (peerlane_dtype)77);
  WRONG("RMSNorm of float", a.dtype = PEERLANE_FLOAT32);
  WRONG("width 12", a.width = 12);
  WRONG("width 0", a.width = 0);
  WRONG("eps", a.eps = -1);
  WRONG("overflow", a.rows = SIZE_MAX / 4);
  WRONG("input is null", a.input = NULL);
  WRONG("residual is null", a.residual = NULL);
  WRONG("gamma is null", a.gamma = NULL);
  WRONG("normed is null", a.normed = NULL);
  WRONG("residual_out is null", a.residual_out = NULL);
  WRONG("overlap", a.normed = m->residual);
  WRONG("overlap", a.residual_out = m->normed);
  WRONG("overlap", a.residual_out = m->residual + 8);
  WRONG("overlap", a.normed = m->gamma);
  a = arguments(m, APART, 0);
  REFUSED(PEERLANE_ERROR_INVALID_ARGUMENT, "'channel' is 1", peerlane_all_reduce_add_rms_norm(comm, &a, NULL, 1));
  memset(&newer, 0, sizeof newer);
  newer.known = a;
  newer.known.size = sizeof newer;
  newer.later = 1;
  REFUSED(PEERLANE_ERROR_UNSUPPORTED, "update the library",
          peerlane_all_reduce_add_rms_norm(comm, &newer.known, NULL, -1));
  CHECK(memcmp(m, &before, sizeof before) == 0);
  /* The control: the same without a mistake, a newer struct with nothing new in it, and an empty call. */
  newer.later = 0;
  OK(peerlane_all_reduce_add_rms_norm(comm, &newer.known, NULL, 0));
  CHECK(memcmp(m, &before, sizeof before) != 0);
  a.rows = 0;
  a.input = a.residual = a.gamma = a.normed = a.residual_out = NULL;
  OK(peerlane_all_reduce_add_rms_norm(comm, &a, NULL, -1));
  OK(peerlane_comm_destroy(comm));
  free(m);
}

int main(void) {
  every_form_has_the_same_bits();
  mistakes_are_named();
  return 0;
}
