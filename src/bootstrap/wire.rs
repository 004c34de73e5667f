//! What ranks say to each other, and how a message becomes bytes.
//!
//! A connection begins with a [`Preamble`] of fixed size, compared before anything is parsed. After it every message
//! is a frame: the body's length and the number of descriptors that travel with it, both `u32` little-endian, then the
//! body in postcard. Both numbers have hard limits.

use super::unique_id::random;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

/// Raised whenever a message changes its form.
pub(super) const PROTOCOL: u32 = 2;
/// Most bytes that one rank may contribute to a stage.
pub(super) const MAX_CONTRIBUTION: usize = 1 << 20;
/// Most bytes of a body: a verdict with 16 full contributions.
pub(super) const MAX_BODY: usize = 16 * MAX_CONTRIBUTION + (64 << 10);
/// Most bytes of a body from a rank that has not been admitted.
pub(super) const MAX_HELLO: usize = 4 << 10;
/// Most descriptors of a frame (the system's limit is 253).
pub(super) const MAX_FDS: usize = 64;
pub(super) const HEADER: usize = 8;

/// Most channels of a communicator.
pub const CHANNELS: usize = 4;
/// A step per channel: the first that a rank has not finished.
pub type Steps = [u64; CHANNELS];

const MAGIC: [u8; 8] = *b"pl-rdv\r\n";

/// The first bytes of a rank on its connection to rank 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Preamble {
    pub(super) protocol: u32,
    pub(super) rank: u32,
}

impl Preamble {
    pub(super) const BYTES: usize = 32;

    pub(super) fn encode(self, token: &[u8]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&self.protocol.to_le_bytes());
        bytes.extend_from_slice(&self.rank.to_le_bytes());
        bytes.extend_from_slice(token);
        bytes
    }

    /// `None` unless the magic and the token are right.
    pub(super) fn decode(bytes: &[u8; Self::BYTES], token: &[u8]) -> Option<Self> {
        // Every byte is compared whatever the others are: how long it takes says nothing about how much was right.
        let differ = bytes[..8].iter().zip(&MAGIC).chain(bytes[16..].iter().zip(token));
        let differ = differ.fold(0, |sum, (a, b)| std::hint::black_box(sum | (a ^ b)));
        let number = |at: usize| {
            let mut raw = [0; 4];
            raw.copy_from_slice(&bytes[at..at + 4]);
            u32::from_le_bytes(raw)
        };
        (differ == 0 && token.len() == Self::BYTES - 16)
            .then(|| Preamble { protocol: number(8), rank: number(12) })
    }
}

/// The process that a rank lives in, told apart across PID namespaces and from forked children.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Process {
    /// In its own namespace.
    pub(super) pid: u32,
    /// Inode of its PID namespace; 0 if /proc is not there.
    pub(super) pid_namespace: u64,
    /// Drawn once per process image: two containers without /proc may both have a pid 1.
    nonce: u64,
}

impl Process {
    pub(super) fn current() -> Result<Self> {
        static NONCE: OnceLock<u64> = OnceLock::new();
        let mut raw = [0; 8];
        random(&mut raw)?;
        Ok(Process {
            pid: std::process::id(),
            pid_namespace: std::fs::metadata("/proc/self/ns/pid").map_or(0, |m| m.ino()),
            nonce: *NONCE.get_or_init(|| u64::from_le_bytes(raw)),
        })
    }
}

/// Who comes, and with what expectations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) version: String,
    pub(super) size: u32,
    pub(super) rank: u32,
    /// The machine's, from /proc; empty if that is not there.
    pub(super) boot_id: String,
    pub(super) process: Process,
}

impl Hello {
    pub(super) fn new(size: usize, rank: usize) -> Result<Self> {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        Ok(Hello {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            size: size as u32,
            rank: rank as u32,
            boot_id: boot_id.map_or(String::new(), |id| id.trim().to_owned()),
            process: Process::current()?,
        })
    }
}

/// A message. The descriptors that travel with it are named here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// To rank 0, with the rank's own pidfd where the system has one.
    Hello(Hello),
    /// From rank 0: the hello was good, wait for the others.
    Admitted,
    /// From rank 0 once all are in, with the pidfds of the ranks in `pidfds`, in that order.
    Welcome { members: Vec<Process>, pidfds: Vec<u32> },
    /// From rank 0, with the socket that leads to rank `rank`.
    Peer { rank: u32, outcome: Result<()> },
    /// To rank 0, with the descriptors that the rank contributes.
    Vote { stage: String, outcome: Result<Vec<u8>> },
    /// From rank 0: every rank's contribution in order of rank, or the error that all ranks return. A failure ends set-up.
    Verdict { stage: String, outcome: Result<Vec<Vec<u8>>> },
    /// From rank 0 after a verdict, with the descriptors that rank `from` contributed.
    Handles { from: u32, outcome: Result<()> },
    /// The rank is done and has finished, on each channel, all steps before the one named; an end of file after this is no
    /// death.
    Goodbye { steps: Steps },
    /// The communicator has failed.
    Failed(Error),
}

impl Message {
    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        encode(self)
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self> {
        decode(body)
    }
}

pub(super) fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    postcard::to_stdvec(value)
        .map_err(|e| Error::Internal(format!("a bootstrap message cannot be encoded: {e}")))
}

/// The value that fills all of `body`.
pub(super) fn decode<T: for<'a> Deserialize<'a>>(body: &[u8]) -> Result<T> {
    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(Error::Internal(format!(
            "a bootstrap message is followed by {} bytes that belong to nothing",
            rest.len()
        ))),
        Err(e) => Err(Error::Internal(format!("a bootstrap message cannot be decoded: {e}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_preamble_admits_only_the_right_token() {
        let token = [7; 16];
        let sent = Preamble { protocol: 3, rank: 5 };
        let mut bytes = [0; Preamble::BYTES];
        bytes.copy_from_slice(&sent.encode(&token));
        assert_eq!(Preamble::decode(&bytes, &token), Some(sent));
        for at in (0..8).chain(16..Preamble::BYTES) {
            let mut wrong = bytes;
            wrong[at] ^= 0x80;
            assert_eq!(Preamble::decode(&wrong, &token), None, "byte {at}");
        }
    }

    #[test]
    fn bytes_after_a_message_are_refused() {
        let mut body = Message::Goodbye { steps: [7; CHANNELS] }.encode().unwrap();
        assert_eq!(Message::decode(&body).unwrap(), Message::Goodbye { steps: [7; CHANNELS] });
        body.push(0);
        assert!(Message::decode(&body).unwrap_err().to_string().contains("1 bytes"));
    }

    proptest! {
        #[test]
        fn garbage_is_refused_without_a_panic(body in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(message) = Message::decode(&body) {
                // Numbers have more than one postcard encoding, so only the value must survive.
                prop_assert_eq!(Message::decode(&message.encode().unwrap()).unwrap(), message);
            }
        }
    }
}
