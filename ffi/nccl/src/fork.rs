//! A forked child forwards everything: the threads, sockets and locks behind a communicator are the parent's.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Once;

static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// To be called before the first lock that a forked child could find held.
pub fn watch() {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        // SAFETY: the handler stores one word; the library is never unloaded.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// Whether this process was forked from one that had communicators.
pub fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}
