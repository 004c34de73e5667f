//! What is known about the box.

use anyhow::{Context, Result};
use peerlane::topology::{self, Address, Files, Topology};
use serde::{Deserialize, Serialize};

/// Where a capture keeps what the driver said.
pub const DRIVER: &str = "peerlane/driver.json";
/// Where a capture keeps NCCL's variables.
pub const NCCL: &str = "peerlane/nccl";
const VERSION: &str = "proc/driver/nvidia/version";

/// Everything the rules read.
pub struct Facts {
    pub files: Files,
    pub topology: Topology,
    /// The kernel module's version, such as `580.65.06`.
    pub driver_version: Option<String>,
    pub driver: Option<Driver>,
    /// NCCL's variables that bear on the fabric, with values.
    pub nccl: Vec<(String, String)>,
}

/// What the driver says of the GPUs that this process sees.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Driver {
    /// Why it could not be asked; empty if it could.
    #[serde(default)]
    pub error: String,
    #[serde(default)]
    pub gpus: Vec<DriverGpu>,
    /// Whether GPU `a` reaches the memory of GPU `b`.
    #[serde(default)]
    pub peer_access: Vec<Vec<bool>>,
}

/// One GPU as the driver sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverGpu {
    pub address: String,
    #[serde(default)]
    pub name: String,
    #[serde(default)]
    pub memory_bytes: u64,
    #[serde(default)]
    pub mig: bool,
}

impl Facts {
    /// From `files`. On the box at hand (`here`) the driver and the environment are asked too, else their captured answers
    /// are taken; who measures (`live`) needs the driver's own answer, whatever was captured.
    pub fn collect(files: Files, here: bool, live: bool) -> Result<Self> {
        let mut topology = topology::from_sysfs(&files)?;
        let driver = match files.text(DRIVER)? {
            _ if live => ask(),
            Some(text) => Some(serde_json::from_str(&text).with_context(|| files.name(DRIVER))?),
            None if here => ask(),
            None => None,
        };
        let nccl = match files.text(NCCL)? {
            Some(text) => text
                .lines()
                .filter_map(|l| l.split_once('='))
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .collect(),
            None if here => peerlane::env::nccl_fabric_settings(),
            None => Vec::new(),
        };
        let text = files.text(VERSION)?;
        let driver_version = text.as_deref().and_then(version).map(str::to_owned);
        topology.peer_access = driver.as_ref().and_then(|d: &Driver| on_topology(&topology, d));
        Ok(Facts { files, topology, driver_version, driver, nccl })
    }

    /// The directory of a GPU or a bridge, by its address.
    pub fn directory(&self, address: Address) -> Option<String> {
        topology::device_directory(&self.files, address)
    }

    /// Text of a file; what cannot be read is as good as not there.
    pub fn text(&self, path: &str) -> Option<String> {
        self.files.text(path).ok().flatten()
    }
}

/// The word after `Kernel Module` that is a version; the text has been worded in several ways.
fn version(text: &str) -> Option<&str> {
    let line = text.lines().next()?;
    line.split_whitespace().find(|word| {
        word.contains('.')
            && word
                .split('.')
                .all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    })
}

/// The driver's matrix in the topology's numbers, if it covers all of it.
fn on_topology(topology: &Topology, driver: &Driver) -> Option<Vec<Vec<bool>>> {
    let place = |gpu: &topology::Gpu| {
        driver
            .gpus
            .iter()
            .position(|d| Address::parse(&d.address).is_some_and(|a| Some(a) == gpu.address))
    };
    let places = topology.gpus.iter().map(place).collect::<Option<Vec<_>>>()?;
    let cell = |a: usize, b: usize| driver.peer_access.get(a)?.get(b).copied();
    places.iter().map(|&a| places.iter().map(|&b| cell(a, b)).collect()).collect()
}

#[cfg(feature = "cuda")]
fn ask() -> Option<Driver> {
    use peerlane::device::cuda;
    let asked = || -> peerlane::Result<Driver> {
        let devices = cuda::Device::all(cuda::Driver::load()?)?;
        let gpus = devices.iter().map(|device| {
            let facts = device.facts();
            DriverGpu {
                address: facts.pci_bus_id.clone(),
                name: facts.name.clone(),
                memory_bytes: facts.memory_bytes,
                mig: facts.mig,
            }
        });
        Ok(Driver {
            error: String::new(),
            gpus: gpus.collect(),
            peer_access: cuda::peer_matrix(&devices)?,
        })
    };
    Some(asked().unwrap_or_else(|error| Driver { error: error.to_string(), ..Driver::default() }))
}

/// A build without CUDA asks no driver.
#[cfg(not(feature = "cuda"))]
fn ask() -> Option<Driver> {
    None
}

#[cfg(test)]
mod tests {
    use super::version;

    #[test]
    fn the_version_is_found_in_every_wording() {
        for text in [
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.57.08  Sat May 24 07:04:56 UTC 2025\nGCC version: 12.2.0",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build  (root@host)  Mon",
        ] {
            assert_eq!(version(text), Some("575.57.08"));
        }
        assert_eq!(version(""), None);
    }
}
