//! The first error, kept for good.
//!
//! Two parties can find a fault: a kernel (a wait outlived its deadline, launches met, calls differ) and the host (a rank
//! died, somebody called abort). Whoever is first decides what every later call returns. The host ends the kernels' waits
//! through the abort word: the CPU device's kernels look at the host's memory itself, a GPU's at their own.

use crate::error::Error;
use crate::launch::*;
use crate::schedule::Goal;
use crate::types::{Algorithm, DType, Op, Protocol};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};
#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::sync::OnceLock;

pub(crate) struct Fault {
    first: OnceLock<Error>,
    word: Word,
}

/// Where the kernels' abort word is.
enum Word {
    Host(Box<UnsafeCell<pl_state>>),
    #[cfg(feature = "cuda")]
    Device(Arc<super::gpu::DeviceState>),
}

// SAFETY: `state` is shared with kernels by address; the host touches only its `abort` word, atomically, and reads the
// record after the kernel that wrote it has returned on the same thread.
unsafe impl Send for Fault {}
// SAFETY: as above.
unsafe impl Sync for Fault {}

impl Fault {
    pub fn new() -> Self {
        // SAFETY: plain integers, for which zero is a value.
        let state = Box::new(UnsafeCell::new(unsafe { std::mem::zeroed() }));
        Fault { first: OnceLock::new(), word: Word::Host(state) }
    }

    /// The fault of a rank on a GPU, whose kernels it ends through `state`.
    #[cfg(feature = "cuda")]
    pub fn on_device(state: Arc<super::gpu::DeviceState>) -> Self {
        Fault { first: OnceLock::new(), word: Word::Device(state) }
    }

    /// For the arguments of the CPU device's kernels; null for a rank on a GPU, whose kernels have a state of their own.
    pub fn state(&self) -> *mut pl_state {
        match &self.word {
            Word::Host(state) => state.get(),
            #[cfg(feature = "cuda")]
            Word::Device(_) => std::ptr::null_mut(),
        }
    }

    fn abort_word(state: &UnsafeCell<pl_state>) -> &AtomicU32 {
        // SAFETY: aligned, lives as long as `state`, and accessed only atomically, by kernels too.
        unsafe { AtomicU32::from_ptr(&raw mut (*state.get()).abort) }
    }

    /// Keeps `error` if it is the first, and ends every wait. True if it was the first.
    pub fn raise(&self, error: Error) -> bool {
        let reason = match error {
            Error::RankDied { .. } | Error::RankLeft { .. } => PL_REASON_RANK_DIED,
            Error::Closed => PL_REASON_CLOSED,
            _ => PL_REASON_ABORTED,
        };
        let first = self.first.set(error).is_ok();
        // The error comes before the word: who sees the word finds the error.
        match &self.word {
            Word::Host(state) => {
                let word = Self::abort_word(state);
                let (set, unset) = (Ordering::Release, Ordering::Relaxed);
                let _ = word.compare_exchange(PL_REASON_NONE, reason, set, unset);
            }
            #[cfg(feature = "cuda")]
            Word::Device(state) => state.abort(reason),
        }
        first
    }

    /// The sticky error.
    pub fn get(&self) -> Option<&Error> {
        self.first.get()
    }

    /// Whether kernels have been told, or have found out, that it is over.
    pub fn aborted(&self) -> bool {
        match &self.word {
            Word::Host(state) => Self::abort_word(state).load(Ordering::Acquire) != PL_REASON_NONE,
            #[cfg(feature = "cuda")]
            Word::Device(state) => state.aborted(),
        }
    }

    /// The error behind an abort word that a kernel of the CPU device left. To be called on the thread that ran it.
    pub fn after_kernel(&self, own: OwnCall) -> Error {
        match &self.word {
            _ if self.get().is_some() => self.get().cloned().unwrap_or(Error::Closed),
            Word::Host(state) => {
                // SAFETY: the kernel has returned on this thread, so its record is complete; later ones leave it alone.
                let record = unsafe { (*state.get()).record };
                error_of(&record, own.rank, Some(own))
            }
            #[cfg(feature = "cuda")]
            Word::Device(_) => Error::Internal("a GPU's record was asked for on the CPU".into()),
        }
    }
}

/// In a mismatch's record: found by the flags' signature, so nothing is known about the other call (`cuda/wait.cuh`).
const DIFFERS_SIGNATURE: u32 = 64;

/// What the rank itself was doing, to say how it differs.
#[derive(Clone, Copy)]
pub(crate) struct OwnCall {
    pub rank: u32,
    pub count: u64,
    pub dtype: DType,
    pub op: Op,
    pub goal: Goal,
    pub algorithm: Algorithm,
    pub protocol: Protocol,
}

/// What a kernel's record says, to rank `rank`, whose own call is `own` where that is known.
pub(crate) fn error_of(record: &pl_record, rank: u32, own: Option<OwnCall>) -> Error {
    match record.reason {
        PL_REASON_DEADLINE => Error::Deadline {
            rank: record.rank,
            peer: record.peer,
            phase: record.phase,
            step: record.step,
            bytes: record.bytes,
        },
        PL_REASON_RANK_DIED => Error::RankDied { rank: record.peer },
        PL_REASON_ABORTED => Error::Aborted { rank: record.rank },
        PL_REASON_CONCURRENT => Error::Concurrent { rank: record.rank },
        PL_REASON_CLOSED => Error::Closed,
        PL_REASON_MISMATCH if record.phase == DIFFERS_SIGNATURE => Error::Mismatch(format!(
            "in step {} rank {} made another call (count, type, operation or order) than rank {}, which called {} bytes; \
             set PEERLANE_CHECK=1 to learn how they differ",
            record.step, record.peer, record.rank, record.bytes
        )),
        PL_REASON_LEFT => Error::RankLeft { rank: record.peer },
        PL_REASON_MISMATCH => {
            let name = |dtype: u32, op: u32| {
                let dtype =
                    DType::from_raw(dtype).map_or_else(|_| dtype.to_string(), |d| d.to_string());
                let op = Op::from_raw(op).map_or_else(|_| op.to_string(), |o| o.to_string());
                format!("{dtype} {op}")
            };
            let theirs = format!(
                "in step {} rank {} called {} elements of {}",
                record.step,
                record.peer,
                record.count,
                name(record.dtype, record.op)
            );
            // The record is either our own finding or that of another rank, whose call we do not know.
            Error::Mismatch(match own {
                Some(own) if record.rank == rank => format!(
                    "{theirs}, rank {rank} {} elements of {} ({}, {} {}; {} differ)",
                    own.count,
                    name(own.dtype as u32, own.op as u32),
                    own.goal,
                    own.algorithm,
                    own.protocol,
                    differing_fields(record.phase)
                ),
                _ => format!(
                    "{theirs}, rank {} something else ({} differ)",
                    record.rank,
                    differing_fields(record.phase)
                ),
            })
        }
        other => Error::Internal(format!("a kernel gave up for the unknown reason {other}")),
    }
}

/// The fields of a call that differ, by the bits that `cuda/step.cuh` sets in a mismatch's `phase`.
fn differing_fields(bits: u32) -> String {
    let names = [
        (1, "count"),
        (2, "data type"),
        (4, "operation"),
        (8, "collective or algorithm"),
        (16, "protocol"),
        (32, "number of the call"),
        (128, "width of a fused row"),
    ];
    let differ: Vec<_> =
        names.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| *name).collect();
    differ.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_error_stays() {
        let fault = Fault::new();
        assert!(!fault.aborted() && fault.get().is_none());
        assert!(fault.raise(Error::RankDied { rank: 3 }));
        assert!(!fault.raise(Error::Aborted { rank: 0 }));
        assert!(fault.aborted());
        assert_eq!(fault.get(), Some(&Error::RankDied { rank: 3 }));
    }
}
