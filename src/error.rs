//! The one error type. Errors are values: they can be cloned (a sticky error is returned again by every later call) and
//! sent to the other ranks (so that all fail with the same one).

use serde::{Deserialize, Serialize};

/// Every public `Result` of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, where, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Error {
    /// The caller's mistake: the text says which argument and what would be right.
    #[error("invalid argument: {0}")]
    InvalidArgument(String),
    /// A call that this library does not serve, though it is not wrong.
    #[error("not supported: {0}")]
    Unsupported(String),
    /// A system call failed.
    #[error("{call} failed: {detail}")]
    System {
        /// The call and its object, such as `memfd_create(slab)`.
        call: String,
        /// The system's own text and number.
        detail: String,
    },
    /// The device's driver failed or refused.
    #[error("device: {0}")]
    Device(String),
    /// What was written to another rank's memory is not what is found there.
    #[error("the lane does not deliver what is written: {0}")]
    Lane(String),
    /// Set-up failed; every rank of the communicator gets this same error.
    #[error("set-up failed on rank {rank} in stage '{stage}': {reason}")]
    Setup {
        /// The first rank, in rank order, that failed.
        rank: u32,
        /// The stage it failed in.
        stage: String,
        /// Its own error.
        reason: String,
    },
    /// A process of the communicator ended without a goodbye.
    #[error("rank {rank} died")]
    RankDied {
        /// The dead rank.
        rank: u32,
    },
    /// A rank destroyed its communicator while others still called.
    #[error("rank {rank} has destroyed its communicator, so no further call can complete")]
    RankLeft {
        /// The rank that left.
        rank: u32,
    },
    /// A wait outlived the deadline.
    #[error("rank {rank} waited for rank {peer} beyond the deadline in phase {phase} of step {step} ({bytes} bytes)")]
    Deadline {
        /// Who waited.
        rank: u32,
        /// For whom.
        peer: u32,
        /// In which phase of the schedule.
        phase: u32,
        /// In which step: the channel's epoch.
        step: u64,
        /// Bytes of that step.
        bytes: u64,
    },
    /// Ranks made calls that do not belong together.
    #[error("calls differ: {0}")]
    Mismatch(String),
    /// Two launches met on one channel of rank `rank`.
    #[error("two collectives were in flight at once on one channel of rank {rank}; order them by stream or use two communicators")]
    Concurrent {
        /// The rank on which they met.
        rank: u32,
    },
    /// `abort` was called on a rank.
    #[error("rank {rank} aborted the communicator")]
    Aborted {
        /// The rank whose caller asked for it.
        rank: u32,
    },
    /// The communicator or its handle has been destroyed.
    #[error("the communicator has been destroyed")]
    Closed,
    /// A defect of this library.
    #[error("internal error, please report it: {0}")]
    Internal(String),
}

impl Error {
    /// An error of the system call `call`, read from `errno`.
    pub fn last_os(call: impl Into<String>) -> Self {
        Self::os(call, &std::io::Error::last_os_error())
    }

    /// An error of the system call `call`.
    pub fn os(call: impl Into<String>, error: &std::io::Error) -> Self {
        Error::System { call: call.into(), detail: error.to_string() }
    }
}
