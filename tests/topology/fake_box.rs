//! A copy of a box's `/sys` and `/proc`, written into a directory: what a rule of `doctor` looks at, sick or healthy.

// Each test binary that includes this uses its own share of it.
#![allow(dead_code)]

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

pub struct FakeBox {
    pub root: PathBuf,
}

/// Healthy: two sockets, two switches with two GPUs each, Gen5 x16, a new driver, everything as it should be.
pub const GPUS: [(&str, u32); 4] = [
    ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0", 0),
    ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0", 0),
    ("pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:00.0/0000:83:00.0", 1),
    ("pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:01.0/0000:84:00.0", 1),
];

impl FakeBox {
    pub fn healthy(name: &str) -> Self {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("topology").join(name);
        let _ = std::fs::remove_dir_all(&root);
        let fake = FakeBox { root };
        for node in 0..2 {
            fake.put(
                &format!("sys/devices/system/node/node{node}/cpulist"),
                format!("{}-{}\n", node * 8, node * 8 + 7),
            );
            fake.put(
                &format!("sys/devices/system/cpu/cpu{}/topology/physical_package_id", node * 8),
                format!("{node}\n"),
            );
        }
        for (number, (way, node)) in GPUS.iter().enumerate() {
            fake.gpu(way, *node as i64, number);
        }
        fake.put("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (builder@secret-host)\n");
        fake.put("proc/driver/nvidia/params", "EnableMSI: 1\nRegistryDwords: \"\"\n");
        fake.put(
            "proc/cmdline",
            "BOOT_IMAGE=/vmlinuz root=UUID=0123-secret ip=10.1.2.3 iommu=pt hostname=secret-host\n",
        );
        fake.put("proc/self/status", "Name:\tcat\nNSpid:\t42\nCpus_allowed_list:\t0-15\n");
        fake.put(
            "proc/self/mountinfo",
            "30 25 0:26 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,size=65867924k,inode64\n",
        );
        fake.put(
            "proc/modules",
            "nvidia_uvm 1 0 - Live 0x0\nnvidia 2 1 - Live 0x0\nsecret_module 1 0 - Live 0x0\n",
        );
        fake.peers(|_, _| true);
        fake
    }

    pub fn put(&self, path: &str, text: impl AsRef<[u8]>) {
        let path = self.root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub fn remove(&self, path: &str) {
        std::fs::remove_file(self.root.join(path)).unwrap();
    }

    pub fn link(&self, path: &str, target: &str) {
        let path = self.root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = std::fs::remove_file(&path);
        symlink(target, path).unwrap();
    }

    /// A GPU and the bridges on its way.
    pub fn gpu(&self, way: &str, node: i64, number: usize) {
        let parts: Vec<&str> = way.split('/').collect();
        for at in 1..parts.len() {
            let directory = format!("sys/devices/{}", parts[..=at].join("/"));
            self.link(
                &format!("sys/bus/pci/devices/{}", parts[at]),
                &format!("../../../devices/{}", parts[..=at].join("/")),
            );
            for when in ["current", "max"] {
                self.put(&format!("{directory}/{when}_link_speed"), "32.0 GT/s PCIe\n");
                self.put(&format!("{directory}/{when}_link_width"), "16\n");
            }
            if at + 1 < parts.len() {
                self.put(&format!("{directory}/class"), "0x060400\n");
                self.put(&format!("{directory}/vendor"), "0x1000\n");
                self.put(&format!("{directory}/device"), "0xc030\n");
                self.put(&format!("{directory}/config"), config(Some(0)));
                continue;
            }
            self.put(&format!("{directory}/class"), "0x030200\n");
            self.put(&format!("{directory}/vendor"), "0x10de\n");
            self.put(&format!("{directory}/device"), "0x2bb5\n");
            self.put(&format!("{directory}/numa_node"), format!("{node}\n"));
            if node >= 0 {
                self.put(
                    &format!("{directory}/local_cpulist"),
                    format!("{}-{}\n", node * 8, node * 8 + 7),
                );
            }
            self.put(&format!("{directory}/resource"), "0x00000000a0000000 0x00000000a3ffffff 0x0000000000040200\n0x0000018000000000 0x0000019fffffffff 0x000000000014220c\n");
            self.link(
                &format!("{directory}/iommu_group"),
                &format!("{}kernel/iommu_groups/{number}", "../".repeat(parts.len() + 1)),
            );
            self.put(&format!("sys/kernel/iommu_groups/{number}/type"), "identity\n");
        }
    }

    /// What the driver says of peer access.
    pub fn peers(&self, reach: impl Fn(usize, usize) -> bool) {
        let gpus: Vec<String> = GPUS
            .iter()
            .map(|(way, _)| {
                format!(
                    "{{\"address\":\"{}\",\"name\":\"RTX\",\"memory_bytes\":1}}",
                    way.rsplit('/').next().unwrap()
                )
            })
            .collect();
        let rows: Vec<Vec<bool>> =
            (0..4).map(|a| (0..4).map(|b| a == b || reach(a, b)).collect()).collect();
        self.put(
            "peerlane/driver.json",
            format!("{{\"gpus\":[{}],\"peer_access\":{rows:?}}}", gpus.join(",")),
        );
    }

    pub fn path(&self) -> &str {
        self.root.to_str().unwrap()
    }
}

/// A configuration space with a serial number, and with an access control register behind it.
pub fn config(control: Option<u16>) -> Vec<u8> {
    let mut config = vec![0u8; 4096];
    config[0x100..0x104].copy_from_slice(&(0x0003u32 | 1 << 16 | 0x148 << 20).to_le_bytes());
    config[0x104..0x10c].copy_from_slice(b"SERIALNO");
    if let Some(control) = control {
        config[0x148..0x14c].copy_from_slice(&(0x000du32 | 1 << 16).to_le_bytes());
        config[0x14e..0x150].copy_from_slice(&control.to_le_bytes());
    }
    config
}
