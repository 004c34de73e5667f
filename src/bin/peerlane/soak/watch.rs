//! What this process holds: a leak shows as growth from round to round.

use anyhow::{bail, ensure, Context, Result};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Threads end and descriptors close shortly after a communicator has gone.
const PATIENCE: Duration = Duration::from_secs(5);
/// The allocator keeps some of what was freed, more or less of it from round to round; see [`settle_allocator`].
const SLACK_KIB: u64 = 2 << 10;
/// Fewer rounds say nothing about memory.
const ROUNDS: usize = 30;

/// What must be the same after every round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Open file descriptors.
    pub descriptors: usize,
    pub threads: usize,
    /// Mappings of slabs.
    pub slabs: usize,
    /// Files of this library in /dev/shm.
    pub shm: usize,
    /// Sockets and files where the ranks meet.
    pub run_dir: usize,
}

impl Held {
    fn read(run_dir: &Path) -> Result<Self> {
        let names = |dir: &Path| -> Result<Vec<String>> {
            let entries =
                std::fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))?;
            entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
        };
        let shm = Path::new("/dev/shm");
        let maps = std::fs::read_to_string("/proc/self/maps").context("reading /proc/self/maps")?;
        Ok(Held {
            descriptors: names(Path::new("/proc/self/fd"))?.len(),
            threads: names(Path::new("/proc/self/task"))?.len(),
            slabs: maps.lines().filter(|line| line.contains("memfd:peerlane")).count(),
            // Other programs' files come and go there; a box without it has none of ours.
            shm: names(shm).unwrap_or_default().iter().filter(|n| n.contains("peerlane")).count(),
            run_dir: names(run_dir)?.len(),
        })
    }

    /// The first kind of thing of which there is more than in `before`.
    fn growth(&self, before: &Held) -> Option<String> {
        let kinds = [
            ("descriptors", before.descriptors, self.descriptors),
            ("threads", before.threads, self.threads),
            ("mapped slabs", before.slabs, self.slabs),
            ("files in /dev/shm", before.shm, self.shm),
            ("files in the run directory", before.run_dir, self.run_dir),
        ];
        kinds
            .into_iter()
            .find(|(_, before, now)| now > before)
            .map(|(what, before, now)| format!("{now} {what}, {before} before the first round"))
    }
}

/// Has the allocator give back what is freed. By itself it keeps it: glibc raises the sizes from which it maps and unmaps
/// to those it has seen freed (up to 32 MiB), in an arena for each of many threads, so that resident memory of a
/// program without a leak was seen to grow to 400 MiB in two minutes. Call it before there are threads.
pub fn settle_allocator() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets parameters of the allocator, before other threads use it.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 10);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 128 << 10);
    }
}

/// Compares after each round with what was there at first.
pub struct Watch {
    run_dir: PathBuf,
    first: Held,
    /// Resident memory in KiB after each round.
    memory: Vec<u64>,
}

impl Watch {
    /// Begins now, with nothing of a round alive.
    pub fn start(run_dir: &Path) -> Result<Self> {
        let first = Held::read(run_dir)?;
        Ok(Watch { run_dir: run_dir.to_owned(), first, memory: Vec::new() })
    }

    /// After a round, with all of its ranks gone.
    ///
    /// # Errors
    /// More of something than before the first round, or memory that grows with the rounds.
    pub fn round(&mut self) -> Result<Held> {
        let end = Instant::now() + PATIENCE;
        let held = loop {
            let held = Held::read(&self.run_dir)?;
            match held.growth(&self.first) {
                None => break held,
                Some(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
                Some(growth) => bail!("a leak: {growth}"),
            }
        };
        #[cfg(target_env = "gnu")]
        // SAFETY: only gives free memory back to the system.
        unsafe {
            libc::malloc_trim(0);
        }
        self.memory.push(resident_kib()?);
        if let Some(grown) = grown(&self.memory) {
            bail!("a leak: memory grows with the rounds, {grown} KiB in {}", self.memory.len());
        }
        Ok(held)
    }

    /// What was there at first.
    pub fn first(&self) -> Held {
        self.first
    }

    /// Resident memory in MiB after the first and the last round.
    pub fn memory_mib(&self) -> (f64, f64) {
        let mib = |kib: Option<&u64>| kib.map_or(0.0, |&kib| kib as f64 / 1024.0);
        (mib(self.memory.first()), mib(self.memory.last()))
    }
}

/// By how much the least of the last third exceeds the most of the first third, if that is more than an allocator's whim.
fn grown(memory: &[u64]) -> Option<u64> {
    if memory.len() < ROUNDS {
        return None;
    }
    let third = memory.len() / 3;
    let most = memory[..third].iter().max()?;
    let least = memory[memory.len() - third..].iter().min()?;
    least.checked_sub(*most).filter(|&grown| grown > SLACK_KIB)
}

fn resident_kib() -> Result<u64> {
    let status =
        std::fs::read_to_string("/proc/self/status").context("reading /proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")).map(|kib| kib.trim().parse());
    let kib = kib.context("/proc/self/status has no VmRSS")??;
    ensure!(kib > 0, "/proc/self/status says that no memory is resident");
    Ok(kib)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELD: Held = Held { descriptors: 4, threads: 1, slabs: 0, shm: 0, run_dir: 0 };

    #[test]
    fn more_of_anything_is_growth_and_less_is_not() {
        assert_eq!(HELD.growth(&HELD), None);
        assert_eq!(Held { descriptors: 3, ..HELD }.growth(&HELD), None);
        for (held, what) in [
            (Held { descriptors: 5, ..HELD }, "5 descriptors, 4 before"),
            (Held { threads: 2, ..HELD }, "threads"),
            (Held { slabs: 1, ..HELD }, "mapped slabs"),
            (Held { shm: 1, ..HELD }, "/dev/shm"),
            (Held { run_dir: 1, ..HELD }, "run directory"),
        ] {
            let growth = held.growth(&HELD).unwrap();
            assert!(growth.contains(what), "{growth}");
        }
    }

    #[test]
    fn a_slab_and_a_file_that_stay_are_counted() {
        let dir = std::env::temp_dir().join(format!("peerlane-watch-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let before = Held::read(&dir).unwrap();
        let slab = peerlane::lane::HostSlab::create(1 << 20).unwrap();
        std::fs::write(dir.join("socket"), "").unwrap();
        let after = Held::read(&dir).unwrap();
        // Tests beside this one have slabs too.
        assert!(after.slabs >= 1, "{after:?}");
        assert_eq!((before.run_dir, after.run_dir), (0, 1));
        drop(slab);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn memory_that_rises_with_the_rounds_is_a_leak_and_noise_is_not() {
        let noise = |round: u64| 6_000 + round * 7919 % 900;
        let flat: Vec<u64> = (0..300).map(noise).collect();
        assert_eq!(grown(&flat), None);
        let leaking: Vec<u64> = (0..300).map(|round| noise(round) + 40 * round).collect();
        assert!(grown(&leaking).is_some());
        assert_eq!(grown(&leaking[..20]), None, "too few to tell");
        assert!(resident_kib().unwrap() > 500);
    }
}
