//! Kernels as host functions, for the stand-in driver (`tests/fakecuda`) to run in programs that know nothing of it:
//! `FAKECUDA_KERNELS` names this library and `FAKECUDA_KERNEL_MAP` the functions.

mod scripted;

use peerlane::launch::{
    pl_args, pl_probe, pl_step, pl_unrolled_1, pl_unrolled_15, pl_unrolled_3, pl_unrolled_7,
};

/// A host function, and the bytes of the struct that it takes.
pub struct Kernel {
    /// Kernels of this library whose name begins so run it.
    pub prefix: &'static str,
    /// Its name in the shared library.
    pub symbol: &'static str,
    pub run: unsafe extern "C" fn(*const std::ffi::c_void),
    pub bytes: usize,
}

/// What stands for each kernel of the library.
pub fn kernels() -> Vec<Kernel> {
    macro_rules! kernels {
        ($($prefix:literal $function:ident $args:ty),* $(,)?) => {
            vec![$(Kernel {
                prefix: $prefix,
                symbol: stringify!($function),
                // SAFETY: the stand-in driver passes a pointer to what the kernel takes, whatever the type.
                run: unsafe {
                    std::mem::transmute::<
                        unsafe extern "C" fn(*const $args),
                        unsafe extern "C" fn(*const std::ffi::c_void),
                    >($function)
                },
                bytes: size_of::<$args>(),
            }),*]
        };
    }
    kernels!(
        "pl_all_reduce_" hostkernels_all_reduce pl_args,
        "pl_add_rms_norm_" hostkernels_add_rms_norm pl_step,
        "pl_unrolled_1_" hostkernels_unrolled_1 pl_unrolled_1,
        "pl_unrolled_3_" hostkernels_unrolled_3 pl_unrolled_3,
        "pl_unrolled_7_" hostkernels_unrolled_7 pl_unrolled_7,
        "pl_unrolled_15_" hostkernels_unrolled_15 pl_unrolled_15,
        "pl_probe_lane" hostkernels_probe pl_probe,
        "peerlane_foreign" hostkernels_foreign ForeignArguments,
    )
}

/// `FAKECUDA_KERNEL_MAP` for programs that register [`kernels`] themselves.
pub const REGISTERED: &str = "pl_all_reduce_=hostkernels_all_reduce,\
    pl_add_rms_norm_=hostkernels_add_rms_norm,\
    pl_unrolled_1_=hostkernels_unrolled_1,\
    pl_unrolled_3_=hostkernels_unrolled_3,\
    pl_unrolled_7_=hostkernels_unrolled_7,\
    pl_unrolled_15_=hostkernels_unrolled_15,\
    pl_probe_lane=hostkernels_probe";

/// `FAKECUDA_KERNEL_MAP` for programs that find them in the shared library.
pub fn kernel_map() -> String {
    let entries = kernels();
    let text = |k: &Kernel| format!("{}={}:{}", k.prefix, k.symbol, k.bytes);
    entries.iter().map(text).collect::<Vec<_>>().join(",")
}

extern "C" {
    fn hostkernels_run_unrolled_1(args: *const pl_unrolled_1);
    fn hostkernels_run_unrolled_3(args: *const pl_unrolled_3);
    fn hostkernels_run_unrolled_7(args: *const pl_unrolled_7);
    fn hostkernels_run_unrolled_15(args: *const pl_unrolled_15);
}

macro_rules! unrolled {
    ($($function:ident $run:ident $args:ident),*) => {$(
        /// The all-reduce with unrolled loops, with rows the fused one.
        #[no_mangle]
        pub unsafe extern "C" fn $function(args: *const $args) {
            // SAFETY: the stand-in driver passes a copy of the launch's parameter, whose addresses are memory of this
            // process.
            unsafe {
                says_how_rows_are_spread(&(*args).step, (*args).widest);
                $run(args)
            }
        }
    )*};
}

/// What kernels on a GPU need of a step with rows, and those of the CPU, for which a row is a block's, never look at.
/// Across the C boundary a panic ends the process.
fn says_how_rows_are_spread(step: &pl_step, widest: u32) {
    if step.rows == 0 {
        return;
    }
    let (block, row, magic) = (step.block_units, step.row_units, u64::from(step.row_magic));
    assert!(block > 0 && row >= widest, "blocks of {block} units, rows of {row}, for {widest}");
    let cluster = step.cluster;
    assert!(cluster == 0 || row == cluster * block, "{cluster} of {block} units, rows of {row}");
    let expected = if row == 1 { 0 } else { (1u64 << 32).div_ceil(row.into()) };
    assert_eq!(magic, expected, "rows of {row} units");
}
unrolled!(
    hostkernels_unrolled_1 hostkernels_run_unrolled_1 pl_unrolled_1,
    hostkernels_unrolled_3 hostkernels_run_unrolled_3 pl_unrolled_3,
    hostkernels_unrolled_7 hostkernels_run_unrolled_7 pl_unrolled_7,
    hostkernels_unrolled_15 hostkernels_run_unrolled_15 pl_unrolled_15
);

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
pub unsafe extern "C" fn hostkernels_add_rms_norm(step: *const pl_step) {
    // SAFETY: as above.
    let done = unsafe { peerlane::device::cpu::add_rms_norm(&*step) };
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
pub unsafe extern "C" fn hostkernels_nothing(_args: *const std::ffi::c_void) {}
