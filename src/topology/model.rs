//! The description of a box.

use super::files::printable;
use super::{Acs, Address, Link};
use serde::Serialize;

/// GPUs and what lies between them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Topology {
    /// What it was read from.
    pub source: String,
    /// NUMA nodes by number.
    pub nodes: Vec<Node>,
    /// Root complexes and bridges above GPUs; a parent stands before its children.
    pub bridges: Vec<Bridge>,
    /// NVIDIA GPUs in order of their address, which is the order in which `nvidia-smi` numbers them.
    pub gpus: Vec<Gpu>,
    /// Whether the driver lets GPU `a` reach the memory of GPU `b`: `peer_access[a][b]`. `None` where no driver was asked.
    pub peer_access: Option<Vec<Vec<bool>>>,
    /// What was strange, missing or assumed, for people.
    pub notes: Vec<String>,
}

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Node {
    /// Its number.
    pub id: u32,
    /// The CPU package it belongs to, where that is one.
    pub socket: Option<u32>,
    /// Its CPUs, such as `0-31,64-95`; empty where unknown.
    pub cpus: String,
}

/// What a bridge is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BridgeKind {
    /// A root complex.
    Host,
    /// A PCIe port: the root complex's, or one of a switch.
    Port,
}

/// A root complex or a bridge.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bridge {
    /// What it is.
    pub kind: BridgeKind,
    /// Its name: an address, or `pci0000:10` for a root complex.
    pub name: String,
    /// The bridge above it; none above a root complex.
    pub parent: Option<usize>,
    /// Vendor and device number.
    pub ids: Option<(u16, u16)>,
    /// The link above it; a root port's is the one below it.
    pub link: Link,
    /// Whether it redirects traffic between GPUs.
    pub acs: Acs,
}

/// An NVIDIA GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// Its address, where the description has one.
    pub address: Option<Address>,
    /// What it is called: model or numbers.
    pub name: String,
    /// The bridge it hangs on.
    pub parent: Option<usize>,
    /// Its NUMA node; `None` where the firmware does not say (-1).
    pub node: Option<u32>,
    /// The CPU package of its node.
    pub socket: Option<u32>,
    /// Vendor and device number.
    pub ids: Option<(u16, u16)>,
    /// The link above it.
    pub link: Link,
    /// Bytes of the window through which peers reach its memory.
    pub bar1: Option<u64>,
    /// CPUs near it, such as `0-31`; empty where unknown.
    pub cpus: String,
}

impl Topology {
    /// The GPU at an address.
    pub fn at(&self, address: Address) -> Option<usize> {
        self.gpus.iter().position(|gpu| gpu.address == Some(address))
    }

    /// The package of a node, if it is known to belong to one.
    pub(super) fn socket_of(&self, node: Option<u32>) -> Option<u32> {
        self.nodes.iter().find(|n| Some(n.id) == node)?.socket
    }

    /// Sorts GPUs by address, fills in their sockets, and says what will matter.
    pub(super) fn finish(mut self) -> Self {
        // All of these are shown to people.
        let names = self.gpus.iter_mut().flat_map(|gpu| [&mut gpu.name, &mut gpu.cpus]);
        let names = names.chain(self.bridges.iter_mut().map(|bridge| &mut bridge.name));
        let names = names.chain(self.nodes.iter_mut().map(|node| &mut node.cpus));
        for text in names.chain(&mut self.notes).chain([&mut self.source]) {
            if text.contains(char::is_control) {
                *text = printable(text);
            }
        }
        self.nodes.sort_by_key(|n| n.id);
        self.gpus.sort_by_key(|g| g.address);
        let described = self.gpus.len();
        self.gpus.dedup_by(|b, a| a.address.is_some() && a.address == b.address);
        if self.gpus.len() < described {
            let twice = described - self.gpus.len();
            self.notes
                .push(format!("{twice} GPU(s) described twice at one address; the first counts"));
        }
        for at in 0..self.gpus.len() {
            let socket = self.socket_of(self.gpus[at].node);
            let gpu = &mut self.gpus[at];
            gpu.socket = gpu.socket.or(socket);
        }
        if self.gpus.is_empty() {
            self.notes.push("no NVIDIA GPU".into());
        }
        let lost: Vec<String> = self
            .gpus
            .iter()
            .enumerate()
            .filter(|(_, gpu)| gpu.node.is_none())
            .map(|(i, _)| format!("GPU{i}"))
            .collect();
        if !lost.is_empty() && self.nodes.len() > 1 {
            self.notes.push(format!(
                "{}: NUMA node unknown on a box with {} nodes, so taken to be far from every other",
                lost.join(", "),
                self.nodes.len()
            ));
        }
        self
    }
}
