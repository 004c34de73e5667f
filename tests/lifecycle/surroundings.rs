//! Creation where the system gives little, or others are about.

use crate::process::{config, socket_of, start, sum, Dir, Rank};
use peerlane::bootstrap::UniqueId;
use peerlane::comm::{Communicator, Config};
use peerlane::Error;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

fn is_root(test: &str) -> bool {
    // SAFETY: no preconditions.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        eprintln!("SKIPPED {test}: it needs root");
    }
    root
}

/// Whether `unshare` with these flags is allowed here: a container may forbid it even to root.
fn may_unshare(test: &str, flags: &[&str]) -> bool {
    let tried = std::process::Command::new("unshare").args(flags).arg("true").output();
    let may = is_root(test) && tried.is_ok_and(|o| o.status.success());
    if !may {
        eprintln!("SKIPPED {test}: unshare {flags:?} is not allowed here");
    }
    may
}

fn two(id: &UniqueId, task: &str, wrapper: &[&str]) -> [Rank; 2] {
    [0, 1].map(|rank| start(id, 2, rank, task, wrapper))
}

#[test]
fn ranks_in_pid_namespaces_of_their_own_find_each_other_and_notice_a_death() {
    if !may_unshare("pid namespaces", &["--pid", "--fork"]) {
        return;
    }
    let wrapper = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let dir = Dir::new();
    for mut rank in two(&dir.id(), "once", &wrapper) {
        assert!(rank.hears("ok").is_some());
    }
    // Both ranks are process 1 of their namespace.
    let [mut survivor, mut victim] = two(&dir.id(), "work", &wrapper);
    survivor.hears("working").unwrap();
    victim.hears("working").unwrap();
    let begun = Instant::now();
    victim.signal(libc::SIGKILL); // of unshare, which takes its child along
    assert_eq!(survivor.hears("error").as_deref(), Some("rank 1 died"));
    assert!(begun.elapsed() < Duration::from_secs(2));
}

#[test]
fn nothing_needs_dev_shm() {
    if !may_unshare("no /dev/shm", &["--mount"]) {
        return;
    }
    // The control is in the script: nothing can be made there any more.
    let script = "mount -t tmpfs -o ro,size=4k none /dev/shm || exit 9; \
                  if touch /dev/shm/x 2>/dev/null; then exit 8; fi; exec \"$0\" \"$@\"";
    let dir = Dir::new();
    for mut rank in two(&dir.id(), "once", &["unshare", "--mount", "sh", "-c", script]) {
        assert!(rank.hears("ok").is_some());
        assert!(rank.end().success());
    }
}

#[test]
fn too_few_descriptors_on_one_rank_fail_on_all_and_the_next_attempt_works() {
    let (mut failed, mut told, mut succeeded) = (0, 0, 0);
    for victim in [0, 2] {
        // Each descriptor in turn is the one that there is no room for.
        for room in (1..=20).chain([80]) {
            let dir = Dir::new();
            let task = format!("limit {victim} {room} {}", dir.id());
            let id = dir.id();
            let begun = Instant::now();
            let mut ranks: Vec<_> = (0..3).map(|rank| start(&id, 3, rank, &task, &[])).collect();
            let said: Vec<String> = ranks
                .iter_mut()
                .map(|rank| {
                    // The one or the other comes first, "ok" comes last.
                    let text = rank.all();
                    assert!(text.contains("PL ok"), "victim {victim}, room {room}: {text}");
                    let first = text.lines().find(|l| l.starts_with("PL ")).unwrap_or_default();
                    first.to_owned()
                })
                .collect();
            let here = format!("victim {victim}, room {room}: {said:?}");
            // Nobody waits for the deadline of 60 s for a rank that could not take part.
            assert!(begun.elapsed() < Duration::from_secs(30), "{here}");
            let errors = said.iter().filter(|s| s.starts_with("PL error")).count();
            assert!(errors == 0 || errors == 3, "{here}");
            if errors == 0 {
                succeeded += 1;
            } else {
                failed += 1;
                assert!(said[victim].contains("open files"), "{here}");
                // A rank that could open no socket, or take none in, reached nobody: then the others know only that it did
                // not come, or went.
                let could_tell = said[victim].contains("set-up failed")
                    && !said[victim].contains("accept failed");
                assert!(!could_tell || said.iter().all(|s| *s == said[0]), "{here}");
                told += u32::from(could_tell);
            }
            dir.assert_empty();
        }
    }
    assert!(told >= 3 && succeeded >= 2, "{failed} failed, {told} of them told, {succeeded} not");
}

fn both(id: &UniqueId, config: &Config) -> Vec<Result<Communicator, Error>> {
    std::thread::scope(|scope| {
        let ranks =
            [0, 1].map(|rank| scope.spawn(move || Communicator::create(id, 2, rank, config)));
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_run_directory_of_another_user_is_refused_and_says_so() {
    if !is_root("a directory of another user") {
        return;
    }
    let dir = Dir::new();
    let id = dir.id();
    std::os::unix::fs::chown(&dir.0, Some(65534), None).unwrap();
    for result in both(&id, &config(2)) {
        let text = result.unwrap_err().to_string();
        assert!(
            text.contains("belongs to uid 65534") && text.contains("PEERLANE_RUN_DIR"),
            "{text}"
        );
    }
    // Control: it is the owner, nothing else.
    std::os::unix::fs::chown(&dir.0, Some(0), None).unwrap();
    assert!(both(&id, &config(2)).iter().all(Result::is_ok));
}

#[test]
fn a_file_or_a_socket_planted_under_the_ids_name_fails_both_ranks_and_is_not_trusted() {
    let quick = Config { setup_deadline: Duration::from_secs(2), ..config(2) };
    for with_listener in [false, true] {
        let dir = Dir::new();
        let id = dir.id();
        let path = socket_of(&id);
        let listener = with_listener.then(|| UnixListener::bind(&path).unwrap());
        if listener.is_none() {
            std::fs::write(&path, "planted").unwrap();
        }
        if let Ok(meta) = std::fs::symlink_metadata(&path) {
            use std::os::unix::fs::MetadataExt;
            let _ = std::os::unix::fs::chown(&path, Some(65534), Some(meta.gid()));
        }
        let begun = Instant::now();
        for result in both(&id, &quick) {
            let text = result.unwrap_err().to_string();
            assert!(text.contains("rendezvous"), "{text}");
        }
        assert!(begun.elapsed() < Duration::from_secs(30));
        // Another id in the same directory is none the worse.
        assert!(both(&dir.id(), &config(2)).iter().all(Result::is_ok));
    }
}

#[test]
fn strangers_at_the_socket_do_not_keep_ranks_from_creating() {
    let dir = Dir::new();
    let id = dir.id();
    let comms: Vec<Communicator> = std::thread::scope(|scope| {
        let zero = scope.spawn(|| Communicator::create(&id, 2, 0, &config(2)).unwrap());
        let socket = socket_of(&id);
        let connect = || loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => break stream,
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        let silent: Vec<_> = (0..50).map(|_| connect()).collect();
        for length in [1, 33, 1 << 20] {
            // Dropped in the middle of it, most likely.
            let _ = connect().write_all(&vec![0xa5; length]);
        }
        let mut oversized = b"pl-rdv\r\n\x02\0\0\0\x01\0\0\0".to_vec();
        oversized.extend(&id.as_bytes()[16..32]);
        oversized.extend(u32::MAX.to_le_bytes());
        oversized.extend([0; 64]);
        let _ = connect().write_all(&oversized);
        // The control: it is rank 1 that is waited for, and nothing else.
        std::thread::sleep(Duration::from_millis(50));
        assert!(!zero.is_finished());
        let one = Communicator::create(&id, 2, 1, &config(2)).unwrap();
        drop(silent);
        vec![zero.join().unwrap(), one]
    });
    std::thread::scope(|scope| {
        for comm in &comms {
            scope.spawn(move || assert_eq!(sum(comm, 1.0), Ok(2.0)));
        }
    });
    dir.assert_empty();
}
