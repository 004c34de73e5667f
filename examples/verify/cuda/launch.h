/* The one parameter of every kernel, between the host (`src/device/cuda/launch.rs`) and the kernels. Addresses are
   device memory; bf16 unless said otherwise; matrices are row-major. `blocks` is the grid, which the CPU cannot ask
   for. */
#ifndef VERIFY_LAUNCH_H
#define VERIFY_LAUNCH_H

#include <stdint.h>

/* Keys of a row's sequence that one block of the attention sees; caches have so many rows of zeros at their end. */
#define VERIFY_CHUNK 128
/* Queries (a row and a head each) of such a block. */
#define VERIFY_QUERIES 16
/* Most elements of a cache row, experts of a layer, and experts of a row. */
#define VERIFY_MOST_CACHE_WIDTH 640
#define VERIFY_MOST_EXPERTS 512
#define VERIFY_MOST_KEPT 16
/* Most rows that the kernels of few rows take. */
#define VERIFY_FEW_ROWS 16
/* Outputs of a row that a block of the down product computes. */
#define VERIFY_OUTPUTS 128
/* Chunks of keys that the product with values puts together itself. */
#define VERIFY_FEW_CHUNKS 40
/* Parts of the hidden dimension that blocks of the router take. */
#define VERIFY_ROUTER_PARTS 4

/* The consecutive rows of one sequence. */
typedef struct {
  uint32_t row; /* its first row in the batch */
  uint32_t rows;
  uint32_t cache;   /* where it begins in the cache */
  uint32_t context; /* rows of the cache before this block */
} verify_block;

/* A batch as every kernel reads it; what stands there is written anew before a replay. */
typedef struct {
  uint64_t tokens;    /* uint32_t [rows] */
  uint64_t positions; /* uint32_t [rows] */
  uint64_t visible;   /* uint64_t [rows]; bit i: the row sees row i of its block */
  uint64_t sequence;  /* uint32_t [rows]: the block that the row is in */
  uint64_t slots;     /* uint32_t [rows]: where the row goes in the cache */
  uint64_t blocks;    /* verify_block [sequences] */
  uint32_t rows, sequences;
} verify_batch;

/* A rectangle of a tensor from a seed. */
typedef struct {
  uint32_t blocks, wide; /* wide: fp32 */
  uint64_t out, key;
  uint64_t first;            /* element of the whole tensor */
  uint64_t columns, between; /* of the rectangle; from one row of it to the next in the whole tensor */
  uint64_t count;
  float centre, reach;
} verify_fill_args;

typedef struct {
  uint32_t blocks, width;
  verify_batch batch;
  uint64_t table, out;
} verify_embed_args;

/* residual += x where there is an x; out = residual / sqrt(mean(residual^2) + eps) * gamma. */
typedef struct {
  uint32_t blocks, width;
  uint64_t x, residual, gamma, out;
  float eps;
  uint32_t unused;
} verify_add_norm_args;

/* From fp32 rows [query latent | key-value latent | rotary key]. */
typedef struct {
  uint32_t blocks, query_latent, kv_latent, rotary;
  verify_batch batch;
  uint64_t fused, query_gamma, key_gamma, turns; /* turns: float [positions, rotary / 2, 2], cosine and sine */
  uint64_t query_latents, cache;
  float eps;
  uint32_t unused;
} verify_latents_args;

/* out = x weights^T for few rows; x [rows, inner], weights [columns, inner], out [rows, columns], fp32 where wide. */
typedef struct {
  uint32_t blocks, rows, inner, columns, splits, wide;
  uint64_t x, weights, out;
} verify_few_rows_args;

/* q [rows, columns] = norm(query latent) weights^T, and the cache's rows, from `fused` as verify_latents takes it. The
   last `rows` blocks are the cache's. */
typedef struct {
  uint32_t blocks, query_latent, kv_latent, rotary, columns, splits;
  verify_batch batch;
  uint64_t fused, query_gamma, key_gamma, turns, weights, out, cache;
  float eps;
  uint32_t unused;
} verify_query_up_args;

/* q [rows, heads, plain + rotary] into out [rows, heads, latent + rotary] by key_up [heads, latent, plain]; as many
   blocks for each head. */
typedef struct {
  uint32_t blocks, heads, plain, rotary, latent, splits;
  verify_batch batch;
  uint64_t q, key_up, turns, out;
} verify_queries_args;

/* in [heads, rows, columns] into out [heads, columns, rows] */
typedef struct {
  uint32_t blocks, heads, rows, columns;
  uint64_t in, out;
} verify_turn_over_args;

/* The rotary part of q [rows, heads, plain + rotary] into out [rows, heads, latent + rotary]. */
typedef struct {
  uint32_t blocks, heads, plain, rotary, latent, unused;
  verify_batch batch;
  uint64_t q, turns, out;
} verify_rotate_args;

typedef struct {
  uint32_t blocks, heads, latent, width; /* width of a cache row */
  uint32_t tiles, chunks;                /* of a sequence: of its queries and of its keys */
  verify_batch batch;
  uint64_t queries, cache;
  uint64_t parts; /* float [sequences, tiles, chunks, VERIFY_QUERIES, latent] */
  uint64_t stats; /* float [sequences, tiles, chunks, VERIFY_QUERIES, 2]: largest score, sum of exponentials */
  uint64_t out;   /* [rows, heads, latent] */
  float scale;
  uint32_t unused;
} verify_attend_args;

/* What the heads' rows saw, by value_up [heads, value, latent] into out [rows, heads, value]; as many blocks for each
   head. The fields up to `out` as verify_attend's. */
typedef struct {
  uint32_t blocks, heads, latent, value, tiles, chunks;
  verify_batch batch;
  uint64_t parts, stats, value_up, out;
  uint32_t splits, unused;
} verify_values_args;

typedef struct {
  uint32_t blocks, rows, experts, groups, kept_groups, kept, unused;
  float scale;
  uint64_t logits, bias;    /* bias: float [experts] */
  uint64_t chosen, weights; /* uint32_t, float [rows, kept] */
} verify_route_args;

/* x gate^T in parts of the hidden dimension, float [VERIFY_ROUTER_PARTS, rows, experts] at `route.logits`; a logit is
   the sum over the parts. The last block routes. */
typedef struct {
  uint32_t blocks, hidden;
  verify_route_args route;
  uint64_t x, gate; /* [rows, hidden], [experts, hidden] */
  uint64_t arrived; /* uint32_t, 0 before and after */
} verify_router_args;

/* The rows of each expert that has any; a pair is a row and the place of an expert in its choice, row * kept + place.
 */
typedef struct {
  uint32_t blocks, experts, pairs, unused;
  uint64_t chosen;
  uint64_t slots; /* uint32_t [1 + 2 * experts + 1]: how many slots; the expert of each; its first pair, and the end */
  uint64_t order; /* uint32_t [pairs]: pairs by slot */
} verify_dispatch_args;

/* One MLP for all rows, and beside it the experts that rows chose; `pairs` 0: none. */
typedef struct {
  uint32_t blocks, rows, hidden, pairs, kept, experts;
  uint32_t always_width, width; /* of the inner layers */
  uint64_t x, always, weights;  /* always [2, always_width, hidden], weights [experts, 2, width, hidden] */
  uint64_t chosen;              /* uint32_t [rows, kept]; with `slots` 0 */
  uint64_t slots, order;        /* as verify_dispatch leaves them, for many rows */
  uint64_t product, inner;      /* out: [rows, always_width], [pairs, width] */
} verify_gate_up_args;

typedef struct {
  uint32_t blocks, rows, hidden, kept; /* kept 0: no experts */
  uint32_t always_width, width;
  uint64_t product, always;                /* always [hidden, always_width] */
  uint64_t inner, weights, chosen, scales; /* weights [experts, hidden, width]; scales float [rows, kept] */
  uint64_t out;                            /* [rows, hidden] */
} verify_down_args;

typedef struct {
  uint32_t blocks, width, first, unused;
  uint64_t logits; /* float [rows, width] */
  uint64_t keys;   /* uint64_t [rows] */
} verify_choose_args;

/* Tokens that a greedy verifier commits for each sequence. */
typedef struct {
  uint32_t blocks, unused;
  verify_batch batch;
  uint64_t keys, accepted; /* uint32_t [sequences] */
} verify_accept_args;

/* The GPU's clock, in nanoseconds. */
typedef struct {
  uint32_t blocks, unused;
  uint64_t out;
} verify_stamp_args;

#endif
