//! Rules about the driver, peer access, CPUs, containers and NCCL's settings.

use super::facts::Facts;
use super::finding::{Finding, Severity};
use std::collections::BTreeSet;

/// Every rule of this file.
pub const RULES: &[fn(&Facts) -> Vec<Finding>] = &[
    no_gpu,
    no_driver,
    old_driver,
    no_peer_access,
    slices,
    far_cpus,
    shared_memory,
    namespaces,
    nccl,
    peer_memory,
];

/// The oldest driver for kernels that CUDA 13 has compiled, and for those of CUDA 12.
const OLDEST_DRIVER: [(u32, u32); 2] = [(13, 580), (12, 525)];
/// What Docker gives a container that asks for nothing.
const SMALL_SHM: u64 = 64 << 20;

fn no_gpu(facts: &Facts) -> Vec<Finding> {
    if !facts.topology.gpus.is_empty() {
        return Vec::new();
    }
    vec![Finding {
        id: "no-gpu",
        severity: Severity::Note,
        what: "this box shows no NVIDIA GPU".into(),
        evidence: format!("no NVIDIA display device in {}", facts.files.name("sys/bus/pci/devices")),
        cost: "peerlane serves the CPU device alone".into(),
        fix: "none if that is meant; else look whether the GPU is seated and passed through (`lspci -d 10de:`)".into(),
    }]
}

fn no_driver(facts: &Facts) -> Vec<Finding> {
    if facts.topology.gpus.is_empty() {
        return Vec::new();
    }
    let asked = facts.driver.as_ref().map(|d| d.error.as_str()).filter(|e| !e.is_empty());
    let evidence = match (asked, &facts.driver_version) {
        (Some(error), _) => error.to_owned(),
        (None, None) => format!("{} is not there", facts.files.name("proc/driver/nvidia/version")),
        (None, Some(_)) => return Vec::new(),
    };
    vec![Finding {
        id: "no-cuda",
        severity: Severity::Wrong,
        what: "the GPUs cannot be used: no working NVIDIA driver".into(),
        evidence,
        cost: "only the CPU device runs".into(),
        fix: "install the driver and load it (`modprobe nvidia nvidia_uvm`); in a container, run with `--gpus all`".into(),
    }]
}

fn old_driver(facts: &Facts) -> Vec<Finding> {
    let Some(version) = facts.driver_version.as_deref().filter(|_| !facts.topology.gpus.is_empty())
    else {
        return Vec::new();
    };
    // A fatbin that was made elsewhere does not say by which compiler; the pinned one is of CUDA 13.
    let compiler = option_env!("PEERLANE_NVCC_VERSION")
        .and_then(|v| v.split('.').next()?.parse().ok())
        .filter(|v| *v > 0)
        .unwrap_or(13u32);
    let oldest =
        OLDEST_DRIVER.iter().find(|(cuda, _)| compiler >= *cuda).map_or(525, |(_, driver)| *driver);
    let major: u32 = version.split('.').next().and_then(|m| m.parse().ok()).unwrap_or(u32::MAX);
    if major >= oldest {
        return Vec::new();
    }
    vec![Finding {
        id: "driver-old",
        severity: Severity::Wrong,
        what: format!("the driver is older than the kernels, which CUDA {compiler} compiled"),
        evidence: format!(
            "{}: {version}, needed is {oldest}",
            facts.files.name("proc/driver/nvidia/version")
        ),
        cost: "kernels do not load, so no communicator on GPUs can be made".into(),
        fix: format!("install driver {oldest} or newer, or build peerlane with an older nvcc"),
    }]
}

fn no_peer_access(facts: &Facts) -> Vec<Finding> {
    let Some(matrix) = &facts.topology.peer_access else { return Vec::new() };
    let pairs: Vec<(usize, usize)> = (0..matrix.len())
        .flat_map(|a| (0..matrix.len()).map(move |b| (a, b)))
        .filter(|(a, b)| a != b && !matrix[*a][*b])
        .collect();
    let Some((a, b)) = pairs.first() else { return Vec::new() };
    vec![Finding {
        id: "no-peer-access",
        severity: Severity::Slow,
        what: format!("{} of {} ordered pairs of GPUs cannot reach each other's memory", pairs.len(), matrix.len() * (matrix.len() - 1)),
        evidence: format!("cuDeviceCanAccessPeer says no for GPU{a} to GPU{b}, {} apart", facts.topology.class(*a, *b)),
        cost: "messages are staged in pinned host memory: every byte crosses PCIe twice".into(),
        fix: "GeForce cards need a driver that allows peer-to-peer; on others look at the IOMMU, at NVreg_RegistryDwords and at `nvidia-smi topo -p2p rw`".into(),
    }]
}

fn slices(facts: &Facts) -> Vec<Finding> {
    let Some(gpu) = facts.driver.iter().flat_map(|d| &d.gpus).find(|gpu| gpu.mig) else {
        return Vec::new();
    };
    vec![Finding {
        id: "mig",
        severity: Severity::Slow,
        what: "a GPU is cut into MIG slices".into(),
        evidence: format!("the driver says so of {}", gpu.address),
        cost: "slices have no peer access to other GPUs, so messages are staged in host memory"
            .into(),
        fix: "switch MIG off (`nvidia-smi -mig 0`), or use ranks on whole GPUs".into(),
    }]
}

/// `0-3,8` as a set; what is no list is empty.
fn cpu_set(list: &str) -> BTreeSet<u32> {
    list.trim()
        .split(',')
        .filter_map(|part| match part.split_once('-') {
            Some((a, b)) => Some((a.parse().ok()?, b.parse::<u32>().ok()?)),
            None => part.parse().ok().map(|one| (one, one)),
        })
        .flat_map(|(a, b)| a..=b.min(a.saturating_add(1 << 16)))
        .collect()
}

/// GPUs none of whose near CPUs this process may use.
fn far_cpus(facts: &Facts) -> Vec<Finding> {
    let status = facts.text("proc/self/status").unwrap_or_default();
    let Some(list) = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")) else {
        return Vec::new();
    };
    let allowed = cpu_set(list);
    let far: Vec<_> = facts
        .topology
        .gpus
        .iter()
        .filter(|gpu| !gpu.cpus.is_empty() && !allowed.is_empty())
        .filter(|gpu| cpu_set(&gpu.cpus).is_disjoint(&allowed))
        .collect();
    let Some(gpu) = far.first() else { return Vec::new() };
    vec![Finding {
        id: "cpu-far",
        severity: Severity::Slow,
        what: format!("{} GPU(s) are far from every CPU that this process may use", far.len()),
        evidence: format!(
            "{}: Cpus_allowed_list {}; {} is near CPUs {}",
            facts.files.name("proc/self/status"),
            list.trim(),
            gpu.address.map_or(String::new(), |a| a.to_string()),
            gpu.cpus
        ),
        cost: "launches, and messages staged in host memory, cross between sockets".into(),
        fix: format!(
            "give the process or container CPUs near its GPUs: taskset -c {}, or --cpuset-cpus",
            gpu.cpus
        ),
    }]
}

fn shared_memory(facts: &Facts) -> Vec<Finding> {
    let mounts = facts.text("proc/self/mountinfo").unwrap_or_default();
    // "... /dev/shm rw - tmpfs shm rw,size=65536k"
    let Some(line) = mounts.lines().find(|l| l.split_whitespace().nth(4) == Some("/dev/shm"))
    else {
        return Vec::new();
    };
    let size = line
        .split([',', ' '])
        .filter_map(|word| word.strip_prefix("size=")?.strip_suffix('k'))
        .next_back()
        .and_then(|kib| kib.parse::<u64>().ok())
        .and_then(|kib| kib.checked_mul(1024));
    let Some(size) = size.filter(|size| *size <= SMALL_SHM && facts.topology.gpus.len() > 1) else {
        return Vec::new();
    };
    vec![Finding {
        id: "shm-small",
        severity: Severity::Slow,
        what: format!("/dev/shm holds {} MiB", size >> 20),
        evidence: format!("{}: size={}k", facts.files.name("proc/self/mountinfo"), size >> 10),
        cost: "peerlane does not use it, but NCCL, which serves what peerlane forwards, fails or falls back to sockets".into(),
        fix: "run the container with --shm-size=16g or --ipc=host".into(),
    }]
}

fn namespaces(facts: &Facts) -> Vec<Finding> {
    let status = facts.text("proc/self/status").unwrap_or_default();
    let Some(ids) = status.lines().find_map(|l| l.strip_prefix("NSpid:")) else {
        return Vec::new();
    };
    if ids.split_whitespace().count() < 2 {
        return Vec::new();
    }
    vec![Finding {
        id: "pid-namespace",
        severity: Severity::Note,
        what: "this process lives in a PID namespace of its own, as in a container".into(),
        evidence: format!("{}: NSpid:{ids}", facts.files.name("proc/self/status")),
        cost: "ranks in different containers find each other only where they share the directory in which they meet".into(),
        fix: "for one rank per container: mount one directory into all, name it in PEERLANE_RUN_DIR, and use one user".into(),
    }]
}

fn nccl(facts: &Facts) -> Vec<Finding> {
    let gpus = facts.topology.gpus.len();
    let mut findings = Vec::new();
    let mut add = |id, severity, name: &str, value: &str, what: &str, cost: &str, fix: &str| {
        findings.push(Finding {
            id,
            severity,
            what: what.into(),
            evidence: format!("{name}={value}"),
            cost: cost.into(),
            fix: fix.into(),
        });
    };
    for (name, value) in &facts.nccl {
        let upper = value.to_uppercase();
        match name.as_str() {
            "NCCL_P2P_DISABLE" if value != "0" => add("nccl-p2p", Severity::Slow, name, value, "NCCL may not use peer-to-peer", "what is forwarded to NCCL goes through host memory", "unset NCCL_P2P_DISABLE"),
            "NCCL_P2P_LEVEL" if gpus > 1 && ["LOC", "NVL", "PIX", "0", "1"].contains(&upper.as_str()) => add("nccl-p2p-level", Severity::Slow, name, value, "NCCL uses peer-to-peer only between GPUs of one switch", "what is forwarded to NCCL and crosses switches or sockets goes through host memory", "set NCCL_P2P_LEVEL=SYS if peer access works between sockets"),
            "NCCL_PROTO" if upper.split(',').any(|p| p == "LL128") && !upper.starts_with('^') => add("nccl-ll128", Severity::Wrong, name, value, "NCCL is made to use LL128 over PCIe", "LL128 needs 128-byte stores to arrive whole; PCIe does not promise that, and NCCL's documentation warns of corrupted data", "unset NCCL_PROTO, or set it to LL,Simple"),
            "NCCL_PROTO" if upper == "SIMPLE" => add("nccl-proto", Severity::Slow, name, value, "NCCL may use its bulk protocol alone", "small messages that are forwarded take several times longer", "unset NCCL_PROTO"),
            "NCCL_ALGO" if upper == "TREE" => add("nccl-tree", Severity::Slow, name, value, "NCCL is made to use trees", "inside one box, and in captured graphs, rings are faster", "unset NCCL_ALGO"),
            "NCCL_SHM_DISABLE" if value != "0" => add("nccl-shm", Severity::Slow, name, value, "NCCL may not use shared memory", "pairs without peer-to-peer go through network sockets", "unset NCCL_SHM_DISABLE"),
            _ => {}
        }
    }
    findings
}

/// Only where there is an InfiniBand adapter, for which it is.
fn peer_memory(facts: &Facts) -> Vec<Finding> {
    let adapters = facts.files.list("sys/class/infiniband");
    let modules = facts.text("proc/modules").unwrap_or_default();
    let loaded = modules.lines().any(|l| l.split_whitespace().next() == Some("nvidia_peermem"));
    let Some(first) = adapters.first().filter(|_| !loaded && !facts.topology.gpus.is_empty())
    else {
        return Vec::new();
    };
    vec![Finding {
        id: "no-peermem",
        severity: Severity::Note,
        what: "network adapters have no direct way to GPU memory".into(),
        evidence: format!("{} is there, and {} has no nvidia_peermem", facts.files.name(&format!("sys/class/infiniband/{first}")), facts.files.name("proc/modules")),
        cost: "none inside this box; NCCL between boxes stages in host memory, unless the kernel offers dma-buf".into(),
        fix: "modprobe nvidia_peermem, if boxes are to talk to each other".into(),
    }]
}

#[cfg(test)]
mod tests {
    use super::cpu_set;

    #[test]
    fn lists_of_cpus_are_sets() {
        assert_eq!(cpu_set("0-2,5\n").into_iter().collect::<Vec<_>>(), [0, 1, 2, 5]);
        assert!(cpu_set("").is_empty() && cpu_set("x-y").is_empty());
        assert!(cpu_set("0-4294967295").len() <= (1 << 16) + 1);
    }
}
