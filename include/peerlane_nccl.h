/* peerlane in the place of NCCL: what became of a process's all-reduces. The function is exported by
 * libpeerlane_preload.so, libpeerlane_nccl.so and peerlane's libnccl.so.2, beside NCCL's own. */
#ifndef PEERLANE_NCCL_H_
#define PEERLANE_NCCL_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* New fields come at the end. */
typedef struct {
  uint64_t communicators;     /* communicators that peerlane could serve: all ranks in this box, and alike */
  uint64_t set_up;            /* of these, the ones that were set up */
  uint64_t refused;           /* communicators that NCCL serves for good */
  uint64_t served_calls;      /* all-reduces launched by peerlane; a captured one counts once */
  uint64_t served_bytes;      /* their bytes */
  uint64_t forwarded_size;    /* to NCCL: larger than PEERLANE_NCCL_BYTES says, or empty */
  uint64_t forwarded_kind;    /* to NCCL: FP8, or an operation made by the caller */
  uint64_t forwarded_unready; /* to NCCL: a refused communicator, or captured before the first eager call */
  uint64_t failed;            /* calls that failed in peerlane */
} peerlane_nccl_stats_t;

/* Reads the counters of a communicator (an ncclComm_t), or for NULL those of the process. `size` is sizeof *stats.
 * Returns 0, or ncclInvalidArgument (4) for a communicator that peerlane has no part in. Any thread, any time. */
int peerlane_nccl_stats(const void* comm, peerlane_nccl_stats_t* stats, size_t size);

#ifdef __cplusplus
}
#endif

#endif
