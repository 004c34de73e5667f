/* peerlane: topology-aware small-message all-reduce between the processes and threads of one machine.
 *
 * Rules that hold for every function; what is particular to one stands beside it.
 *
 * Errors. Every function that can fail returns a `peerlane_status`; 0 is success. No function aborts, exits or throws,
 * and nothing is printed but the log on stderr (PEERLANE_LOG=off is silent). After a failure `peerlane_last_error()`
 * says on the same thread which argument or rank it was and what to do. Numbers of statuses, data types, operations,
 * algorithms, protocols and directions are fixed for good.
 *
 * Results. Values are only written on success: after a failure everything behind an output pointer is as it was. (The
 * one exception is the output buffer of a collective that fails on its way: wherever the result is not known it holds
 * NaN, or zero for integers.)
 *
 * Pointers. NULL is refused with PEERLANE_ERROR_INVALID_ARGUMENT except where "may be NULL" is said. Other pointers
 * must be valid for the size that the function's type or text says; that cannot be checked. The library keeps no
 * pointer after a function has returned, except: the buffers of a collective that is queued on a stream or noted in a
 * group until that work is done, and the `comm` pointer of a creation inside a group until `peerlane_group_end`.
 *
 * Ownership. A handle (`peerlane_comm_t`, `peerlane_stream_t`) belongs to the caller from the call that wrote it to the
 * call that destroys it. Handles are names, not addresses: one that is NULL, destroyed, made up, of the wrong kind or
 * inherited over fork() is refused with PEERLANE_ERROR_INVALID_HANDLE by every function. Text that a function returns
 * belongs to the library.
 *
 * Threads. Every function may be called from any thread at any time, on the same handle too: calls on one communicator
 * take effect in the order in which they come in, and since all ranks must make the same calls in the same order, the
 * caller has to see to that order. Destroying a handle waits for calls that other threads are in; calls that come later
 * are refused. Groups and `peerlane_last_error` belong to the calling thread. Nothing may be called from a signal
 * handler.
 *
 * Processes. Create communicators after fork(), not before it: a child cannot use, and does not disturb, what its
 * parent created. A process that ends without `peerlane_comm_destroy` counts as dead for the other ranks of a
 * communicator. The library cannot be unloaded: dlclose() leaves it in place, because its threads may still run.
 *
 * Structs that begin with `size` may get fields at their end in a later version. A program built with an older header
 * keeps working with a newer library; a newer field that is set is refused by an older library. That is why every
 * field that is added to peerlane_config later says "not set" with 0 or NULL: peerlane_config_init zeroes what it does
 * not know, and a library takes a field that it does not know for set unless all of it is zero.
 */
#ifndef PEERLANE_H
#define PEERLANE_H

#include <stddef.h>
#include <stdint.h>

#define PEERLANE_VERSION_MAJOR 0
#define PEERLANE_VERSION_MINOR 1
#define PEERLANE_VERSION_PATCH 0
/* As `peerlane_version()` returns it. */
#define PEERLANE_VERSION (PEERLANE_VERSION_MAJOR * 10000 + PEERLANE_VERSION_MINOR * 100 + PEERLANE_VERSION_PATCH)

#define PEERLANE_MAX_RANKS 16
#define PEERLANE_UNIQUE_ID_BYTES 128

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  PEERLANE_SUCCESS = 0,
  PEERLANE_ERROR_INVALID_ARGUMENT = 1, /* the caller's mistake; nothing was done */
  PEERLANE_ERROR_UNSUPPORTED = 2,      /* not wrong, but not served by this library */
  PEERLANE_ERROR_SYSTEM = 3,           /* a system call failed */
  PEERLANE_ERROR_DEVICE = 4,           /* the device or its driver failed */
  PEERLANE_ERROR_SETUP = 5,            /* creation failed, on all ranks with the same text */
  PEERLANE_ERROR_RANK_DIED = 6,        /* a process of the communicator ended without destroying it */
  PEERLANE_ERROR_DEADLINE = 7,         /* a rank waited for another beyond the deadline */
  PEERLANE_ERROR_MISMATCH = 8,         /* ranks made calls that do not belong together */
  PEERLANE_ERROR_CONCURRENT = 9,       /* two collectives were in flight at once on one channel */
  PEERLANE_ERROR_ABORTED = 10,         /* a rank called peerlane_comm_abort */
  PEERLANE_ERROR_CLOSED = 11,          /* the communicator has been destroyed meanwhile */
  PEERLANE_ERROR_INTERNAL = 12,        /* a defect of this library */
  PEERLANE_ERROR_INVALID_HANDLE = 13,  /* NULL, destroyed, made up, of the wrong kind, or inherited over fork() */
  PEERLANE_ERROR_RANK_LEFT = 14        /* a rank destroyed its communicator before a call that needs it */
} peerlane_status;

/* Element types, numbered as NCCL's. */
typedef enum {
  PEERLANE_INT8 = 0,
  PEERLANE_UINT8 = 1,
  PEERLANE_INT32 = 2,
  PEERLANE_UINT32 = 3,
  PEERLANE_INT64 = 4,
  PEERLANE_UINT64 = 5,
  PEERLANE_FLOAT16 = 6,
  PEERLANE_FLOAT32 = 7,
  PEERLANE_FLOAT64 = 8,
  PEERLANE_BFLOAT16 = 9
} peerlane_dtype;

/* Operations, numbered as NCCL's. Sums are taken along the communicator's tree and rounded once, so that all ranks and
 * all runs get the same bits. Integer sums wrap. MAX and MIN ignore a NaN unless all are NaN. AVG divides the sum by
 * the number of ranks; for integers the wrapped sum, truncating. */
typedef enum { PEERLANE_SUM = 0, PEERLANE_PROD = 1, PEERLANE_MAX = 2, PEERLANE_MIN = 3, PEERLANE_AVG = 4 } peerlane_op;

typedef enum {
  PEERLANE_ONE_SHOT = 0,
  PEERLANE_TWO_SHOT = 1,
  PEERLANE_HIERARCHICAL = 2,
  PEERLANE_DUAL_OWNER = 3,
  PEERLANE_PAIRWISE = 4,
  PEERLANE_STAGED = 5
} peerlane_algorithm;

typedef enum { PEERLANE_LL = 0, PEERLANE_SENTINEL = 1, PEERLANE_FLAGGED = 2 } peerlane_protocol;

typedef enum { PEERLANE_PUSH = 0, PEERLANE_PULL = 1 } peerlane_direction;

typedef enum { PEERLANE_CPU = 0, PEERLANE_CUDA = 1 } peerlane_device;

/* How ranks on GPUs reach each other's slabs: device memory as file descriptors (VMM) or CUDA IPC handles, or pinned
 * host memory where there is no peer access. AUTO takes the first that works on all ranks. */
typedef enum {
  PEERLANE_LANE_AUTO = 0,
  PEERLANE_LANE_VMM = 1,
  PEERLANE_LANE_IPC = 2,
  PEERLANE_LANE_HOST = 3
} peerlane_lane;

/* One rank's end of a communicator. */
typedef struct peerlane_comm* peerlane_comm_t;

/* An ordered queue of work of the CPU device. */
typedef struct peerlane_stream* peerlane_stream_t;

/* Names a communicator to be. Whoever holds it and runs as the same user may join: hand it on over a channel that only
 * your own processes can read. */
typedef struct {
  unsigned char bytes[PEERLANE_UNIQUE_ID_BYTES];
} peerlane_unique_id;

/* How a communicator is made. All ranks must say the same, except for deadlines, `device_ordinal` and `run_dir`;
 * creation checks that. A field that is left as `peerlane_config_init` set it takes the value of the environment
 * variable beside it, or else the default. */
typedef struct {
  size_t size;                   /* bytes of this struct; set by peerlane_config_init */
  const char* islands;           /* ranks of each island, such as "0-3,4-7"; NULL: PEERLANE_ISLANDS, or one island */
  uint64_t slab_bytes;           /* bytes of a rank's slab; 0: PEERLANE_SLAB, or the device's default */
  double deadline_seconds;       /* until a wait gives up; 0: PEERLANE_DEADLINE, or 600 */
  double setup_deadline_seconds; /* until creation gives up; 0: PEERLANE_SETUP_DEADLINE, or 120 */
  int32_t algorithm;             /* a peerlane_algorithm for every call; -1: PEERLANE_ALGO, or chosen by size */
  int32_t protocol;              /* a peerlane_protocol for every call; -1: PEERLANE_PROTO, or chosen by size */
  int32_t direction;   /* a peerlane_direction for every FLAGGED call; -1: PEERLANE_DIRECTION, or chosen by size */
  int32_t check;       /* 1: compare what the ranks call before every step; 0: do not; -1: PEERLANE_CHECK, or 0 */
  const char* run_dir; /* where the ranks of peerlane_comm_create_local meet; NULL: PEERLANE_RUN_DIR, or the user's run
                          directory. An id names the directory of the process that made it. */
  int32_t device;      /* a peerlane_device: where this rank runs; -1: PEERLANE_DEVICE, or the CPU */
  int32_t device_ordinal; /* with `device` CUDA: the GPU's number in this process; -1: that of the current context, or
                             else the first */
  int32_t lane;           /* a peerlane_lane; -1: PEERLANE_LANE, or AUTO */
  int32_t reserved;       /* 0 */
} peerlane_config;

/* What a communicator did so far. */
typedef struct {
  size_t size;               /* bytes of this struct; set by the caller before peerlane_comm_stats */
  uint64_t calls;            /* collectives accepted, empty ones included */
  uint64_t steps;            /* steps launched; a call larger than the slab is several */
  uint64_t bytes;            /* `count` elements of every call that was served */
  uint64_t failed;           /* calls that failed */
  uint64_t tree_hash;        /* hash of the reduction tree, the same on all ranks */
  uint64_t by_algorithm[16]; /* calls by peerlane_algorithm; one that needs no other rank may have none */
  uint64_t by_protocol[8];   /* calls by peerlane_protocol */
} peerlane_stats;

/* ---- about the library ---- */

/* The library's version: major * 10000 + minor * 100 + patch. */
uint32_t peerlane_version(void);

/* A short constant text for a status, such as "rank died"; never NULL, also for a number that is no status. */
const char* peerlane_status_string(peerlane_status status);

/* Why the last function that returned a status failed on this thread; "" if it succeeded. Never NULL. Valid until the
 * next call on this thread of a function that returns a status. */
const char* peerlane_last_error(void);

/* ---- communicators ---- */

/* Makes a new id, good for one communicator. Call it once, then give the id to all ranks; before fork() is fine. The
 * ranks meet in the directory PEERLANE_RUN_DIR, or in the user's run directory. */
peerlane_status peerlane_get_unique_id(peerlane_unique_id* id);

/* Sets every field of `config` to "not set". `size` is `sizeof(peerlane_config)`: it tells the library which version of
 * the struct the program was built with. */
peerlane_status peerlane_config_init(peerlane_config* config, size_t size);

/* Joins communicator `id` as `rank` of `n` (1 to 16) and writes this rank's handle to `*comm`. Blocks until all ranks
 * have joined, and at most for the set-up deadline; succeeds on all ranks or fails on all with the same error.
 * `config` may be NULL: everything as the environment or the default says.
 * Inside a group the call only notes what to do, and `*comm` is written by the outermost peerlane_group_end: that is
 * how one thread creates several ranks. An error in the arguments is still returned at once. */
peerlane_status peerlane_comm_create(peerlane_comm_t* comm, int n, const peerlane_unique_id* id, int rank,
                                     const peerlane_config* config);

/* Creates all `n` ranks as members of this process and writes their handles to `comms[0]` to `comms[n - 1]`, all or
 * none. Each is meant for a thread of its own, or for a group. `config` may be NULL. Takes effect at once inside a
 * group too. */
peerlane_status peerlane_comm_create_local(peerlane_comm_t comms[], int n, const peerlane_config* config);

/* Says goodbye to the other ranks and frees what this rank holds. Waits for work in flight, for calls that other
 * threads are in and for groups of theirs that hold such calls; to cut that short, abort first. The handle is invalid
 * afterwards, whatever is returned. Ranks may be destroyed in any order and from any thread; only while the calling
 * thread has an open group it is refused and nothing is done. */
peerlane_status peerlane_comm_destroy(peerlane_comm_t comm);

/* Ends every wait of this communicator on all ranks. All later collectives on it fail, on all ranks; the handle stays
 * valid until it is destroyed. */
peerlane_status peerlane_comm_abort(peerlane_comm_t comm);

/* Writes the communicator's sticky error to `*error`, PEERLANE_SUCCESS if there is none. Never waits. If there is one,
 * peerlane_last_error() gives its text afterwards, although this function itself succeeded. */
peerlane_status peerlane_comm_async_error(peerlane_comm_t comm, peerlane_status* error);

/* Writes this rank's number. */
peerlane_status peerlane_comm_rank(peerlane_comm_t comm, int* rank);

/* Writes the number of ranks. */
peerlane_status peerlane_comm_size(peerlane_comm_t comm, int* size);

/* Writes what the communicator did so far. Set `stats->size = sizeof *stats` before; fields that this library does not
 * know are zeroed. */
peerlane_status peerlane_comm_stats(peerlane_comm_t comm, peerlane_stats* stats);

/* Writes how an all-reduce of `bytes` bytes would be served, as text for people: islands, tree, schedule, protocol.
 * At most `capacity` bytes go to `buffer`, the closing 0 included; a longer text is cut. `*length` gets the length of
 * the whole text without the 0, so `*length >= capacity` says that it was cut. `buffer` may be NULL if `capacity` is 0;
 * `length` may be NULL. */
peerlane_status peerlane_comm_explain(peerlane_comm_t comm, size_t bytes, peerlane_dtype dtype, char* buffer,
                                      size_t capacity, size_t* length);

/* Writes what creation has measured of the lane between the ranks (PEERLANE_PROBE), or an earlier creation since boot,
 * as one line of JSON, the same on all ranks; an empty text if nothing was measured. Its keys:
 *
 * - "lane": "vmm", "ipc", "host", or "cpu";
 * - "islands": the ranks of each island;
 * - "latency_ns": a row per rank, nanoseconds that a word takes to each other rank and into a poll there; null where no
 *   schedule has an edge;
 * - "rates": objects of "access" ("store" or "load"), "scope" ("within" islands or "across"), "fan_out" (ranks at
 *   once), "together" (all ranks at the same time, or each alone), "gb_per_s" (10^9 bytes of payload a second and
 *   rank, the median), "worst_gb_per_s" and "worst_rank";
 * - "pairs": objects of "access", "rank" (who stores or loads), "memory" (the rank whose memory it is) and "gb_per_s",
 *   each pair by itself; every edge with PEERLANE_PROBE=pairs, else one per rank and scope;
 * - "bytes": to or from each rank in a round;
 * - "milliseconds": that measuring took.
 *
 * `buffer`, `capacity` and `length` are as in peerlane_comm_explain. */
peerlane_status peerlane_comm_probe(peerlane_comm_t comm, char* buffer, size_t capacity, size_t* length);

/* ---- all-reduce ---- */

/* Reduces `count` elements at `input` over all ranks into `output`, on all ranks. All ranks must call it with the same
 * count, dtype and op. Buffers are aligned to the size of an element, no more is needed. `input` and `output` are the
 * same or do not overlap; both may be NULL if `count` is 0. With `stream` NULL the call returns when `output` is
 * complete. With a stream it returns when the work is queued behind what the stream already holds: `output` is
 * complete, and both buffers free, after peerlane_stream_synchronize; whether it worked says peerlane_comm_async_error.
 * Inside a group the call is only noted. A failure of the communicator is sticky: every later call returns it again.
 *
 * On the CPU device naming a stream does not make the call return early: where the stream is idle it runs on the
 * caller's thread and may block until all ranks have called, so a thread that drives several ranks needs a group. Only
 * a call that finds its stream busy is queued. A stream named in a group must live until the group's end and must not
 * be shared by two ranks of one communicator: the one's work would wait for the other's behind it.
 *
 * `stream` is a peerlane_stream_t for ranks of the CPU. For ranks on GPUs the buffers are device memory and `stream` is
 * a CUstream or cudaStream_t, NULL being the legacy default stream: the call launches its kernels there, or records
 * them where the stream is being captured, and returns. Ranks of one process that share a GPU need a stream each. A
 * graph that captured a call may be replayed after the communicator is destroyed: it then only fills its output with
 * NaN or zero. */
peerlane_status peerlane_all_reduce(peerlane_comm_t comm, const void* input, void* output, size_t count,
                                    peerlane_dtype dtype, peerlane_op op, void* stream);

/* The same on a channel: ranks on GPUs have channels 0 to 3, and each carries one collective at a time. Left to the
 * library (-1), eager calls use channel 0, in the order in which they are made, and captured calls channel 1. Graphs
 * whose replays may overlap need channels of their own, the same on all ranks; two collectives that meet on one are
 * PEERLANE_ERROR_CONCURRENT on all ranks. Ranks of the CPU have channel 0. */
peerlane_status peerlane_all_reduce_channel(peerlane_comm_t comm, const void* input, void* output, size_t count,
                                            peerlane_dtype dtype, peerlane_op op, void* stream, int channel);

/* ---- broadcast, all-gather and reduce-scatter ---- */

/* Streams, groups, results and errors are as for peerlane_all_reduce, channels (-1, or 0 to 3) as for
 * peerlane_all_reduce_channel. Broadcast and all-gather copy bits: of `dtype` only the size matters, so a type that is
 * not in the list goes as PEERLANE_UINT8. They and all-reduces may follow each other in any order. */

/* Copies `count` elements at `input` of rank `root` to `output` of every rank. All ranks must call it with the same
 * count, dtype and root. Only the root's `input` is looked at, elsewhere it may be anything, NULL too; on the root it
 * may be `output`, or lie apart from it. */
peerlane_status peerlane_broadcast(peerlane_comm_t comm, const void* input, void* output, size_t count,
                                   peerlane_dtype dtype, int root, void* stream, int channel);

/* Copies `count` elements at `input` of every rank to `output` of every rank, rank r's to element r * count. `output`
 * has room for `count` elements of every rank. All ranks must call it with the same count and dtype. `input` may be
 * this rank's part of `output`, or lie apart from all of it. */
peerlane_status peerlane_all_gather(peerlane_comm_t comm, const void* input, void* output, size_t count,
                                    peerlane_dtype dtype, void* stream, int channel);

/* Reduces over all ranks as peerlane_all_reduce does, with its bits, and writes rank r's part, the `count` elements
 * from r * count on, to `output` of rank r alone. `input` holds `count` elements for every rank. All ranks must call it
 * with the same count, dtype and op. `output` may be this rank's part of `input`, whose other parts stay as they are,
 * or lie apart from all of it. */
peerlane_status peerlane_reduce_scatter(peerlane_comm_t comm, const void* input, void* output, size_t count,
                                        peerlane_dtype dtype, peerlane_op op, void* stream, int channel);

/* ---- all-reduce with residual add and RMSNorm ---- */

/* The arguments of peerlane_all_reduce_add_rms_norm. Zero the struct, then set `size` and what you need. Matrices are
 * row-major, `rows` x `width` elements of `dtype`, aligned to an element; on GPUs they are device memory. Outputs may
 * lie over inputs in these ways and no other: `normed` over `input`; `residual_out` over `residual`, or over `input` if
 * `normed` is elsewhere. */
typedef struct {
  size_t size;          /* bytes of this struct; set by the caller */
  const void* input;    /* summed over the ranks */
  const void* residual; /* added to the sum */
  const void* gamma;    /* `width` weights */
  void* normed;         /* the normed rows */
  void* residual_out;   /* sum plus residual: the next layer's residual */
  size_t rows;          /* any number; with 0 the call is empty and pointers may be NULL */
  size_t width;         /* a multiple of 8, up to 2^24 */
  peerlane_dtype dtype; /* FLOAT16 or BFLOAT16 */
  float eps;            /* added to the mean of the squares; not negative */
  float weight_bias;    /* added to each weight: 1 for models that store gamma less one, else 0 */
  int32_t unfused;      /* 0: one kernel does all of it; 1: an all-reduce into `normed`, then a kernel that norms */
} peerlane_add_rms_norm;

/* All-reduce, residual add and RMSNorm in one. With s the sum that peerlane_all_reduce would give, rounded to `dtype`:
 *
 *   residual_out = round(s + residual)
 *   normed       = round(residual_out * (1 / sqrt(mean(residual_out^2) + eps)) * (gamma + weight_bias))
 *
 * round() is to `dtype`, all else is fp32; the mean is over the rounded residual_out of a row, summed in an order that
 * the width alone decides. Ranks with the same residual and gamma get the same bits, fused or not, on GPUs and CPUs.
 * All ranks must call it with the same rows, width, dtype and `unfused`.
 *
 * Streams, groups and errors are as for peerlane_all_reduce, channels (-1, or 0 to 3) as for
 * peerlane_all_reduce_channel. After a failure of the communicator both outputs hold NaN wherever the result is not
 * known. With `residual_out` over `residual` the old residual is then lost: keep a copy to go on with a new
 * communicator. A fused row that does not fit the slab is PEERLANE_ERROR_UNSUPPORTED; unfused there is no such limit.
 */
peerlane_status peerlane_all_reduce_add_rms_norm(peerlane_comm_t comm, const peerlane_add_rms_norm* arguments,
                                                 void* stream, int channel);

/* ---- groups ---- */

/* Opens a group on this thread: creations and collectives are noted until the outermost peerlane_group_end, so that no
 * call of one rank waits for one that the same thread has yet to make. Groups nest. */
peerlane_status peerlane_group_start(void);

/* Closes a group. The outermost one first makes the noted communicators, one thread per rank, and writes their handles;
 * then it starts the noted collectives in order and waits for those that name no stream. All of them are tried, and the
 * first error in order is returned: set handles to NULL before, to see which were made. Refused if this thread has no
 * open group. */
peerlane_status peerlane_group_end(void);

/* ---- streams of the CPU device ---- */

/* Writes a new, idle stream. */
peerlane_status peerlane_stream_create(peerlane_stream_t* stream);

/* Waits until all work queued so far is done. An error of that work is its communicator's: peerlane_comm_async_error.
 */
peerlane_status peerlane_stream_synchronize(peerlane_stream_t stream);

/* Waits for what the stream holds, and for groups of other threads that name it, and frees it. The handle is invalid
 * afterwards, whatever is returned; only while the calling thread has an open group it is refused and nothing is done.
 */
peerlane_status peerlane_stream_destroy(peerlane_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
