//! What `peerlane-verify --device cuda` finds over the stand-in driver (`tests/fakecuda`): the kernels as host functions, named
//! by `FAKECUDA_KERNELS`, and under the name of cuBLAS the few of its functions that the runner calls.

mod blas;

use peerlane::launch::{pl_args, pl_probe};
use std::ffi::c_char;

extern "C" {
    /// Of `cuda/host.cpp`.
    fn verify_parameter_bytes(kernel: *const c_char) -> u64;
}

/// Bytes of a kernel's parameter by the kernels' own header; 0 for what is no kernel.
pub fn parameter_bytes(kernel: &std::ffi::CStr) -> u64 {
    // SAFETY: a terminated name.
    unsafe { verify_parameter_bytes(kernel.as_ptr()) }
}

/// The library's all-reduce.
#[no_mangle]
pub unsafe extern "C" fn standin_all_reduce(args: *const pl_args) {
    // SAFETY: the stand-in driver passes a copy of the launch's parameter.
    unsafe { hostkernels::hostkernels_all_reduce(args) }
}

/// The library's add + RMSNorm by itself.
#[no_mangle]
pub unsafe extern "C" fn standin_add_rms_norm(args: *const pl_args) {
    // SAFETY: as above.
    unsafe { hostkernels::hostkernels_add_rms_norm(args) }
}

/// The library's probe.
#[no_mangle]
pub unsafe extern "C" fn standin_probe(probe: *const pl_probe) {
    // SAFETY: as above.
    unsafe { hostkernels::hostkernels_probe(probe) }
}
