//! Counters of what a communicator did.

use crate::types::{Algorithm, Protocol};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const ALGORITHMS: usize = Algorithm::ALL.len();
const PROTOCOLS: usize = Protocol::ALL.len();

/// What a communicator did so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Collectives accepted, empty ones included.
    pub calls: u64,
    /// Steps launched; a call larger than the slab is several.
    pub steps: u64,
    /// Bytes of what was served: of a message, or of the part of one rank where each has its own.
    pub bytes: u64,
    /// Calls by algorithm, indexed by `Algorithm as usize`.
    pub by_algorithm: [u64; ALGORITHMS],
    /// Calls by protocol, indexed by `Protocol as usize`.
    pub by_protocol: [u64; PROTOCOLS],
    /// Calls that failed after they were accepted.
    pub failed: u64,
    /// Hash of the reduction tree.
    pub tree_hash: u64,
}

/// The live counters. Each is independent of the others, so relaxed order is enough.
#[derive(Default)]
pub(crate) struct Counters {
    pub calls: AtomicU64,
    pub steps: AtomicU64,
    pub bytes: AtomicU64,
    pub by_algorithm: [AtomicU64; ALGORITHMS],
    pub by_protocol: [AtomicU64; PROTOCOLS],
    pub failed: AtomicU64,
}

impl Counters {
    pub fn served(&self, algorithm: Algorithm, protocol: Protocol, bytes: u64) {
        self.by_algorithm[algorithm as usize].fetch_add(1, Relaxed);
        self.by_protocol[protocol as usize].fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
    }

    pub fn read(&self, tree_hash: u64) -> Stats {
        Stats {
            calls: self.calls.load(Relaxed),
            steps: self.steps.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            by_algorithm: std::array::from_fn(|i| self.by_algorithm[i].load(Relaxed)),
            by_protocol: std::array::from_fn(|i| self.by_protocol[i].load(Relaxed)),
            failed: self.failed.load(Relaxed),
            tree_hash,
        }
    }
}
