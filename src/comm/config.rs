//! What a caller may ask for, and what all ranks must agree on.

use super::described::{self, Seen};
use crate::env::Env;
use crate::error::{Error, Result};
use crate::launch::PL_MAX_BLOCKS;
use crate::log;
use crate::plan::DeviceKind;
use crate::probe;
use crate::schedule::{self, Islands};
use crate::types::{Algorithm, Device, Direction, Lane, ProbeMode, Protocol};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Default slab of the CPU device: with one channel, 4 MiB for each half of the bulk protocol.
const CPU_SLAB: u64 = 16 << 20;
/// Default slab of a GPU: with four channels, 1 MiB for each half of the word protocols and 2 MiB for each of the bulk one (in host
/// memory less: `Layout::region`).
const CUDA_SLAB: u64 = 32 << 20;
const SLAB_RANGE: std::ops::RangeInclusive<u64> = (1 << 20)..=(1 << 30);

/// How a communicator is made. All ranks must agree on everything but the GPU's number, the paths, the placement, the deadlines,
/// programmatic launches and clusters; creation checks that and names the rank that differs.
#[derive(Clone, Debug)]
pub struct Config {
    /// Islands of ranks; `None` takes those that follow from the described box, or one island where none is.
    pub islands: Option<Islands>,
    /// A description of the box in place of what sysfs shows: the text of `nvidia-smi topo -m`, hwloc's XML (feature
    /// `cli`), or a directory that stands for `/`. All ranks must see the same. On the CPU device rank `r` then takes the
    /// place of GPU `r`.
    pub topology: Option<PathBuf>,
    /// Where this rank runs.
    pub device: Device,
    /// How GPUs reach each other's slabs.
    pub lane: Lane,
    /// Bytes of each rank's slab, 1 MiB to 1 GiB; `None` is the device's default (16 MiB on the CPU, 32 MiB on a GPU).
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
    /// On GPUs, for benchmarks: at most so many blocks per launch, in place of the rule by which calls on all channels, of all
    /// ranks that share a GPU, fit it at once: captured calls on half of it, eager ones on a quarter. More blocks than the GPU holds at once, over all ranks on it, end in the deadline.
    pub blocks: Option<u32>,
    /// On GPUs, for benchmarks: threads of a block, a multiple of 32 up to 512. Kernels that take fewer get fewer.
    pub threads: Option<u32>,
    /// A fatbin to load in place of the one that is built in.
    pub kernels: Option<PathBuf>,
    /// Whether creation measures what the lane does.
    pub probe: ProbeMode,
    /// Where verdicts on lanes are kept from one communicator to the next; `None` keeps nothing. Rank 0's counts.
    pub cache_dir: Option<PathBuf>,
    /// On GPUs: host memory on the GPU's NUMA node, and the library's own threads on CPUs near it.
    pub numa: bool,
    /// On GPUs from compute capability 9.0 on: a kernel of a graph may start while the library's kernel before it still runs,
    /// and waits for it inside. Whether it does changes no result.
    pub programmatic: bool,
    /// On the same GPUs: the blocks of a row of the fused operation may start together, as a cluster. Whether they do changes no
    /// result.
    pub clusters: bool,
    /// Where rendezvous sockets live, for ids made on behalf of this configuration.
    pub run_dir: Option<PathBuf>,
}

impl Config {
    /// The configuration that the environment asks for; `n` ranks.
    pub fn from_env(n: usize) -> Result<Self> {
        Self::from_vars(n, &Env::read()?)
    }

    /// The same from variables already read.
    pub fn from_vars(n: usize, env: &Env) -> Result<Self> {
        if let Some(level) = env.log.as_deref().and_then(log::Level::parse) {
            log::set_level(level);
        }
        Ok(Config {
            islands: env.islands.as_deref().map(|text| Islands::parse(n, text)).transpose()?,
            topology: env.topology.clone(),
            device: env.device.unwrap_or_default(),
            lane: env.lane.unwrap_or(Lane::Auto),
            slab_bytes: env.slab,
            deadline: env.deadline.unwrap_or(Duration::from_secs(600)),
            setup_deadline: env.setup_deadline.unwrap_or(Duration::from_secs(120)),
            algorithm: env.algorithm,
            protocol: env.protocol,
            direction: env.direction,
            check: env.check.unwrap_or(false),
            blocks: None,
            threads: None,
            kernels: env.kernels.clone(),
            probe: env.probe.unwrap_or(ProbeMode::Auto),
            cache_dir: probe::default_dir(env),
            numa: env.numa.unwrap_or(true),
            programmatic: env.programmatic.unwrap_or(true),
            clusters: env.clusters.unwrap_or(true),
            run_dir: env.run_dir.clone(),
        })
    }

    /// Fills in the defaults and refuses what cannot be.
    pub(super) fn settle(&self, n: usize, seen: Option<&Seen>) -> Result<Agreed> {
        let islands = described::islands(self, n, seen)?;
        let slab_bytes = self.slab_bytes.unwrap_or(match self.device {
            Device::Cpu => CPU_SLAB,
            Device::Cuda { .. } => CUDA_SLAB,
        });
        if !SLAB_RANGE.contains(&slab_bytes) {
            return Err(Error::InvalidArgument(format!(
                "a slab of {slab_bytes} bytes; it takes {} to {} (PEERLANE_SLAB)",
                SLAB_RANGE.start(),
                SLAB_RANGE.end()
            )));
        }
        if self.device != Device::Cpu && !cfg!(feature = "cuda") {
            return Err(Error::Unsupported(format!(
                "the device {}: this library was built without CUDA; build it with the feature cuda",
                self.device
            )));
        }
        if let Some(algorithm) = self.algorithm {
            if !schedule::exists(algorithm, &islands) {
                return Err(Error::InvalidArgument(format!(
                    "{algorithm} does not exist for the islands {islands}; leave the choice open or pin one_shot or two_shot"
                )));
            }
        }
        if self.threads.is_some_and(|t| t == 0 || t > 512 || t % 32 != 0)
            || self.blocks.is_some_and(|b| b == 0 || b > PL_MAX_BLOCKS)
        {
            return Err(Error::InvalidArgument(format!(
                "{:?} blocks of {:?} threads; a launch takes 1 to {PL_MAX_BLOCKS} blocks of 32 to 512 threads, in steps of 32",
                self.blocks, self.threads
            )));
        }
        if self.direction == Some(Direction::Pull)
            && self.protocol.is_some_and(|p| p != Protocol::Flagged)
        {
            return Err(Error::InvalidArgument(
                "pull needs the flagged protocol; ll and sentinel words only travel by push".into(),
            ));
        }
        Ok(Agreed {
            version: env!("CARGO_PKG_VERSION").into(),
            topology: match seen {
                Some(seen) => seen.hash(),
                None if self.topology.is_some() => "without a place for every rank".into(),
                None => "unknown".into(),
            },
            islands: islands.groups().to_vec(),
            device: match self.device {
                Device::Cpu => "cpu".into(),
                Device::Cuda { .. } => "cuda".into(),
            },
            lane: self.lane,
            blocks: self.blocks,
            threads: self.threads,
            slab_bytes,
            algorithm: self.algorithm,
            protocol: self.protocol,
            direction: self.direction,
            check: self.check,
            probe: self.probe,
        })
    }
}

/// What every rank must have set alike: a difference would give different schedules or layouts, hence wrong data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Agreed {
    version: String,
    topology: String,
    islands: Vec<Vec<u8>>,
    device: String,
    pub lane: Lane,
    pub blocks: Option<u32>,
    pub threads: Option<u32>,
    pub slab_bytes: u64,
    pub algorithm: Option<Algorithm>,
    pub protocol: Option<Protocol>,
    pub direction: Option<Direction>,
    pub check: bool,
    pub probe: ProbeMode,
}

impl Agreed {
    /// What the ranks run on, for the rule that chooses.
    pub fn device_kind(&self) -> DeviceKind {
        if self.device == "cpu" {
            DeviceKind::Cpu
        } else {
            DeviceKind::Gpu
        }
    }

    pub fn islands(&self) -> Result<Islands> {
        let groups: Vec<Vec<usize>> =
            self.islands.iter().map(|g| g.iter().map(|&r| r.into()).collect()).collect();
        Islands::new(groups.iter().map(Vec::len).sum(), groups)
    }

    /// The first rank that differs from rank 0, as the error that all ranks return.
    pub fn compare(all: &[Agreed]) -> Result<()> {
        let Some(first) = all.first() else { return Ok(()) };
        match all.iter().position(|other| other != first) {
            None => Ok(()),
            Some(rank) => Err(Error::Setup {
                rank: rank as u32,
                stage: "agree on the configuration".into(),
                reason: format!("{} on rank {rank}", first.difference(&all[rank])),
            }),
        }
    }

    fn difference(&self, other: &Agreed) -> String {
        macro_rules! field {
            ($($name:ident),+) => {$(
                if self.$name != other.$name {
                    return format!("{} is {:?} on rank 0 and {:?}", stringify!($name), self.$name, other.$name);
                }
            )+};
        }
        field!(
            version, topology, islands, device, lane, blocks, threads, slab_bytes, algorithm,
            protocol, direction, check, probe
        );
        String::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config::from_vars(4, &Env::default()).unwrap()
    }

    #[test]
    fn the_rank_that_differs_is_named() {
        let agreed = config().settle(4, None).unwrap();
        let mut all = vec![agreed.clone(), agreed.clone(), agreed.clone(), agreed];
        assert_eq!(Agreed::compare(&all), Ok(()));
        all[2].slab_bytes = 4 << 20;
        let error = Agreed::compare(&all).unwrap_err().to_string();
        assert!(error.contains("rank 2") && error.contains("slab_bytes is 16777216"), "{error}");
    }

    #[test]
    fn what_cannot_be_is_refused_before_anyone_is_contacted() {
        let islands = Islands::parse(4, "0-1,2-3").unwrap();
        for (config, n, what) in [
            (Config { islands: Some(islands), ..config() }, 8, "hold 4 ranks"),
            (Config { slab_bytes: Some(7), ..config() }, 4, "slab of 7 bytes"),
            (
                Config { algorithm: Some(Algorithm::Hierarchical), ..config() },
                4,
                "hierarchical does not exist",
            ),
            (
                Config {
                    protocol: Some(Protocol::Ll),
                    direction: Some(Direction::Pull),
                    ..config()
                },
                4,
                "flagged",
            ),
        ] {
            let error = config.settle(n, None).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }
}
