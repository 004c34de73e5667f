//! What is asked of a communicator, and its end.

use super::{find, table, Own, Place};
use crate::status::{fail, failed};
use crate::types::*;
use std::ffi::c_int;
use std::sync::Arc;

/// `ncclGetVersion`: the API that is served.
pub unsafe fn version(version: *mut c_int) -> ncclResult_t {
    // SAFETY: the caller's.
    unsafe { put(version, NCCL_VERSION_CODE as c_int) }
}

unsafe fn put(to: *mut c_int, value: c_int) -> ncclResult_t {
    if to.is_null() {
        return fail(ncclInvalidArgument, "the place for the result is NULL");
    }
    // SAFETY: not NULL, and the caller's.
    unsafe { *to = value };
    ncclSuccess
}

fn remove(comm: ncclComm_t) -> std::result::Result<Arc<Own>, ncclResult_t> {
    let own = find(comm)?;
    table().remove(&(comm as usize));
    Ok(own)
}

/// `ncclCommDestroy`.
pub fn destroy(comm: ncclComm_t) -> ncclResult_t {
    if comm.is_null() {
        return ncclSuccess;
    }
    remove(comm).map_or_else(
        |code| code,
        |own| {
            drop(own);
            ncclSuccess
        },
    )
}

/// `ncclCommFinalize`: calls on the CPU are done when they return, and destroying waits for those on a GPU.
pub fn finalize(comm: ncclComm_t) -> ncclResult_t {
    find(comm).map_or_else(|code| code, |_| ncclSuccess)
}

/// `ncclCommAbort`.
pub fn abort(comm: ncclComm_t) -> ncclResult_t {
    let own = match remove(comm) {
        Ok(own) => own,
        Err(code) => return code,
    };
    if let Some(made) = own.made.get() {
        made.comm.abort();
    }
    ncclSuccess
}

/// `ncclCommGetAsyncError`.
pub unsafe fn async_error(comm: ncclComm_t, to: *mut ncclResult_t) -> ncclResult_t {
    let own = match find(comm) {
        Ok(own) if !to.is_null() => own,
        Ok(_) => return fail(ncclInvalidArgument, "the place for the result is NULL"),
        Err(code) => return code,
    };
    let error = own.made.get().and_then(|made| made.comm.error());
    // SAFETY: not NULL, and the caller's.
    unsafe { *to = error.map_or(ncclSuccess, |error| failed(&error)) };
    ncclSuccess
}

macro_rules! asked {
    ($($(#[$doc:meta])* $name:ident($made:ident) $value:expr;)*) => {$(
        $(#[$doc])*
        pub unsafe fn $name(comm: ncclComm_t, to: *mut c_int) -> ncclResult_t {
            let own = match find(comm) {
                Ok(own) => own,
                Err(code) => return code,
            };
            match own.made() {
                // SAFETY: the caller's.
                Ok($made) => unsafe { put(to, $value as c_int) },
                Err(error) => failed(&error),
            }
        }
    )*};
}

asked! {
    /// `ncclCommCount`.
    comm_count(made) made.comm.size();
    /// `ncclCommUserRank`.
    comm_rank(made) made.comm.rank();
    /// `ncclCommCuDevice`; 0 on the CPU.
    comm_device(made) match &made.place {
        Place::Cpu => 0,
        #[cfg(feature = "cuda")]
        Place::Cuda { ordinal, .. } => *ordinal,
    };
}
