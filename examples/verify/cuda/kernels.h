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
#include "route.cuh"

#define VERIFY_KERNELS(KERNEL)                                 \
  KERNEL(verify_fill, verify_fill_args, 256, fill)             \
  KERNEL(verify_embed, verify_embed_args, 256, embed)          \
  KERNEL(verify_add_norm, verify_add_norm_args, 256, add_norm) \
  KERNEL(verify_latents, verify_latents_args, 256, latents)    \
  KERNEL(verify_turn, verify_turn_args, 256, turn)             \
  KERNEL(verify_attend, verify_attend_args, 256, attend)       \
  KERNEL(verify_merge, verify_attend_args, 128, merge)         \
  KERNEL(verify_route, verify_route_args, 32, route)           \
  KERNEL(verify_dispatch, verify_dispatch_args, 512, dispatch) \
  KERNEL(verify_gate_up, verify_gate_up_args, 256, gate_up)    \
  KERNEL(verify_down, verify_down_args, 256, down_add)         \
  KERNEL(verify_gated, verify_gate_args, 256, gate)            \
  KERNEL(verify_choose, verify_choose_args, 512, choose)       \
  KERNEL(verify_accept, verify_accept_args, 32, accept)        \
  KERNEL(verify_stamp, verify_stamp_args, 32, stamp)

#endif
