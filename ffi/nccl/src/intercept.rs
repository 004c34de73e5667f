//! The functions that peerlane has a say in, under NCCL's names and with NCCL's types. Everything else is in
//! [`forward`].
//!
//! # Safety
//! Every function asks what NCCL's documentation asks of its caller.
#![allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]

use crate::alone;
use crate::create::{self, Coming};
use crate::entry::Phase;
use crate::forward;
use crate::group::{self, Call};
use crate::policy::{judge, Verdict};
use crate::real;
use crate::stats::{self, count};
use crate::status::{self, guarded};
use crate::table;
use crate::types::*;
use std::ffi::{c_char, c_int, c_void};

/// Serves an all-reduce, or says that it is NCCL's.
unsafe fn serve(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    elements: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> Option<ncclResult_t> {
    let entry = table::find(comm)?;
    let forwarded = |which: fn(&stats::Counters) -> &std::sync::atomic::AtomicU64| {
        count(entry.counters(), which, 1);
        None
    };
    let (dtype, op) = match judge(entry.most_bytes(), elements, datatype, op) {
        Verdict::Serve(dtype, op) => (dtype, op),
        Verdict::Size => return forwarded(|c| &c.forwarded_size),
        Verdict::Kind => return forwarded(|c| &c.forwarded_kind),
    };
    let call = Call { input: sendbuff, output: recvbuff, count: elements, dtype, op, stream, comm };
    let grouped = group::is_open();
    match entry.phase() {
        Phase::Refused => return forwarded(|c| &c.forwarded_unready),
        Phase::Waiting => match entry.capturing(stream) {
            // Set-up allocates and waits for other ranks, which is no part of a graph.
            Ok(true) => return forwarded(|c| &c.forwarded_unready),
            Ok(false) if grouped => {}
            Ok(false) => {
                if entry.set_up() != Phase::Ready {
                    return forwarded(|c| &c.forwarded_unready);
                }
            }
            Err(error) => return Some(status::failed(&error)),
        },
        Phase::Ready => {}
    }
    if grouped {
        group::queue(entry, call);
        return Some(ncclSuccess);
    }
    // SAFETY: the caller's promise.
    Some(match unsafe { entry.launch(&call, false) } {
        Ok(()) => ncclSuccess,
        Err(error) => status::failed(&error),
    })
}

/// All-reduce.
pub unsafe fn ncclAllReduce(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    elements: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    guarded(|| {
        status::clear_last();
        if real::alone() {
            // SAFETY: the caller's promise.
            return unsafe {
                alone::all_reduce(sendbuff, recvbuff, elements, datatype, op, comm, stream)
            };
        }
        // SAFETY: as above.
        let served = unsafe { serve(sendbuff, recvbuff, elements, datatype, op, comm, stream) };
        served.unwrap_or_else(|| {
            group::shared();
            // SAFETY: as above.
            unsafe {
                forward::ncclAllReduce(sendbuff, recvbuff, elements, datatype, op, comm, stream)
            }
        })
    })
}

/// All-reduce with a configuration for this call, which ranks set alike: with one it is NCCL's.
pub unsafe fn ncclAllReduceConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    elements: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    if config.is_null() {
        // SAFETY: the caller's promise.
        return unsafe { ncclAllReduce(sendbuff, recvbuff, elements, datatype, op, comm, stream) };
    }
    guarded(|| {
        group::shared();
        // SAFETY: the caller's promise.
        unsafe {
            forward::ncclAllReduceConfig(
                sendbuff, recvbuff, elements, datatype, op, comm, stream, config,
            )
        }
    })
}

/// What is NCCL's, and served alone where there is none.
macro_rules! forwarded_or_alone {
    ($($(#[$doc:meta])* $name:ident => $alone:ident ($($arg:ident: $ty:ty),*);)*) => {$(
        $(#[$doc])*
        pub unsafe fn $name($($arg: $ty),*) -> ncclResult_t {
            guarded(|| {
                crate::passing();
                if real::alone() {
                    // SAFETY: the caller's promise.
                    return unsafe { alone::$alone($($arg),*) };
                }
                // SAFETY: the caller's promise.
                unsafe { forward::$name($($arg),*) }
            })
        }
    )*};
}

forwarded_or_alone! {
    /// All-gather.
    ncclAllGather => all_gather(sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t, comm: ncclComm_t, stream: cudaStream_t);
    /// Reduce-scatter.
    ncclReduceScatter => reduce_scatter(sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t);
    /// Broadcast.
    ncclBroadcast => broadcast(sendbuff: *const c_void, recvbuff: *mut c_void, elements: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t);
    /// Broadcast in place.
    ncclBcast => bcast(buff: *mut c_void, elements: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t);
    /// Number of ranks.
    ncclCommCount => comm_count(comm: ncclComm_t, n: *mut c_int);
    /// This rank.
    ncclCommUserRank => comm_rank(comm: ncclComm_t, rank: *mut c_int);
    /// Its GPU.
    ncclCommCuDevice => comm_device(comm: ncclComm_t, device: *mut c_int);
    /// A new unique id.
    ncclGetUniqueId => unique_id(id: *mut ncclUniqueId);
    /// NCCL's version.
    ncclGetVersion => version(version: *mut c_int);
}

/// Follows a creation by NCCL: at once, or at the end of the group that it is in.
unsafe fn follow(result: ncclResult_t, at: *mut ncclComm_t, nonblocking: bool) -> ncclResult_t {
    if ![ncclSuccess, ncclInProgress].contains(&result) || at.is_null() {
        return result;
    }
    // SAFETY: NCCL has written there.
    let handle = unsafe { *at };
    // A communicator that was destroyed past this library may have had the address.
    drop(table::remove(handle));
    if result != ncclSuccess || nonblocking {
        return result;
    }
    if group::is_open() {
        group::coming(Coming { at, handle });
        return result;
    }
    create::created(&[handle])
}

/// Creates a communicator.
pub unsafe fn ncclCommInitRank(
    comm: *mut ncclComm_t,
    nranks: c_int,
    commId: ncclUniqueId,
    rank: c_int,
) -> ncclResult_t {
    guarded(|| {
        status::clear_last();
        // SAFETY: the caller's promise.
        unsafe {
            if real::alone() {
                return alone::init_rank(comm, nranks, commId, rank);
            }
            follow(forward::ncclCommInitRank(comm, nranks, commId, rank), comm, false)
        }
    })
}

/// Creates a communicator with a configuration.
pub unsafe fn ncclCommInitRankConfig(
    comm: *mut ncclComm_t,
    nranks: c_int,
    commId: ncclUniqueId,
    rank: c_int,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    guarded(|| {
        status::clear_last();
        // SAFETY: the caller's promise.
        unsafe {
            let nonblocking = create::is_nonblocking(config);
            if real::alone() {
                return match nonblocking {
                    true => status::fail(
                        ncclInvalidUsage,
                        "without a real NCCL communicators are blocking",
                    ),
                    false => alone::init_rank(comm, nranks, commId, rank),
                };
            }
            follow(
                forward::ncclCommInitRankConfig(comm, nranks, commId, rank, config),
                comm,
                nonblocking,
            )
        }
    })
}

/// Creates a communicator with several ids.
pub unsafe fn ncclCommInitRankScalable(
    newcomm: *mut ncclComm_t,
    nranks: c_int,
    myrank: c_int,
    nId: c_int,
    commIds: *mut ncclUniqueId,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    guarded(|| {
        status::clear_last();
        // SAFETY: the caller's promise.
        unsafe {
            let nonblocking = create::is_nonblocking(config);
            if real::alone() && nId >= 1 && !commIds.is_null() && !nonblocking {
                return alone::init_rank(newcomm, nranks, *commIds, myrank);
            }
            let result =
                forward::ncclCommInitRankScalable(newcomm, nranks, myrank, nId, commIds, config);
            follow(result, newcomm, nonblocking)
        }
    })
}

/// Creates all ranks in this process.
pub unsafe fn ncclCommInitAll(
    comm: *mut ncclComm_t,
    ndev: c_int,
    devlist: *const c_int,
) -> ncclResult_t {
    guarded(|| {
        status::clear_last();
        // SAFETY: the caller's promise.
        unsafe {
            if real::alone() {
                return alone::init_all(comm, ndev, devlist);
            }
            let result = forward::ncclCommInitAll(comm, ndev, devlist);
            if result != ncclSuccess || comm.is_null() || ndev <= 0 {
                return result;
            }
            let handles = std::slice::from_raw_parts(comm, ndev as usize);
            if group::is_open() {
                for (rank, &handle) in handles.iter().enumerate() {
                    group::coming(Coming { at: comm.add(rank), handle });
                }
                return result;
            }
            create::created(handles)
        }
    })
}

/// Creates communicators out of one.
pub unsafe fn ncclCommSplit(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    newcomm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    guarded(|| {
        status::clear_last();
        // SAFETY: the caller's promise.
        unsafe {
            if real::alone() {
                return alone::split(comm, color, key, newcomm);
            }
            let nonblocking = create::is_nonblocking(config);
            let result = forward::ncclCommSplit(comm, color, key, newcomm, config);
            if color == NCCL_SPLIT_NOCOLOR {
                return result;
            }
            follow(result, newcomm, nonblocking)
        }
    })
}

/// Creates a communicator with fewer ranks.
pub unsafe fn ncclCommShrink(
    comm: ncclComm_t,
    excludeRanksList: *mut c_int,
    excludeRanksCount: c_int,
    newcomm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
    shrinkFlags: c_int,
) -> ncclResult_t {
    guarded(|| {
        status::clear_last();
        // SAFETY: the caller's promise.
        unsafe {
            let nonblocking = create::is_nonblocking(config);
            if shrinkFlags as u32 & NCCL_SHRINK_ABORT != 0 {
                // What is under way on the parent ends, ours too; its entry stays and says so.
                if let Some(entry) = table::find(comm) {
                    entry.abort();
                }
            }
            let result = forward::ncclCommShrink(
                comm,
                excludeRanksList,
                excludeRanksCount,
                newcomm,
                config,
                shrinkFlags,
            );
            follow(result, newcomm, nonblocking)
        }
    })
}

/// Creates a communicator with more ranks.
pub unsafe fn ncclCommGrow(
    comm: ncclComm_t,
    nRanks: c_int,
    uniqueId: *const ncclUniqueId,
    rank: c_int,
    newcomm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    guarded(|| {
        status::clear_last();
        // SAFETY: the caller's promise.
        unsafe {
            let nonblocking = create::is_nonblocking(config);
            let result = forward::ncclCommGrow(comm, nRanks, uniqueId, rank, newcomm, config);
            follow(result, newcomm, nonblocking)
        }
    })
}

/// Flushes a communicator, which serves no more.
pub unsafe fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t {
    guarded(|| {
        if real::alone() {
            return alone::finalize(comm);
        }
        // Says goodbye, once its work is done.
        drop(table::remove(comm));
        // SAFETY: the caller's promise.
        unsafe { forward::ncclCommFinalize(comm) }
    })
}

/// Destroys a communicator.
pub unsafe fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t {
    guarded(|| {
        if real::alone() {
            return alone::destroy(comm);
        }
        // Before NCCL frees the handle, whose address may come back with the next communicator.
        drop(table::remove(comm));
        // SAFETY: the caller's promise.
        unsafe { forward::ncclCommDestroy(comm) }
    })
}

/// Ends every wait of a communicator, of both kinds.
unsafe fn end_waits(comm: ncclComm_t, theirs: impl FnOnce() -> ncclResult_t) -> ncclResult_t {
    let entry = table::remove(comm);
    if let Some(entry) = &entry {
        entry.abort();
    }
    let result = theirs();
    // After NCCL's waits have ended too: work of ours may be behind them.
    drop(entry);
    result
}

/// Aborts a communicator.
pub unsafe fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t {
    guarded(|| {
        if real::alone() {
            return alone::abort(comm);
        }
        // SAFETY: the caller's promise.
        unsafe { end_waits(comm, || forward::ncclCommAbort(comm)) }
    })
}

/// Revokes a communicator.
pub unsafe fn ncclCommRevoke(comm: ncclComm_t, revokeFlags: c_int) -> ncclResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        unsafe { end_waits(comm, || forward::ncclCommRevoke(comm, revokeFlags)) }
    })
}

/// The sticky error, NCCL's or ours.
pub unsafe fn ncclCommGetAsyncError(
    comm: ncclComm_t,
    asyncError: *mut ncclResult_t,
) -> ncclResult_t {
    guarded(|| {
        if real::alone() {
            // SAFETY: the caller's promise.
            return unsafe { alone::async_error(comm, asyncError) };
        }
        // SAFETY: the caller's promise.
        let result = unsafe { forward::ncclCommGetAsyncError(comm, asyncError) };
        // SAFETY: NCCL has written there.
        if result == ncclSuccess && !asyncError.is_null() && unsafe { *asyncError } == ncclSuccess {
            if let Some(error) = table::find(comm).and_then(|entry| entry.error()) {
                // SAFETY: not NULL, and the caller's.
                unsafe { *asyncError = status::failed(&error) };
            }
        }
        result
    })
}

/// Opens a group.
pub unsafe fn ncclGroupStart() -> ncclResult_t {
    guarded(group::start)
}

/// Closes a group.
pub unsafe fn ncclGroupEnd() -> ncclResult_t {
    guarded(|| {
        status::clear_last();
        group::end()
    })
}

/// Closes a group as if.
pub unsafe fn ncclGroupSimulateEnd(simInfo: *mut ncclSimInfo_t) -> ncclResult_t {
    guarded(|| {
        group::drop_calls();
        // SAFETY: the caller's promise.
        unsafe { forward::ncclGroupSimulateEnd(simInfo) }
    })
}

/// The text of a code.
pub unsafe fn ncclGetErrorString(result: ncclResult_t) -> *const c_char {
    if real::exists() {
        // SAFETY: the caller's promise.
        return unsafe { forward::ncclGetErrorString(result) };
    }
    status::text(result).as_ptr()
}

/// Why the last call failed: ours, if it was one that peerlane refused or failed, else NCCL's.
pub unsafe fn ncclGetLastError(comm: ncclComm_t) -> *const c_char {
    if let Some(text) = status::last() {
        return text;
    }
    if let Some(error) = table::find(comm).and_then(|entry| entry.error()) {
        status::failed(&error);
        return status::last().unwrap_or(c"".as_ptr());
    }
    if !real::exists() {
        return c"".as_ptr();
    }
    // SAFETY: the caller's promise.
    unsafe { forward::ncclGetLastError(comm) }
}
