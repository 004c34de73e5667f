//! The box that `explain` and `doctor` look at, and how it is drawn.

use anyhow::{anyhow, bail, Context, Result};
use peerlane::topology::{self, BridgeKind, Entry, Files, Topology};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::path::Path;

/// Longest capture that is read.
const MOST_CAPTURE: u64 = 64 << 20;

/// What stands for `/`: a directory, or a capture made by `doctor --capture`, which is read without unpacking it.
pub fn root(path: &Path) -> Result<Files> {
    let name = path.display().to_string();
    let files = match std::fs::metadata(path).with_context(|| name.clone())?.is_dir() {
        true => Files::directory(path),
        false => {
            let bytes = topology::read_file(path, MOST_CAPTURE)?;
            // The archive's own words quote the bytes that it stumbled over.
            capture(&bytes, path).map_err(|_| {
                anyhow!("{name}: neither a directory nor a capture of `peerlane doctor --capture`")
            })?
        }
    };
    // A mistyped name must not pass for a box without GPUs.
    if files.try_list("sys")?.is_empty() {
        bail!("{name}: there is no sys in it; it should hold a copy of /sys, as `peerlane doctor --capture` makes one");
    }
    Ok(files)
}

/// Writes to standard output. A reader that has seen enough, such as `head`, is no error.
pub fn say(text: &str) -> Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("standard output"),
    }
}

fn capture(bytes: &[u8], path: &Path) -> Result<Files> {
    let mut entries = BTreeMap::new();
    for entry in tar::Archive::new(bytes).entries()? {
        let mut entry = entry?;
        let name = entry.path()?.to_string_lossy().trim_start_matches("./").to_owned();
        let held = match entry.link_name()? {
            Some(target) => Entry::Link(target.to_string_lossy().into_owned()),
            None => {
                let mut held = Vec::new();
                entry.by_ref().take(1 << 20).read_to_end(&mut held)?;
                Entry::File(held)
            }
        };
        entries.insert(name, held);
    }
    if entries.is_empty() {
        bail!("the archive is empty");
    }
    Ok(Files::memory(&path.display().to_string(), entries))
}

/// Describes `path`: hwloc XML, the text of `nvidia-smi topo -m`, a directory that stands for `/`, or a capture. Without
/// one, this box.
pub fn describe(path: Option<&Path>) -> Result<Topology> {
    let Some(path) = path else { return Ok(topology::from_sysfs(&Files::directory("/"))?) };
    if path.extension().is_some_and(|e| e == "tar") {
        return Ok(topology::from_sysfs(&root(path)?)?);
    }
    Ok(topology::from_path(path)?)
}

/// The tree from sockets to GPUs; `gpu_of[r]` is the GPU of rank `r`.
pub fn draw(topology: &Topology, gpu_of: &[usize]) -> String {
    let mut text = String::new();
    let mut sides: Vec<(Option<u32>, Option<u32>)> =
        topology.gpus.iter().map(|gpu| (gpu.socket, gpu.node)).collect();
    sides.sort();
    sides.dedup();
    for (socket, node) in sides {
        let socket_text = socket.map_or(String::new(), |s| format!("socket {s}, "));
        let cpus = topology.nodes.iter().find(|n| Some(n.id) == node && !n.cpus.is_empty());
        let cpus = cpus.map_or(String::new(), |n| format!(" (CPUs {})", n.cpus));
        let node_text = node.map_or("NUMA node unknown".into(), |n| format!("NUMA node {n}"));
        text.push_str(&format!("{socket_text}{node_text}{cpus}\n"));
        let here: Vec<usize> = (0..topology.gpus.len())
            .filter(|g| (topology.gpus[*g].socket, topology.gpus[*g].node) == (socket, node))
            .collect();
        branch(topology, gpu_of, &here, None, "", &mut text);
    }
    text
}

/// What hangs below `above`, of the GPUs `here`.
fn branch(
    topology: &Topology,
    gpu_of: &[usize],
    here: &[usize],
    above: Option<usize>,
    indent: &str,
    text: &mut String,
) {
    enum Item {
        Bridge(usize),
        Gpu(usize),
    }
    let mut items: Vec<Item> = Vec::new();
    for &gpu in here {
        let way = topology.way(gpu);
        let below = match above {
            None => way.last().copied(),
            Some(above) => {
                let at = way.iter().position(|b| *b == above);
                match at {
                    Some(0) | None => None,
                    Some(at) => Some(way[at - 1]),
                }
            }
        };
        let belongs = above.is_none() || way.contains(&above.unwrap_or(0));
        match below {
            _ if !belongs => {}
            Some(bridge) if items.iter().any(|i| matches!(i, Item::Bridge(b) if *b == bridge)) => {}
            Some(bridge) => items.push(Item::Bridge(bridge)),
            None => items.push(Item::Gpu(gpu)),
        }
    }
    let count = items.len();
    for (at, item) in items.into_iter().enumerate() {
        let last = at + 1 == count;
        let (fork, next) = if last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        match item {
            Item::Bridge(b) => {
                let bridge = &topology.bridges[b];
                let what = match (bridge.kind, bridge.link.now.or(bridge.link.best)) {
                    (BridgeKind::Host, _) => String::new(),
                    (_, Some(rate)) => format!(", {rate}"),
                    _ => String::new(),
                };
                text.push_str(&format!("{indent}{fork}{}{what}\n", bridge.name));
                branch(topology, gpu_of, here, Some(b), &format!("{indent}{next}"), text);
            }
            Item::Gpu(g) => {
                let gpu = &topology.gpus[g];
                let address = gpu.address.map_or(String::new(), |a| format!(" {a}"));
                let rate =
                    gpu.link.now.or(gpu.link.best).map_or(String::new(), |r| format!(", {r}"));
                let name = match gpu.name == format!("GPU{g}") {
                    true => String::new(),
                    false => format!(" {}", gpu.name),
                };
                let ranks: Vec<String> =
                    (0..gpu_of.len()).filter(|r| gpu_of[*r] == g).map(|r| r.to_string()).collect();
                let ranks = match ranks.len() {
                    0 => String::new(),
                    1 => format!(": rank {}", ranks[0]),
                    _ => format!(": ranks {}", ranks.join(", ")),
                };
                text.push_str(&format!("{indent}{fork}GPU{g}{address}{name}{rate}{ranks}\n"));
            }
        }
    }
}
