//! Error codes and texts. Codes are NCCL's; the text of the thread's last failure is kept for `ncclGetLastError`.

#![allow(non_upper_case_globals)]

use crate::types::*;
use peerlane_core::Error;
use std::cell::RefCell;
use std::ffi::{c_char, CStr, CString};

thread_local! {
    static LAST: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Keeps `text` for `ncclGetLastError` on this thread.
pub fn set_last(text: &str) {
    // A NUL inside would cut the text short; it is cut there.
    let bytes: Vec<u8> = text.bytes().take_while(|b| *b != 0).collect();
    if let Ok(text) = CString::new(bytes) {
        // A thread that is ending has no last error.
        let _ = LAST.try_with(|last| *last.borrow_mut() = Some(text));
    }
}

/// Forgets it: what a later call asks for is NCCL's.
pub fn clear_last() {
    let _ = LAST.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = None;
        }
    });
}

/// The text, good until this thread's next failure or success.
pub fn last() -> Option<*const c_char> {
    LAST.try_with(|last| last.borrow().as_ref().map(|text| text.as_ptr())).ok().flatten()
}

/// Fails with `code`, for the reason `text`.
pub fn fail(code: ncclResult_t, text: &str) -> ncclResult_t {
    set_last(text);
    code
}

/// Fails with an error of the library.
pub fn failed(error: &Error) -> ncclResult_t {
    fail(code(error), &error.to_string())
}

/// The code of NCCL for an error of the library.
pub fn code(error: &Error) -> ncclResult_t {
    match error {
        Error::InvalidArgument(_) => ncclInvalidArgument,
        Error::Unsupported(_) | Error::Mismatch(_) | Error::Concurrent { .. } | Error::Closed => {
            ncclInvalidUsage
        }
        Error::System { .. } | Error::Setup { .. } | Error::Lane(_) => ncclSystemError,
        Error::Device(_) => ncclUnhandledCudaError,
        // What NCCL returns when another process ended or gave up. `ncclTimeout` is not used: callers built with a NCCL before
        // 2.30 do not know it.
        Error::RankDied { .. }
        | Error::RankLeft { .. }
        | Error::Aborted { .. }
        | Error::Deadline { .. } => ncclRemoteError,
        Error::Internal(_) => ncclInternalError,
    }
}

/// The text of a code, where there is no real NCCL to ask.
pub fn text(code: ncclResult_t) -> &'static CStr {
    match code {
        ncclSuccess => c"no error",
        ncclUnhandledCudaError => c"unhandled cuda error",
        ncclSystemError => c"unhandled system error",
        ncclInternalError => c"internal error",
        ncclInvalidArgument => c"invalid argument",
        ncclInvalidUsage => c"invalid usage",
        ncclRemoteError => c"remote process exited or there was a network error",
        ncclInProgress => c"in progress",
        ncclTimeout => c"timed out",
        _ => c"unknown result code",
    }
}

/// Runs the body of an exported function: no panic crosses the boundary.
pub fn guarded(body: impl FnOnce() -> ncclResult_t) -> ncclResult_t {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
        Ok(result) => result,
        Err(_) => fail(ncclInternalError, "peerlane panicked; please report it"),
    }
}

/// The first of two results that is a failure.
pub fn first_failure(a: ncclResult_t, b: ncclResult_t) -> ncclResult_t {
    match a {
        ncclSuccess => b,
        _ => a,
    }
}
