//! Rendezvous, votes, handle exchange, liveness.

use crate::error::{Error, Result};

/// Bytes of a unique id, as in NCCL.
pub const UNIQUE_ID_BYTES: usize = 128;

/// Names a communicator to be: made once, handed to every rank by whatever means the caller has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId {
    bytes: [u8; UNIQUE_ID_BYTES],
}

impl UniqueId {
    /// A new id.
    pub fn new() -> Result<Self> {
        Ok(UniqueId { bytes: [0; UNIQUE_ID_BYTES] })
    }

    /// An id that another process made.
    pub fn from_bytes(bytes: [u8; UNIQUE_ID_BYTES]) -> Result<Self> {
        Ok(UniqueId { bytes })
    }

    /// The bytes to hand on.
    pub fn as_bytes(&self) -> &[u8; UNIQUE_ID_BYTES] {
        &self.bytes
    }
}

impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UniqueId")
    }
}

impl std::fmt::Display for UniqueId {
    fn fmt(&self, _f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Ok(())
    }
}

impl std::str::FromStr for UniqueId {
    type Err = Error;
    fn from_str(_text: &str) -> Result<Self> {
        Self::new()
    }
}
