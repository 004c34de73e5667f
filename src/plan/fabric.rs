//! The described box as the model sees it: where each rank sits, what it shares, what that can carry.

use super::constants::Constants;
use crate::topology::{BridgeKind, Class, Topology};
use std::collections::BTreeSet;

/// Ranks on a described box.
#[derive(Clone, Debug)]
pub struct Fabric {
    /// By rank.
    pub seats: Vec<Seat>,
    /// Class and one-way latency of every ordered pair of ranks: `[from][to]`.
    pub hops: Vec<Vec<Hop>>,
    /// GB/s in one direction between two sockets.
    pub sockets: f64,
    /// GB/s of an uplink by its number in [`Seat::uplink`].
    pub uplinks: Vec<f64>,
    /// Several GPUs behind one uplink, and GPUs behind two or more other root complexes: stores that fan out may collapse.
    pub collapse_prone: bool,
    /// Whether some link's rate was not described.
    pub links_assumed: bool,
}

/// Where a rank sits.
#[derive(Clone, Debug, PartialEq)]
pub struct Seat {
    /// Its GPU in the topology.
    pub gpu: usize,
    /// GB/s that stores reach over its link.
    pub link: f64,
    /// The port of the root complex that it shares with other ranks' GPUs; an index of [`Fabric::uplinks`].
    pub uplink: Option<usize>,
    /// Its root complex; GPUs without one have each their own.
    pub root: usize,
    /// Its socket or NUMA node.
    pub side: Option<u32>,
}

/// Between two ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hop {
    /// How far.
    pub class: Class,
    /// Microseconds one way.
    pub latency_us: f64,
}

impl Fabric {
    /// Rank `r` on GPU `gpu_of[r]`, which must exist.
    pub fn new(topology: &Topology, gpu_of: &[usize], constants: &Constants) -> Self {
        let rate = |gb: Option<f64>| gb.unwrap_or(constants.unknown_link) * constants.efficiency;
        let gpus: BTreeSet<usize> = gpu_of.iter().copied().collect();
        let shared =
            |port: usize| gpus.iter().filter(|g| topology.uplink(**g) == Some(port)).count() > 1;
        let ports: Vec<usize> = gpus
            .iter()
            .filter_map(|g| topology.uplink(*g))
            .filter(|port| shared(*port))
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect();
        // A root port's own link; where it is not described, its GPUs' best.
        let uplinks = ports
            .iter()
            .map(|&port| {
                let below = gpus.iter().filter(|g| topology.uplink(**g) == Some(port));
                let best = below.filter_map(|g| topology.gpus[*g].link.gb_per_s()).reduce(f64::max);
                rate(topology.bridges[port].link.gb_per_s().or(best))
            })
            .collect();
        let seats: Vec<Seat> = gpu_of
            .iter()
            .map(|&gpu| Seat {
                gpu,
                link: rate(topology.gpus[gpu].link.gb_per_s()),
                uplink: topology.uplink(gpu).and_then(|u| ports.iter().position(|p| *p == u)),
                root: topology.root_complex(gpu).unwrap_or(usize::MAX - gpu),
                side: topology.gpus[gpu].socket.or(topology.gpus[gpu].node),
            })
            .collect();
        let hop = |a: usize, b: usize| {
            let class = topology.class(a, b);
            let latency_us = constants.of(class).latency_us
                + constants.switch_us * switches(topology, a, b) as f64;
            Hop { class, latency_us }
        };
        let hops = gpu_of.iter().map(|&a| gpu_of.iter().map(|&b| hop(a, b)).collect()).collect();
        let roots: BTreeSet<usize> = seats.iter().map(|s| s.root).collect();
        let link = gpus.iter().filter_map(|g| topology.gpus[*g].link.gb_per_s()).reduce(f64::max);
        Fabric {
            collapse_prone: seats.iter().any(|s| s.uplink.is_some()) && roots.len() > 2,
            sockets: constants.between_sockets(link.unwrap_or(constants.unknown_link)),
            links_assumed: gpus.iter().any(|g| topology.gpus[*g].link.gb_per_s().is_none()),
            seats,
            hops,
            uplinks,
        }
    }

    /// Number of GPUs that the ranks sit on.
    pub fn gpus(&self) -> usize {
        self.seats.iter().map(|s| s.gpu).collect::<BTreeSet<_>>().len()
    }
}

/// Switches between two GPUs: pairs of ports of which one has several ways down. A port of the root complex with one
/// device below is none.
fn switches(topology: &Topology, a: usize, b: usize) -> usize {
    if a == b {
        return 0;
    }
    let (up, over) = (topology.way(a), topology.way(b));
    let meet = up.iter().rev().zip(over.iter().rev()).take_while(|(x, y)| x == y).count();
    let joined = meet > 0 && topology.bridges[up[up.len() - meet]].kind == BridgeKind::Port;
    // Below the meeting point each switch shows an upstream and a downstream port, except that the one they meet in shows
    // only a downstream port on either side.
    let below = |way: &[usize]| {
        let ports = way[..way.len() - meet]
            .iter()
            .filter(|p| topology.bridges[**p].kind == BridgeKind::Port)
            .count();
        ports.saturating_sub(1).div_ceil(2)
    };
    below(&up) + below(&over) + usize::from(joined)
}
