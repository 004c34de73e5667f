//! The box that is played, from the environment.

use std::collections::BTreeSet;
use std::sync::LazyLock;

pub struct Gpu {
    pub uuid: [u8; 16],
    pub mig: bool,
}

pub struct Config {
    /// Every GPU of the box.
    pub gpus: Vec<Gpu>,
    /// Those that this process sees, by its ordinals.
    pub visible: Vec<usize>,
    pub peer_limit: usize,
    pub vmm: bool,
    pub host_map: bool,
    pub driver_version: i32,
    pub capability: (i32, i32),
    pub ptx_version: i32,
    pub edge_type: u8,
    pub kernels: Option<String>,
    pub kernel_map: Vec<(String, String, usize)>,
    /// By kind of sharing (`vmm`, `ipc`): offset and length of what is a mirror.
    mirrors: Vec<(String, usize, usize)>,
    no_peer: Option<BTreeSet<(usize, usize)>>,
}

static CONFIG: LazyLock<Config> = LazyLock::new(Config::read);

pub fn config() -> &'static Config {
    &CONFIG
}

pub fn text(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// A test's mistake must not pass for the behaviour it wants to see.
pub fn bad(name: &str, value: &str) -> ! {
    eprintln!("fakecuda: {name}={value} cannot be read");
    std::process::abort()
}

fn number<T: std::str::FromStr>(name: &str, default: T) -> T {
    match text(name) {
        Some(value) => value.parse().unwrap_or_else(|_| bad(name, &value)),
        None => default,
    }
}

fn capability() -> (i32, i32) {
    let Some(value) = text("FAKECUDA_CAPABILITY") else { return (9, 0) };
    let number = |part: &str| part.parse().ok();
    let parts = value.split_once('.').and_then(|(a, b)| Some((number(a)?, number(b)?)));
    parts.unwrap_or_else(|| bad("FAKECUDA_CAPABILITY", &value))
}

impl Config {
    fn read() -> Self {
        let count: usize = number("FAKECUDA_DEVICES", 2);
        let mig: Vec<usize> = text("FAKECUDA_MIG")
            .map(|list| {
                list.split(',')
                    .map(|item| item.parse().unwrap_or_else(|_| bad("FAKECUDA_MIG", &list)))
                    .collect()
            })
            .unwrap_or_default();
        let gpus: Vec<Gpu> = (0..count)
            .map(|i| {
                let mut uuid = *b"\xfa\x6e\xcd\xa0\x00\x00\x40\x00\x80\x00peerl\x00";
                // In front as well, so that short UUIDs tell the GPUs apart.
                uuid[3] = i as u8;
                uuid[15] = i as u8;
                Gpu { uuid, mig: mig.contains(&i) }
            })
            .collect();
        let no_peer = match text("FAKECUDA_NO_PEER").as_deref() {
            Some("*") => None,
            list => Some(
                list.unwrap_or_default()
                    .split(',')
                    .filter(|pair| !pair.is_empty())
                    .map(|pair| {
                        pair.split_once('-')
                            .and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)))
                            .unwrap_or_else(|| bad("FAKECUDA_NO_PEER", pair))
                    })
                    .collect(),
            ),
        };
        let kernel_map = text("FAKECUDA_KERNEL_MAP")
            .map(|list| {
                list.split(',')
                    .map(|item| {
                        let (prefix, symbol) = item
                            .split_once('=')
                            .unwrap_or_else(|| bad("FAKECUDA_KERNEL_MAP", &list));
                        let (symbol, bytes) = symbol.split_once(':').unwrap_or((symbol, "0"));
                        let bytes =
                            bytes.parse().unwrap_or_else(|_| bad("FAKECUDA_KERNEL_MAP", &list));
                        (prefix.to_owned(), symbol.to_owned(), bytes)
                    })
                    .collect()
            })
            .unwrap_or_default();
        let mirrors = text("FAKECUDA_MIRROR")
            .map(|list| {
                let wrong = || bad("FAKECUDA_MIRROR", &list);
                list.split(',')
                    .map(|item| {
                        let mut parts = item.split(':');
                        let kind = parts.next().unwrap_or_default().to_owned();
                        let mut number = |default| {
                            parts.next().map_or(default, |n| n.parse().unwrap_or_else(|_| wrong()))
                        };
                        let (offset, bytes) = (number(0), number(usize::MAX));
                        if offset % 4096 != 0 || !["vmm", "ipc"].contains(&kind.as_str()) {
                            wrong();
                        }
                        (kind, offset, bytes)
                    })
                    .collect()
            })
            .unwrap_or_default();
        Config {
            mirrors,
            visible: visible(&gpus),
            gpus,
            peer_limit: number("FAKECUDA_PEER_LIMIT", 8),
            vmm: number("FAKECUDA_NO_VMM", 0) == 0,
            host_map: number("FAKECUDA_NO_HOST_MAP", 0) == 0,
            capability: capability(),
            ptx_version: number("FAKECUDA_PTX_VERSION", 90),
            edge_type: number("FAKECUDA_EDGE_TYPE", 0),
            driver_version: number("FAKECUDA_DRIVER_VERSION", 13000),
            kernels: text("FAKECUDA_KERNELS"),
            kernel_map,
            no_peer,
        }
    }

    /// The part of `bytes` bytes of another process's memory that is a mirror: offset and length.
    pub fn mirror(&self, kind: &str, bytes: usize) -> Option<(usize, usize)> {
        let (_, offset, length) = self.mirrors.iter().find(|(of, ..)| of == kind)?;
        (*offset < bytes).then(|| (*offset, (*length).min(bytes - offset)))
    }

    /// Whether kernels of one GPU of the box can reach another's memory.
    pub fn peers(&self, from: usize, to: usize) -> bool {
        let whole = !self.gpus[from].mig && !self.gpus[to].mig;
        from != to
            && whole
            && self.no_peer.as_ref().is_some_and(|holes| !holes.contains(&(from, to)))
    }
}

fn visible(gpus: &[Gpu]) -> Vec<usize> {
    let Ok(list) = std::env::var("CUDA_VISIBLE_DEVICES") else { return (0..gpus.len()).collect() };
    list.split(',')
        .map_while(|item| {
            let item = item.trim();
            if let Ok(ordinal) = item.parse::<usize>() {
                return (ordinal < gpus.len()).then_some(ordinal);
            }
            let wanted: String = item.strip_prefix("GPU-")?.chars().filter(|c| *c != '-').collect();
            gpus.iter().position(|gpu| {
                let uuid: String = gpu.uuid.iter().map(|b| format!("{b:02x}")).collect();
                uuid.starts_with(&wanted.to_ascii_lowercase())
            })
        })
        .collect()
}
