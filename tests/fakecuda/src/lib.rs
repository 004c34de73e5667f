//! A stand-in `libcuda.so.1`: the driver calls that peerlane makes, without a GPU, so that whole programs run in CI in several
//! processes. It is strict where the real driver is: a call without a current context, a freed handle, an allocation during
//! somebody's capture or an event of another capture gets the driver's error. It is stricter with programmatic launches of the
//! library's kernels: a graph in which one could start too early is not made launchable, and none may be outside a graph.
//! A kernel must have been told of the clusters that it is launched as.
//!
//! | here | stands for |
//! | --- | --- |
//! | a memfd, mapped read-write | device memory, a physical allocation, an exported descriptor |
//! | a descriptor reached through `/proc/PID/fd` | a CUDA IPC handle |
//! | a thread | a stream: kernels of several streams really run at the same time |
//! | a host function of the kernel's name, run once per launch | a kernel |
//! | closures and their order | a graph |
//!
//! Environment, read at the first call:
//!
//! | variable | meaning |
//! | --- | --- |
//! | `FAKECUDA_DEVICES` | GPUs in the box, default 2 |
//! | `CUDA_VISIBLE_DEVICES` | as with the real driver: ordinals or `GPU-` UUIDs (a prefix is enough); ends at the first that is unknown |
//! | `FAKECUDA_MIG` | ordinals of GPUs that are MIG slices: `0,2` |
//! | `FAKECUDA_NO_PEER` | pairs without peer access, one way each: `0-1,1-0`; `*` for all |
//! | `FAKECUDA_PEER_LIMIT` | peers per GPU, default 8 |
//! | `FAKECUDA_NO_VMM`, `FAKECUDA_NO_HOST_MAP` | `1`: the GPUs cannot do that |
//! | `FAKECUDA_MIRROR` | `vmm` or `ipc`, separated by commas, each with `:OFFSET[:BYTES]` if not all is meant: memory of another process is a mirror there; who writes it reads it back, and its owner never sees it |
//! | `FAKECUDA_DRIVER_VERSION` | as `cuDriverGetVersion` gives it, default 13000 |
//! | `FAKECUDA_CAPABILITY` | the GPUs' compute capability, default 9.0 |
//! | `FAKECUDA_PTX_VERSION` | what kernels' source was compiled for, default 90 |
//! | `FAKECUDA_EDGE_TYPE` | type of the edges that a captured stream's next node gets, default 0 |
//! | `FAKECUDA_RANK` | who this process is, for the rules below and the log; `fakecuda_set_rank` does it per thread |
//! | `FAKECUDA_FAIL` | rules `CALL:NTH:RANK[:CODE]`, separated by commas; `*` for any; a call matches with or without its version suffix; the code is a `CUresult`, default 999 |
//! | `FAKECUDA_DELAY` | rules `CALL:NTH:RANK:MILLISECONDS` |
//! | `FAKECUDA_LOG` | file to which every call is appended: `PID RANK CALL CODE` |
//! | `FAKECUDA_KERNELS` | shared library with the host kernels |
//! | `FAKECUDA_KERNEL_MAP` | `PREFIX=SYMBOL[:BYTES]`, separated by commas: kernels whose name begins so run that host function, registered or of the library; its argument has that many bytes (default: a `pl_args`) |
//!
//! Functions beyond the driver's, for tests that live in the same process: `fakecuda_register_kernel`, `fakecuda_set_rank`,
//! `fakecuda_set_fail`, `fakecuda_calls`, `fakecuda_live`, `fakecuda_graph`.

mod access;
mod capture;
mod config;
mod context;
mod device;
mod entry;
mod errors;
mod graph;
mod ipc;
mod kernel;
mod memory;
mod stream;
mod table;
mod testing;
mod user_object;
mod vmm;
