//! What `peerlane-verify --device cuda` finds over the stand-in driver (`tests/fakecuda`): the kernels as host functions, named
//! by `FAKECUDA_KERNELS`, and under the name of cuBLAS the few of its functions that the runner calls.

mod blas;

/// The map of the library's own kernels, which this library exports too.
pub use hostkernels::kernel_map;
use std::ffi::{c_char, c_void};

extern "C" {
    /// Of `cuda/host.cpp`.
    fn verify_parameter_bytes(kernel: *const c_char) -> u64;
}

/// Bytes of a kernel's parameter by the kernels' own header; 0 for what is no kernel.
pub fn parameter_bytes(kernel: &std::ffi::CStr) -> u64 {
    // SAFETY: a terminated name.
    unsafe { verify_parameter_bytes(kernel.as_ptr()) }
}

/// Exports the kernels of `cuda/host.cpp`: a shared library shows only what Rust names.
macro_rules! kernels {
    ($($kernel:ident: $exported:ident,)*) => {
        extern "C" { $(fn $kernel(args: *const c_void);)* }
        $(
            #[no_mangle]
            #[doc = concat!("`", stringify!($kernel), "`")]
            pub unsafe extern "C" fn $exported(args: *const c_void) {
                // SAFETY: the stand-in driver passes a copy of the launch's parameter, whose addresses are memory of this
                // process.
                unsafe { $kernel(args) }
            }
        )*
    };
}

kernels! {
    verify_fill: standin_fill,
    verify_embed: standin_embed,
    verify_add_norm: standin_add_norm,
    verify_latents: standin_latents,
    verify_few_rows: standin_few_rows,
    verify_query_up: standin_query_up,
    verify_queries: standin_queries,
    verify_values: standin_values,
    verify_turn_over: standin_turn_over,
    verify_rotate: standin_rotate,
    verify_attend: standin_attend,
    verify_merge: standin_merge,
    verify_router: standin_router,
    verify_choice: standin_choice,
    verify_dispatch: standin_dispatch,
    verify_gate_up: standin_gate_up,
    verify_down: standin_down,
    verify_choose: standin_choose,
    verify_accept: standin_accept,
    verify_stamp: standin_stamp,
}
