//! Where the ranks sit on the described box: each says its place, and what follows is the same on all.

use super::config::Config;
use crate::error::{Error, Result};
use crate::log::log;
use crate::placement::Placement;
use crate::plan::{Model, NOMINAL};
use crate::schedule::Islands;
use crate::topology::{self, Address, Files, Topology};
use crate::types::Device;

/// What a rank knows before it has heard of the others.
#[derive(Default)]
pub(super) struct Look {
    topology: Option<Topology>,
    /// The address of its GPU, or `GPU3` where the description has no addresses; `None` where nothing is described.
    place: Option<String>,
}

/// The description with all ranks on it.
pub(super) struct Seen {
    topology: Topology,
    gpu_of: Vec<usize>,
}

impl Look {
    /// The box as `config` names it, else as sysfs shows it to a rank on a GPU. Ranks of the CPU device sit nowhere, unless a
    /// description is named: then rank `r` takes the place of its GPU `r`.
    pub fn new(config: &Config, rank: usize) -> Result<Self> {
        let named = config.topology.as_deref().map(topology::from_path).transpose()?;
        if config.device == Device::Cpu {
            let place = named.as_ref().map(|_| format!("GPU{rank}"));
            return Ok(Look { topology: named, place });
        }
        let shown = match topology::from_sysfs(&Files::directory("/")) {
            Ok(shown) => shown,
            Err(error) => {
                log!(Warn, "rank {rank}: the box cannot be described: {error}");
                Topology::default()
            }
        };
        if shown.gpus.is_empty() && named.is_none() {
            return Ok(Look::default());
        }
        let address = address(config.device);
        // A description without addresses numbers GPUs by address, as sysfs sorts them.
        let place = match &named {
            Some(described) => address
                .and_then(|a| described.at(a).or_else(|| shown.at(a)))
                .map(|at| format!("GPU{at}")),
            None => address.map(|a| a.to_string()),
        };
        Ok(Look { topology: Some(named.unwrap_or(shown)), place })
    }

    /// Where this rank's host memory and threads belong, if it runs on a GPU that is described.
    pub fn placement(&self, config: &Config) -> Placement {
        let gpu = || {
            let topology = self.topology.as_ref()?;
            let gpu = &topology.gpus[at(topology, self.place.as_deref()?)?];
            let node = topology.nodes.iter().find(|node| Some(node.id) == gpu.node);
            let of_node = node.map_or("", |node| node.cpus.as_str());
            let cpus = if gpu.cpus.is_empty() { of_node } else { &gpu.cpus };
            Some(Placement::new(gpu.node, cpus))
        };
        match config.device {
            Device::Cuda { .. } if config.numa => gpu().unwrap_or_default(),
            _ => Placement::default(),
        }
    }

    /// What the other ranks are told.
    pub fn place(&self) -> Option<String> {
        self.place.clone()
    }

    /// All ranks on the description; `None` where one of them has no place on it.
    pub fn locate(self, places: &[Option<String>]) -> Option<Seen> {
        let topology = self.topology?;
        let gpu = |place: &Option<String>| at(&topology, place.as_deref()?);
        let gpu_of = places.iter().map(gpu).collect::<Option<Vec<usize>>>();
        if gpu_of.is_none() {
            log!(
                Info,
                "some rank has no place in {}: islands and schedules go by defaults",
                topology.source
            );
        }
        gpu_of.map(|gpu_of| Seen { topology, gpu_of })
    }
}

/// The GPU at a place.
fn at(topology: &Topology, place: &str) -> Option<usize> {
    match place.strip_prefix("GPU") {
        Some(number) => number.parse().ok().filter(|at| *at < topology.gpus.len()),
        None => topology.at(Address::parse(place)?),
    }
}

#[cfg(feature = "cuda")]
fn address(device: Device) -> Option<Address> {
    // A driver that fails fails again in the stage that needs it, with its own words.
    super::gpu::address_of(device).ok().as_deref().and_then(Address::parse)
}

#[cfg(not(feature = "cuda"))]
fn address(_device: Device) -> Option<Address> {
    None
}

impl Seen {
    /// Islands by the rule of [`topology::islands`].
    pub fn islands(&self) -> Result<Islands> {
        let found = topology::islands(&self.topology, &self.gpu_of)?;
        log!(Info, "islands {}: {}", found.islands, found.reason);
        Ok(found.islands)
    }

    /// What all ranks must see alike, as a hash.
    pub fn hash(&self) -> String {
        format!("{:016x}", self.topology.hash64(&self.gpu_of))
    }

    /// The model that chooses schedules, if there are links between the ranks: on one GPU none of its bytes would count.
    pub fn model(&self, islands: &Islands) -> Result<Option<Model>> {
        let model = Model::new(&self.topology, &self.gpu_of, islands, &NOMINAL)?;
        Ok(Some(model).filter(|model| model.fabric.gpus() > 1))
    }
}

/// Islands for `n` ranks: those that `config` names, else those of the box, else one.
pub(super) fn islands(config: &Config, n: usize, seen: Option<&Seen>) -> Result<Islands> {
    match (&config.islands, seen) {
        (Some(islands), _) if islands.ranks() != n => Err(Error::InvalidArgument(format!(
            "the islands {islands} hold {} ranks, but the communicator has {n}",
            islands.ranks()
        ))),
        (Some(islands), _) => Ok(islands.clone()),
        (None, Some(seen)) => seen.islands(),
        (None, None) => Islands::single(n),
    }
}
