//! Kernels as host functions, for the stand-in driver (`tests/fakecuda`) to run in programs that know nothing of it:
//! `FAKECUDA_KERNELS` names this library and `FAKECUDA_KERNEL_MAP` the functions.

mod scripted;

use peerlane::launch::{pl_args, pl_probe};

/// The all-reduce of every type and protocol: the library's own host kernels.
#[no_mangle]
pub unsafe extern "C" fn hostkernels_all_reduce(args: *const pl_args) {
    // SAFETY: the stand-in driver passes a copy of the launch's parameter, whose addresses are memory of this process.
    let done = unsafe { peerlane::device::cpu::all_reduce(&*args) };
    if let Err(error) = done {
        // Across the C boundary this ends the process.
        panic!("{error}");
    }
}

/// Add + RMSNorm by itself: the library's own host kernel.
#[no_mangle]
pub unsafe extern "C" fn hostkernels_add_rms_norm(args: *const pl_args) {
    // SAFETY: as above.
    let done = unsafe { peerlane::device::cpu::add_rms_norm(&*args) };
    if let Err(error) = done {
        panic!("{error}");
    }
}

/// The probe.
#[no_mangle]
pub unsafe extern "C" fn hostkernels_probe(probe: *const pl_probe) {
    // SAFETY: as above.
    let done = unsafe { peerlane::device::cpu::probe(&*probe) };
    if let Err(error) = done {
        panic!("{error}");
    }
}

/// `pl_foreign_args` of `cuda/foreign.cu`.
#[repr(C)]
pub struct ForeignArguments {
    source: *const u8,
    result: *const u8,
    next: *mut u8,
    bytes: u64,
}

const UNWRITTEN: [u8; 4] = [0xa5; 4];

/// What `peerlane_foreign` of `cuda/foreign.cu` does.
#[no_mangle]
pub unsafe extern "C" fn hostkernels_foreign(args: *const ForeignArguments) {
    // SAFETY: as above.
    let args = unsafe { &*args };
    let whole = args.bytes as usize / 16 * 16;
    // In place `next` is `result`: only pointers, no slices.
    for at in (0..whole).step_by(4) {
        // SAFETY: the tool's buffers hold `bytes` bytes, aligned to 16.
        unsafe {
            let result = args.result.add(at).cast::<[u8; 4]>().read();
            let source = args.source.add(at).cast::<[u8; 4]>().read();
            let next = if result == UNWRITTEN { result } else { source };
            args.next.add(at).cast::<[u8; 4]>().write(next);
        }
    }
    for at in whole..args.bytes as usize {
        // SAFETY: as above.
        unsafe { args.next.add(at).write(args.source.add(at).read()) };
    }
}

/// An all-reduce that leaves everything as it is, for tests that must notice.
#[no_mangle]
pub unsafe extern "C" fn hostkernels_nothing(_args: *const pl_args) {}
