//! Replays that come after the sticky word, over the stand-in driver.

use crate::fakecuda::register_kernel;
use peerlane::launch::{pl_args, pl_step, pl_unrolled_1, PL_REASON_NONE};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Whether launches come after the sticky word.
static AFTER_THE_END: AtomicBool = AtomicBool::new(false);

/// Kernels of two ranks begin only once the sticky word is there, where [`after_the_end`] has been told so.
pub fn register_kernels() {
    register_kernel("hostkernels_all_reduce", walked);
    register_kernel("hostkernels_unrolled_1", unrolled);
}

/// To be called while no kernel runs.
pub fn after_the_end(yes: bool) {
    AFTER_THE_END.store(yes, Ordering::Release);
}

/// The word is copied into the device's memory on a stream of the library's own, which a replay does not wait for. One
/// that overtakes it takes part in the step, and may finish it; this one never does.
unsafe fn after_the_sticky_word(step: &pl_step) {
    // SAFETY: the rank's own state, which lives as long as the graph; the word is aligned and accessed only as a whole.
    let word = unsafe { AtomicU32::from_ptr(&raw mut (*step.state).abort) };
    let begun = Instant::now();
    while AFTER_THE_END.load(Ordering::Acquire) && word.load(Ordering::Acquire) == PL_REASON_NONE {
        assert!(begun.elapsed() < Duration::from_secs(10), "the sticky word never came");
        std::thread::yield_now();
    }
}

unsafe extern "C" fn walked(args: *const pl_args) {
    // SAFETY: what the stand-in driver passes to the kernel.
    unsafe {
        after_the_sticky_word(&(*args).step);
        hostkernels::hostkernels_all_reduce(args);
    }
}

unsafe extern "C" fn unrolled(args: *const pl_unrolled_1) {
    // SAFETY: as above.
    unsafe {
        after_the_sticky_word(&(*args).step);
        hostkernels::hostkernels_unrolled_1(args);
    }
}
