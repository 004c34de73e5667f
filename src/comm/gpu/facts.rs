//! What the ranks tell each other about their GPUs, and the lanes that follow from it: a pure function of what all know, so
//! all ranks come to the same end.

use super::slab::this_process;
use crate::device::cuda::{peer_matrix, Context, Device as Gpu, Driver, Uuid};
use crate::error::{Error, Result};
use crate::launch::pl_table;
use crate::types::{Device, Lane};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Peers that a GPU has room for, in all processes together.
pub(super) const PEERS_PER_GPU: usize = 8;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Facts {
    pub uuid: Uuid,
    pub name: String,
    pub sm_count: u32,
    pub vmm_fd: bool,
    pub maps_host_memory: bool,
    pub process: u64,
    /// The other GPUs that its process sees, and whether its kernels can reach their memory.
    reach: Vec<(Uuid, bool)>,
}

/// The GPU that `device` means.
fn gpu(driver: Driver, device: Device) -> Result<Gpu> {
    match device {
        Device::Cuda { ordinal: Some(ordinal) } => Gpu::by_ordinal(driver, ordinal),
        _ => match Gpu::current(driver)? {
            Some(gpu) => Ok(gpu),
            None => Gpu::by_ordinal(driver, 0),
        },
    }
}

/// Where the GPU that `device` means sits on the PCI buses.
pub(in crate::comm) fn address_of(device: Device) -> Result<String> {
    Ok(gpu(Driver::load()?, device)?.facts().pci_bus_id.clone())
}

/// The GPU that `device` means, with its context, and what there is to say about it.
pub(super) fn look(device: Device) -> Result<(Context, Facts)> {
    let driver = Driver::load()?;
    let gpu = gpu(driver, device)?;
    let context = Context::retain(&gpu)?;
    let all = Gpu::all(driver)?;
    let mut pair = vec![gpu.clone()];
    pair.extend(all);
    let reach = peer_matrix(&pair)?.swap_remove(0);
    let facts = gpu.facts();
    Ok((
        context,
        Facts {
            uuid: facts.uuid,
            name: facts.name.clone(),
            sm_count: facts.sm_count,
            vmm_fd: facts.vmm_fd,
            maps_host_memory: facts.maps_host_memory,
            process: this_process()?,
            reach: pair.iter().map(|gpu| gpu.facts().uuid).zip(reach).skip(1).collect(),
        },
    ))
}

/// The GPU of the calling thread's current context, for threads that are about to be started on its behalf.
pub(crate) fn settle_ordinal(device: Device) -> Result<Device> {
    if device != (Device::Cuda { ordinal: None }) {
        return Ok(device);
    }
    let driver = Driver::load()?;
    let current = Gpu::current(driver)?.map(|gpu| gpu.facts().uuid);
    let place =
        |uuid| Gpu::all(driver).map(|all| all.iter().position(|gpu| gpu.facts().uuid == uuid));
    let ordinal = current.map(place).transpose()?.flatten().unwrap_or(0);
    Ok(Device::Cuda { ordinal: Some(ordinal as u32) })
}

impl Facts {
    /// Whether its kernels are known not to reach `other`'s memory. A GPU that the process does not see is not known about;
    /// opening it will tell.
    fn cannot_reach(&self, other: &Facts) -> bool {
        self.uuid != other.uuid && self.reach.contains(&(other.uuid, false))
    }
}

/// The first edge of this rank that has no peer access, for people.
pub(super) fn hole(facts: &[Facts], rank: usize, edges: &BTreeSet<usize>) -> Option<String> {
    let peer = edges.iter().find(|&&peer| facts[rank].cannot_reach(&facts[peer]))?;
    Some(format!(
        "rank {rank} ({}, {}) has no peer access to rank {peer} ({}, {})",
        facts[rank].name, facts[rank].uuid, facts[*peer].name, facts[*peer].uuid
    ))
}

/// The lanes to try, best first.
pub(super) fn lanes(facts: &[Facts], hole: Option<&str>, pinned: Lane) -> Result<Vec<Lane>> {
    let lacks = |can: fn(&Facts) -> bool| facts.iter().position(|facts| !can(facts));
    let refuse = |why: String| {
        Err(Error::Unsupported(format!("the lane {pinned}: {why}; leave PEERLANE_LANE to auto")))
    };
    match (pinned, hole) {
        (Lane::Vmm | Lane::Ipc, Some(hole)) => refuse(hole.to_owned()),
        (Lane::Vmm, None) => match lacks(|facts| facts.vmm_fd) {
            Some(rank) => {
                refuse(format!("rank {rank}'s GPU cannot share memory as file descriptors"))
            }
            None => Ok(vec![Lane::Vmm]),
        },
        (Lane::Host, _) => match lacks(|facts| facts.maps_host_memory) {
            Some(rank) => refuse(format!("rank {rank}'s GPU cannot map host memory")),
            None => Ok(vec![Lane::Host]),
        },
        (Lane::Ipc, None) => Ok(vec![Lane::Ipc]),
        (Lane::Auto, Some(_)) => Ok(vec![Lane::Host]),
        (Lane::Auto, None) if lacks(|facts| facts.vmm_fd).is_some() => {
            Ok(vec![Lane::Ipc, Lane::Host])
        }
        (Lane::Auto, None) => Ok(vec![Lane::Vmm, Lane::Ipc, Lane::Host]),
    }
}

/// Most other GPUs that one rank's kernels touch in a schedule, over all ranks.
pub(super) fn degree(facts: &[Facts], tables: &[pl_table]) -> usize {
    let others = |rank: usize| {
        let peers = crate::comm::plans::edges(&tables[rank]);
        let gpus: BTreeSet<Uuid> = peers.iter().map(|&peer| facts[peer].uuid).collect();
        gpus.iter().filter(|uuid| **uuid != facts[rank].uuid).count()
    };
    (0..tables.len()).map(others).max().unwrap_or(0)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn facts(gpu: u8, unreachable: &[u8]) -> Facts {
        let uuid = |gpu| Uuid([gpu; 16]);
        Facts {
            uuid: uuid(gpu),
            name: "a GPU".into(),
            sm_count: 132,
            vmm_fd: true,
            maps_host_memory: true,
            process: 1,
            reach: (0..5)
                .filter(|&g| g != gpu)
                .map(|g| (uuid(g), !unreachable.contains(&g)))
                .collect(),
        }
    }

    /// Every matrix of who reaches whom, up to four GPUs: the lane is direct exactly where every edge in use is there.
    #[test]
    fn only_edges_in_use_decide() {
        for n in 2..=4u32 {
            let pairs: Vec<_> =
                (0..n).flat_map(|a| (0..n).filter(move |&b| a != b).map(move |b| (a, b))).collect();
            for bits in 0..1u32 << pairs.len() {
                let missing = |a: u32| -> Vec<u8> {
                    let of_a = pairs.iter().enumerate().filter(|(_, (from, _))| *from == a);
                    of_a.filter(|(i, _)| bits >> i & 1 == 1).map(|(_, (_, to))| *to as u8).collect()
                };
                let all: Vec<_> = (0..n).map(|a| facts(a as u8, &missing(a))).collect();
                // A ring, and all to all.
                for ring in [true, false] {
                    let used = |a: usize, b: usize| {
                        !ring || (a + 1) % n as usize == b || (b + 1) % n as usize == a
                    };
                    let holes = (0..n as usize).find_map(|rank| {
                        let edges =
                            (0..n as usize).filter(|&b| b != rank && used(rank, b)).collect();
                        hole(&all, rank, &edges)
                    });
                    let expected = pairs
                        .iter()
                        .enumerate()
                        .any(|(i, (a, b))| bits >> i & 1 == 1 && used(*a as usize, *b as usize));
                    assert_eq!(holes.is_some(), expected, "{n} {bits:b} {ring}");
                    let lanes = lanes(&all, holes.as_deref(), Lane::Auto).unwrap();
                    assert_eq!(
                        lanes.first(),
                        Some(if expected { &Lane::Host } else { &Lane::Vmm })
                    );
                }
            }
        }
    }

    #[test]
    fn a_pinned_lane_that_cannot_be_is_refused_with_the_reason() {
        let mut all = vec![facts(0, &[1]), facts(1, &[])];
        let hole = hole(&all, 0, &BTreeSet::from([1]));
        let text = lanes(&all, hole.as_deref(), Lane::Ipc).unwrap_err().to_string();
        assert!(
            text.contains("no peer access to rank 1") && text.contains("PEERLANE_LANE"),
            "{text}"
        );
        all[1].vmm_fd = false;
        assert!(lanes(&all, None, Lane::Vmm).unwrap_err().to_string().contains("rank 1"));
        assert_eq!(lanes(&all, None, Lane::Auto).unwrap(), [Lane::Ipc, Lane::Host]);
    }
}
