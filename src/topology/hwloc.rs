//! hwloc's XML, versions 2 and 3: what `lstopo box.xml` writes.

use super::address::hex;
use super::model::*;
use super::{mistake, Acs, Address, Link, Rate, MAX_DEPTH, MAX_GPUS};
use crate::error::Result;
use roxmltree::{Document, Node as Element, ParsingOptions};

/// Most elements of a file: hwloc's largest published machine has some 60,000.
const MOST_ELEMENTS: u32 = 2_000_000;
const NVIDIA: u16 = 0x10de;

/// Reads the XML that the file `name` holds.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) with the line: no XML, no hwloc, another version, a device whose place or numbers are missing.
pub fn from_hwloc_xml(name: &str, text: &str) -> Result<Topology> {
    // hwloc's files name their DTD; it is not fetched, and entities are bounded by the parser.
    let options =
        ParsingOptions { allow_dtd: true, nodes_limit: MOST_ELEMENTS, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).map_err(|e| {
        mistake(name, e.pos().row, format!("{e}; expected the XML that `lstopo box.xml` writes"))
    })?;
    let root = document.root_element();
    let reader = Reader { name, document: &document };
    let version = root.attribute("version").unwrap_or("");
    let known = ["2.", "3."].iter().any(|v| version.starts_with(v));
    if !root.has_tag_name("topology") || !known {
        return Err(reader.wrong(root, format!(
            "<{} version=\"{}\"> is not the XML of hwloc 2 or 3; write it with `lstopo --of xml box.xml`",
            root.tag_name().name(), short(version)
        )));
    }
    reader.read(root)
}

/// What an object inherits from those around it.
#[derive(Clone, Copy, Default)]
struct Around {
    depth: usize,
    bridge: Option<usize>,
    /// Its NUMA node, if that is one.
    node: Option<u32>,
    socket: Option<u32>,
}

struct Reader<'r, 'input> {
    name: &'r str,
    document: &'r Document<'input>,
}

impl<'r, 'input> Reader<'r, 'input> {
    fn wrong(&self, at: Element, what: impl std::fmt::Display) -> crate::Error {
        mistake(self.name, self.document.text_pos_at(at.range().start).row, what)
    }

    fn read(&self, root: Element<'r, 'input>) -> Result<Topology> {
        let mut topology = Topology { source: self.name.to_owned(), ..Topology::default() };
        // Packages and their node sets, in which nodes find their own.
        let mut packages: Vec<(u32, u64)> = Vec::new();
        let mut others = 0;
        let mut links = 0;
        // Depth first without recursion: a file decides how deep it is nested.
        let mut open: Vec<(Element<'r, 'input>, Around)> = vec![(root, Around::default())];
        while let Some((element, around)) = open.pop() {
            let mut inside = Around { depth: around.depth + 1, ..around };
            if inside.depth > MAX_DEPTH {
                return Err(self.wrong(
                    element,
                    format!("objects nested deeper than {MAX_DEPTH}; no machine is"),
                ));
            }
            if element.has_tag_name("object") {
                let kind = element.attribute("type").unwrap_or("");
                let set = element
                    .attribute("nodeset")
                    .map(|text| self.node_set(element, text))
                    .transpose()?;
                if let Some(set) = set {
                    inside.node = (set.count_ones() == 1).then(|| set.trailing_zeros());
                }
                match kind {
                    "Package" => {
                        let id = self.os_index(element)?;
                        inside.socket = Some(id);
                        packages.push((id, set.unwrap_or(0)));
                    }
                    "NUMANode" => topology.nodes.push(Node {
                        id: self.os_index(element)?,
                        socket: None,
                        cpus: cpu_list(element.attribute("cpuset").unwrap_or("")),
                    }),
                    "Bridge" => {
                        inside.bridge = self.bridge(element, around.bridge, &mut topology)?
                    }
                    "PCIDev" => match self.device(element, &inside, &mut topology)? {
                        Some(true) => {}
                        Some(false) => others += 1,
                        None => {}
                    },
                    _ => {}
                }
            }
            if element.has_tag_name("distances2")
                && element.attribute("name") == Some("NVLinkBandwidth")
                || element.has_tag_name("distances2hetero")
            {
                links += 1;
            }
            // hwloc's own order is that of the file.
            let children: Vec<_> = element.children().filter(Element::is_element).collect();
            open.extend(children.into_iter().rev().map(|child| (child, inside)));
        }
        for node in &mut topology.nodes {
            let mut of = packages
                .iter()
                .filter(|(_, set)| node.id < 64 && set >> node.id & 1 == 1)
                .map(|(id, _)| *id);
            node.socket = of.next().filter(|_| of.next().is_none());
        }
        if others > 0 {
            topology.notes.push(format!("{others} display device(s) that are not NVIDIA's"));
        }
        if links > 0 && topology.gpus.len() > 1 {
            topology.notes.push("some GPUs are joined by NVLink: peerlane is made for PCIe and reckons with PCIe alone".into());
        }
        Ok(topology.finish())
    }

    fn os_index(&self, element: Element) -> Result<u32> {
        let text = element.attribute("os_index").unwrap_or("");
        text.parse()
            .map_err(|_| self.wrong(element, format!("os_index \"{}\" is no number", short(text))))
    }

    /// `0x0000ffff,0xff000000`, most significant word first. Nodes above 63 are not told apart.
    fn node_set(&self, element: Element, text: &str) -> Result<u64> {
        let bad = || {
            self.wrong(element, format!("nodeset \"{}\" is no set such as 0x00000003", short(text)))
        };
        let mut set: u64 = 0;
        for word in text.split(',').rev().take(2).collect::<Vec<_>>().into_iter().rev() {
            let digits = word.strip_prefix("0x");
            let bits = match word {
                "" => 0,
                _ => digits
                    .and_then(|d| if d == "f...f" { Some(u32::MAX) } else { hex(d, 1..=8) })
                    .ok_or_else(bad)?,
            };
            set = set << 32 | u64::from(bits);
        }
        Ok(set)
    }

    /// A bridge's place in the list. A bridge to something other than PCI is passed by.
    fn bridge(
        &self,
        element: Element,
        parent: Option<usize>,
        topology: &mut Topology,
    ) -> Result<Option<usize>> {
        let missing = |what: &str| {
            self.wrong(
                element,
                format!("a bridge without {what}; write the file anew with `lstopo`"),
            )
        };
        let link = Link { now: self.link(element)?, best: None };
        let bridge = match element.attribute("bridge_type") {
            Some("0-1") => Bridge {
                kind: BridgeKind::Host,
                name: format!(
                    "pci{}",
                    element.attribute("bridge_pci").ok_or_else(|| missing("bridge_pci"))?
                ),
                parent: None,
                ids: None,
                link: Link::default(),
                acs: Acs::Unknown,
            },
            Some("1-1") => Bridge {
                kind: BridgeKind::Port,
                name: self.address(element)?.to_string(),
                parent,
                ids: self.pci_type(element)?.map(|(_, vendor, device)| (vendor, device)),
                link,
                acs: Acs::Unknown,
            },
            Some(_) => return Ok(parent),
            None => return Err(missing("bridge_type")),
        };
        topology.bridges.push(bridge);
        Ok(Some(topology.bridges.len() - 1))
    }

    /// Whether it is an NVIDIA GPU, or another display device; `None` for all else.
    fn device(
        &self,
        element: Element,
        inside: &Around,
        topology: &mut Topology,
    ) -> Result<Option<bool>> {
        let Some((class, vendor, device)) = self.pci_type(element)? else {
            return Err(self.wrong(
                element,
                "a PCI device without pci_type; write the file anew with `lstopo`",
            ));
        };
        if class != 0x0300 && class != 0x0302 {
            return Ok(None);
        }
        if vendor != NVIDIA {
            return Ok(Some(false));
        }
        if topology.gpus.len() == MAX_GPUS {
            return Err(self.wrong(element, format!("more than {MAX_GPUS} GPUs in one machine")));
        }
        let info = |key: &str| {
            element
                .descendants()
                .filter(|e| e.has_tag_name("info"))
                .find(|e| e.attribute("name") == Some(key))
                .and_then(|e| e.attribute("value"))
        };
        let numbers = format!("NVIDIA {vendor:04x}:{device:04x}");
        topology.gpus.push(Gpu {
            address: Some(self.address(element)?),
            name: info("GPUModel")
                .or(info("PCIDevice"))
                .map_or(numbers, |text| text.chars().take(80).collect()),
            parent: inside.bridge,
            node: inside.node,
            socket: inside.socket,
            ids: Some((vendor, device)),
            link: Link { now: self.link(element)?, best: None },
            bar1: None,
            cpus: String::new(),
        });
        Ok(Some(true))
    }

    fn address(&self, element: Element) -> Result<Address> {
        let text = element.attribute("pci_busid").unwrap_or("");
        Address::parse(text).ok_or_else(|| {
            self.wrong(
                element,
                format!("pci_busid \"{}\" is no address such as 0000:3b:00.0", short(text)),
            )
        })
    }

    /// `0302 [10de:2bb5] ...`: class, vendor, device.
    fn pci_type(&self, element: Element) -> Result<Option<(u16, u16, u16)>> {
        let Some(text) = element.attribute("pci_type") else { return Ok(None) };
        let mut words = text.split_whitespace();
        let class = words.next().and_then(|w| hex(w, 4..=4));
        let ids =
            words.next().and_then(|w| w.strip_prefix('[')?.strip_suffix(']')?.split_once(':'));
        let ids = ids.and_then(|(vendor, device)| hex(vendor, 4..=4).zip(hex(device, 4..=4)));
        match (class, ids) {
            (Some(class), Some((vendor, device))) => {
                Ok(Some((class as u16, vendor as u16, device as u16)))
            }
            _ => Err(self.wrong(
                element,
                format!("pci_type \"{}\" is not like 0302 [10de:2bb5]", short(text)),
            )),
        }
    }

    fn link(&self, element: Element) -> Result<Option<Rate>> {
        let Some(text) = element.attribute("pci_link_speed") else { return Ok(None) };
        let rate: f64 = text.parse().map_err(|_| {
            self.wrong(element, format!("pci_link_speed \"{}\" is no number of GB/s", short(text)))
        })?;
        Ok(Rate::from_gb_per_s(rate))
    }
}

/// A set of CPUs as a list of ranges; empty where it is none, for it only serves people.
fn cpu_list(set: &str) -> String {
    let mut cpus: Vec<usize> = Vec::new();
    for (at, word) in set.split(',').rev().enumerate().take(1024) {
        let bits = word.strip_prefix("0x").and_then(|d| hex(d, 1..=8)).unwrap_or(0);
        cpus.extend((0..32).filter(|bit| bits >> bit & 1 == 1).map(|bit| at * 32 + bit));
    }
    let mut text = String::new();
    let mut at = 0;
    while at < cpus.len() {
        let run = (at + 1..cpus.len()).take_while(|&k| cpus[k] == cpus[at] + (k - at)).count();
        let comma = if text.is_empty() { "" } else { "," };
        text.push_str(&match run {
            0 => format!("{comma}{}", cpus[at]),
            _ => format!("{comma}{}-{}", cpus[at], cpus[at + run]),
        });
        at += run + 1;
    }
    text
}

fn short(text: &str) -> String {
    text.chars().take(60).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str =
        "<topology version=\"2.0\">\n<object type=\"Machine\" os_index=\"0\" nodeset=\"0x1\">\n";

    fn read(body: &str) -> Result<Topology> {
        from_hwloc_xml("box.xml", &format!("{HEAD}{body}\n</object></topology>"))
    }

    #[test]
    fn sets_are_read_in_hwlocs_order() {
        assert_eq!(cpu_list("0x0000ffff,0xff000000"), "24-47");
        assert_eq!(cpu_list("0x00000015"), "0,2,4");
        assert_eq!(cpu_list("0xf...f"), "");
    }

    #[test]
    fn what_hwloc_would_not_write_is_refused_with_its_line() {
        for (body, what) in [
            ("<object type=\"PCIDev\" pci_busid=\"0000:01:00.0\"/>", "box.xml:3: a PCI device without pci_type"),
            ("<object type=\"PCIDev\" pci_type=\"0302 [10de:2bb5]\"/>", "box.xml:3: pci_busid \"\""),
            ("<object type=\"PCIDev\" pci_type=\"VGA\" pci_busid=\"0000:01:00.0\"/>", "box.xml:3: pci_type \"VGA\""),
            ("\n<object type=\"Bridge\"/>", "box.xml:4: a bridge without bridge_type"),
            ("<object type=\"NUMANode\" os_index=\"-1\"/>", "box.xml:3: os_index \"-1\""),
            ("<object type=\"Group\" nodeset=\"all\"/>", "box.xml:3: nodeset \"all\""),
            ("<object type=\"Bridge\" bridge_type=\"1-1\" pci_busid=\"0000:01:00.0\" pci_type=\"0604 [10de:2bb5]\" pci_link_speed=\"fast\"/>", "box.xml:3: pci_link_speed"),
            ("<object>", "box.xml:4:"),
        ] {
            let error = read(body).unwrap_err().to_string();
            assert!(error.contains(what), "wanted {what}: {error}");
        }
        for text in ["<svg/>", "<topology version=\"1.0\"/>", "<topology/>", "<"] {
            assert!(from_hwloc_xml("x", text).unwrap_err().to_string().contains("x:1:"), "{text}");
        }
    }

    #[test]
    fn a_gpu_that_is_described_twice_counts_once_and_a_note_says_so() {
        let gpu =
            "<object type=\"PCIDev\" pci_busid=\"0000:01:00.0\" pci_type=\"0302 [10de:2bb5]\"/>";
        let t = read(&gpu.repeat(2)).unwrap();
        assert_eq!(t.gpus.len(), 1);
        assert!(t.notes.iter().any(|n| n.contains("described twice")), "{:?}", t.notes);
        assert_eq!(
            (t.gpus[0].parent, t.gpus[0].node),
            (None, Some(0)),
            "it hangs on the machine itself"
        );
    }

    #[test]
    fn hostile_files_end() {
        let deep = "<object type=\"Group\">".repeat(100_000);
        assert!(read(&deep).is_err());
        let closed = format!("{}{}", "<object>".repeat(1000), "</object>".repeat(1000));
        assert!(read(&closed).unwrap_err().to_string().contains("nested deeper"));
        let bomb = format!(
            "<!DOCTYPE topology [<!ENTITY a \"aaaaaaaaaa\">{}]><topology version=\"2.0\">&j;</topology>",
            ('b'..='j').map(|c| format!("<!ENTITY {c} \"{}\">", format!("&{};", (c as u8 - 1) as char).repeat(10))).collect::<String>()
        );
        assert!(from_hwloc_xml("x", &bomb).is_err());
    }
}
