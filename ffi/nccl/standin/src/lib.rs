//! A stand-in `libnccl.so.2`: what NCCL does for its callers, over shared memory and the stand-in CUDA driver, so that the
//! libraries that stand before it can be tested without a GPU. Work runs on the caller's stream and is captured with it; a send
//! waits for its receive, and the collectives of a group go before its sends, as NCCL's do. It counts its calls, refuses handles
//! that are not its own, and gives the address of a freed communicator to the next one.
//!
//! `standin_calls(name)` is how often a function was called under its first or second name.
#![allow(
    missing_docs,
    non_snake_case,
    non_upper_case_globals,
    clippy::missing_safety_doc,
    clippy::missing_transmute_annotations,
    clippy::too_many_arguments
)]

mod comm;
mod cuda;
mod imp;
mod ops;

use peerlane_nccl_core::types::*;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::sync::{Mutex, MutexGuard, PoisonError};

static CALLS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn record(name: &'static str) {
    *lock(&CALLS).entry(name).or_default() += 1;
}

#[no_mangle]
pub unsafe extern "C" fn standin_calls(name: *const c_char) -> u64 {
    // SAFETY: a terminated name.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    lock(&CALLS).get(&*name).copied().unwrap_or(0)
}

/// What a function that the stand-in does not have returns.
trait Stub {
    fn stub() -> Self;
}

impl Stub for ncclResult_t {
    fn stub() -> Self {
        ncclInvalidUsage
    }
}

impl Stub for c_int {
    fn stub() -> Self {
        0
    }
}

impl Stub for () {
    fn stub() {}
}

impl Stub for *const c_char {
    fn stub() -> Self {
        c"stand-in".as_ptr()
    }
}

impl Stub for ncclTeam_t {
    fn stub() -> Self {
        ncclTeam { nRanks: 3, rank: 2, stride: 1 }
    }
}

#[allow(dead_code)]
mod stubs {
    use super::*;
    macro_rules! stubs {
        ($(fn $name:ident $(/ $twin:ident)? ($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty;)*) => {$(
            pub unsafe fn $name($(_: $ty),*) -> $ret { Stub::stub() }
        )*};
    }
    peerlane_nccl_core::for_each_intercepted!(stubs);
    peerlane_nccl_core::for_each_forwarded!(stubs);
}

mod either {
    pub use super::imp::{
        ncclAllGather, ncclAllReduce, ncclBcast, ncclBroadcast, ncclCommAbort, ncclCommCount,
        ncclCommCuDevice, ncclCommDestroy, ncclCommFinalize, ncclCommGetAsyncError,
        ncclCommGetUniqueId, ncclCommGrow, ncclCommInitAll, ncclCommInitRank,
        ncclCommInitRankConfig, ncclCommInitRankScalable, ncclCommRevoke, ncclCommShrink,
        ncclCommSplit, ncclCommUserRank, ncclGetUniqueId, ncclGetVersion, ncclGroupEnd,
        ncclGroupSimulateEnd, ncclGroupStart, ncclRecv, ncclReduceScatter, ncclSend,
    };
    pub use super::stubs::*;
}

macro_rules! define {
    ($name:ident ($($arg:ident: $ty:ty),*) -> $ret:ty) => {};
    ($name:ident $exported:ident ($($arg:ident: $ty:ty),*) -> $ret:ty) => {
        #[no_mangle]
        pub unsafe extern "C" fn $exported($($arg: $ty),*) -> $ret {
            record(stringify!($name));
            // SAFETY: the caller's promise.
            unsafe { either::$name($($arg),*) }
        }
    };
}

macro_rules! defined {
    ($(fn $name:ident $(/ $twin:ident)? ($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty;)*) => {$(
        define! { $name $name ($($arg: $ty),*) -> $ret }
        define! { $name $($twin)? ($($arg: $ty),*) -> $ret }
    )*};
}
peerlane_nccl_core::for_each_intercepted!(defined);
peerlane_nccl_core::for_each_forwarded!(defined);
