//! Without CUDA there are no entries: NCCL serves every communicator.

use crate::group::Call;
use crate::stats::Counters;
use crate::types::cudaStream_t;
use peerlane_core::{Error, Result};

/// How far an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code)]
pub enum Phase {
    /// NCCL serves, for good.
    Refused,
    /// The first eager call sets it up.
    Waiting,
    /// Peerlane serves.
    Ready,
}

/// There is none.
pub enum Entry {}

#[allow(missing_docs, clippy::missing_safety_doc)]
impl Entry {
    pub fn counters(&self) -> &Counters {
        match *self {}
    }
    pub fn most_bytes(&self) -> u64 {
        match *self {}
    }
    pub fn phase(&self) -> Phase {
        match *self {}
    }
    pub fn set_up(&self) -> Phase {
        match *self {}
    }
    pub fn capturing(&self, _: cudaStream_t) -> Result<bool> {
        match *self {}
    }
    pub unsafe fn launch(&self, _: &Call, _: bool) -> Result<()> {
        match *self {}
    }
    pub fn fork(&self, _: cudaStream_t) -> Result<()> {
        match *self {}
    }
    pub fn join(&self, _: cudaStream_t) -> Result<()> {
        match *self {}
    }
    pub fn error(&self) -> Option<Error> {
        match *self {}
    }
    pub fn abort(&self) {
        match *self {}
    }
}
