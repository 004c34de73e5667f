/* The explorer's entry: plain C, called from Rust. */
#ifndef EXPLORER_EXPLORER_H
#define EXPLORER_EXPLORER_H

#include <stdint.h>

#include "launch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Safeguards taken out: what the back end does wrong on purpose, so that a test can show that it
 * would be seen. */
enum explorer_control {
  CONTROL_NONE = 0,
  CONTROL_NO_REARM = 1,           /* sentinel words that were read are not armed again */
  CONTROL_EPOCH_STANDS = 2,       /* a finished step does not advance the epoch */
  CONTROL_TAG_NOT_LESS = 3,       /* ll tags compare by >= */
  CONTROL_FLAG_NOT_LESS = 4,      /* flags compare by >= over their low 32 bits, wrapping */
  CONTROL_NO_WAIT = 5,            /* the sum is made before the data has arrived */
  CONTROL_PLAIN_FLAG = 6,         /* flags are stored without release */
  CONTROL_NO_FENCE = 7,           /* system fences order nothing */
  CONTROL_NO_BARRIER = 8,         /* barriers of a block let threads through */
  CONTROL_TORN_WORDS = 9,         /* 64-bit words travel as two 32-bit words */
  CONTROL_TAG_WRAPS = 10,         /* ll tags compare by >=, wrapping */
  CONTROL_NO_CLEAR = 11,          /* ll words are never cleared */
  CONTROL_RAW_NAN = 12,           /* sentinel words of all ones are sent as they are */
  CONTROL_ANY_SQUARES = 13,       /* squares of rows are taken whatever their tag */
  CONTROL_FORGETS = 14,           /* a rank does not remember what it has sent and seen (delta) */
  CONTROL_ALL_IS_NEW = 15,        /* every word differs from what is remembered (delta) */
  CONTROL_NO_WORD_OF_REARMS = 16, /* steps by delta are not told that words may be on their way that were armed again */
  CONTROL_BLOCKS_TOO_EARLY = 17,  /* blocks of a cluster store before the others run */
  CONTROL_SQUARES_TOO_EARLY = 18  /* and take what they find without waiting for them */
};

typedef struct {
  uint64_t seed;
  uint32_t n, steps, blocks, threads;
  uint32_t cpu_shape;                /* 1: the kernels as the CPU device compiles them; one thread per rank */
  uint32_t control;                  /* explorer_control */
  uint32_t host_staged;              /* slabs are host memory: a rank's own stores travel as well */
  uint32_t drop_at;                  /* the number of the write that is lost, from 1; 0: none */
  uint32_t mirror_from, mirror_to;   /* mirror_from's writes to mirror_to's slab never reach it; equal: none */
  uint32_t abort_at, abort_rank;     /* the decision at which a rank's host aborts, from 1; 0: none */
  uint32_t rank_steps[PL_MAX_RANKS]; /* how many of the steps a rank makes */
  char* arena;                       /* n slabs, each 1 << slab_log2 bytes */
  uint32_t slab_log2;
  const pl_args* args;           /* [steps][n] */
  const pl_unrolled_7* unrolled; /* [steps][n]; where it has phases it is run, in the shape of a GPU */
} explorer_case;

typedef struct {
  uint64_t events, writes; /* scheduling decisions; posted writes */
  uint32_t stuck;          /* 1: threads of a block or a cluster left each other at a barrier */
  uint32_t strayed;        /* 1: a block's shared memory was stored to before it ran or after it had ended */
} explorer_outcome;

void explorer_run(const explorer_case* c, explorer_outcome* out);

#ifdef __cplusplus
}
#endif

#endif
