//! hwloc's own tool draws the same tree: which GPUs hang on which bridges, root complexes and NUMA nodes.

use crate::fixture;
use crate::fixtures::{read, DESCRIBED, REAL};
use peerlane::topology::{Address, BridgeKind, Topology};

/// A GPU by its lines in lstopo's drawing: node, and how many PCI bridges are above it, outermost first, each by its line.
#[derive(Debug, PartialEq)]
struct Place {
    address: String,
    node: Option<u32>,
    host: usize,
    ports: Vec<usize>,
}

/// Ways of all 3D devices, from the drawing's indentation alone.
fn drawn(text: &str) -> Vec<Place> {
    let mut open: Vec<(usize, usize, &str)> = Vec::new();
    let mut places = Vec::new();
    // A memory node stands beside the bridges of its package.
    let mut nodes: Vec<(usize, u32)> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let indent = line.len() - line.trim_start().len();
        let line = line.trim_start();
        open.retain(|(at, ..)| *at < indent);
        nodes.retain(|(at, _)| *at <= indent);
        if let Some(rest) = line.strip_prefix("NUMANode") {
            let id = rest.split("P#").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
            nodes.retain(|(at, _)| *at < indent);
            nodes.push((indent, id));
        }
        if let Some(rest) = line.strip_prefix("PCI ").filter(|rest| rest.contains("(3D)")) {
            let lines = |kind: &str| {
                open.iter()
                    .filter(|(.., l)| l.starts_with(kind))
                    .map(|(_, n, _)| *n)
                    .collect::<Vec<_>>()
            };
            places.push(Place {
                address: format!("0000:{}", rest.split(' ').next().unwrap()),
                node: nodes.last().map(|n| n.1),
                host: lines("HostBridge")[0],
                ports: lines("PCIBridge"),
            });
        }
        open.push((indent, number, line));
    }
    places
}

/// The same from our description, with bridges numbered by itself.
fn described(t: &Topology) -> Vec<Place> {
    (0..t.gpus.len())
        .map(|gpu| {
            let mut way = t.way(gpu);
            way.reverse();
            let (hosts, ports): (Vec<usize>, Vec<usize>) =
                way.iter().partition(|b| t.bridges[**b].kind == BridgeKind::Host);
            Place {
                address: t.gpus[gpu].address.unwrap().to_string(),
                node: t.gpus[gpu].node,
                host: hosts[0],
                ports,
            }
        })
        .collect()
}

/// Numbers in the order in which they first appear, so that two numberings compare.
fn renumbered(mut places: Vec<Place>) -> Vec<Place> {
    let mut seen: Vec<(bool, usize)> = Vec::new();
    let mut number = |host: bool, old: usize| {
        let known = seen.iter().position(|s| *s == (host, old));
        known.unwrap_or_else(|| {
            seen.push((host, old));
            seen.len() - 1
        })
    };
    places.sort_by_key(|p| Address::parse(&p.address));
    for place in &mut places {
        place.host = number(true, place.host);
        place.ports.iter_mut().for_each(|p| *p = number(false, *p));
    }
    places
}

#[test]
fn lstopo_draws_the_same_tree() {
    let mut gpus = 0;
    for name in DESCRIBED.iter().chain(&REAL) {
        let text = std::fs::read_to_string(fixture(&format!("{name}.lstopo.txt"))).unwrap();
        let theirs = renumbered(drawn(&text));
        assert_eq!(renumbered(described(&read(name))), theirs, "{name}");
        gpus += theirs.len();
    }
    // A control: one GPU drawn below another switch is another tree.
    let name = "2-socket-8-gpu-4-switches";
    let text = std::fs::read_to_string(fixture(&format!("{name}.lstopo.txt"))).unwrap();
    let moved = text.replace("PCI 13:00.0", "PCI 33:00.1").replace("PCI 33:00.0", "PCI 13:00.0");
    let moved = moved.replace("PCI 33:00.1", "PCI 33:00.0");
    assert_ne!(renumbered(described(&read(name))), renumbered(drawn(&moved)));
    assert_eq!(gpus, 4 + 4 + 16 + 8 + 8 + 16);
}
