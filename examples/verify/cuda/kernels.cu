// The kernels for GPUs.
#include "kernels.h"

#define ON_GPU(name, Args, threads, body)                                                         \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Args args) { \
    body(args, Block<threads>());                                                                 \
  }
VERIFY_KERNELS(ON_GPU)
