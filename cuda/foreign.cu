// A kernel of somebody else's, as far as the all-reduce can tell: it reads the last result and writes the next input,
// as a model's kernels around an all-reduce do. `peerlane bench --between` measures between such kernels. It is no part
// of the library.
#include <stdint.h>

// By value, as the host passes it: `src/bin/peerlane/bench/gpu/foreign.rs`.
struct pl_foreign_args {
  const unsigned char* source;  // what the next input is
  const unsigned char* result;  // of the last all-reduce; the same as `next` where it works in place
  unsigned char* next;
  uint64_t bytes;
};

namespace {

// What the benchmark fills results with before anything runs. An element that an all-reduce has not written is passed
// on, so that the next sum is wrong and the check sees it.
constexpr uint32_t UNWRITTEN = 0xa5a5a5a5u;

__device__ uint32_t next_word(uint32_t source, uint32_t result) { return result == UNWRITTEN ? result : source; }

}  // namespace

// One pack of 16 bytes per thread; the first threads also take the bytes behind the last whole pack, one each.
extern "C" __global__ void __launch_bounds__(256) peerlane_foreign(const __grid_constant__ pl_foreign_args args) {
  const uint64_t pack = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const uint64_t packs = args.bytes / 16;
  if (pack < packs) {
    const uint4 source = reinterpret_cast<const uint4*>(args.source)[pack];
    const uint4 result = reinterpret_cast<const uint4*>(args.result)[pack];
    reinterpret_cast<uint4*>(args.next)[pack] =
        make_uint4(next_word(source.x, result.x), next_word(source.y, result.y), next_word(source.z, result.z),
                   next_word(source.w, result.w));
  }
  if (pack < args.bytes % 16) {
    const uint64_t byte = packs * 16 + pack;
    args.next[byte] = args.source[byte];
  }
}
