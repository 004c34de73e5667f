// Every kernel: its name to the host, its parameter, the threads of a block, and the function that it runs.
#ifndef VERIFY_KERNELS_H
#define VERIFY_KERNELS_H

#include "attend.cuh"
#include "choose.cuh"
#include "embed.cuh"
#include "experts.cuh"
#include "fill.cuh"
#include "latents.cuh"
#include "norm.cuh"
#include "product.cuh"
#include "route.cuh"

#define VERIFY_KERNELS(KERNEL)                                    \
  KERNEL(verify_fill, verify_fill_args, 256, fill)                \
  KERNEL(verify_embed, verify_embed_args, 256, embed)             \
  KERNEL(verify_add_norm, verify_add_norm_args, 256, add_norm)    \
  KERNEL(verify_few_rows, verify_few_rows_args, 256, few_rows)    \
  KERNEL(verify_query_up, verify_query_up_args, 256, query_up)    \
  KERNEL(verify_queries, verify_queries_args, 256, queries)       \
  KERNEL(verify_values, verify_values_args, 256, values)          \
  KERNEL(verify_turn_over, verify_turn_over_args, 256, turn_over) \
  KERNEL(verify_latents, verify_latents_args, 256, latents)       \
  KERNEL(verify_rotate, verify_rotate_args, 256, rotate)          \
  KERNEL(verify_attend, verify_attend_args, 256, attend)          \
  KERNEL(verify_merge, verify_attend_args, 128, merge)            \
  KERNEL(verify_router, verify_router_args, 256, router)          \
  KERNEL(verify_choice, verify_route_args, 256, route)            \
  KERNEL(verify_dispatch, verify_dispatch_args, 512, dispatch)    \
  KERNEL(verify_gate_up, verify_gate_up_args, 256, gate_up)       \
  KERNEL(verify_down, verify_down_args, 256, down_outputs)        \
  KERNEL(verify_choose, verify_choose_args, 512, choose)          \
  KERNEL(verify_accept, verify_accept_args, 32, accept)           \
  KERNEL(verify_stamp, verify_stamp_args, 32, stamp)

#endif
