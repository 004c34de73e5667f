//! A capture: what the rules read and nothing else. Every file is written anew from what was understood of it, so that serial
//! numbers, host names and addresses that stand beside it do not travel along.

use super::facts::{Facts, DRIVER, NCCL};
use anyhow::{Context, Result};
use peerlane::topology::{Address, BridgeKind};
use std::collections::BTreeMap;

/// Words of the kernel's command line that bear on the fabric begin with these.
const BOOT_WORDS: [&str; 6] = ["iommu", "intel_iommu", "amd_iommu", "pci", "pcie_", "nvidia"];
/// Attributes that are copied as they are: numbers and words from a fixed set.
const ATTRIBUTES: [&str; 9] = [
    "class",
    "vendor",
    "device",
    "numa_node",
    "local_cpulist",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
];

enum Kept {
    File(Vec<u8>),
    Link(String),
}

/// The archive.
pub fn archive(facts: &Facts) -> Result<Vec<u8>> {
    let mut kept: BTreeMap<String, Kept> = BTreeMap::new();
    devices(facts, &mut kept);
    nodes(facts, &mut kept);
    system(facts, &mut kept);
    if let Some(driver) = &facts.driver {
        kept.insert(DRIVER.into(), Kept::File(serde_json::to_vec_pretty(driver)?));
    }
    let nccl: String = facts.nccl.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
    kept.insert(NCCL.into(), Kept::File(nccl.into_bytes()));
    let mut archive = tar::Builder::new(Vec::new());
    for (path, kept) in kept {
        // Owner, times and rights are the same for all: nobody's.
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        match kept {
            Kept::File(bytes) => {
                header.set_size(bytes.len() as u64);
                archive.append_data(&mut header, &path, bytes.as_slice())
            }
            Kept::Link(target) => {
                header.set_entry_type(tar::EntryType::Symlink);
                header.set_size(0);
                archive.append_link(&mut header, &path, &target)
            }
        }
        .with_context(|| format!("--capture: {path}"))?;
    }
    Ok(archive.into_inner()?)
}

fn copy(facts: &Facts, kept: &mut BTreeMap<String, Kept>, path: &str) {
    if let Some(text) = facts.text(path) {
        kept.insert(path.into(), Kept::File(format!("{text}\n").into_bytes()));
    }
}

fn devices(facts: &Facts, kept: &mut BTreeMap<String, Kept>) {
    let t = &facts.topology;
    let gpus = t.gpus.iter().filter_map(|gpu| Some((gpu.address?, gpu.bar1, None)));
    let ports = t.bridges.iter().filter(|b| b.kind == BridgeKind::Port);
    let ports = ports.filter_map(|b| Some((Address::parse(&b.name)?, None, Some(b.acs))));
    for (address, bar1, acs) in gpus.chain(ports) {
        let link = format!("sys/bus/pci/devices/{address}");
        let (Some(target), Some(directory)) = (facts.files.link(&link), facts.directory(address))
        else {
            continue;
        };
        kept.insert(link, Kept::Link(target));
        for name in ATTRIBUTES {
            copy(facts, kept, &format!("{directory}/{name}"));
        }
        if let Some(bytes) = bar1 {
            // Sizes, not addresses.
            let text = format!(
                "0x0 0x0 0x0\n{:#018x} {:#018x} 0x0\n",
                1u64 << 40,
                (1u64 << 40) + (bytes - 1)
            );
            kept.insert(format!("{directory}/resource"), Kept::File(text.into_bytes()));
        }
        if let Some(acs) = acs {
            kept.insert(format!("{directory}/config"), Kept::File(acs.to_config()));
        }
        if let Some(group) = facts.files.link(&format!("{directory}/iommu_group")) {
            let number = group.rsplit('/').next().unwrap_or("").to_owned();
            copy(facts, kept, &format!("sys/kernel/iommu_groups/{number}/type"));
            kept.insert(format!("{directory}/iommu_group"), Kept::Link(group));
        }
    }
}

fn nodes(facts: &Facts, kept: &mut BTreeMap<String, Kept>) {
    for node in &facts.topology.nodes {
        copy(facts, kept, &format!("sys/devices/system/node/node{}/cpulist", node.id));
        let first: String = node.cpus.chars().take_while(char::is_ascii_digit).collect();
        copy(
            facts,
            kept,
            &format!("sys/devices/system/cpu/cpu{first}/topology/physical_package_id"),
        );
    }
}

fn system(facts: &Facts, kept: &mut BTreeMap<String, Kept>) {
    let mut lines = |path: &str, of: &dyn Fn(&str) -> String| {
        if let Some(text) = facts.text(path) {
            kept.insert(path.into(), Kept::File(of(&text).into_bytes()));
        }
    };
    let only = |starts: &'static [&'static str]| {
        move |text: &str| -> String {
            text.lines()
                .filter(|l| starts.iter().any(|s| l.starts_with(s)))
                .map(|l| format!("{l}\n"))
                .collect()
        }
    };
    lines("proc/cmdline", &|text| {
        let words: Vec<&str> = text
            .split_whitespace()
            .filter(|w| BOOT_WORDS.iter().any(|b| w.starts_with(b)))
            .collect();
        format!("{}\n", words.join(" "))
    });
    lines("proc/self/status", &only(&["Cpus_allowed_list:", "NSpid:"]));
    lines("proc/driver/nvidia/params", &only(&["RegistryDwords:"]));
    lines("proc/modules", &|text| {
        let names = text
            .lines()
            .filter_map(|l| l.split_whitespace().next())
            .filter(|n| n.starts_with("nvidia"));
        names.map(|n| format!("{n}\n")).collect()
    });
    lines("proc/self/mountinfo", &|text| {
        let shm = text.lines().find(|l| l.split_whitespace().nth(4) == Some("/dev/shm"));
        let size = shm.and_then(|l| l.split([',', ' ']).rfind(|w| w.starts_with("size=")));
        size.map_or(String::new(), |size| format!("1 1 0:1 / /dev/shm rw - tmpfs shm rw,{size}\n"))
    });
    if let Some(version) = &facts.driver_version {
        let text = format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}\n");
        kept.insert("proc/driver/nvidia/version".into(), Kept::File(text.into_bytes()));
    }
    for adapter in facts.files.list("sys/class/infiniband") {
        // Adapters are numbered; their names say nothing else.
        kept.insert(format!("sys/class/infiniband/{adapter}/present"), Kept::File(Vec::new()));
    }
}
