//! What the parent of a run and its ranks say to each other: one JSON object a line on a pipe, or the same values through
//! a channel to threads. None of it goes through the library under test, so a defect there cannot hide itself.

use anyhow::{Context, Result};
use peerlane::comm::Config;
use peerlane::env::Env;
use peerlane::{Algorithm, DType, Direction, Op, Protocol};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// How the communicator is made; what is `None` follows the environment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    pub ranks: usize,
    pub islands: Option<String>,
    pub algo: Option<Algorithm>,
    pub proto: Option<Protocol>,
    pub direction: Option<Direction>,
    pub deadline: f64,
    pub seed: u64,
    /// Bytes of a rank's slab.
    pub slab: Option<u64>,
    /// Compare what the ranks call before every step.
    pub compare_calls: Option<bool>,
    /// Where the ranks meet.
    pub run_dir: Option<PathBuf>,
}

impl Settings {
    /// The communicator's configuration: the environment's, overruled by the flags.
    pub fn config(&self) -> peerlane::Result<Config> {
        let mut env = Env::read()?;
        if self.islands.is_some() {
            env.islands.clone_from(&self.islands);
        }
        let mut config = Config::from_vars(self.ranks, &env)?;
        config.algorithm = self.algo.or(config.algorithm);
        config.protocol = self.proto.or(config.protocol);
        config.direction = self.direction.or(config.direction);
        config.slab_bytes = self.slab.or(config.slab_bytes);
        config.check = self.compare_calls.unwrap_or(config.check);
        config.run_dir = self.run_dir.clone().or(config.run_dir);
        config.deadline = Duration::from_secs_f64(self.deadline);
        Ok(config)
    }
}

/// The all-reduce that a row measures.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Call {
    pub count: usize,
    pub dtype: DType,
    pub op: Op,
    pub in_place: bool,
}

impl Call {
    /// Bytes of one rank's input.
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }
}

/// Calls that are on their way together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Burst {
    pub calls: Vec<Call>,
    /// Streams that take turns; with none the calls name no stream.
    pub streams: usize,
    /// Make the calls in one group.
    pub group: bool,
}

/// How a row is timed; the same numbers for every rank, always.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    pub warmup: u32,
    pub iters: u32,
    pub batches: u32,
    /// Calls of an iteration.
    pub aggregate: u32,
    /// Compare the result of the last timed call, where it is known (out of place).
    pub verify: bool,
}

/// From the parent to a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Join the communicator; the first order of a rank that is a process.
    Join { id: String, rank: usize, settings: Settings },
    /// Make `iterations` calls with fresh data each and compare every element.
    Check { call: Call, iterations: u32 },
    /// Make all of a burst's calls before any has to be done, and compare every element.
    Burst(Burst),
    /// Time batches of calls.
    Time { call: Call, timing: Timing },
    /// Leave the communicator and end.
    Leave,
}

/// From a rank to the parent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    Joined,
    /// Still at work; sent between batches so that silence means trouble.
    Busy,
    Checked {
        wrong: u64,
    },
    Timed {
        /// Mean time of a call in microseconds, batch by batch.
        batch_us: Vec<f64>,
        wrong: u64,
        /// Which algorithm and protocol served the timed calls.
        algo: String,
        proto: String,
    },
    Left,
    Failed {
        why: String,
    },
}

/// The line of a message, newline included.
pub fn to_line<T: Serialize>(message: &T) -> Result<String> {
    Ok(serde_json::to_string(message)? + "\n")
}

/// The message of a line.
pub fn from_line<'a, T: Deserialize<'a>>(line: &'a str) -> Result<T> {
    serde_json::from_str(line).with_context(|| format!("not a message of this tool: {line:?}"))
}
