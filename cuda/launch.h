/* What the host hands to a kernel: plain C structs, shared by Rust (bindgen), the GPU kernels and the host kernels.
 *
 * A schedule compiles to one `pl_table` per rank. A step (one kernel launch) gets it inside `pl_args`, by value: on a
 * GPU as a `const __grid_constant__` argument, so that a run-time index does not put the struct on the stack. The
 * tables of the hot path are laid out for unrolled kernels instead (`pl_unrolled_*`).
 *
 * Units: a *pack* is 16 bytes of the caller's data type (the last one of a message may be short). A *tile* is the
 * message of one step, cut into *pieces* at whole packs; a *chunk* is a run of `chunk_packs` packs of a piece. In the
 * fused add + RMSNorm a tile is one row, a step has many, and a chunk is what a piece has of one row.
 */
#ifndef PEERLANE_LAUNCH_H
#define PEERLANE_LAUNCH_H

#include <stdint.h>

/* Capacities of pl_table: what the largest schedule over up to 16 ranks in one to four islands needs. A test recounts
 * them. */
#define PL_MAX_RANKS 16
#define PL_MAX_PIECES 16
#define PL_MAX_PHASES 44
#define PL_MAX_SENDS 72
#define PL_MAX_ITEMS 240
#define PL_MAX_FOLDS 54
#define PL_PACK_BYTES 16
#define PL_TURN_ID_BITS 12 /* of pl_channel.turn: the id of the launch in flight */
#define PL_TURN_BITS 20    /* of it: that id, and above it how many blocks are done; the rest is the epoch */
#define PL_MAX_BLOCKS 256  /* of a launch: as many as can be counted there */
#define PL_FOLD_STACK 5    /* most values that a fold's postfix form keeps beside the operand in hand */

/* Data types and operations carry NCCL's numbers, so that the NCCL replacement needs no table. */
enum pl_dtype {
  PL_I8 = 0,
  PL_U8 = 1,
  PL_I32 = 2,
  PL_U32 = 3,
  PL_I64 = 4,
  PL_U64 = 5,
  PL_F16 = 6,
  PL_F32 = 7,
  PL_F64 = 8,
  PL_BF16 = 9
};
enum pl_op { PL_SUM = 0, PL_PROD = 1, PL_MAX = 2, PL_MIN = 3, PL_AVG = 4 };

enum pl_protocol { PL_LL = 0, PL_SENTINEL = 1, PL_FLAGGED = 2 };

/* pl_send.src: what is sent. Nothing: a flag without data, which says that the sender has begun the step (flagged
 * alone; it is only awaited, and its data slot is 0). */
enum pl_source { PL_SRC_INPUT = 0, PL_SRC_PARTIAL = 1, PL_SRC_RESULT = 2, PL_SRC_NOTHING = 3 };

/* pl_item.from: 0..15 is the peer that wrote the slot; these two are the rank's own data. */
enum pl_from { PL_FROM_INPUT = 16, PL_FROM_PARTIAL = 17 };

/* pl_fold.dst: round to the caller's output; keep in the accumulator type; or only wait until the items are there
 * (they stay in their slots for a later fold). */
enum pl_dst { PL_DST_RESULT = 0, PL_DST_PARTIAL = 1, PL_DST_AWAIT = 2 };

/* Why a rank gave up; 0 is "has not". */
enum pl_reason {
  PL_REASON_NONE = 0,
  PL_REASON_DEADLINE = 1,   /* a wait outlived its deadline */
  PL_REASON_RANK_DIED = 2,  /* the host saw a rank die */
  PL_REASON_ABORTED = 3,    /* somebody called abort */
  PL_REASON_CONCURRENT = 4, /* two launches met on one channel */
  PL_REASON_MISMATCH = 5,   /* ranks made different calls (PEERLANE_CHECK) */
  PL_REASON_CLOSED = 6,     /* replayed after destroy */
  PL_REASON_LEFT = 7        /* a rank that the step needs has destroyed its communicator before it */
};

/* Push `piece` of `src` to `peer`. `slot`: where it arrives there (its flag, and for push its data). `data`: the data
 * slot: of the peer's slab for push (equal to `slot`), of the sender's own slab for pull. Sends that share a data slot
 * carry the same value and follow each other in one phase: it is stored once, then all their flags are raised. */
typedef struct {
  uint8_t peer, piece, src, slot, data;
} pl_send;

/* One operand of a fold, in postfix order of the tree: push it, then combine the top two `merge` times.
 * `wire_f32`: the slot holds accumulator values, not the caller's type. `data`: as in pl_send; in `from`'s slab for
 * pull. */
typedef struct {
  uint8_t slot, data, from, merge, wire_f32;
} pl_item;

typedef struct {
  uint16_t item0;
  uint8_t items, piece, dst, canonical; /* canonical: the merges are those of the balanced tree over `items` leaves */
} pl_fold;

/* In a phase all sends come first, then the folds in order. */
typedef struct {
  uint8_t send0, sends, fold0, folds, wire_f32;
} pl_phase;

typedef struct {
  uint8_t n, rank, phases, pieces;
  uint8_t fan_in;     /* most remote items of any fold */
  uint8_t pull;       /* 1: data stays in the writer's slab and only the flag travels (flagged protocol alone) */
  uint8_t slots;      /* data slots per half, the same on all ranks; at least 1 */
  uint8_t flag_slots; /* arrivals per half, the same on all ranks; at least 1 */
  uint16_t cut_num[PL_MAX_PIECES + 1], cut_den; /* piece p of L packs: [L*cut_num[p]/cut_den, L*cut_num[p+1]/cut_den) */
  pl_phase phase[PL_MAX_PHASES];
  pl_send send[PL_MAX_SENDS];
  pl_item item[PL_MAX_ITEMS];
  pl_fold fold[PL_MAX_FOLDS];
} pl_table;

/* What a rank says when it gives up; written into its own slot of every peer's slab, `valid` last. */
typedef struct {
  uint32_t reason, rank, peer, phase; /* peer: whom it waited for, or who differs */
  uint64_t step, bytes;               /* the epoch, and the size of the step */
  uint32_t dtype, op;                 /* of the call; for a mismatch the peer's */
  uint64_t count;                     /* likewise */
  uint64_t valid;                     /* 1 once the rest can be read */
} pl_record;

/* What a rank is about to do, exchanged before the first phase under PEERLANE_CHECK. */
typedef struct {
  uint64_t count;
  uint32_t dtype, op, algo, proto;
  uint64_t width; /* elements of a row of the fused add + RMSNorm; 0 for an all-reduce alone */
  uint64_t call;  /* the host's number of the call on this channel */
  uint64_t tag;   /* the epoch once the rest can be read */
} pl_call;

/* One per communicator and rank, in the rank's own memory. Sticky: never cleared. */
typedef struct {
  uint32_t abort; /* pl_reason; ends every wait and makes later launches fill their output and return */
  uint32_t reserved;
  pl_record record; /* the first reason, by whoever set `abort` */
} pl_state;

/* One per channel, in host memory that the device maps: what host and kernels tell each other without a call of the
 * driver, which could queue behind the very kernel that it is meant to end. NULL on the CPU device, where pl_state is
 * host memory. */
typedef struct {
  uint32_t abort;   /* as in pl_state, by the host; a wait looks at it now and then */
  uint32_t leaver;  /* the rank behind `left` */
  uint64_t left;    /* by the host: the first step that a rank which has left did not finish; 0: nobody has left */
  pl_record record; /* a copy of pl_state.record, by the kernel of this channel that set `abort` there */
} pl_report;

/* One per channel, in the rank's own memory, never in the slab (which may be host memory). */
typedef struct {
  uint64_t turn;     /* epoch of the next step << PL_TURN_BITS | of the launch in flight; 0 there when idle: step.cuh */
  uint32_t entered;  /* blocks of the launch that have begun; 0 again once all have */
  uint32_t rearming; /* 1: words that have been armed again may be under way (land_rearmed in step.cuh) */
} pl_channel;

/* Offsets into a slab, in bytes; the same on all ranks. Derived from the capacity and the schedule, never from the
 * call, so that no step can find another step's layout where it reads. */
typedef struct {
  /* Of the protocol's region: word = data + (epoch & rotation) * half_bytes + slot * slot_bytes + offset. Two halves
   * (rotation 1) are enough to be right. More (3, 7) leave a buffer alone for longer: on a CPU its lines have then
   * moved out of the reader's innermost cache, from where taking them back is slow; in host memory that GPUs write,
   * words that have been armed again land late. */
  uint64_t half_bytes;
  uint32_t rotation; /* number of buffers that the step rotates over, less one: 1, 3 or 7; 1 for ll */
  /* flagged only: flag = flags + (epoch & 1) * flags_half_bytes + (slot * flag_chunks + chunk) * 64 */
  uint32_t flag_chunks; /* most chunks per slot */
  uint64_t data, slot_bytes;
  uint64_t flags, flags_half_bytes;
  uint64_t records;           /* pl_record[16] */
  uint64_t calls;             /* pl_call[2][16], of the channel */
  uint64_t ll, ll_half_bytes; /* the channel's ll region, whose old tags a step of any protocol may have to clear */
} pl_geometry;

/* What every step has, whatever its kernel. Arguments are fetched anew for every launch, line by line, and a line more
 * is 50 ns. So what the hot path needs stands together: 48 bytes at the beginning, and behind a multiple of 64 another
 * 48 at the end and in the arguments that are the kernel's own. The first argument stands at 0x210 on GPUs of 9.0 (in
 * the line of what every kernel needs of the driver's) and at 0x380 on those of 10.0 and 12.0: in either case both are
 * one line. See cuda/fan.cuh. */
typedef struct {
  pl_state* state;
  pl_channel* channel;
  const void* input;
  void* output;
  pl_geometry geo;
  uint64_t base[PL_MAX_RANKS]; /* address of each rank's slab as mapped here; 0: not mapped, the schedule has no edge
                                  there */
  pl_report* report;
  void* partial;  /* own scratch: accumulator values of the whole tile, addressed by pack */
  uint64_t count; /* elements of this step */
  uint64_t deadline_ns;
  uint64_t launch; /* id of this launch where the device has none of its own; not 0 */
  uint64_t call;
  uint64_t signature; /* of the whole call, in the high 16 bits, the rest 0: differs where calls do; see flagged */
  uint32_t n, rank;
  uint32_t dtype, op, proto, algo;
  uint32_t chunk_packs;
  uint32_t check; /* 1: exchange and compare pl_call first */
  uint32_t yield; /* CPU: 1 when ranks outnumber cores, so a poll that fails gives the core away */
  /* 1: the pieces are parts of `count` elements each, whatever the cuts say, and piece p starts p times so many bytes
   * into the buffers: an all-gather's input is one part for all pieces, a reduce-scatter's output likewise. */
  uint32_t parts;
  uint64_t input_part, output_part;
  /* What both ends of a slot remember, in the rank's own memory, see cuda/protocol_delta.cuh. `seen_shift`: added to
   * the address of a word in the own slab it is the address of the last word that was read there. `sent`: the last
   * words sent, by phase, send and buffer; NULL: the step goes by another protocol. */
  uint64_t seen_shift;
  void* sent;
  /* Add + RMSNorm, see cuda/add_rms_norm.cuh: rows of `width` elements (a multiple of 8), count = rows * width, and
   * `output` is the normed one. An all-reduce alone has 0 rows. */
  uint64_t rows, width;
  const void* residual;
  const void* gamma; /* `width` elements */
  void* residual_out;
  float eps, weight_bias;
  void* squares; /* own scratch of the channel, zero at first: two halves of words, see cuda/spread.cuh; NULL: none */
  uint64_t squares_half_bytes;
  /* Of unrolled kernels on a GPU: how many packs of the longest piece a block takes, those of all rows counted; how
   * many a row is counted with, at least `widest`; and 2^32 over that, rounded up, or 0 for 1. See cuda/spread.cuh. */
  uint32_t block_units, row_units, row_magic;
  uint32_t cluster;     /* the blocks of a row, if they are launched as a cluster, else 0: see cuda/cluster.cuh */
  uint32_t host_staged; /* 1: slabs are host memory that GPUs write: a block of each step fences, see step.cuh */
  uint32_t dependents;  /* 1: the next kernel in the stream is this library's and may start while this one waits */
} pl_step;

/* A step that walks a table. */
typedef struct {
  pl_step step;
  pl_table table;
} pl_args;

/* A step of ll or sentinel whose table the host has laid out for a kernel with unrolled loops over up to K sends, and
 * K + 1 operands, a phase: addresses instead of slots, packs instead of cuts. The struct has only what its K needs: the
 * arguments of a launch are fetched anew each time, and what they hold cold is on the path of the data. See
 * src/lane/unrolled.rs for the tables that have this form. */
#define PL_UNROLLED_PHASES 2
enum pl_unrolled_fold {
  PL_FOLD_NONE = 0,
  PL_FOLD_SUM = 1,   /* one fold: the sum of all operands, rounded, is the result of piece 0 of the operands */
  PL_FOLD_COPIES = 2 /* each operand is the result of its piece */
};
/* What a short step reads before it does anything else: its own piece, and the one of each send; first | packs << 16,
 * as in send_first and the others. With three sends and more it comes first, in the line of what stands before it. With
 * one the addresses do: one phase needs nothing else. */
#define PL_PIECES(K) uint32_t own_piece, send_piece[K];
#define PL_PLACES(K)                                                                                               \
  uint32_t present, remote; /* PL_FOLD_SUM: a bit per leaf of the complete tree; not remote is the rank's input */ \
  uint64_t to[K];           /* where a send goes: the address of the slot in the first half, in the peer's slab */ \
  uint64_t at[(K) + 1];     /* where an operand arrives, likewise, in the own slab; where none does, some other one's */
#define PL_UNROLLED(K, FIRST, THEN)                                                                                   \
  typedef struct {                                                                                                    \
    FIRST(K)                                                                                                          \
    THEN(K)                                                                                                           \
    uint32_t copy_piece[K];                            /* of short steps: the pieces that are copied, likewise */     \
    uint32_t send_first[K], send_packs[K];             /* the piece, in the tile; 0 packs where there is no send */   \
    uint32_t item_first[(K) + 1], item_packs[(K) + 1]; /* likewise of operands */                                     \
    uint32_t fold;                                     /* pl_unrolled_fold */                                         \
    uint8_t one_source;                                /* all sends carry the same piece */                           \
    uint8_t result;                                    /* they carry results, not input */                            \
    uint8_t from[(K) + 1];                             /* the rank behind an operand */                               \
  } pl_unrolled_phase_##K;                                                                                            \
  typedef struct {                                                                                                    \
    pl_step step;                                                                                                     \
    uint16_t phases;                                                                                                  \
    uint16_t straight; /* 1: a sum in one phase, or by reduce-scatter and all-gather, a pack of each piece per thread \
                          at most, and at most 65535 packs; rows: with a kernel of its own, cuda/straight_rows.cuh */ \
    uint32_t widest;   /* packs of the longest piece */                                                               \
    pl_unrolled_phase_##K phase[PL_UNROLLED_PHASES];                                                                  \
  } pl_unrolled_##K;
PL_UNROLLED(1, PL_PLACES, PL_PIECES)
PL_UNROLLED(3, PL_PIECES, PL_PLACES)
PL_UNROLLED(7, PL_PIECES, PL_PLACES)
PL_UNROLLED(15, PL_PIECES, PL_PLACES)

/* What a launch of the probe measures; see cuda/probe.cuh. */
enum pl_probe_what {
  PL_PROBE_LATENCY = 0, /* a flag to one peer and back, again and again */
  PL_PROBE_STORE = 1,   /* stores into the slabs of `to` */
  PL_PROBE_LOAD = 2     /* loads from the slabs of `to` */
};
#define PL_PROBE_BLOCKS 16 /* most blocks of a launch */
#define PL_PROBE_FLAGS 3   /* kinds of flags: arrived, acknowledged, checked */

typedef struct {
  pl_step step;   /* of any: its ranks, slabs, records, state, report and deadline are what waits need */
  uint64_t flags; /* offset in every slab of [PL_PROBE_FLAGS][PL_MAX_RANKS][PL_PROBE_BLOCKS] lines of 64 bytes */
  uint64_t data;  /* offset in every slab of a slot per writer */
  uint64_t slot_bytes;
  uint64_t tag;     /* round r has tag + 1 + r, a value that was never in the slab before */
  uint64_t bytes;   /* per peer and round, a multiple of 1024, at most slot_bytes */
  uint64_t result;  /* address: per block, the mask of ranks with wrong data, then start and end of each round in ns */
  uint64_t barrier; /* address of two words in the rank's own memory, zero before the launch */
  uint32_t what, rounds; /* rounds 0, 2, 4, ... carry no data: what is left of a round is its fixed cost */
  uint32_t to, from;     /* a bit per rank: whom this one works on, and who works on this one */
} pl_probe;

#endif
