//! Counters per route, for a communicator and for the process.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What became of all-reduces. `include/peerlane_nccl.h` has the same struct.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Communicators that peerlane could serve: all ranks in this box, and alike.
    pub communicators: u64,
    /// Of these, the ones that were set up.
    pub set_up: u64,
    /// Communicators that NCCL serves for good.
    pub refused: u64,
    /// All-reduces launched by peerlane.
    pub served_calls: u64,
    /// Their bytes.
    pub served_bytes: u64,
    /// Forwarded to NCCL for their size.
    pub forwarded_size: u64,
    /// Forwarded for their type or operation.
    pub forwarded_kind: u64,
    /// Forwarded because the communicator is NCCL's alone, or was captured before it was set up.
    pub forwarded_unready: u64,
    /// Calls that failed in peerlane.
    pub failed: u64,
}

/// The live counters; each is independent of the others, so relaxed order is enough.
#[derive(Default)]
pub struct Counters {
    /// As in `Stats`.
    pub communicators: AtomicU64,
    /// As in `Stats`.
    pub set_up: AtomicU64,
    /// As in `Stats`.
    pub refused: AtomicU64,
    /// As in `Stats`.
    pub served_calls: AtomicU64,
    /// As in `Stats`.
    pub served_bytes: AtomicU64,
    /// As in `Stats`.
    pub forwarded_size: AtomicU64,
    /// As in `Stats`.
    pub forwarded_kind: AtomicU64,
    /// As in `Stats`.
    pub forwarded_unready: AtomicU64,
    /// As in `Stats`.
    pub failed: AtomicU64,
}

/// Of the whole process.
pub static PROCESS: Counters = Counters::new();

impl Counters {
    /// All zero.
    pub const fn new() -> Self {
        Counters {
            communicators: AtomicU64::new(0),
            set_up: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            served_calls: AtomicU64::new(0),
            served_bytes: AtomicU64::new(0),
            forwarded_size: AtomicU64::new(0),
            forwarded_kind: AtomicU64::new(0),
            forwarded_unready: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }
    }

    /// As they are now.
    pub fn read(&self) -> Stats {
        Stats {
            communicators: self.communicators.load(Relaxed),
            set_up: self.set_up.load(Relaxed),
            refused: self.refused.load(Relaxed),
            served_calls: self.served_calls.load(Relaxed),
            served_bytes: self.served_bytes.load(Relaxed),
            forwarded_size: self.forwarded_size.load(Relaxed),
            forwarded_kind: self.forwarded_kind.load(Relaxed),
            forwarded_unready: self.forwarded_unready.load(Relaxed),
            failed: self.failed.load(Relaxed),
        }
    }
}

/// Adds to a counter of a communicator and of the process.
pub(crate) fn count(own: &Counters, which: impl Fn(&Counters) -> &AtomicU64, by: u64) {
    which(own).fetch_add(by, Relaxed);
    which(&PROCESS).fetch_add(by, Relaxed);
}

/// Writes the counters of a communicator, or of the process for NULL; `size` is the caller's size of the struct, of which
/// older and newer ones get what they have room for. 0, or NCCL's `ncclInvalidArgument`.
///
/// # Safety
/// `out` has room for `size` bytes.
pub unsafe fn read(comm: crate::types::ncclComm_t, out: *mut Stats, size: usize) -> u32 {
    let stats = match comm.is_null() {
        true => Some(PROCESS.read()),
        false => crate::table::find(comm).map(|entry| entry.counters().read()),
    };
    let Some(stats) = stats.filter(|_| !out.is_null()) else {
        return crate::status::fail(
            crate::types::ncclInvalidArgument,
            "peerlane_nccl_stats: NULL, or a communicator that is NCCL's alone",
        );
    };
    // SAFETY: the caller's promise; no more than both structs have.
    unsafe {
        std::ptr::copy_nonoverlapping(
            (&raw const stats).cast::<u8>(),
            out.cast::<u8>(),
            size.min(size_of::<Stats>()),
        );
    }
    0
}
