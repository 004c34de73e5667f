//! The kernel's own description: `/sys`, or a copy of it below any root.
//!
//! A device's place in the PCIe tree is the path that the link `/sys/bus/pci/devices/ADDRESS` points to; nothing else is
//! needed, no library and no tool. Containers usually show the host's tree, so that GPUs which this process may not use
//! are described too, and ranks in several containers see the same.

use super::files::{printable, Files};
use super::model::*;
use super::{mistake, Acs, Address, Link, Rate, MAX_DEPTH, MAX_GPUS};
use crate::error::{Error, Result};
use std::collections::BTreeMap;

const DEVICES: &str = "sys/bus/pci/devices";
const NODES: &str = "sys/devices/system/node";
const NVIDIA: u16 = 0x10de;

/// Reads the box that `files` shows. No PCI bus and no GPU are answers with a note.
///
/// # Errors
/// [`Error::InvalidArgument`] with the file where it is not what the kernel writes.
pub fn from_sysfs(files: &Files) -> Result<Topology> {
    let mut reader = Reader {
        files,
        topology: Topology { source: files.name("sys"), ..Topology::default() },
        bridge_at: BTreeMap::new(),
    };
    reader.nodes()?;
    let names = files.try_list(DEVICES)?;
    if names.is_empty() {
        reader.topology.notes.push(format!("no PCI bus: {} is empty", files.name(DEVICES)));
    }
    let mut others = 0;
    for name in names {
        let Some(address) = Address::parse(&name) else {
            reader
                .topology
                .notes
                .push(format!("{} is no PCI address", files.name(&format!("{DEVICES}/{name}"))));
            continue;
        };
        match reader.is_gpu(&name)? {
            Some(NVIDIA) => reader.gpu(address, &name)?,
            Some(_) => others += 1,
            None => {}
        }
    }
    if others > 0 {
        reader.topology.notes.push(format!("{others} display device(s) that are not NVIDIA's"));
    }
    Ok(reader.topology.finish())
}

struct Reader<'f> {
    files: &'f Files,
    topology: Topology,
    /// Bridges by the path of their directory.
    bridge_at: BTreeMap<String, usize>,
}

impl Reader<'_> {
    fn nodes(&mut self) -> Result<()> {
        for name in self.files.list(NODES) {
            let Some(id) = name.strip_prefix("node").and_then(|n| n.parse().ok()) else { continue };
            let cpus = self.files.text(&format!("{NODES}/{name}/cpulist"))?.unwrap_or_default();
            let first: String = cpus.chars().take_while(char::is_ascii_digit).collect();
            let package = format!("sys/devices/system/cpu/cpu{first}/topology/physical_package_id");
            let socket = match first.is_empty() {
                true => None,
                false => self.files.text(&package)?.and_then(|text| text.parse().ok()),
            };
            self.topology.nodes.push(Node { id, socket, cpus });
        }
        Ok(())
    }

    /// The vendor, if the device is a display controller or a 3D one.
    fn is_gpu(&self, name: &str) -> Result<Option<u16>> {
        let class = self.files.text(&format!("{DEVICES}/{name}/class"))?;
        // In memory, attributes lie at the device's own path alone.
        let (class, vendor) = match class {
            Some(class) => (Some(class), self.files.text(&format!("{DEVICES}/{name}/vendor"))?),
            None => match self.files.link(&format!("{DEVICES}/{name}")) {
                Some(target) => {
                    let at = device_path(&target);
                    (
                        self.files.text(&format!("{at}/class"))?,
                        self.files.text(&format!("{at}/vendor"))?,
                    )
                }
                None => (None, None),
            },
        };
        let display = class.is_some_and(|c| c.starts_with("0x0300") || c.starts_with("0x0302"));
        Ok(vendor.filter(|_| display).and_then(|v| number(&v)))
    }

    fn gpu(&mut self, address: Address, name: &str) -> Result<()> {
        let link = format!("{DEVICES}/{name}");
        let place = self.files.name(&link);
        if self.topology.gpus.len() == MAX_GPUS {
            return Err(Error::InvalidArgument(format!(
                "{place}: more than {MAX_GPUS} GPUs; is this a copy of one box's /sys?"
            )));
        }
        let Some(target) = self.files.link(&link) else {
            return Err(Error::InvalidArgument(format!(
                "{place}: no symbolic link, so its place in the PCIe tree is lost; copy /sys with links (`tar`, `cp -a`, or `peerlane doctor --capture`)"
            )));
        };
        let parts: Vec<&str> =
            target.split('/').filter(|part| !part.is_empty() && *part != "..").collect();
        if parts.len() > MAX_DEPTH || parts.last() != Some(&name) || parts.contains(&".") {
            return Err(Error::InvalidArgument(format!(
                "{place}: points to '{}', which does not end in {name}; copy /sys with links as they are",
                printable(&target.chars().take(200).collect::<String>())
            )));
        }
        let at = device_path(&target);
        let mut parent = None;
        let mut path = String::from("sys");
        for part in &parts[..parts.len() - 1] {
            path = format!("{path}/{part}");
            if is_root_complex(part) || Address::parse(part).is_some() {
                parent = Some(self.bridge(&path, part, parent)?);
            }
        }
        let node = self.number_in(&format!("{at}/numa_node"))?.and_then(|n| u32::try_from(n).ok());
        let ids = self.ids(&at)?;
        let gpu = Gpu {
            address: Some(address),
            name: ids.map_or("NVIDIA".into(), |(v, d)| format!("NVIDIA {v:04x}:{d:04x}")),
            parent,
            node,
            socket: None,
            ids,
            link: self.link(&at)?,
            bar1: self.bar1(&at)?,
            cpus: self.files.text(&format!("{at}/local_cpulist"))?.unwrap_or_default(),
        };
        if parent.is_none() {
            self.topology.notes.push(format!("{name} hangs on no root complex that sysfs names"));
        }
        self.topology.gpus.push(gpu);
        Ok(())
    }

    fn bridge(&mut self, path: &str, name: &str, parent: Option<usize>) -> Result<usize> {
        if let Some(&known) = self.bridge_at.get(path) {
            return Ok(known);
        }
        let host = is_root_complex(name);
        let bridge = Bridge {
            kind: if host { BridgeKind::Host } else { BridgeKind::Port },
            name: name.to_owned(),
            parent: parent.filter(|_| !host),
            ids: if host { None } else { self.ids(path)? },
            link: if host { Link::default() } else { self.link(path)? },
            acs: match self.files.read(&format!("{path}/config"))? {
                Some(config) if !host => Acs::from_config(&config),
                _ => Acs::Unknown,
            },
        };
        self.topology.bridges.push(bridge);
        self.bridge_at.insert(path.to_owned(), self.topology.bridges.len() - 1);
        Ok(self.topology.bridges.len() - 1)
    }

    fn number_in(&self, path: &str) -> Result<Option<i64>> {
        let Some(text) = self.files.text(path)? else { return Ok(None) };
        text.parse().map(Some).map_err(|_| {
            mistake(&self.files.name(path), 1, format!("'{}' is no number", short(&text)))
        })
    }

    fn ids(&self, at: &str) -> Result<Option<(u16, u16)>> {
        let mut ids = [0; 2];
        for (id, name) in ids.iter_mut().zip(["vendor", "device"]) {
            let path = format!("{at}/{name}");
            let Some(text) = self.files.text(&path)? else { return Ok(None) };
            *id = number(&text).ok_or_else(|| {
                mistake(
                    &self.files.name(&path),
                    1,
                    format!("'{}' is no number such as 0x10de", short(&text)),
                )
            })?;
        }
        Ok(Some((ids[0], ids[1])))
    }

    fn link(&self, at: &str) -> Result<Link> {
        let rate = |when: &str| -> Result<Option<Rate>> {
            let speed = self.files.text(&format!("{at}/{when}_link_speed"))?;
            let width = self.files.text(&format!("{at}/{when}_link_width"))?;
            Ok(speed.zip(width).and_then(|(speed, width)| Rate::from_sysfs(&speed, &width)))
        };
        Ok(Link { now: rate("current")?, best: rate("max")? })
    }

    /// The second line of `resource` is the window to the GPU's memory: first and last address, flags.
    fn bar1(&self, at: &str) -> Result<Option<u64>> {
        let path = format!("{at}/resource");
        let Some(text) = self.files.text(&path)? else { return Ok(None) };
        let Some(line) = text.lines().nth(1) else { return Ok(None) };
        let bad = || {
            let what = format!("'{}' is not two addresses and flags", short(line));
            mistake(&self.files.name(&path), 2, what)
        };
        let mut numbers = line.split_whitespace().map(|word| {
            word.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok())
        });
        match (numbers.next().flatten(), numbers.next().flatten()) {
            (Some(0), Some(0)) => Ok(None),
            (Some(first), Some(last)) => {
                last.checked_sub(first).and_then(|d| d.checked_add(1)).map(Some).ok_or_else(bad)
            }
            _ => Err(bad()),
        }
    }
}

/// The directory of a PCI device below any root, found without following links; `None` if it is not there.
pub fn device_directory(files: &Files, address: Address) -> Option<String> {
    files.link(&format!("{DEVICES}/{address}")).map(|target| device_path(&target))
}

/// `../../../devices/pci0000:10/...` as a path from the root.
fn device_path(target: &str) -> String {
    let parts: Vec<&str> =
        target.split('/').filter(|part| !part.is_empty() && *part != "..").collect();
    format!("sys/{}", parts.join("/"))
}

/// `pci0000:10`.
fn is_root_complex(name: &str) -> bool {
    let digits =
        |t: &str| !t.is_empty() && t.len() <= 8 && t.bytes().all(|b| b.is_ascii_hexdigit());
    name.strip_prefix("pci")
        .and_then(|rest| rest.split_once(':'))
        .is_some_and(|(domain, bus)| digits(domain) && digits(bus))
}

/// `0x10de`.
fn number(text: &str) -> Option<u16> {
    u16::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// No more of a hostile file than an error can bear.
fn short(text: &str) -> String {
    text.chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::super::files::Entry;
    use super::super::Class;
    use super::*;

    type Entries = BTreeMap<String, Entry>;

    fn put(entries: &mut Entries, path: &str, text: &str) {
        entries.insert(path.into(), Entry::File(text.as_bytes().to_vec()));
    }

    /// A GPU at the end of `way`, such as `pci0000:10/0000:10:01.0/0000:11:00.0`.
    fn gpu(entries: &mut Entries, way: &str, node: &str) {
        let name = way.rsplit('/').next().unwrap();
        entries.insert(format!("{DEVICES}/{name}"), Entry::Link(format!("../../../devices/{way}")));
        for (file, text) in [
            ("class", "0x030200\n"),
            ("vendor", "0x10de\n"),
            ("device", "0x2bb5\n"),
            ("numa_node", node),
            ("resource", "0x0 0xffffff 0x40200\n0x1000000000 0x1fffffffff 0x14220c\n"),
        ] {
            put(entries, &format!("sys/devices/{way}/{file}"), text);
        }
    }

    fn read(entries: Entries) -> Result<Topology> {
        from_sysfs(&Files::memory("box", entries))
    }

    fn two_nodes() -> Entries {
        let mut entries = Entries::new();
        for node in 0..2 {
            put(
                &mut entries,
                &format!("{NODES}/node{node}/cpulist"),
                &format!("{0}-{1}\n", node * 8, node * 8 + 7),
            );
            put(
                &mut entries,
                &format!("sys/devices/system/cpu/cpu{}/topology/physical_package_id", node * 8),
                &format!("{node}\n"),
            );
        }
        entries
    }

    #[test]
    fn every_class_is_found_from_the_paths() {
        let mut entries = two_nodes();
        let switch = "pci0000:10/0000:10:01.0/0000:11:00.0";
        gpu(&mut entries, &format!("{switch}/0000:12:00.0/0000:13:00.0"), "0");
        gpu(&mut entries, &format!("{switch}/0000:12:01.0/0000:14:00.0"), "0");
        gpu(
            &mut entries,
            &format!("{switch}/0000:12:02.0/0000:15:00.0/0000:16:00.0/0000:17:00.0"),
            "0",
        );
        gpu(&mut entries, "pci0000:10/0000:10:02.0/0000:20:00.0", "0");
        gpu(&mut entries, "pci0000:40/0000:40:01.0/0000:41:00.0", "0");
        gpu(&mut entries, "pci0000:80/0000:80:01.0/0000:81:00.0", "1");
        let t = read(entries).unwrap();
        let row: Vec<Class> = (0..6).map(|other| t.class(0, other)).collect();
        assert_eq!(row, [Class::X, Class::Pix, Class::Pxb, Class::Phb, Class::Node, Class::Sys]);
        assert_eq!((t.gpus[5].node, t.gpus[5].socket), (Some(1), Some(1)));
        assert_eq!(t.gpus[0].bar1, Some(64 << 30));
        assert_eq!(t.bridges[t.uplink(2).unwrap()].name, "0000:10:01.0");
    }

    #[test]
    fn a_box_without_gpus_or_without_pci_is_described_too() {
        let t = read(two_nodes()).unwrap();
        assert!(
            t.notes.iter().any(|n| n.contains("no PCI bus"))
                && t.notes.iter().any(|n| n == "no NVIDIA GPU"),
            "{:?}",
            t.notes
        );
        assert!(from_sysfs(&Files::directory("/nonexistent")).unwrap().gpus.is_empty());
        // One that cannot be listed is no box without GPUs.
        let root = std::env::temp_dir().join(format!("peerlane-sysfs-{}", std::process::id()));
        std::fs::create_dir_all(root.join("sys/bus/pci")).unwrap();
        std::fs::write(root.join(DEVICES), "").unwrap();
        let error = from_sysfs(&Files::directory(&root)).unwrap_err().to_string();
        std::fs::remove_dir_all(&root).unwrap();
        assert!(error.contains("sys/bus/pci/devices failed: Not a directory"), "{error}");
    }

    #[test]
    fn a_gpu_whose_node_is_unknown_is_far_from_all_and_a_note_says_so() {
        let mut entries = two_nodes();
        gpu(&mut entries, "pci0000:10/0000:10:01.0/0000:11:00.0", "-1");
        gpu(&mut entries, "pci0000:20/0000:20:01.0/0000:21:00.0", "-1");
        let t = read(entries).unwrap();
        assert_eq!((t.gpus[0].node, t.class(0, 1)), (None, Class::Sys));
        assert!(t.notes.iter().any(|n| n.contains("NUMA node unknown")), "{:?}", t.notes);
    }

    #[test]
    fn what_the_kernel_would_not_write_is_refused_with_its_place() {
        let path = "sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0";
        for (file, text, what) in [
            ("numa_node", "many", "numa_node:1: 'many' is no number"),
            ("device", "2bb5", "device:1: '2bb5'"),
            ("resource", "0x0 0x1 0x0\n0x5 0x1 0x0\n", "resource:2"),
            ("resource", "0x0 0x1 0x0\nzero\n", "resource:2"),
        ] {
            let mut entries = two_nodes();
            gpu(&mut entries, "pci0000:10/0000:10:01.0/0000:11:00.0", "0");
            put(&mut entries, &format!("{path}/{file}"), text);
            let error = read(entries).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
        for target in ["../../../devices/pci0000:10", "", "/etc/passwd", "../0000:12:00.0"] {
            let mut entries = two_nodes();
            gpu(&mut entries, "pci0000:10/0000:10:01.0/0000:11:00.0", "0");
            put(&mut entries, &format!("{}/class", device_path(target)), "0x030200");
            put(&mut entries, &format!("{}/vendor", device_path(target)), "0x10de");
            entries.insert(format!("{DEVICES}/0000:11:00.0"), Entry::Link(target.into()));
            let error = read(entries).unwrap_err().to_string();
            assert!(error.contains("does not end in 0000:11:00.0"), "{target}: {error}");
        }
    }
}
