//! The explorer's entry, see `explorer.h`. Arguments are untyped here, so that this crate does not need the library.

use std::ffi::c_void;

/// `explorer_case`.
#[repr(C)]
pub struct Case {
    pub seed: u64,
    pub n: u32,
    pub steps: u32,
    pub blocks: u32,
    pub threads: u32,
    pub cpu_shape: u32,
    pub control: u32,
    pub host_staged: u32,
    pub drop_at: u32,
    pub mirror_from: u32,
    pub mirror_to: u32,
    pub abort_at: u32,
    pub abort_rank: u32,
    pub rank_steps: [u32; 16],
    pub arena: *mut u8,
    pub slab_log2: u32,
    /// `pl_args[steps][n]`.
    pub args: *const c_void,
    /// `pl_unrolled_7[steps][n]`; where it has phases it is run in place of `args`, in the shape of a GPU.
    pub unrolled: *const c_void,
}

/// `explorer_outcome`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Scheduling decisions.
    pub events: u64,
    /// Posted writes.
    pub writes: u64,
    /// 1: threads of a block or a cluster left each other at a barrier.
    pub stuck: u32,
    /// 1: a block's shared memory was stored to before it ran or after it had ended.
    pub strayed: u32,
}

extern "C" {
    fn explorer_run(case: *const Case, out: *mut Outcome);
}

/// Runs a case.
///
/// # Safety
/// `arena` holds `n` slabs of `1 << slab_log2` bytes; `args` and `unrolled` are `[steps][n]`, each valid over those slabs, with
/// nothing that another thread touches.
pub unsafe fn run(case: &Case) -> Outcome {
    let mut out = Outcome::default();
    // SAFETY: the caller's promise; `out` is the explorer's struct.
    unsafe { explorer_run(case, &mut out) };
    out
}

/// `explorer_control`: the safeguard that is taken out.
pub mod control {
    pub const NONE: u32 = 0;
    pub const NO_REARM: u32 = 1;
    pub const EPOCH_STANDS: u32 = 2;
    pub const TAG_NOT_LESS: u32 = 3;
    pub const FLAG_NOT_LESS: u32 = 4;
    pub const NO_WAIT: u32 = 5;
    pub const PLAIN_FLAG: u32 = 6;
    pub const NO_FENCE: u32 = 7;
    pub const NO_BARRIER: u32 = 8;
    pub const TORN_WORDS: u32 = 9;
    pub const TAG_WRAPS: u32 = 10;
    pub const NO_CLEAR: u32 = 11;
    pub const RAW_NAN: u32 = 12;
    pub const ANY_SQUARES: u32 = 13;
    pub const FORGETS: u32 = 14;
    pub const ALL_IS_NEW: u32 = 15;
    pub const NO_WORD_OF_REARMS: u32 = 16;
    pub const BLOCKS_TOO_EARLY: u32 = 17;
    pub const SQUARES_TOO_EARLY: u32 = 18;
}
