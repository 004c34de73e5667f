//! Run directories that clean up, ranks as threads, ranks as processes.

use peerlane::bootstrap::{Mesh, UniqueId};
use peerlane::{Error, Result};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Long enough for a busy machine, short enough for a test that fails.
pub const LONG: Duration = Duration::from_secs(30);
/// What a survivor may take to learn of a death.
pub const AT_ONCE: Duration = Duration::from_secs(2);

/// A run directory of its own.
pub struct Dir(pub PathBuf);

impl Dir {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = Dir(PathBuf::from(format!("/tmp/pl-test-{}-{n}", std::process::id())));
        let _ = std::fs::remove_dir_all(&dir.0);
        dir
    }

    pub fn id(&self) -> UniqueId {
        UniqueId::in_dir(Some(&self.0)).unwrap()
    }

    pub fn entries(&self) -> Vec<PathBuf> {
        std::fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().path()).collect()
    }

    #[track_caller]
    pub fn assert_empty(&self) {
        assert_eq!(self.entries(), Vec::<PathBuf>::new(), "left in the run directory");
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The path of an id's socket, as its debug text tells.
pub fn socket_of(id: &UniqueId) -> PathBuf {
    let text = format!("{id:?}");
    Path::new(text.trim_start_matches("UniqueId(").trim_end_matches(')')).to_path_buf()
}

/// Runs `f` for every rank on a thread of its own.
pub fn threads<R: Send>(n: usize, f: impl Fn(usize) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let f = &f;
        let ranks: Vec<_> = (0..n).map(|rank| scope.spawn(move || f(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Meshes of `n` ranks of this process.
pub fn meshes(dir: &Dir, n: usize) -> Vec<Mesh> {
    let id = dir.id();
    threads(n, |rank| Mesh::connect(&id, n, rank, LONG).unwrap())
}

/// The error that all ranks returned.
#[track_caller]
pub fn common_error<T>(results: Vec<Result<T>>) -> Error {
    let mut errors: Vec<Error> =
        results.into_iter().map(|r| r.err().expect("a rank succeeded")).collect();
    let first = errors.remove(0);
    for other in errors {
        assert_eq!(other, first);
    }
    first
}

#[track_caller]
pub fn assert_setup(error: &Error, rank: u32, stage: &str, reason: &str) {
    match error {
        Error::Setup { rank: r, stage: s, reason: why }
            if (*r, s.as_str()) == (rank, stage) && why.contains(reason) => {}
        other => panic!("expected rank {rank}, stage {stage}, '{reason}': got {other}"),
    }
}

/// Waits until `what` holds.
#[track_caller]
pub fn eventually(what: impl Fn() -> bool) {
    let start = Instant::now();
    while !what() {
        assert!(start.elapsed() < LONG, "did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Nanoseconds of the clock that all processes of the machine share.
pub fn clock() -> u128 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is writable.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u128 * 1_000_000_000 + now.tv_nsec as u128
}

/// A rank in a process of its own; killed when dropped.
pub struct Rank {
    pub child: Child,
}

/// Starts the scenario `task` of `child.rs` as `rank` of `n`, behind `wrapper` (such as `unshare`) if it is not empty.
pub fn process(id: &UniqueId, n: usize, rank: usize, task: &str, wrapper: &[&str]) -> Rank {
    let me = std::env::current_exe().unwrap();
    let mut words: Vec<std::ffi::OsString> = wrapper.iter().map(Into::into).collect();
    words.push(me.into());
    words.extend(["child::rank", "--exact", "--nocapture", "--test-threads=1"].map(Into::into));
    let child = Command::new(&words[0])
        .args(&words[1..])
        .env("PL_TEST_TASK", task)
        .env("PL_TEST_ID", id.to_string())
        .env("PL_TEST_RANK", format!("{rank}/{n}"))
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    Rank { child }
}

impl Rank {
    /// What it said with `say`, as (word, rest), once it has ended.
    pub fn finish(mut self) -> Vec<(String, String)> {
        let mut text = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        self.child.wait().unwrap();
        text.lines()
            .filter_map(|line| line.strip_prefix("PL "))
            .filter_map(|line| line.split_once(' '))
            .map(|(word, rest)| (word.to_owned(), rest.to_owned()))
            .collect()
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The rest of the line that began with `word`.
pub fn said<'a>(lines: &'a [(String, String)], word: &str) -> Option<&'a str> {
    lines.iter().find(|(w, _)| w == word).map(|(_, rest)| rest.as_str())
}
