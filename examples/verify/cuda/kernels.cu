// The kernels for GPUs.
#include "kernels.h"

// Threads that a multiprocessor must be able to hold. Told nothing, the compiler may cram a kernel into so few
// registers, for more threads than matter here, that it spills.
constexpr int ROOM = 512;

#define ON_GPU(name, Args, threads, body)                                                                         \
  extern "C" __global__ void __launch_bounds__(threads, ROOM / threads) name(const __grid_constant__ Args args) { \
    body(args, Block<threads>());                                                                                 \
  }
VERIFY_KERNELS(ON_GPU)
