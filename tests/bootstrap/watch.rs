//! Liveness among ranks that are threads of one process.

use crate::support::*;
use peerlane::bootstrap::{Mesh, Watch};
use peerlane::Error;
use std::sync::mpsc::{channel, Receiver};
use std::time::Duration;

fn watches(dir: &Dir, n: usize) -> Vec<(Watch, Receiver<Error>)> {
    let id = dir.id();
    threads(n, |rank| {
        let (send, receive) = channel();
        let mesh = Mesh::connect(&id, n, rank, LONG).unwrap();
        let watch = mesh
            .watch(Box::new(move |error| send.send(error).unwrap()), Box::new(|_, _| None), None)
            .unwrap();
        (watch, receive)
    })
}

const QUIET: Duration = Duration::from_millis(300);

#[test]
fn a_goodbye_is_no_death() {
    let dir = Dir::new();
    let mut all = watches(&dir, 4);
    let (left, _) = all.remove(1);
    assert!((0..4).all(|r| !left.gone(r)));
    left.goodbye([1; 4]);
    left.goodbye([1; 4]);
    drop(left);
    for (watch, errors) in &all {
        eventually(|| watch.gone(1));
        assert!(!watch.gone(0) && !watch.gone(2) && !watch.gone(3));
        assert!(errors.recv_timeout(QUIET).is_err());
        assert_eq!(watch.failure(), None);
    }
}

#[test]
fn ending_without_a_goodbye_is_a_death() {
    // The control of `a_goodbye_is_no_death`: a panicking rank says none.
    let dir = Dir::new();
    let mut all = watches(&dir, 4);
    let (victim, _) = all.remove(1);
    let panicked = std::thread::spawn(move || {
        let _victim = victim;
        panic!("part of the test");
    });
    assert!(panicked.join().is_err());
    for (watch, errors) in &all {
        let error = errors.recv_timeout(LONG).unwrap();
        assert_eq!(error, Error::RankDied { rank: 1 });
        assert_eq!(watch.failure(), Some(error));
        assert!(watch.gone(1));
        assert!(errors.recv_timeout(Duration::from_millis(50)).is_err(), "told once");
    }
}

#[test]
fn an_error_is_told_to_all_as_it_is_and_the_first_one_stays() {
    let dir = Dir::new();
    let all = watches(&dir, 3);
    let error =
        Error::Deadline { rank: 1, peer: 2, phase: 3, step: 4_000_000_000_000, bytes: 14336 };
    all[1].0.tell(&error);
    all[1].0.tell(&Error::Closed);
    for rank in [0, 2] {
        assert_eq!(all[rank].1.recv_timeout(LONG).unwrap(), error);
        all[rank].0.tell(&Error::Closed);
        assert_eq!(all[rank].0.failure(), Some(error.clone()));
    }
    assert!(all[1].1.recv_timeout(QUIET).is_err(), "the teller knows already");
    assert_eq!(all[1].0.failure(), Some(error));
}

#[test]
fn a_rank_that_tells_and_leaves_is_heard_before_it_is_missed() {
    for _ in 0..20 {
        let dir = Dir::new();
        let mut all = watches(&dir, 3);
        let (watch, _) = all.remove(0);
        let error = Error::Mismatch("count 3 on rank 0, 4 on rank 1".into());
        watch.tell(&error);
        let ended = std::thread::spawn(move || {
            let _watch = watch;
            panic!("part of the test");
        });
        assert!(ended.join().is_err());
        for (_, errors) in &all {
            assert_eq!(errors.recv_timeout(LONG).unwrap(), error);
        }
    }
}

#[test]
fn a_text_of_any_length_can_be_told() {
    let dir = Dir::new();
    let all = watches(&dir, 2);
    all[0].0.tell(&Error::Device("long ".repeat(1 << 20)));
    let error = all[1].1.recv_timeout(LONG).unwrap().to_string();
    assert!(error.contains("device: long long"), "{error}");
    assert_eq!(all[0].0.failure().unwrap().to_string(), error, "the same on both");
}

#[test]
fn the_callback_may_drop_the_watch() {
    let dir = Dir::new();
    let id = dir.id();
    let slot = std::sync::Arc::new(std::sync::Mutex::new(None::<Watch>));
    let (send, receive) = channel();
    let in_callback = slot.clone();
    threads(2, |rank| {
        let mesh = Mesh::connect(&id, 2, rank, LONG).unwrap();
        if rank == 0 {
            let (slot, send) = (in_callback.clone(), send.clone());
            let on_failure = move |error| {
                drop(slot.lock().unwrap().take());
                send.send(error).unwrap();
            };
            let watch = mesh.watch(Box::new(on_failure), Box::new(|_, _| None), None);
            *in_callback.lock().unwrap() = Some(watch.unwrap());
        } else {
            let watch = mesh.watch(Box::new(|_| ()), Box::new(|_, _| None), None).unwrap();
            eventually(|| slot.lock().unwrap().is_some());
            watch.tell(&Error::Closed);
        }
    });
    assert_eq!(receive.recv_timeout(LONG).unwrap(), Error::Closed);
}

#[test]
fn all_may_leave_at_once() {
    let dir = Dir::new();
    for _ in 0..20 {
        let all = watches(&dir, 4);
        std::thread::scope(|scope| {
            for (watch, errors) in all {
                scope.spawn(move || {
                    drop(watch);
                    assert!(errors.try_recv().is_err());
                });
            }
        });
    }
    dir.assert_empty();
}

/// Forks; the child runs `f` and ends without destructors of its own.
fn in_child(f: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child makes system calls and small allocations only (glibc keeps its allocator usable after a fork).
    unsafe {
        let pid = libc::fork();
        assert!(pid >= 0);
        if pid == 0 {
            libc::alarm(20);
            libc::_exit(i32::from(!f()));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
    }
}

#[test]
fn a_forked_child_cannot_speak_for_its_parent() {
    let dir = Dir::new();
    let mut all = watches(&dir, 2);
    let (mine, errors) = all.remove(0);
    // SAFETY: the child drops this copy once and never touches the original.
    assert!(in_child(|| unsafe {
        mine.tell(&Error::Closed);
        mine.goodbye([1; 4]);
        drop(std::ptr::read(&mine));
        mine.failure().is_none()
    }));
    assert!(all[0].1.recv_timeout(QUIET).is_err());
    assert!(!all[0].0.gone(0) && !mine.gone(1));
    // Control: the parent still can.
    mine.tell(&Error::Closed);
    assert_eq!(all[0].1.recv_timeout(LONG).unwrap(), Error::Closed);
    assert!(errors.try_recv().is_err());
}

#[test]
fn set_up_cannot_go_on_in_a_forked_child() {
    let dir = Dir::new();
    let mut all = meshes(&dir, 2);
    assert!(in_child(|| matches!(all[1].vote("fork", Ok(())), Err(Error::Unsupported(_)))));
    let mut second = all.pop().unwrap();
    let mut first = all.pop().unwrap();
    // SAFETY: the child drops this copy once and never touches the original.
    assert!(in_child(|| unsafe {
        drop(std::ptr::read(&second));
        true
    }));
    std::thread::scope(|scope| {
        scope.spawn(move || first.vote("on", Ok(())).unwrap());
        scope.spawn(move || second.vote("on", Ok(())).unwrap());
    });
}
