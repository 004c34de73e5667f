//! What follows the creation of communicators by NCCL.

use crate::types::*;

/// A communicator that a group will have created at its end.
#[derive(Clone, Copy)]
pub struct Coming {
    /// Where the caller gets it.
    pub at: *mut ncclComm_t,
    /// What stood there when the call returned; NCCL fills it in at once.
    pub handle: ncclComm_t,
}

/// Whether a configuration asks for calls that return before they are done: NCCL serves those communicators alone.
///
/// # Safety
/// `config` is NULL or what NCCL asks for.
pub unsafe fn is_nonblocking(config: *const ncclConfig_t) -> bool {
    if config.is_null() {
        return false;
    }
    // SAFETY: size, magic and `blocking` are there since the first version of the struct; no more is read.
    unsafe {
        (*config).magic == NCCL_API_MAGIC
            && (*config).size >= std::mem::offset_of!(ncclConfig_t, cgaClusterSize)
            && (*config).blocking == 0
    }
}

/// Gives new communicators their entries. The result is that of their creation.
#[cfg(feature = "cuda")]
pub fn created(handles: &[ncclComm_t]) -> ncclResult_t {
    use crate::entry::Entry;
    use crate::exchange::{exchange, Member};
    use crate::{fork, forward, log, settings, stats, status, table};
    use std::sync::atomic::Ordering::Relaxed;
    use std::sync::Arc;

    if settings::get().disabled || fork::forked() {
        return ncclSuccess;
    }
    fork::watch();
    let mut members = Vec::with_capacity(handles.len());
    let mut failure = None;
    for &comm in handles.iter().filter(|comm| !comm.is_null()) {
        match Member::new(comm) {
            Ok(Some(member)) => members.push(member),
            Ok(None) => {
                stats::PROCESS.refused.fetch_add(1, Relaxed);
            }
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    if members.is_empty() && failure.is_none() {
        return ncclSuccess;
    }
    let decided = match failure {
        None => exchange(&members),
        Some(error) => Err(error),
    };
    match decided {
        Ok(decided) => {
            for (member, (agreed, kept)) in members.into_iter().zip(decided) {
                let Member { comm, n, rank, ordinal, context } = member;
                table::insert(comm, Arc::new(Entry::new(rank, n, ordinal, context, agreed, kept)));
            }
            ncclSuccess
        }
        Err(error) => {
            log!(Warn, "a communicator is given up: {error}");
            for &comm in handles.iter().filter(|comm| !comm.is_null()) {
                // SAFETY: NCCL made it, and the caller is told that its creation failed.
                unsafe { forward::ncclCommAbort(comm) };
            }
            status::failed(&error)
        }
    }
}

/// Without CUDA, NCCL serves every communicator.
#[cfg(not(feature = "cuda"))]
pub fn created(_handles: &[ncclComm_t]) -> ncclResult_t {
    static SAID: std::sync::Once = std::sync::Once::new();
    if !crate::settings::get().disabled {
        SAID.call_once(|| {
            crate::log!(Warn, "NCCL serves every call: this library was built without CUDA");
        });
    }
    ncclSuccess
}
