//! Result codes, their names and texts.

use crate::entry::entry;
use cudarc::driver::sys::CUresult;
use std::ffi::{c_char, CStr, CString};
use std::sync::LazyLock;

macro_rules! codes {
    ($($short:ident = $long:ident;)*) => {
        // Some exist to be named when a rule asks for them.
        $(#[allow(dead_code)] pub const $short: u32 = CUresult::$long as u32;)*
        static NAMES: LazyLock<Vec<(u32, CString, CString)>> = LazyLock::new(|| {
            vec![$((
                CUresult::$long as u32,
                CString::new(stringify!($long)).unwrap_or_default(),
                CString::new(stringify!($short).to_lowercase().replace('_', " ")).unwrap_or_default(),
            ),)*]
        });
    };
}

codes! {
    INVALID_ARGUMENT = CUDA_ERROR_INVALID_VALUE;
    CLUSTER_SIZE_IS_NOT_VALID = CUDA_ERROR_INVALID_CLUSTER_SIZE;
    OUT_OF_MEMORY = CUDA_ERROR_OUT_OF_MEMORY;
    INITIALIZATION_ERROR = CUDA_ERROR_NOT_INITIALIZED;
    NO_CUDA_CAPABLE_DEVICE_IS_DETECTED = CUDA_ERROR_NO_DEVICE;
    INVALID_DEVICE_ORDINAL = CUDA_ERROR_INVALID_DEVICE;
    DEVICE_KERNEL_IMAGE_IS_INVALID = CUDA_ERROR_INVALID_IMAGE;
    INVALID_DEVICE_CONTEXT = CUDA_ERROR_INVALID_CONTEXT;
    NO_KERNEL_IMAGE_IS_AVAILABLE = CUDA_ERROR_NO_BINARY_FOR_GPU;
    PEER_ACCESS_IS_NOT_SUPPORTED = CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    INVALID_RESOURCE_HANDLE = CUDA_ERROR_INVALID_HANDLE;
    NAMED_SYMBOL_NOT_FOUND = CUDA_ERROR_NOT_FOUND;
    DEVICE_NOT_READY = CUDA_ERROR_NOT_READY;
    AN_ILLEGAL_MEMORY_ACCESS_WAS_ENCOUNTERED = CUDA_ERROR_ILLEGAL_ADDRESS;
    PEER_ACCESS_IS_ALREADY_ENABLED = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    PEER_ACCESS_HAS_NOT_BEEN_ENABLED = CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    CONTEXT_IS_DESTROYED = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    PEER_MAPPING_RESOURCES_EXHAUSTED = CUDA_ERROR_TOO_MANY_PEERS;
    PART_OR_ALL_OF_THE_RANGE_IS_ALREADY_REGISTERED = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    POINTER_IS_NOT_REGISTERED = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    OPERATION_NOT_PERMITTED = CUDA_ERROR_NOT_PERMITTED;
    OPERATION_NOT_SUPPORTED = CUDA_ERROR_NOT_SUPPORTED;
    OPERATION_NOT_PERMITTED_WHEN_STREAM_IS_CAPTURING = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    OPERATION_FAILED_DUE_TO_A_PREVIOUS_ERROR_DURING_CAPTURE = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    OPERATION_WOULD_MERGE_TWO_CAPTURES = CUDA_ERROR_STREAM_CAPTURE_MERGE;
    CAPTURE_WAS_NOT_BEGUN_IN_THIS_STREAM = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    CAPTURING_STREAM_HAS_UNJOINED_WORK = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    DEPENDENCY_ON_UNCAPTURED_WORK_IN_ANOTHER_STREAM = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    OPERATION_WOULD_MAKE_THE_LEGACY_STREAM_DEPEND_ON_A_CAPTURING_BLOCKING_STREAM = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    OPERATION_NOT_PERMITTED_ON_AN_EVENT_LAST_RECORDED_IN_A_CAPTURING_STREAM = CUDA_ERROR_CAPTURED_EVENT;
    ATTEMPT_TO_TERMINATE_A_CAPTURE_FROM_ANOTHER_THREAD = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    UNKNOWN_ERROR = CUDA_ERROR_UNKNOWN;
}

fn look_up(code: u32) -> Result<&'static (u32, CString, CString), u32> {
    NAMES.iter().find(|(known, ..)| *known == code).ok_or(INVALID_ARGUMENT)
}

/// Writes a result through a pointer of the caller's.
///
/// # Safety
/// `out` is null or valid for a write of `T`, as the driver API asks.
pub unsafe fn put<T>(out: *mut T, value: T) -> Result<(), u32> {
    if out.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: not null, so valid by the caller's contract.
    unsafe { out.write(value) };
    Ok(())
}

/// Writes text into a buffer of the caller's, cut to fit and terminated.
///
/// # Safety
/// `out` is valid for `len` bytes.
pub unsafe fn put_text(out: *mut c_char, len: i32, text: &str) -> Result<(), u32> {
    let len = usize::try_from(len).ok().filter(|len| *len > 0).ok_or(INVALID_ARGUMENT)?;
    let kept = text.len().min(len - 1);
    for (i, byte) in text.bytes().take(kept).chain([0]).enumerate() {
        // SAFETY: within the caller's buffer.
        unsafe { put(out.add(i), byte as c_char) }?;
    }
    Ok(())
}

/// A C string of the caller's.
///
/// # Safety
/// `text` is null or a terminated string.
pub unsafe fn get_text(text: *const c_char) -> Result<String, u32> {
    if text.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the caller's contract.
    Ok(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

entry! {
    fn cuGetErrorName(code: u32, text: *mut *const c_char) {
        put(text, look_up(code)?.1.as_ptr())
    }
    fn cuGetErrorString(code: u32, text: *mut *const c_char) {
        put(text, look_up(code)?.2.as_ptr())
    }
}
