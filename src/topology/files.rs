//! Where a description's files are read from: a directory that stands for `/`, or files held in memory.

use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Longest description that is read: the largest machines' XML has a few MB.
pub(super) const MOST_BYTES: u64 = 32 << 20;
/// Longest file below a root; a PCI configuration space has 4 KiB.
const MOST_ATTRIBUTE_BYTES: u64 = 1 << 20;

/// A file system as far as a description needs it. Paths are relative to `/`, as in `sys/bus/pci/devices`.
#[derive(Clone, Debug)]
pub struct Files {
    name: String,
    held: Held,
}

#[derive(Clone, Debug)]
enum Held {
    Directory(PathBuf),
    Memory(BTreeMap<String, Entry>),
}

/// A file held in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Its bytes.
    File(Vec<u8>),
    /// A symbolic link's target.
    Link(String),
}

impl Files {
    /// The directory `root` stands for `/`.
    pub fn directory(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        Files { name: root.display().to_string(), held: Held::Directory(root) }
    }

    /// Files by path; `name` is what errors call them. Directories need no entry, and only [`link`](Self::link) knows links.
    pub fn memory(name: &str, entries: BTreeMap<String, Entry>) -> Self {
        Files { name: name.into(), held: Held::Memory(entries) }
    }

    /// A path as errors and evidence name it.
    pub fn name(&self, path: &str) -> String {
        printable(&match self.name.as_str() {
            "/" => format!("/{path}"),
            root => format!("{root}/{path}"),
        })
    }

    /// A file's bytes; `None` where it is not there, or is not for this user to read.
    pub fn read(&self, path: &str) -> Result<Option<Vec<u8>>> {
        match &self.held {
            Held::Directory(root) => match read_bounded(&root.join(path), MOST_ATTRIBUTE_BYTES) {
                Ok(bytes) => Ok(Some(bytes)),
                Err(Failed::Absent) => Ok(None),
                Err(Failed::Error(error)) => Err(error),
            },
            Held::Memory(entries) => Ok(match entries.get(path) {
                Some(Entry::File(bytes)) => Some(bytes.clone()),
                _ => None,
            }),
        }
    }

    /// A file's text without space at its ends; what is not UTF-8 is replaced.
    pub fn text(&self, path: &str) -> Result<Option<String>> {
        Ok(self.read(path)?.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned()))
    }

    /// Names in a directory, sorted; empty where it is not there, or not for this user to read.
    pub fn list(&self, path: &str) -> Vec<String> {
        self.try_list(path).unwrap_or_default()
    }

    /// Names in a directory, sorted; empty where it is not there.
    ///
    /// # Errors
    /// [`Error::System`] where it is there and cannot be read.
    pub fn try_list(&self, path: &str) -> Result<Vec<String>> {
        Ok(match &self.held {
            Held::Directory(root) => {
                let entries = match std::fs::read_dir(root.join(path)) {
                    Ok(entries) => entries,
                    Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
                    Err(e) => return Err(Error::os(format!("reading {}", self.name(path)), &e)),
                };
                let mut names: Vec<String> =
                    entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect();
                names.sort();
                names
            }
            Held::Memory(entries) => {
                let inside = format!("{path}/");
                let mut names: Vec<String> = entries
                    .range(inside.clone()..)
                    .map_while(|(key, _)| key.strip_prefix(&inside))
                    .filter_map(|rest| rest.split('/').next().map(str::to_owned))
                    .collect();
                names.dedup();
                names
            }
        })
    }

    /// The target of a symbolic link; `None` if it is none or is not there.
    pub fn link(&self, path: &str) -> Option<String> {
        match &self.held {
            Held::Directory(root) => {
                std::fs::read_link(root.join(path)).ok()?.into_os_string().into_string().ok()
            }
            Held::Memory(entries) => match entries.get(path) {
                Some(Entry::Link(target)) => Some(target.clone()),
                _ => None,
            },
        }
    }
}

/// Text of a file on its way to a terminal: one line, and nothing that the terminal would obey.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// Why a file gave nothing.
pub(super) enum Failed {
    Absent,
    Error(Error),
}

/// Reads at most `most` bytes; a longer file is refused, so that a device file or a trap cannot fill the memory.
pub(super) fn read_bounded(path: &Path, most: u64) -> std::result::Result<Vec<u8>, Failed> {
    let name = || format!("reading {}", path.display());
    let failed = |e: std::io::Error| match e.kind() {
        // A link that the kernel does not know the value of reads as EINVAL; a suspended device as EIO.
        ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::InvalidInput => {
            Failed::Absent
        }
        _ if e.raw_os_error() == Some(libc::EIO) => Failed::Absent,
        _ => Failed::Error(Error::os(name(), &e)),
    };
    // Opening a pipe would wait for who writes to it.
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(Failed::Error(Error::InvalidArgument(format!(
            "{} is no plain file",
            path.display()
        ))));
    }
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > most {
        return Err(Failed::Error(Error::InvalidArgument(format!(
            "{}: longer than {most} bytes, so it is not what it should be",
            path.display()
        ))));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_lists_like_a_directory() {
        let file = |text: &str| Entry::File(text.into());
        let files = Files::memory(
            "box",
            [
                ("sys/a/one".to_owned(), file("1\n")),
                ("sys/a/two/x".to_owned(), file("2")),
                ("sys/ab".to_owned(), file("3")),
                ("sys/link".to_owned(), Entry::Link("../a".into())),
            ]
            .into(),
        );
        assert_eq!(files.list("sys/a"), ["one", "two"]);
        assert_eq!(files.list("sys"), ["a", "ab", "link"]);
        assert_eq!(files.text("sys/a/one").unwrap().as_deref(), Some("1"));
        assert_eq!(files.link("sys/link").as_deref(), Some("../a"));
        assert_eq!((files.link("sys/ab"), files.read("none").unwrap()), (None, None));
    }

    #[test]
    fn what_never_ends_is_not_read() {
        let error = Files::directory("/").read("dev/zero").unwrap_err().to_string();
        assert!(error.contains("no plain file"), "{error}");
        let pipe = std::env::temp_dir().join(format!("peerlane-pipe-{}", std::process::id()));
        let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
        // SAFETY: a terminated path.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let read = read_bounded(&pipe, 10);
        std::fs::remove_file(&pipe).unwrap();
        assert!(matches!(read, Err(Failed::Error(Error::InvalidArgument(_)))));
    }

    #[test]
    fn names_are_one_line_that_no_terminal_obeys() {
        let files = Files::memory("box", BTreeMap::new());
        assert_eq!(files.name("a\u{1b}[31m\nb\u{9b}2Jc"), "box/a\u{fffd}[31m\u{fffd}b\u{fffd}2Jc");
    }
}
