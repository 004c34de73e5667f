//! Every `PEERLANE_*` variable, in one struct. Nothing else in the library reads the environment.

use crate::error::{Error, Result};
use crate::types::{Algorithm, Device, Direction, Lane, ProbeMode, Protocol};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// What the environment asks for; a field is `None` where its variable is not set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Env {
    /// `PEERLANE_LOG`: `off`, `error`, `warn` (default), `info`, `debug`; where the library says what it decided (stderr).
    pub log: Option<String>,
    /// `PEERLANE_ISLANDS`: ranks of each island, such as `0-3,4-7`; default those of the described box, else one.
    pub islands: Option<String>,
    /// `PEERLANE_TOPOLOGY`: a file or directory that describes the box in place of `/sys`.
    pub topology: Option<PathBuf>,
    /// `PEERLANE_SLAB`: bytes of a rank's slab, with an optional K, M or G (powers of 1024); 1M to 1G.
    pub slab: Option<u64>,
    /// `PEERLANE_DEADLINE`: seconds (a fraction is fine) until a wait gives up; default 600.
    pub deadline: Option<Duration>,
    /// `PEERLANE_SETUP_DEADLINE`: seconds until set-up gives up; default 120.
    pub setup_deadline: Option<Duration>,
    /// `PEERLANE_ALGO`: serve every call with this algorithm.
    pub algorithm: Option<Algorithm>,
    /// `PEERLANE_PROTO`: serve every call with this protocol.
    pub protocol: Option<Protocol>,
    /// `PEERLANE_DIRECTION`: `push` or `pull` for the `flagged` protocol.
    pub direction: Option<Direction>,
    /// `PEERLANE_CHECK`: `1` compares what the ranks call before every step and fails with the difference.
    pub check: Option<bool>,
    /// `PEERLANE_DEVICE`: `cpu` (default), `cuda` (the GPU of the current context, else the first) or `cuda:N`.
    pub device: Option<Device>,
    /// `PEERLANE_LANE`: `auto` (default), `vmm`, `ipc` or `host`; how GPUs reach each other's slabs.
    pub lane: Option<Lane>,
    /// `PEERLANE_KERNELS`: a fatbin to load in place of the one that is built in, as `nvcc -fatbin cuda/kernels.cu` makes it
    /// from the same source: for a GPU newer than the build, or a build without nvcc.
    pub kernels: Option<PathBuf>,
    /// `PEERLANE_PROBE`: `auto` (default), `off`, `always` or `pairs`; whether creation measures the lane, see [`ProbeMode`].
    pub probe: Option<ProbeMode>,
    /// `PEERLANE_NUMA`: `0` leaves host memory and the library's own threads where the kernel puts them; default near the
    /// rank's GPU.
    pub numa: Option<bool>,
    /// `PEERLANE_PROGRAMMATIC`: `0` never lets a kernel of a graph start while the library's kernel before it still runs; by
    /// default it may where the GPU can (compute capability 9.0 and newer).
    pub programmatic: Option<bool>,
    /// `PEERLANE_CLUSTERS`: `0` never launches the blocks of a fused row as a cluster; by default they are where the GPU can
    /// (compute capability 9.0 and newer) and there is room for it.
    pub clusters: Option<bool>,
    /// `PEERLANE_CACHE_DIR`: where verdicts on lanes are kept; default `$XDG_CACHE_HOME/peerlane`, else
    /// `$HOME/.cache/peerlane`.
    pub cache_dir: Option<PathBuf>,
    /// `XDG_CACHE_HOME`, the default parent of the cache directory.
    pub xdg_cache_home: Option<PathBuf>,
    /// `HOME`, whose `.cache` stands in for it.
    pub home: Option<PathBuf>,
    /// `PEERLANE_NCCL_LIB`: the real NCCL. The library in its place forwards to it, by default to the one that is loaded, else
    /// the one beside PyTorch, else the system's; who calls NCCL itself takes `libnccl.so.2` of the loader's path by default.
    pub nccl_lib: Option<PathBuf>,
    /// `CUDA_DEVICE_MAX_CONNECTIONS`, which the driver reads when it starts: hardware queues that a process's streams share.
    pub cuda_connections: Option<String>,
    /// `NCCL_MULTI_RANK_GPU_ENABLE`, which NCCL reads when it starts: `1` lets ranks share a GPU.
    pub nccl_multi_rank: Option<String>,
    /// `PEERLANE_RUN_DIR`: where rendezvous sockets live; default `$XDG_RUNTIME_DIR/peerlane`, else `/tmp/peerlane-UID`.
    pub run_dir: Option<PathBuf>,
    /// `PEERLANE_NCCL_BYTES`: the largest all-reduce that the NCCL replacement serves itself, see [`ServedBytes`].
    pub nccl_bytes: Option<ServedBytes>,
    /// `PEERLANE_DISABLE`: `1` makes the NCCL replacement forward every call.
    pub disable: Option<bool>,
    /// `XDG_RUNTIME_DIR`, the default parent of the run directory.
    pub xdg_runtime_dir: Option<PathBuf>,
}

/// Up to how many bytes a call is served, by number of ranks: `512K`, or `2:1M,8:256K` (from 2 ranks on 1 MiB, from 8 ranks on
/// 256 KiB, below 2 nothing), or `all`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedBytes(Vec<(u32, u64)>);

impl ServedBytes {
    /// From so many ranks on, up to so many bytes; in ascending order.
    pub const fn new(steps: Vec<(u32, u64)>) -> Self {
        ServedBytes(steps)
    }

    /// The largest message that is served among `ranks` ranks.
    pub fn of(&self, ranks: usize) -> u64 {
        self.0.iter().rev().find(|(from, _)| *from as usize <= ranks).map_or(0, |(_, bytes)| *bytes)
    }

    /// The steps, for comparison between ranks.
    pub fn steps(&self) -> &[(u32, u64)] {
        &self.0
    }

    fn parse(text: &str) -> std::result::Result<Self, String> {
        if text == "all" {
            return Ok(ServedBytes(vec![(1, u64::MAX)]));
        }
        let mut steps = Vec::new();
        for part in text.split(',') {
            let (from, bytes) = part.split_once(':').unwrap_or(("1", part));
            let from = from.parse().map_err(|_| format!("has '{from}' for a number of ranks"))?;
            if steps.last().is_some_and(|(before, _)| *before >= from) {
                return Err("does not name the numbers of ranks in ascending order".to_owned());
            }
            steps.push((from, parse_bytes(bytes)?));
        }
        Ok(ServedBytes(steps))
    }
}

impl Env {
    /// Reads the process environment. A variable that is set but makes no sense is an error that names it.
    pub fn read() -> Result<Self> {
        Self::from_lookup(|name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned()))
    }

    /// Whether `PEERLANE_DISABLE` says `1`, whatever the other variables hold: one that makes no sense must not keep peerlane
    /// from being switched off.
    pub fn is_disabled() -> bool {
        std::env::var_os("PEERLANE_DISABLE").is_some_and(|value| value == "1")
    }

    /// The same from any source of variables; an empty value counts as not set.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let text = |name: &str| lookup(name).filter(|v| !v.is_empty());
        Ok(Env {
            log: parsed("PEERLANE_LOG", text("PEERLANE_LOG"), |v| match v {
                "off" | "error" | "warn" | "info" | "debug" => Ok(v.to_owned()),
                _ => Err("is none of off, error, warn, info, debug".to_owned()),
            })?,
            islands: text("PEERLANE_ISLANDS"),
            topology: text("PEERLANE_TOPOLOGY").map(PathBuf::from),
            slab: parsed("PEERLANE_SLAB", text("PEERLANE_SLAB"), parse_bytes)?,
            deadline: parsed("PEERLANE_DEADLINE", text("PEERLANE_DEADLINE"), parse_seconds)?,
            setup_deadline: parsed(
                "PEERLANE_SETUP_DEADLINE",
                text("PEERLANE_SETUP_DEADLINE"),
                parse_seconds,
            )?,
            algorithm: parsed("PEERLANE_ALGO", text("PEERLANE_ALGO"), from_str)?,
            protocol: parsed("PEERLANE_PROTO", text("PEERLANE_PROTO"), from_str)?,
            direction: parsed("PEERLANE_DIRECTION", text("PEERLANE_DIRECTION"), from_str)?,
            check: parsed("PEERLANE_CHECK", text("PEERLANE_CHECK"), parse_flag)?,
            device: parsed("PEERLANE_DEVICE", text("PEERLANE_DEVICE"), from_str)?,
            lane: parsed("PEERLANE_LANE", text("PEERLANE_LANE"), from_str)?,
            kernels: text("PEERLANE_KERNELS").map(PathBuf::from),
            probe: parsed("PEERLANE_PROBE", text("PEERLANE_PROBE"), from_str)?,
            numa: parsed("PEERLANE_NUMA", text("PEERLANE_NUMA"), parse_flag)?,
            programmatic: parsed(
                "PEERLANE_PROGRAMMATIC",
                text("PEERLANE_PROGRAMMATIC"),
                parse_flag,
            )?,
            clusters: parsed("PEERLANE_CLUSTERS", text("PEERLANE_CLUSTERS"), parse_flag)?,
            cache_dir: text("PEERLANE_CACHE_DIR").map(PathBuf::from),
            xdg_cache_home: text("XDG_CACHE_HOME").map(PathBuf::from),
            home: text("HOME").map(PathBuf::from),
            nccl_lib: text("PEERLANE_NCCL_LIB").map(PathBuf::from),
            cuda_connections: text("CUDA_DEVICE_MAX_CONNECTIONS"),
            nccl_multi_rank: text("NCCL_MULTI_RANK_GPU_ENABLE"),
            run_dir: text("PEERLANE_RUN_DIR").map(PathBuf::from),
            nccl_bytes: parsed(
                "PEERLANE_NCCL_BYTES",
                text("PEERLANE_NCCL_BYTES"),
                ServedBytes::parse,
            )?,
            disable: parsed("PEERLANE_DISABLE", text("PEERLANE_DISABLE"), parse_flag)?,
            xdg_runtime_dir: text("XDG_RUNTIME_DIR").map(PathBuf::from),
        })
    }
}

/// NCCL's variables that decide how it uses the fabric, with their values, where they are set. They are looked at, never
/// obeyed; others may hold names and addresses and are left alone.
pub fn nccl_fabric_settings() -> Vec<(String, String)> {
    let names =
        ["NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_PROTO", "NCCL_ALGO"];
    let set = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
    names.into_iter().filter_map(|name| Some((name.to_owned(), set(name)?))).collect()
}

fn parsed<T>(
    name: &str,
    value: Option<String>,
    parse: impl Fn(&str) -> std::result::Result<T, String>,
) -> Result<Option<T>> {
    value
        .map(|v| parse(&v).map_err(|why| Error::InvalidArgument(format!("{name}={v} {why}"))))
        .transpose()
}

fn from_str<T: FromStr<Err = Error>>(text: &str) -> std::result::Result<T, String> {
    text.parse().map_err(|e: Error| format!("({e})"))
}

fn parse_flag(text: &str) -> std::result::Result<bool, String> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err("is neither 0 nor 1".to_owned()),
    }
}

fn parse_seconds(text: &str) -> std::result::Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(s) if s > 0.0 && s <= 1e9 => Ok(Duration::from_secs_f64(s)),
        _ => Err("is not a number of seconds above 0".to_owned()),
    }
}

/// Bytes with an optional suffix K, M or G (powers of 1024), as in nccl-tests.
pub fn parse_bytes(text: &str) -> std::result::Result<u64, String> {
    let (digits, shift) = match text.char_indices().last() {
        Some((i, 'K' | 'k')) => (&text[..i], 10),
        Some((i, 'M' | 'm')) => (&text[..i], 20),
        Some((i, 'G' | 'g')) => (&text[..i], 30),
        _ => (text, 0),
    };
    digits
        .parse::<u64>()
        .ok()
        .and_then(|v| v.checked_mul(1 << shift))
        .ok_or_else(|| "is not a number of bytes, such as 14336, 8K or 4M".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn env(pairs: &[(&str, &str)]) -> Result<Env> {
        let pairs: Vec<_> = pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        Env::from_lookup(move |name| pairs.iter().find(|(k, _)| k == name).map(|(_, v)| v.clone()))
    }

    #[test]
    fn an_empty_environment_asks_for_nothing() {
        assert_eq!(env(&[]).unwrap(), Env::default());
        assert_eq!(env(&[("PEERLANE_SLAB", "")]).unwrap(), Env::default());
    }

    #[test]
    fn values_are_parsed() {
        let e = env(&[
            ("PEERLANE_SLAB", "4M"),
            ("PEERLANE_DEADLINE", "1.5"),
            ("PEERLANE_ALGO", "two_shot"),
            ("PEERLANE_CHECK", "1"),
        ])
        .unwrap();
        assert_eq!(e.slab, Some(4 << 20));
        assert_eq!(e.deadline, Some(Duration::from_millis(1500)));
        assert_eq!(e.algorithm, Some(Algorithm::TwoShot));
        assert_eq!(e.check, Some(true));
    }

    #[test]
    fn sizes_are_served_by_number_of_ranks() {
        let served = |text| env(&[("PEERLANE_NCCL_BYTES", text)]).unwrap().nccl_bytes.unwrap();
        let by_ranks = served("2:1M,8:256K");
        assert_eq!(
            [1, 2, 7, 8, 16].map(|n| by_ranks.of(n)),
            [0, 1 << 20, 1 << 20, 256 << 10, 256 << 10]
        );
        assert_eq!(served("4K").of(3), 4096);
        assert_eq!(served("all").of(16), u64::MAX);
    }

    #[test]
    fn nonsense_is_refused_and_names_the_variable() {
        for (name, value) in [
            ("PEERLANE_SLAB", "many"),
            ("PEERLANE_SLAB", "99999999999G"),
            ("PEERLANE_DEADLINE", "-1"),
            ("PEERLANE_DEADLINE", "nan"),
            ("PEERLANE_ALGO", "ring"),
            ("PEERLANE_DEVICE", "cuda:-1"),
            ("PEERLANE_DEVICE", "gpu"),
            ("PEERLANE_LANE", "nvlink"),
            ("PEERLANE_PROBE", "perhaps"),
            ("PEERLANE_CHECK", "yes"),
            ("PEERLANE_NUMA", "2"),
            ("PEERLANE_PROGRAMMATIC", "yes"),
            ("PEERLANE_CLUSTERS", "no"),
            ("PEERLANE_DISABLE", "on"),
            ("PEERLANE_NCCL_BYTES", "8:1M,2:4M"),
            ("PEERLANE_NCCL_BYTES", "two:1M"),
            ("PEERLANE_LOG", "loud"),
        ] {
            let error = env(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(value), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_value_is_refused_by_name_or_taken(
            name in prop::sample::select(vec![
                "ISLANDS", "SLAB", "DEADLINE", "SETUP_DEADLINE", "ALGO", "PROTO", "DIRECTION", "CHECK", "DEVICE", "LANE",
            ]),
            value in "[0-9]{0,20}[.eEkKmMgG-]?[0-9]{0,3}|(cuda|cpu)?:?[0-9]{0,12}|.{0,20}",
        ) {
            let name = format!("PEERLANE_{name}");
            if let Err(error) = env(&[(&name, &value)]) {
                prop_assert!(error.to_string().contains(&name), "{}", error);
            }
        }
    }
}
