//! What the box is: GPUs, the PCIe tree above them, NUMA nodes and sockets; and the islands that follow.
//!
//! Everything here is *described*, never measured: two runs on one box see the same, which the order of summation
//! depends on. Three readers give the same [`Topology`]:
//!
//! | file | reads |
//! | --- | --- |
//! | `sysfs` | what the kernel shows below `/sys`, from any [`Files`] root; no library is needed |
//! | `matrix` | the text of `nvidia-smi topo -m` |
//! | `hwloc` | hwloc's XML, with the feature `cli` |
//! | `files` | a directory that stands for `/`, or files held in memory |
//! | `address`, `link`, `acs` | PCI addresses, link rates, access control: the words of the description |
//! | `model`, `class` | the description, and the distance classes computed from its tree |
//! | `islands` | the rule that finds islands, and the fingerprint that ranks compare |
//!
//! # Why XML is read by an XML crate
//! hwloc's own library reads its XML too, through `hwlocality`. It is not used: it needs `libhwloc-dev` and `libudev-dev`
//! to build and `libhwloc` to run, Debian 12 ships 2.9, which refuses the files of hwloc 3 ("cannot import XML version 3.0"),
//! and a hostile file then meets a C parser. `roxmltree` is pure Rust, reads versions 2 and 3, knows the line of every
//! element and bounds entities. Live boxes are read from sysfs, as hwloc itself does.

mod acs;
mod address;
mod class;
mod files;
#[cfg(feature = "cli")]
mod hwloc;
mod islands;
mod link;
mod matrix;
mod model;
mod sysfs;

pub use acs::Acs;
pub use address::Address;
pub use class::Class;
pub use files::{Entry, Files};
#[cfg(feature = "cli")]
pub use hwloc::from_hwloc_xml;
pub use islands::{islands, Found};
pub use link::{Link, Rate};
pub use matrix::from_matrix;
pub use model::{Bridge, BridgeKind, Gpu, Node, Topology};
pub use sysfs::{device_directory, from_sysfs};

use crate::error::{Error, Result};

/// Most GPUs of a described box: more than any has, and a bound on the work that a file can ask for.
pub const MAX_GPUS: usize = 64;
/// Longest way from a root complex to a GPU that is believed. PCIe has 256 buses, so no tree is deeper.
const MAX_DEPTH: usize = 256;

/// A mistake in a described file: where it is, what is wrong and what would be right.
fn mistake(file: &str, line: u32, what: impl std::fmt::Display) -> Error {
    Error::InvalidArgument(files::printable(&format!("{file}:{line}: {what}")))
}

/// Reads a description from the bytes of a file named `name`: hwloc's XML if it begins with `<`, else the text of
/// `nvidia-smi topo -m`.
///
/// # Errors
/// [`Error::InvalidArgument`] with file, line and what to fix; [`Error::Unsupported`] for XML without the feature `cli`.
pub fn from_bytes(name: &str, bytes: &[u8]) -> Result<Topology> {
    let text = std::str::from_utf8(bytes).map_err(|e| {
        let line = bytes.get(..e.valid_up_to()).unwrap_or(&[]).iter().filter(|b| **b == b'\n');
        mistake(
            name,
            line.count() as u32 + 1,
            "this is no text (not UTF-8); expected hwloc XML or the text of `nvidia-smi topo -m`",
        )
    })?;
    if !text.trim_start_matches('\u{feff}').trim_start().starts_with('<') {
        return from_matrix(name, text);
    }
    #[cfg(feature = "cli")]
    return from_hwloc_xml(name, text);
    #[cfg(not(feature = "cli"))]
    Err(Error::Unsupported(format!(
        "{name}: hwloc XML is read with the feature cli; give the text of `nvidia-smi topo -m`, or a directory that holds a copy of /sys"
    )))
}

/// The bytes of a plain file of at most `most` bytes.
///
/// # Errors
/// [`Error::InvalidArgument`] for what is no plain file or is longer, without waiting for what never ends;
/// [`Error::System`] if it cannot be read.
pub fn read_file(path: &std::path::Path, most: u64) -> Result<Vec<u8>> {
    files::read_bounded(path, most).map_err(|failed| match failed {
        files::Failed::Absent => Error::InvalidArgument(files::printable(&format!(
            "{}: not there, or not for this user to read",
            path.display()
        ))),
        files::Failed::Error(error) => error,
    })
}

/// Reads a description from a path: a directory stands for `/` and is read as sysfs, a file as [`from_bytes`] does.
///
/// # Errors
/// As [`from_bytes`] and [`from_sysfs`]; [`Error::System`] if it cannot be read.
pub fn from_path(path: &std::path::Path) -> Result<Topology> {
    let name = path.display().to_string();
    let facts = std::fs::metadata(path).map_err(|e| Error::os(format!("reading {name}"), &e))?;
    if facts.is_dir() {
        return from_sysfs(&Files::directory(path));
    }
    from_bytes(&name, &read_file(path, files::MOST_BYTES)?)
}
