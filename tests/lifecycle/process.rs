//! Ranks in processes of their own: this test program again, told by its environment what to do.

use peerlane::bootstrap::UniqueId;
use peerlane::comm::{Communicator, Config};
use peerlane::env::Env;
use peerlane::{DType, Error, Op};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// A run directory of its own.
pub struct Dir(pub PathBuf);

impl Dir {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = Dir(PathBuf::from(format!("/tmp/pl-life-{}-{n}", std::process::id())));
        let _ = std::fs::remove_dir_all(&dir.0);
        dir
    }

    pub fn id(&self) -> UniqueId {
        UniqueId::in_dir(Some(&self.0)).unwrap()
    }

    #[track_caller]
    pub fn assert_empty(&self) {
        assert_eq!(std::fs::read_dir(&self.0).unwrap().count(), 0, "left in the run directory");
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
    text.trim_start_matches("UniqueId(").trim_end_matches(')').into()
}

pub fn config(n: usize) -> Config {
    let deadline = Duration::from_secs(60);
    Config { deadline, ..Config::from_vars(n, &Env::default()).unwrap() }
}

/// Sums one float over all ranks.
pub fn sum(comm: &Communicator, mine: f32) -> Result<f32, Error> {
    let (input, mut output) = ([mine; 3000], [0f32; 3000]);
    // SAFETY: two arrays of 3000 floats that live through the call.
    unsafe {
        comm.all_reduce(
            input.as_ptr().cast(),
            output.as_mut_ptr().cast(),
            3000,
            DType::F32,
            Op::Sum,
            None,
        )?;
    }
    assert!(output.iter().all(|v| *v == output[0]));
    Ok(output[0])
}

/// A rank's process; killed when dropped.
pub struct Rank {
    pub child: Child,
    lines: BufReader<ChildStdout>,
}

/// Starts `task` as `rank` of `n`, behind `wrapper` if it is not empty.
pub fn start(id: &UniqueId, n: usize, rank: usize, task: &str, wrapper: &[&str]) -> Rank {
    let mut words: Vec<std::ffi::OsString> = wrapper.iter().map(Into::into).collect();
    words.push(std::env::current_exe().unwrap().into());
    words.extend(["process::body", "--exact", "--nocapture", "--test-threads=1"].map(Into::into));
    let mut child = Command::new(&words[0])
        .args(&words[1..])
        .env("PL_TEST_TASK", task)
        .env("PL_TEST_ID", id.to_string())
        .env("PL_TEST_RANK", format!("{rank}/{n}"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap());
    Rank { child, lines }
}

impl Rank {
    /// What follows `word` in the next line that says it, or `None` at the end of its output.
    pub fn hears(&mut self, word: &str) -> Option<String> {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap() > 0 {
            if let Some(rest) = line.trim_end().strip_prefix(&format!("PL {word} ")) {
                return Some(rest.to_owned());
            }
            line.clear();
        }
        None
    }

    /// All that is still to come.
    pub fn all(&mut self) -> String {
        let mut text = String::new();
        self.lines.read_to_string(&mut text).unwrap();
        text
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: the child has not been waited for, so the number is still its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    pub fn end(mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(word: &str, rest: impl std::fmt::Display) {
    // On a line of its own: the test harness leaves one open.
    print!("\nPL {word} {rest}\n");
    std::io::stdout().flush().unwrap();
}

static SIGNALLED: AtomicBool = AtomicBool::new(false);

extern "C" fn remember(_: i32) {
    SIGNALLED.store(true, Ordering::SeqCst);
}

/// Not a test of its own: what a rank's process does.
#[test]
fn body() {
    let Ok(task) = std::env::var("PL_TEST_TASK") else { return };
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the default action, before anything else runs here. A shell's background job inherits SIGINT ignored, and
        // then no test could end this process by it.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let id: UniqueId = std::env::var("PL_TEST_ID").unwrap().parse().unwrap();
    let place = std::env::var("PL_TEST_RANK").unwrap();
    let (rank, n) = place.split_once('/').unwrap();
    let (rank, n): (usize, usize) = (rank.parse().unwrap(), n.parse().unwrap());
    let words: Vec<&str> = task.split(' ').collect();
    if words[0] == "limit" {
        return limited(&id, n, rank, &words[1..]);
    }
    if words[0] == "cycles" {
        return cycles(words[1].parse().unwrap(), words[2] == "leak");
    }
    let comm = match Communicator::create(&id, n, rank, &config(n)) {
        Ok(comm) => comm,
        Err(error) => return say("error", error),
    };
    match words[0] {
        "once" => assert_eq!(sum(&comm, 1.0), Ok(n as f32)),
        "exit" => {
            sum(&comm, 1.0).unwrap();
            say("working", "-");
            if rank == 1 {
                // The others must have returned from the first call too.
                std::thread::sleep(Duration::from_millis(300));
                std::process::exit(0);
            }
            while let Ok(total) = sum(&comm, 1.0) {
                assert_eq!(total, n as f32);
            }
            return say("error", comm.error().unwrap());
        }
        // Calls until the signal has come to any rank; all learn of it by the same sum.
        "handle" | "work" => {
            if words[0] == "handle" {
                for signal in [libc::SIGINT, libc::SIGTERM] {
                    // SAFETY: the handler only stores to an atomic. No SA_RESTART: system calls do return EINTR.
                    unsafe {
                        let mut action: libc::sigaction = std::mem::zeroed();
                        action.sa_sigaction = remember as *const () as usize;
                        libc::sigaction(signal, &action, std::ptr::null_mut());
                    }
                }
            }
            let mut calls = 0;
            let result = loop {
                let flag = if SIGNALLED.load(Ordering::SeqCst) { 1.0 } else { 0.0 };
                match sum(&comm, flag) {
                    Ok(0.0) => {}
                    other => break other,
                }
                calls += 1;
                if calls == 3 {
                    say("working", "-");
                }
            };
            if let Err(error) = result {
                return say("error", error);
            }
            for _ in 0..100 {
                sum(&comm, 1.0).unwrap();
            }
        }
        other => panic!("unknown task {other}"),
    }
    comm.destroy().unwrap();
    say("ok", "-");
}

/// Creates with a limit of `room` more descriptors on rank `victim`, then, on a second id, with the old limit.
fn limited(id: &UniqueId, n: usize, rank: usize, words: &[&str]) {
    let victim: usize = words[0].parse().unwrap();
    let room: u64 = words[1].parse().unwrap();
    let again: UniqueId = words[2].parse().unwrap();
    let next = std::fs::File::open("/dev/null").unwrap();
    let next = std::os::fd::AsRawFd::as_raw_fd(&next) as u64;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is readable and writable.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    let old = limit.rlim_cur;
    let mut set = |to| {
        limit.rlim_cur = to;
        // SAFETY: as above.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    };
    if rank == victim {
        set(next + room);
    }
    // A rank that cannot even open its socket has no way to tell: the others have only this deadline. Everywhere else a
    // short one would let a busy machine fail the set-up for a reason of its own.
    let unheard = room == 1;
    let quick =
        Config { setup_deadline: Duration::from_secs(if unheard { 3 } else { 60 }), ..config(n) };
    match Communicator::create(id, n, rank, &quick) {
        Ok(comm) => say("created", sum(&comm, 1.0).unwrap()),
        Err(error) => say("error", error),
    }
    if rank == victim {
        set(old);
    }
    let comm = Communicator::create(&again, n, rank, &config(n)).unwrap();
    assert_eq!(sum(&comm, 1.0), Ok(n as f32));
    say("ok", "-");
}

/// Descriptors, threads and mappings of this process.
fn held() -> [usize; 3] {
    let entries = |path| std::fs::read_dir(path).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    [entries("/proc/self/fd"), entries("/proc/self/task"), maps]
}

/// Creates and destroys communicators of two ranks; says what is held after a tenth of them and after all.
fn cycles(times: usize, leak: bool) {
    let mut early = [0; 3];
    for i in 0..times {
        let comms = Communicator::create_local(2, &config(2)).unwrap();
        std::thread::scope(|scope| {
            for comm in &comms {
                scope.spawn(|| assert_eq!(sum(comm, 1.0), Ok(2.0)));
            }
        });
        if leak {
            comms.into_iter().for_each(std::mem::forget);
        } else {
            comms.into_iter().for_each(|comm| comm.destroy().unwrap());
        }
        if i == times / 10 {
            early = held();
        }
    }
    say("early", format!("{early:?}"));
    say("late", format!("{:?}", held()));
}
