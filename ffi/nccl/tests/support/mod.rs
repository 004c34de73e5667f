//! Ranks as processes of their own, over the stand-in CUDA driver and the stand-in NCCL, with one of our libraries before it.
//! Every file of tests includes this and uses a part of it.
#![allow(dead_code, unused_imports)]

mod gpu;
mod library;
mod rank;

pub use gpu::{Buffer, Gpu};
pub use library::{dlsym, Api, Rest};
pub use rank::{sum, values, Rank};

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Elements of a message that is small enough to be served, and more than a pack.
pub const SMALL: usize = 1001;

/// How a process gets at our library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// The real NCCL is loaded first, as PyTorch does; then the preload library.
    Preload,
    /// The linking library, which brings the real one with it.
    Linking,
    /// The full library; the variable says where the real one is.
    Full,
    /// The full library and no real one.
    Alone,
}

/// In a test's folder: anything is a fatbin to the stand-in driver.
const KERNELS: &str = "fake.fatbin";
const ROLE: &str = "PEERLANE_TEST_ROLE";

pub fn built(name: &str) -> PathBuf {
    let path = std::env::current_exe().unwrap().with_file_name(name);
    assert!(path.exists(), "{} was not built with the tests", path.display());
    path
}

/// A folder with links of the names that programs look for.
pub fn folder(name: &str, links: &[(&str, &str)]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    for (link, target) in links {
        // Tests share the folder, and it stays for the next run.
        let _ = std::os::unix::fs::symlink(built(target), folder.join(link));
    }
    folder
}

pub fn driver() -> PathBuf {
    folder("nccl-driver", &[("libcuda.so", "libfakecuda.so"), ("libcuda.so.1", "libfakecuda.so")])
}

pub fn standin() -> PathBuf {
    folder("nccl-standin", &[("libnccl.so.2", "libstandin_nccl.so")])
}

/// What a test starts: processes of one role, which share a folder.
pub struct World {
    pub dir: tempfile::TempDir,
    test: String,
    env: Vec<(String, String)>,
}

pub struct Process {
    pub child: Child,
    pub what: String,
    log: PathBuf,
}

impl World {
    pub fn new(test: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        // Once, before any rank is there to read it.
        std::fs::write(dir.path().join(KERNELS), b"an image").unwrap();
        World { dir, test: test.to_owned(), env: Vec::new() }
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts rank `rank` of `n`, as the test of the same name in a process of its own.
    pub fn start(&self, way: Way, rank: usize, n: usize, env: &[(&str, &str)]) -> Process {
        let kernels = self.dir.path().join(KERNELS);
        let run = self.dir.path().join("run");
        let mut path = driver().into_os_string();
        if way == Way::Linking {
            path.push(":");
            path.push(standin());
        }
        let log = self.dir.path().join(format!("log-{rank}"));
        let out = std::fs::File::create(&log).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([&self.test, "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{way:?} {rank} {n} {}", self.dir.path().display()))
            .env("LD_LIBRARY_PATH", path)
            .env("FAKECUDA_RANK", rank.to_string())
            .env("FAKECUDA_KERNEL_MAP", hostkernels::REGISTERED)
            .env("PEERLANE_KERNELS", kernels)
            .env("PEERLANE_RUN_DIR", run)
            .env("PEERLANE_SLAB", "4M")
            .env("PEERLANE_PROBE", "off")
            .env("PEERLANE_CACHE_DIR", self.dir.path().join("cache"))
            .env("PEERLANE_LOG", "info")
            .env("PEERLANE_DEADLINE", "60")
            .env("PEERLANE_SETUP_DEADLINE", "60")
            .envs(self.env.iter().map(|(k, v)| (k, v)))
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::from(out.try_clone().unwrap()))
            .stderr(Stdio::from(out));
        if way == Way::Full {
            command.env("PEERLANE_NCCL_LIB", standin().join("libnccl.so.2"));
        }
        Process { child: command.spawn().unwrap(), what: format!("{way:?} rank {rank}"), log }
    }

    /// All ranks, which must all succeed.
    pub fn run(&self, way: Way, n: usize) {
        let ranks: Vec<Process> = (0..n).map(|rank| self.start(way, rank, n, &[])).collect();
        ranks.into_iter().for_each(Process::succeeds);
    }
}

impl Process {
    pub fn output(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn succeeds(mut self) {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break Some(status);
            }
            if start.elapsed() > Duration::from_secs(100) {
                break None;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let text = self.output();
        let passed = status.is_some_and(|status| status.success()) && text.contains("1 passed");
        assert!(passed, "{}: {status:?}\n{text}", self.what);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a started process: who it is, with our library loaded.
pub fn role() -> Option<Rank> {
    let text = std::env::var(ROLE).ok()?;
    let parts: Vec<&str> = text.splitn(4, ' ').collect();
    let way = match parts[0] {
        "Preload" => Way::Preload,
        "Linking" => Way::Linking,
        "Full" => Way::Full,
        _ => Way::Alone,
    };
    library::register_kernels();
    let (api, rest, real) = library::load(way);
    Some(Rank {
        way,
        rank: parts[1].parse().unwrap(),
        n: parts[2].parse().unwrap(),
        dir: PathBuf::from(parts[3]),
        api,
        rest,
        real,
    })
}
