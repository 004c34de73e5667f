//! Rules about links, switches, access control, address translation and memory windows.

use super::facts::Facts;
use super::finding::{Finding, Severity};
use super::measured::DIRECT_ACCESS;
use peerlane::plan::{Fabric, NOMINAL};
use peerlane::topology::{Acs, Address, BridgeKind, Link, Rate};
use std::collections::{BTreeMap, BTreeSet};

/// Every rule of this file.
pub const RULES: &[fn(&Facts) -> Vec<Finding>] = &[
    access_control,
    access_control_unseen,
    translation,
    links,
    windows,
    unknown_nodes,
    shared_uplinks,
    collapse,
    staging,
];

/// Windows up to this are those of a firmware without large BARs.
const SMALL_WINDOW: u64 = 256 << 20;

/// Bridges between two GPUs, of which traffic between them turns around in or passes through.
fn between(facts: &Facts) -> BTreeSet<usize> {
    let t = &facts.topology;
    if t.gpus.len() < 2 {
        return BTreeSet::new();
    }
    (0..t.gpus.len())
        .flat_map(|gpu| t.way(gpu))
        .filter(|b| t.bridges[*b].kind == BridgeKind::Port)
        .collect()
}

/// Redirection on a port below which traffic could turn around: a switch's, or a root port that several GPUs hang on.
fn access_control(facts: &Facts) -> Vec<Finding> {
    let t = &facts.topology;
    let below = |bridge: usize| (0..t.gpus.len()).filter(|g| t.way(*g).contains(&bridge)).count();
    let in_switch = |bridge: usize| {
        (0..t.gpus.len())
            .any(|g| t.way(g).contains(&bridge) && t.uplink(g).is_some_and(|up| below(up) > 1))
    };
    between(facts)
        .into_iter()
        .filter(|b| in_switch(*b) && !t.bridges[*b].acs.redirects().is_empty())
        .filter_map(|b| {
            let bridge = &t.bridges[b];
            let Acs::Control(control) = bridge.acs else { return None };
            Some(Finding {
                id: "acs-redirect",
                severity: Severity::Slow,
                what: format!("bridge {} sends traffic between GPUs up to the root complex", bridge.name),
                evidence: format!(
                    "{}: ACS control {control:#06x} ({})",
                    config_of(facts, &bridge.name), bridge.acs.redirects().join(", ")
                ),
                cost: "traffic between GPUs of one switch halves (50 instead of 103 GB/s were measured), and with address translation it may hang".into(),
                fix: format!(
                    "setpci -s {} ECAP_ACS+0x6.w={:#06x} as root, at every boot; or switch ACS off in the firmware",
                    bridge.name, control & !0x1c
                ),
            })
        })
        .collect()
}

fn config_of(facts: &Facts, name: &str) -> String {
    let directory = Address::parse(name).and_then(|a| facts.directory(a));
    facts.files.name(&format!(
        "{}/config",
        directory.unwrap_or_else(|| format!("sys/bus/pci/devices/{name}"))
    ))
}

fn access_control_unseen(facts: &Facts) -> Vec<Finding> {
    let t = &facts.topology;
    let hidden: Vec<&str> = between(facts)
        .into_iter()
        .filter(|b| t.bridges[*b].acs == Acs::Unknown)
        .map(|b| t.bridges[b].name.as_str())
        .collect();
    let Some(first) = hidden.first() else { return Vec::new() };
    vec![Finding {
        id: "acs-unseen",
        severity: Severity::Note,
        what: format!("access control of {} bridge(s) cannot be seen", hidden.len()),
        evidence: format!("{} shows no more than 64 bytes", config_of(facts, first)),
        cost: "a redirect there, which halves the traffic of a switch, would go unnoticed".into(),
        fix: "run peerlane doctor as root".into(),
    }]
}

/// Translated addresses: peers' stores then go through the IOMMU, if they arrive at all.
fn translation(facts: &Facts) -> Vec<Finding> {
    if facts.topology.gpus.len() < 2 {
        return Vec::new();
    }
    let mut seen = Vec::new();
    for address in facts.topology.gpus.iter().filter_map(|gpu| gpu.address) {
        let Some(directory) = facts.directory(address) else { continue };
        let Some(group) = facts.files.link(&format!("{directory}/iommu_group")) else { continue };
        let group = group.rsplit('/').next().unwrap_or("").to_owned();
        let path = format!("sys/kernel/iommu_groups/{group}/type");
        if let Some(mode) = facts.text(&path).filter(|mode| mode.starts_with("DMA")) {
            seen.push(format!("{} = {mode} ({address})", facts.files.name(&path)));
        }
    }
    let Some(first) = seen.first() else { return Vec::new() };
    let cmdline = facts.text("proc/cmdline").unwrap_or_default();
    let iommu: Vec<&str> = cmdline.split_whitespace().filter(|w| w.contains("iommu")).collect();
    let boot = match iommu.is_empty() {
        true => "the kernel's command line does not say".to_owned(),
        false => format!("the kernel's command line says {}", iommu.join(" ")),
    };
    vec![Finding {
        id: "iommu-translated",
        severity: Severity::Wrong,
        what: format!("the IOMMU translates the addresses of {} GPU(s)", seen.len()),
        evidence: format!("{first}; {boot}"),
        cost: "stores between GPUs hang, arrive as zeros or crawl".into(),
        fix: "boot with iommu=pt, or switch the IOMMU off in the firmware".into(),
    }]
}

fn links(facts: &Facts) -> Vec<Finding> {
    let t = &facts.topology;
    let mut findings = Vec::new();
    let gpus = t.gpus.iter().filter_map(|gpu| {
        let port = gpu.parent.map(|b| t.bridges[b].link.best);
        Some((gpu.address?.to_string(), "GPU", gpu.link, port.flatten()))
    });
    // An upstream port of a switch; its downstream ports are their GPUs' other end, and a root port its own.
    let upstream = between(facts).into_iter().filter(|b| {
        let parent = t.bridges[*b].parent.map(|p| t.bridges[p].kind);
        let children = t.bridges.iter().filter(|c| c.parent == Some(*b)).count();
        parent == Some(BridgeKind::Port) && children > 0
    });
    let switches = upstream.map(|b| {
        let port = t.bridges[b].parent.and_then(|p| t.bridges[p].link.best);
        (t.bridges[b].name.clone(), "switch", t.bridges[b].link, port)
    });
    for (name, what, link, port) in gpus.chain(switches).collect::<Vec<_>>() {
        findings.extend(link_finding(facts, &name, what, link, port));
    }
    findings
}

fn link_finding(
    facts: &Facts,
    name: &str,
    what: &str,
    link: Link,
    port: Option<Rate>,
) -> Option<Finding> {
    let (now, best) = (link.now?, link.best?);
    let (generation, width) = (now.generation?, now.width?);
    let narrow = width < best.width?;
    let old = generation < best.generation?;
    // A GPU without work trains its link down to the first generation; that is no fault.
    let idle = generation == 1 && !narrow && what == "GPU";
    if !narrow && !old {
        return None;
    }
    let directory = Address::parse(name).and_then(|a| facts.directory(a)).unwrap_or_default();
    let speed = format!("{directory}/current_link_speed");
    let slot = port.filter(|p| p.gb_per_s < best.gb_per_s && !idle);
    Some(Finding {
        id: if idle { "link-idle" } else if narrow { "link-width" } else { "link-generation" },
        severity: if idle { Severity::Note } else { Severity::Slow },
        what: format!("the link of {what} {name} runs as {now}, its best is {best}"),
        evidence: format!(
            "{} = {}, current_link_width = {width}",
            facts.files.name(&speed),
            facts.text(&speed).unwrap_or_default()
        ),
        cost: match idle {
            true => "none if the GPU is idle: it lowers its generation until it has work".into(),
            false => format!("{:.0} of {:.0} GB/s for everything this {what} sends", now.gb_per_s, best.gb_per_s),
        },
        fix: match (idle, slot) {
            (true, _) => "look again while the GPU works".into(),
            (_, Some(port)) => format!("its port does no more than {port}: use another slot, or other bifurcation in the firmware"),
            _ => "reseat it or its riser, shorten the cable, set the slot's generation and bifurcation in the firmware; then look again under load".into(),
        },
    })
}

fn windows(facts: &Facts) -> Vec<Finding> {
    let small: Vec<_> =
        facts.topology.gpus.iter().filter(|g| g.bar1.is_some_and(|b| b <= SMALL_WINDOW)).collect();
    let Some(gpu) = small.first().filter(|_| facts.topology.gpus.len() > 1) else {
        return Vec::new();
    };
    let Some((address, bar1)) = gpu.address.zip(gpu.bar1) else { return Vec::new() };
    let directory = facts.directory(address).unwrap_or_default();
    vec![Finding {
        id: "bar1-small",
        severity: Severity::Slow,
        what: format!("{} GPU(s) show peers no more than {} MiB of their memory at a time", small.len(), bar1 >> 20),
        evidence: format!("{}, line 2: {} MiB ({address})", facts.files.name(&format!("{directory}/resource")), bar1 >> 20),
        cost: "slabs of several communicators may not fit, and then travel through host memory".into(),
        fix: "switch on Above 4G Decoding and Resizable BAR in the firmware, and NVreg_EnableResizableBar=1 for GeForce".into(),
    }]
}

fn unknown_nodes(facts: &Facts) -> Vec<Finding> {
    let t = &facts.topology;
    let lost: Vec<String> = t
        .gpus
        .iter()
        .filter(|g| g.node.is_none())
        .filter_map(|g| g.address)
        .map(|a| a.to_string())
        .collect();
    let Some(first) = lost.first().filter(|_| t.nodes.len() > 1 && t.gpus.len() > 1) else {
        return Vec::new();
    };
    let directory = Address::parse(first).and_then(|a| facts.directory(a)).unwrap_or_default();
    vec![Finding {
        id: "numa-unknown",
        severity: Severity::Slow,
        what: format!("the firmware does not say which NUMA node {} GPU(s) belong to", lost.len()),
        evidence: format!("{} = -1, and the box has {} nodes", facts.files.name(&format!("{directory}/numa_node")), t.nodes.len()),
        cost: "islands are not found, so that every schedule crosses between sockets more than it must".into(),
        fix: "update the firmware; until then set PEERLANE_ISLANDS, or describe the box with PEERLANE_TOPOLOGY".into(),
    }]
}

fn shared_uplinks(facts: &Facts) -> Vec<Finding> {
    let t = &facts.topology;
    let mut below: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for gpu in 0..t.gpus.len() {
        if let Some(port) = t.uplink(gpu) {
            below.entry(port).or_default().push(gpu);
        }
    }
    let shared: Vec<_> = below.into_iter().filter(|(_, gpus)| gpus.len() > 1).collect();
    let elsewhere = shared.iter().any(|(_, gpus)| gpus.len() < t.gpus.len());
    let Some((port, gpus)) = shared.first().filter(|_| elsewhere) else { return Vec::new() };
    let each = gpus.len();
    vec![Finding {
        id: "shared-uplink",
        severity: Severity::Note,
        what: format!("{} uplink(s) are shared by several GPUs", shared.len()),
        evidence: format!("{each} GPUs hang on {}", t.bridges[*port].name),
        cost: format!(
            "where all of them send beyond their switch at once, each gets 1/{each} of the uplink"
        ),
        fix: "none needed: islands follow the switches or sockets, and bytes cross once".into(),
    }]
}

fn collapse(facts: &Facts) -> Vec<Finding> {
    let ranks: Vec<usize> = (0..facts.topology.gpus.len()).collect();
    let fabric = Fabric::new(&facts.topology, &ranks, &NOMINAL);
    if !fabric.collapse_prone {
        return Vec::new();
    }
    let roots: BTreeSet<usize> = fabric.seats.iter().map(|s| s.root).collect();
    vec![Finding {
        id: "collapse-possible",
        severity: Severity::Note,
        what: "stores that fan out across switches may collapse (possible, not measured)".into(),
        evidence: format!(
            "several GPUs share an uplink, and the GPUs hang on {} root complexes",
            roots.len()
        ),
        cost: format!(
            "down to {} GB/s of {:.0} on some platforms, unharmed on others",
            NOMINAL.collapsed, fabric.seats[0].link
        ),
        fix: "none needed: pairwise and staged are preferred here, which open one stream per GPU"
            .into(),
    }]
}

/// Without a switch the driver may stage peers' accesses in system memory and still call them direct.
fn staging(facts: &Facts) -> Vec<Finding> {
    let t = &facts.topology;
    let direct = (0..t.gpus.len()).all(|g| t.way(g).len() <= 2) && t.gpus.len() > 1;
    let forced = facts.text("proc/driver/nvidia/params").is_some_and(|p| p.contains("ForceP2P"));
    if !direct || forced || facts.driver_version.is_none() {
        return Vec::new();
    }
    vec![Finding {
        id: "staging-possible",
        severity: Severity::Note,
        what: "the driver may stage stores between GPUs in system memory (possible, not measured)".into(),
        evidence: format!("every GPU hangs on a root port of its own, and {} does not force peer-to-peer", facts.files.name("proc/driver/nvidia/params")),
        cost: "114 KB took 242 us instead of 17 on such a box; the driver reports peer access either way".into(),
        fix: format!("measure with `peerlane doctor --live`; if it is slow, {DIRECT_ACCESS}"),
    }]
}
