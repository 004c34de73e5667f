//! Processes that reduce in a loop are killed at random moments. The survivors name the dead rank at once, none of them
//! takes anything for a sum that is not one, and nothing is left on the machine.
//!
//! `PL_TEST_ROUNDS` sets the number of rounds, `PL_TEST_SEED` the seed of the first.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

#[path = "common/ranks.rs"]
mod ranks;

use peerlane::bootstrap::UniqueId;
use peerlane::comm::Communicator;
use peerlane::Error;
use ranks::{config, data, expected, sum};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{channel, Receiver};
use std::time::Duration;

const N: usize = 4;
/// What a survivor may take to learn of a death.
const AT_ONCE: Duration = Duration::from_secs(2);
/// What a step of the test may take on a busy machine before it counts as a hang.
const HANGS: Duration = Duration::from_secs(40);
const SIZES: [usize; 5] = [1, 3584, 250, 60_000, 14_336];

// ---- a rank's process ----

fn say(words: &str) {
    // One write, on a line of its own: the test harness leaves one open, and ranks are threads here.
    let line = format!("\nPL {words}\n");
    std::io::stdout().write_all(line.as_bytes()).unwrap();
    std::io::stdout().flush().unwrap();
}

/// Not a test of its own: a process with the ranks that the environment names, each a thread.
#[test]
fn process() {
    let Ok(task) = std::env::var("PL_TEST_TASK") else { return };
    let id: UniqueId = std::env::var("PL_TEST_ID").unwrap().parse().unwrap();
    let (ranks, leaver) = task.split_once(' ').unwrap();
    let leaver: usize = leaver.parse().unwrap();
    // What was there before, such as a file that the test's output goes to.
    let inherited = &names_in_use();
    std::thread::scope(|scope| {
        for rank in ranks.split(',') {
            let rank: usize = rank.parse().unwrap();
            scope.spawn(move || work(&id, rank, rank == leaver, inherited));
        }
    });
}

/// Reduces until it fails, or for a while if this rank is to leave of its own accord.
fn work(id: &UniqueId, rank: usize, leaves: bool, inherited: &BTreeSet<String>) {
    let comm = Communicator::create(id, N, rank, &config(N)).unwrap();
    for call in 0.. {
        let count = SIZES[call % SIZES.len()];
        let mut output = vec![5.0; count];
        let result = sum(&comm, &data(rank, call, count), &mut output, None);
        let right = expected(N, call, count);
        let Err(error) = result else {
            assert!(output == right, "rank {rank}, call {call}: a wrong sum");
            match call {
                2 => {
                    let names: Vec<_> = names_in_use().difference(inherited).cloned().collect();
                    say(&format!("works {rank} {}", names.join(" ")));
                }
                400 if leaves => return,
                _ => {}
            }
            continue;
        };
        let now = clock();
        let done = output.iter().take_while(|v| !v.is_nan()).count();
        let fills = output[done..].iter().all(|v| v.to_bits() == 0x7fff_ffff);
        assert!(output[..done] == right[..done] && fills, "rank {rank}, call {call}: neither");
        let again = sum(&comm, &data(rank, call, count), &mut output, None);
        assert_eq!(again, Err(error.clone()), "sticky");
        assert!(output.iter().all(|v| v.is_nan()));
        say(&format!("ended {rank} {now} {error}"));
        return;
    }
}

/// Nanoseconds of the clock that all processes of the machine share.
fn clock() -> u128 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is writable.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u128 * 1_000_000_000 + now.tv_nsec as u128
}

/// Files with a name that this process has mapped or open and that would outlive it; a memfd has no name.
fn names_in_use() -> BTreeSet<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).map(str::to_owned);
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let open = open.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    let open = open.map(|path| path.to_string_lossy().into_owned());
    let lasting = |name: &String| name.starts_with("/dev/shm/") || name.starts_with("/tmp/");
    mapped.chain(open).filter(lasting).collect()
}

// ---- the test ----

struct Random(u64);

impl Random {
    /// xorshift.
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

/// A run directory of its own.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let dir = Dir(PathBuf::from(format!("/tmp/pl-kills-{name}-{}", std::process::id())));
        let _ = std::fs::remove_dir_all(&dir.0);
        dir
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A process with some ranks; killed when dropped.
struct Ranks {
    child: Child,
    ranks: Vec<usize>,
    lines: Receiver<String>,
}

impl Ranks {
    fn start(id: &UniqueId, ranks: &[usize], leaver: usize) -> Self {
        let list: Vec<_> = ranks.iter().map(usize::to_string).collect();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["process", "--exact", "--nocapture", "--test-threads=1"])
            .env("PL_TEST_TASK", format!("{} {leaver}", list.join(",")))
            .env("PL_TEST_ID", id.to_string())
            .env("PEERLANE_LOG", "off")
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let (send, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            let said = output.lines().map_while(Result::ok);
            for line in said.filter_map(|l| l.strip_prefix("PL ").map(str::to_owned)) {
                let _ = send.send(line);
            }
        });
        Ranks { child, ranks: ranks.to_vec(), lines }
    }

    /// The next line that begins with `word`, without it and the rank.
    fn hear(&self, word: &str, here: &str) -> String {
        let line = self.lines.recv_timeout(HANGS);
        let line = line.unwrap_or_else(|e| panic!("{here}: ranks {:?}: {e}", self.ranks));
        let mut parts = line.splitn(3, ' ');
        assert_eq!(parts.next(), Some(word), "{here}: {line}");
        let rank = parts.next().and_then(|rank| rank.parse().ok());
        assert!(rank.is_some_and(|rank| self.ranks.contains(&rank)), "{here}: {line}");
        parts.next().unwrap_or_default().to_owned()
    }

    /// Waits for its end, and checks that nothing of its process group is alive.
    fn gone(mut self) -> bool {
        let status = self.child.wait().unwrap();
        // SAFETY: signal 0 only asks.
        let alive = unsafe { libc::kill(-(self.child.id() as i32), 0) } == 0;
        assert!(!alive, "a process of ranks {:?} survives", self.ranks);
        status.success()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Names in the places for files that outlive a process, beside the run directory, which is checked after every round.
fn names() -> BTreeSet<PathBuf> {
    let entries = ["/dev/shm", "/tmp"].map(|dir| std::fs::read_dir(dir).unwrap());
    entries.into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// What these processes have left behind since there were the names `before`. Others on the machine use the library
/// too, so a name counts that holds the number of one of the processes.
fn left_behind(before: &BTreeSet<PathBuf>, pids: &BTreeSet<u32>) -> Vec<PathBuf> {
    let is_theirs = |path: &PathBuf| {
        let name = path.to_string_lossy();
        let mut numbers = name.split(|c: char| !c.is_ascii_digit());
        numbers.any(|number| number.parse().is_ok_and(|pid| pids.contains(&pid)))
    };
    names().difference(before).filter(|path| is_theirs(path)).cloned().collect()
}

/// A round: these processes, of which the one numbered `victim` ends in the way that `end` says. How long it took
/// the slowest survivor to learn of it, by its own clock, and what the survivors say. Their numbers go into `pids`.
fn round(
    dir: &Dir,
    processes: &[&[usize]],
    victim: usize,
    leaver: usize,
    here: &str,
    pids: &mut BTreeSet<u32>,
    end: impl FnOnce(&mut Ranks) -> u128,
) -> (Duration, BTreeSet<String>) {
    let id = UniqueId::in_dir(Some(&dir.0)).unwrap();
    let mut all: Vec<_> = processes.iter().map(|p| Ranks::start(&id, p, leaver)).collect();
    pids.extend(all.iter().map(|process| process.child.id()));
    for process in &all {
        for _ in &process.ranks {
            let names = process.hear("works", here);
            assert_eq!(names, "", "{here}: in use");
        }
    }
    let mut dead = all.remove(victim);
    let ended = end(&mut dead);
    dead.gone();
    let (mut slowest, mut said) = (0, BTreeSet::new());
    for process in all {
        for _ in &process.ranks {
            let line = process.hear("ended", here);
            let (when, error) = line.split_once(' ').unwrap();
            slowest = slowest.max(when.parse::<u128>().unwrap().saturating_sub(ended));
            said.insert(error.to_owned());
        }
        assert!(process.gone(), "{here}: a survivor failed, see above");
    }
    let left: Vec<_> = std::fs::read_dir(&dir.0).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(left.is_empty(), "{here}: left in the run directory: {left:?}");
    (Duration::from_nanos(slowest as u64), said)
}

fn kill_rounds(name: &str, processes: &[&[usize]], seed: u64) {
    let from_env = |name: &str| std::env::var(name).ok().and_then(|value| value.parse().ok());
    let rounds: u64 = from_env("PL_TEST_ROUNDS").unwrap_or(20);
    let mut random = Random(from_env("PL_TEST_SEED").unwrap_or(seed).max(1));
    let dir = Dir::new(name);
    let (before, mut pids) = (names(), BTreeSet::new());
    let mut slowest = Duration::ZERO;
    for round_number in 0..rounds {
        let state = random.0;
        let victim = random.below(processes.len() as u64) as usize;
        let delay = Duration::from_micros(random.below(20_000));
        let here = format!("round {round_number}, PL_TEST_SEED={state}: {victim} after {delay:?}");
        let (took, said) = round(&dir, processes, victim, N, &here, &mut pids, |dead| {
            std::thread::sleep(delay);
            let now = clock();
            dead.child.kill().unwrap();
            now
        });
        let rank = processes[victim][0] as u32;
        assert_eq!(said, BTreeSet::from([Error::RankDied { rank }.to_string()]), "{here}");
        assert!(took < AT_ONCE, "{here}: {took:?}");
        slowest = slowest.max(took);
    }
    let left = left_behind(&before, &pids);
    assert!(left.is_empty(), "left behind: {left:?}");
    println!("{name}: {rounds} kills, the slowest survivor knew within {slowest:?}");
}

#[test]
fn survivors_of_a_killed_process_name_its_rank_and_leave_nothing_behind() {
    kill_rounds("processes", &[&[0], &[1], &[2], &[3]], 0x5eed_0001);
}

#[test]
fn survivors_of_a_killed_process_of_several_ranks_name_its_lowest() {
    kill_rounds("mixed", &[&[0, 2], &[1, 3]], 0x5eed_0002);
}

/// The control: a rank that destroys its communicator is not dead.
#[test]
fn a_rank_that_leaves_is_not_taken_for_dead() {
    let dir = Dir::new("leaves");
    for (processes, leaver) in [([&[0][..], &[1], &[2], &[3]], 2), ([&[0], &[1], &[2], &[3]], 0)] {
        let here = format!("rank {leaver} leaves");
        let (before, mut pids) = (names(), BTreeSet::new());
        let (_, said) = round(&dir, &processes, leaver, leaver, &here, &mut pids, |_| clock());
        assert!(left_behind(&before, &pids).is_empty());
        // Control: a file that one of them might have left is seen.
        let planted = PathBuf::from(format!("/tmp/pl-planted-{}", pids.first().unwrap()));
        std::fs::write(&planted, "").unwrap();
        let seen = left_behind(&before, &pids);
        std::fs::remove_file(&planted).unwrap();
        assert_eq!(seen, [planted]);
        let rank = leaver as u32;
        assert_eq!(said, BTreeSet::from([Error::RankLeft { rank }.to_string()]));
    }
}
