//! Communicators: create, all-reduce, abort, destroy; groups.

use crate::bootstrap::UniqueId;
use crate::device::Stream;
use crate::env::Env;
use crate::error::{Error, Result};
use crate::schedule::Islands;
use crate::types::{Algorithm, DType, Direction, Op, Protocol};
use std::ffi::c_void;
use std::path::PathBuf;
use std::time::Duration;

/// How a communicator is made. All ranks must agree on everything but the directories; creation checks that.
#[derive(Clone, Debug)]
pub struct Config {
    /// Islands of ranks; `None` is one island.
    pub islands: Option<Islands>,
    /// Bytes of each rank's slab; `None` is the device's default.
    pub slab_bytes: Option<u64>,
    /// How long a wait lasts before it gives up. A dead rank is noticed at once, whatever this says.
    pub deadline: Duration,
    /// How long set-up may take.
    pub setup_deadline: Duration,
    /// Serve every call with this algorithm.
    pub algorithm: Option<Algorithm>,
    /// Serve every call with this protocol.
    pub protocol: Option<Protocol>,
    /// Serve every `flagged` call in this direction.
    pub direction: Option<Direction>,
    /// Compare what the ranks call before every step.
    pub check: bool,
    /// Where rendezvous sockets live.
    pub run_dir: Option<PathBuf>,
}

impl Config {
    /// The configuration that the environment asks for; `n` ranks.
    pub fn from_env(n: usize) -> Result<Self> {
        Self::from_vars(n, &Env::read()?)
    }

    /// The same from variables already read.
    pub fn from_vars(n: usize, env: &Env) -> Result<Self> {
        Ok(Config {
            islands: env.islands.as_deref().map(|text| Islands::parse(n, text)).transpose()?,
            slab_bytes: env.slab,
            deadline: env.deadline.unwrap_or(Duration::from_secs(600)),
            setup_deadline: env.setup_deadline.unwrap_or(Duration::from_secs(120)),
            algorithm: env.algorithm,
            protocol: env.protocol,
            direction: env.direction,
            check: env.check.unwrap_or(false),
            run_dir: env.run_dir.clone(),
        })
    }
}

/// What a communicator did so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// All-reduce calls accepted, empty ones included.
    pub calls: u64,
    /// Steps launched; a call larger than the slab is several.
    pub steps: u64,
    /// Bytes of input reduced.
    pub bytes: u64,
    /// Calls by algorithm, indexed by `Algorithm as usize`.
    pub by_algorithm: [u64; 6],
    /// Calls by protocol, indexed by `Protocol as usize`.
    pub by_protocol: [u64; 3],
    /// Calls that failed.
    pub failed: u64,
    /// Hash of the reduction tree.
    pub tree_hash: u64,
}

/// One rank's end of a group of ranks that reduce together. `Send` and `Sync`: calls from several threads are ordered as
/// they come in.
#[derive(Debug)]
pub struct Communicator {
    rank: usize,
    size: usize,
}

impl Communicator {
    /// Joins the communicator `id` as `rank` of `n`; returns once all ranks have, or fails on all with the same error.
    pub fn create(_id: &UniqueId, n: usize, rank: usize, _config: &Config) -> Result<Self> {
        Ok(Communicator { rank, size: n })
    }

    /// All `n` ranks as members of this process, in order; each is meant for a thread of its own, or for a group.
    pub fn create_local(n: usize, _config: &Config) -> Result<Vec<Self>> {
        Ok((0..n).map(|rank| Communicator { rank, size: n }).collect())
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Reduces `count` elements over all ranks into `output`. With `stream` `None` the call returns when `output` is
    /// complete; with a stream it returns when the work is queued behind what the stream already holds. Between
    /// [`group_start`] and [`group_end`] it only notes the call.
    ///
    /// # Safety
    /// `input` is readable and `output` writable for `count` elements until the work is done; they are the same or do
    /// not overlap.
    pub unsafe fn all_reduce(
        &self,
        _input: *const c_void,
        _output: *mut c_void,
        _count: usize,
        _dtype: DType,
        _op: Op,
        _stream: Option<&Stream>,
    ) -> Result<()> {
        Err(Error::Unsupported("all_reduce".into()))
    }

    /// Ends every wait of this communicator on all ranks; every later call fails.
    pub fn abort(&self) {}

    /// The sticky error, if there is one.
    pub fn error(&self) -> Option<Error> {
        None
    }

    /// What it did so far.
    pub fn stats(&self) -> Stats {
        Stats::default()
    }

    /// How a call of `bytes` bytes would be served: islands, tree, schedule phase by phase, protocol.
    pub fn explain(&self, _bytes: usize, _dtype: DType) -> Result<String> {
        Err(Error::Unsupported("explain".into()))
    }

    /// Says goodbye to the other ranks and frees what this rank holds. Waits for work in flight. Dropping does the same.
    pub fn destroy(self) -> Result<()> {
        Ok(())
    }
}

/// Opens a group on this thread: calls are noted until the outermost [`group_end`], so that no call of one rank waits
/// for one that the same thread has yet to make. Groups nest.
pub fn group_start() {}

/// Closes a group; the outermost one starts everything noted. The first error of a call is returned, and the others are
/// still made.
pub fn group_end() -> Result<()> {
    Ok(())
}
