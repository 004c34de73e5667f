// The same kernels as functions that run a whole grid on the calling thread, for tests over a stand-in driver.
#include "kernels.h"

#define ON_HOST(name, Args, threads, body)                                                      \
  extern "C" __attribute__((visibility("default"))) void name(const Args* args) {               \
    for (uint32_t index = 0; index < args->blocks; ++index) body(*args, Block<threads>(index)); \
  }
VERIFY_KERNELS(ON_HOST)

// So that a test can compare the host's idea of a parameter with the kernels'.
#define BYTES(name, Args, threads, body) \
  if (__builtin_strcmp(kernel, #name) == 0) return sizeof(Args);
extern "C" __attribute__((visibility("default"))) uint64_t verify_parameter_bytes(const char* kernel) {
  VERIFY_KERNELS(BYTES)
  return 0;
}
