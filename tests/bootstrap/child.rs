//! What a rank in a process of its own does.

use crate::support::{clock, LONG};
use peerlane::bootstrap::{Mesh, UniqueId, Watch};
use peerlane::{Error, Result};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{channel, Receiver};
use std::time::Duration;

/// The places at which a rank can be made to die.
pub const PLACES: [&str; 5] = ["alpha", "handles", "omega", "watch", "work"];

fn say(word: &str, rest: &str) {
    // On a line of its own: the test harness leaves one open.
    print!("\nPL {word} {rest}\n");
    std::io::stdout().flush().unwrap();
}

fn kill_myself() -> ! {
    say("killed", &clock().to_string());
    // SAFETY: no memory is involved.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    unreachable!()
}

fn null() -> OwnedFd {
    std::fs::File::open("/dev/null").unwrap().into()
}

/// Not a test of its own: the body of a rank's process, given its task by the environment.
#[test]
fn rank() {
    let Ok(task) = std::env::var("PL_TEST_TASK") else { return };
    let id: UniqueId = std::env::var("PL_TEST_ID").unwrap().parse().unwrap();
    let place = std::env::var("PL_TEST_RANK").unwrap();
    let (rank, n) = place.split_once('/').unwrap();
    let (rank, n): (usize, usize) = (rank.parse().unwrap(), n.parse().unwrap());
    let words: Vec<&str> = task.split(' ').collect();
    let outcome = match words[0] {
        "die" => all_stages(&id, n, rank, words[1].parse().unwrap(), words[2], LONG),
        "run" => all_stages(&id, n, rank, n, "", Duration::from_secs(words[1].parse().unwrap())),
        "pair" => pair(&id, n, rank),
        "limit" => limited(&id, n, rank, words[1].parse().unwrap(), words[2].parse().unwrap()),
        "cycles" => cycles(words[1].parse().unwrap()),
        other => panic!("unknown task {other}"),
    };
    match outcome {
        Ok(()) => say("ok", "-"),
        Err(error) => say("error", &error.to_string()),
    }
    say("ended", &clock().to_string());
}

/// Goes through all stages, calling `here` with the name of each place before it.
fn set_up(
    id: &UniqueId,
    n: usize,
    rank: usize,
    deadline: Duration,
    here: impl Fn(&str),
) -> Result<(Watch, Receiver<Error>)> {
    say("started", "-");
    let mut mesh = Mesh::connect(id, n, rank, deadline)?;
    here("alpha");
    mesh.all_gather("alpha", Ok(rank as u32))?;
    here("handles");
    mesh.exchange_fds("handles", Ok(vec![null()]))?;
    here("omega");
    mesh.vote("omega", Ok(()))?;
    here("watch");
    let (send, receive) = channel();
    let on_failure = move |error| {
        let _ = send.send(error);
    };
    let watch = mesh.watch(Box::new(on_failure), Box::new(|_, _| None), None)?;
    say("working", "-");
    here("work");
    Ok((watch, receive))
}

/// Sets up and then works for ever; rank `victim` dies at `place`, or does after set-up what `place` says.
fn all_stages(
    id: &UniqueId,
    n: usize,
    rank: usize,
    victim: usize,
    place: &str,
    deadline: Duration,
) -> Result<()> {
    let (watch, errors) = set_up(id, n, rank, deadline, |now| {
        if (rank, now) == (victim, place) {
            kill_myself();
        }
    })?;
    if rank == victim {
        leave(place, &watch);
    }
    match errors.recv_timeout(LONG) {
        Ok(error) => {
            // What a rank does in practice: it stops at once, without a goodbye, which must not be taken for the cause.
            std::mem::forget(watch);
            Err(error)
        }
        Err(_) => Ok(()),
    }
}

/// Two ranks of one process, `rank` and the next, which dies once both are at work.
fn pair(id: &UniqueId, n: usize, rank: usize) -> Result<()> {
    let _both = crate::support::threads(2, |i| set_up(id, n, rank + i, LONG, |_| ()).unwrap());
    kill_myself()
}

fn leave(place: &str, watch: &Watch) {
    match place {
        "fork" | "clone" => {
            // SAFETY: the child makes no call but pause and close.
            let child = unsafe {
                if place == "fork" {
                    libc::fork()
                } else {
                    libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as i32
                }
            };
            if child == 0 {
                // SAFETY: as above. The standard output is closed so that the test sees its end.
                unsafe {
                    libc::close(1);
                    libc::alarm(30);
                    libc::pause();
                    libc::_exit(0);
                }
            }
            say("child", &child.to_string());
            kill_myself();
        }
        "exit" => {
            say("killed", &clock().to_string());
            std::process::exit(0);
        }
        "goodbye" => {
            watch.goodbye([1; 4]);
            std::process::exit(0);
        }
        "tell" => {
            watch.tell(&Error::Device("the victim's own words".into()));
            say("killed", &clock().to_string());
            std::process::exit(0);
        }
        "work" => {}
        other => panic!("unknown place {other}"),
    }
}

/// Sets up with room for `room` more descriptors on rank `victim`.
fn limited(id: &UniqueId, n: usize, rank: usize, victim: usize, room: u64) -> Result<()> {
    if rank == victim {
        let next = std::os::fd::AsRawFd::as_raw_fd(&null()) as u64;
        let limit = libc::rlimit { rlim_cur: next + room, rlim_max: next + room };
        // SAFETY: `limit` is readable.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    }
    // A rank that cannot even open its socket has no way to tell, so the others have only their deadline. Everywhere else
    // a short one would let a busy machine fail the set-up for a reason of its own.
    let deadline = if room <= 1 { Duration::from_secs(4) } else { LONG };
    let mut mesh = Mesh::connect(id, n, rank, deadline)?;
    let mine = std::fs::File::open("/dev/null").map_err(|e| Error::os("open", &e));
    mesh.exchange_fds("handles", mine.map(|file| vec![file.into()]))?;
    let _watch = mesh.watch(Box::new(|_| ()), Box::new(|_, _| None), None)?;
    Ok(())
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Creates and destroys communicators of 4 ranks in this process and counts what is open.
fn cycles(times: usize) -> Result<()> {
    let dir = crate::support::Dir::new();
    let cycle = |fail: bool| {
        let id = dir.id();
        crate::support::threads(4, |rank| {
            let mut mesh = Mesh::connect(&id, 4, rank, LONG).unwrap();
            mesh.exchange_fds("handles", Ok(vec![null(), null()])).unwrap();
            if fail {
                let mine = if rank == 2 { Err(Error::Closed) } else { Ok(()) };
                mesh.vote("fail", mine).unwrap_err();
            } else {
                let _watch = mesh.watch(Box::new(|_| ()), Box::new(|_, _| None), None).unwrap();
            }
        });
    };
    cycle(false);
    let before = open_descriptors();
    for i in 0..times {
        cycle(i % 3 == 2);
    }
    say("descriptors", &format!("{before} {}", open_descriptors()));
    dir.assert_empty();
    Ok(())
}
