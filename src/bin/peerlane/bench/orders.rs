//! What the parent of a run and its ranks say to each other: one JSON object a line on a pipe, or the same values through
//! a channel to threads. None of it goes through the library under test, so a defect there cannot hide itself.

use anyhow::{Context, Result};
use peerlane::comm::Config;
use peerlane::env::Env;
use peerlane::{Algorithm, DType, Device, Direction, Lane, Op, Protocol};
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
    /// Ranks on GPUs; `None` is the CPU.
    pub gpu: Option<Gpu>,
}

/// Which GPU carries which rank, and how.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Gpu {
    /// Rank `r` is on the GPU with the number `r / ranks_per_gpu`.
    pub ranks_per_gpu: usize,
    pub lane: Option<Lane>,
    /// At most so many blocks per launch, in place of the library's rule.
    pub blocks: Option<u32>,
    /// Threads of a block.
    pub threads: Option<u32>,
    /// A fatbin of the foreign kernel in place of the built-in one.
    pub foreign_kernel: Option<PathBuf>,
}

impl Gpu {
    /// The number of the GPU that carries `rank`.
    pub fn ordinal(&self, rank: usize) -> u32 {
        (rank / self.ranks_per_gpu.max(1)) as u32
    }
}

impl Settings {
    /// The configuration of `rank`'s communicator: the environment's, overruled by the flags.
    pub fn config(&self, rank: usize) -> peerlane::Result<Config> {
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
        config.device = Device::Cpu;
        if let Some(gpu) = &self.gpu {
            config.device = Device::Cuda { ordinal: Some(gpu.ordinal(rank)) };
            config.lane = gpu.lane.unwrap_or(config.lane);
            config.blocks = gpu.blocks;
            config.threads = gpu.threads;
        }
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
    /// Launches of a graph of `iters` iterations per batch; 0 is one eager pass over them. GPUs alone.
    pub graph: u32,
    /// Put a foreign kernel before every call, and subtract what these take alone. GPUs alone.
    pub between: bool,
}

impl Timing {
    /// All-reduces of a batch.
    pub fn calls(&self) -> f64 {
        f64::from(self.iters) * f64::from(self.aggregate) * f64::from(self.graph.max(1))
    }
}

/// From the parent to a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Join the communicator; the first order of a rank that is a process.
    Join { id: String, rank: usize, settings: Settings },
    /// Make `iterations` calls with fresh data each and compare every element; with `graph` each is a launch of a graph.
    Check { call: Call, iterations: u32, graph: bool },
    /// Make all of a burst's calls before any has to be done, and compare every element.
    Burst(Burst),
    /// Time batches of calls.
    Time { call: Call, timing: Timing },
    /// Make a communicator of NCCL's beside ours; `id` is its unique id in hexadecimal.
    JoinNccl { library: PathBuf, id: String },
    /// To check or to time something else than our all-reduce.
    Other(Subject, Task),
    /// Leave the communicator and end.
    Leave,
}

/// Whose calls an order is about, where it is not our all-reduce. GPUs alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Subject {
    /// NCCL's all-reduce.
    Nccl,
    /// All-reduce, residual add and RMSNorm over rows of `width`, in one kernel or two.
    Norm { width: usize, fused: bool },
}

/// What is to be done with the calls of a [`Subject`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Task {
    /// As [`Order::Check`].
    Check { call: Call, iterations: u32, graph: bool },
    /// As [`Order::Time`].
    Time { call: Call, timing: Timing },
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
        /// What the foreign kernel before each call took, where there was one; already subtracted above.
        foreign_us: Vec<f64>,
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
