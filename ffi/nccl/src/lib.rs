//! **In the place of NCCL**: what `libpeerlane_preload.so`, `libpeerlane_nccl.so` and the full `libnccl.so.2` have in common.
//!
//! Callers get NCCL's own communicators. Beside each stands an entry of a table, found by the handle's address; an all-reduce
//! that the entry can serve is launched by peerlane, every other call goes to NCCL untouched. Without a real NCCL the full
//! library serves a part of the API by itself.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`types`], `exports` | NCCL's types, and every function that it exports; generated |
//! | [`real`] | the real NCCL: found at the first call |
//! | [`forward`] | every function, passed on to it |
//! | [`intercept`] | the functions that peerlane has a say in |
//! | `create` | what follows the creation of communicators |
//! | `exchange` | the ranks tell each other where they are, over the new communicator, and decide alike |
//! | `entry` | a communicator's entry: set-up, launches, counters |
//! | `table` | entries by handle |
//! | `group` | groups, which span peerlane and NCCL |
//! | `policy` | which calls are served |
//! | `alone` | communicators without a real NCCL |
//! | `status` | error codes and texts |
//! | [`stats`] | counters per route |
//! | `fork` | a forked child forwards everything |

// Without CUDA no communicator of NCCL gets an entry, so part of what serves them has no caller.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

mod alone;
mod create;
#[cfg_attr(not(feature = "cuda"), path = "entry_without_cuda.rs")]
mod entry;
#[cfg(feature = "cuda")]
mod exchange;
mod export;
mod exports;
mod fork;
pub mod forward;
mod group;
pub mod intercept;
mod policy;
pub mod real;
mod settings;
pub mod stats;
mod status;
mod table;
pub mod types;
mod variant;

#[doc(hidden)]
pub use status::guarded;
pub use variant::Variant;

/// What precedes a call that is passed on: NCCL has a call in this thread's group, if it has one open, and what
/// `ncclGetLastError` says is NCCL's.
pub fn passing() {
    status::clear_last();
    group::shared();
}

/// Every function by NCCL's first name: as intercepted, or passed on.
#[doc(hidden)]
pub mod either {
    pub use crate::forward::*;
    pub use crate::intercept::{
        ncclAllGather, ncclAllReduce, ncclAllReduceConfig, ncclBcast, ncclBroadcast, ncclCommAbort,
        ncclCommCount, ncclCommCuDevice, ncclCommDestroy, ncclCommFinalize, ncclCommGetAsyncError,
        ncclCommGrow, ncclCommInitAll, ncclCommInitRank, ncclCommInitRankConfig,
        ncclCommInitRankScalable, ncclCommRevoke, ncclCommShrink, ncclCommSplit, ncclCommUserRank,
        ncclGetErrorString, ncclGetLastError, ncclGetUniqueId, ncclGetVersion, ncclGroupEnd,
        ncclGroupSimulateEnd, ncclGroupStart, ncclReduceScatter,
    };
}

/// Formats and writes a line of the log, if its level is on.
macro_rules! log {
    ($level:ident, $($arg:tt)*) => {
        if peerlane_core::log::enabled(peerlane_core::log::Level::$level) {
            peerlane_core::log::write(peerlane_core::log::Level::$level, format_args!($($arg)*));
        }
    };
}
pub(crate) use log;
