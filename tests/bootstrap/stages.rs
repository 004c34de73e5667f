//! A stage succeeds on all ranks or fails on all with the same error.

use crate::support::*;
use peerlane::bootstrap::Mesh;
use peerlane::{Error, Result};
use std::fs::File;
use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

fn memfd(text: &str) -> OwnedFd {
    // SAFETY: a C string; the result is checked before it is owned.
    let file = unsafe {
        let fd = libc::memfd_create(c"pl-test".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0);
        OwnedFd::from_raw_fd(fd)
    };
    File::from(file.try_clone().unwrap()).write_all(text.as_bytes()).unwrap();
    file
}

fn text(fd: &OwnedFd) -> String {
    // Read at a place: all ranks share the descriptor's position.
    let mut bytes = [0; 64];
    let got = File::from(fd.try_clone().unwrap()).read_at(&mut bytes, 0).unwrap();
    String::from_utf8(bytes[..got].to_vec()).unwrap()
}

const STAGES: [&str; 4] = ["plan", "slabs", "proof", "watch"];

/// All stages of a set-up; `failing` (stage, rank) brings an error.
fn set_up(mut mesh: Mesh, failing: Option<(usize, usize)>) -> Result<()> {
    let rank = mesh.rank();
    let mine = |stage: usize| match failing {
        Some((s, r)) if (s, r) == (stage, rank) => Err(Error::Device(format!("{rank} is broken"))),
        _ => Ok(()),
    };
    mesh.all_gather(STAGES[0], mine(0).map(|()| vec![rank; rank]))?;
    mesh.exchange_fds(STAGES[1], mine(1).map(|()| vec![memfd("x")]))?;
    mesh.vote(STAGES[2], mine(2))?;
    mesh.watch(Box::new(|_| ()), Box::new(|_, _| None), None).map(drop)
}

#[test]
fn a_failure_of_any_rank_in_any_stage_is_the_same_error_on_all() {
    let dir = Dir::new();
    for n in [1, 2, 3, 5] {
        for (stage, name) in STAGES.iter().enumerate().take(3) {
            for rank in 0..n {
                let id = dir.id();
                let results = threads(n, |r| {
                    Mesh::connect(&id, n, r, LONG).and_then(|m| set_up(m, Some((stage, rank))))
                });
                let reason = format!("{rank} is broken");
                assert_setup(&common_error(results), rank as u32, name, &reason);
            }
        }
        // Control: without a failure the same stages succeed.
        let id = dir.id();
        threads(n, |r| Mesh::connect(&id, n, r, LONG).and_then(|m| set_up(m, None)).unwrap());
    }
    dir.assert_empty();
}

#[test]
fn of_several_failures_the_first_in_order_of_rank_is_reported() {
    let dir = Dir::new();
    let meshes = meshes(&dir, 4);
    let results = std::thread::scope(|scope| {
        let ranks: Vec<_> = meshes
            .into_iter()
            .map(|mut mesh| {
                scope.spawn(move || {
                    let rank = mesh.rank();
                    // The later ranks vote first.
                    std::thread::sleep(Duration::from_millis(20 * (4 - rank as u64)));
                    let mine = if rank >= 2 { Err(Error::Closed) } else { Ok(()) };
                    mesh.vote("several", mine)
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    assert_setup(&common_error(results), 2, "several", "destroyed");
}

#[test]
fn after_a_failure_every_stage_returns_the_same_error() {
    let dir = Dir::new();
    let meshes = meshes(&dir, 3);
    std::thread::scope(|scope| {
        for mut mesh in meshes {
            scope.spawn(move || {
                let mine = if mesh.rank() == 1 { Err(Error::Closed) } else { Ok(1_u8) };
                let first = mesh.all_gather("one", mine).unwrap_err();
                assert_eq!(mesh.vote("two", Ok(())).unwrap_err(), first);
                assert_eq!(mesh.exchange_fds("three", Ok(vec![])).unwrap_err(), first);
                assert_eq!(
                    mesh.watch(Box::new(|_| ()), Box::new(|_, _| None), None).unwrap_err(),
                    first
                );
            });
        }
    });
}

#[test]
fn descriptors_arrive_usable_close_on_exec_and_in_order() {
    let dir = Dir::new();
    let n = 5;
    let id = dir.id();
    threads(n, |rank| {
        let mut mesh = Mesh::connect(&id, n, rank, LONG).unwrap();
        // Rank r brings r of them, so rank 0 none.
        let mine = (0..rank).map(|i| memfd(&format!("{rank}.{i}"))).collect();
        let all = mesh.exchange_fds("slabs", Ok(mine)).unwrap();
        for (from, fds) in all.iter().enumerate() {
            let texts: Vec<String> = fds.iter().map(text).collect();
            let expected: Vec<String> = (0..from).map(|i| format!("{from}.{i}")).collect();
            assert_eq!(texts, expected);
            for fd in fds {
                use std::os::fd::AsRawFd;
                // SAFETY: reads a flag of an open descriptor.
                let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
                assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
            }
        }
        mesh.vote("after", Ok(())).unwrap();
    });
}

#[test]
fn too_much_at_once_is_an_error_on_all() {
    let dir = Dir::new();
    let results = std::thread::scope(|scope| {
        let ranks: Vec<_> = meshes(&dir, 3)
            .into_iter()
            .map(|mut mesh| {
                scope.spawn(move || {
                    let length = if mesh.rank() == 1 { (1 << 20) + 1 } else { 1000 };
                    mesh.all_gather("large", Ok(vec![1_u8; length])).map(drop)
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    assert_setup(&common_error(results), 1, "large", "at most 1048576 are allowed");

    // Control: the largest that is allowed passes, on every rank at once.
    let id = dir.id();
    threads(3, |rank| {
        let mut mesh = Mesh::connect(&id, 3, rank, LONG).unwrap();
        let all = mesh.all_gather("large", Ok(vec![rank as u8; (1 << 20) - 3])).unwrap();
        assert!(all.iter().enumerate().all(|(r, v)| v.iter().all(|&b| b == r as u8)));
    });
}

#[test]
fn ranks_in_different_stages_are_told_which() {
    let dir = Dir::new();
    let results = std::thread::scope(|scope| {
        let ranks: Vec<_> = meshes(&dir, 2)
            .into_iter()
            .map(|mut mesh| scope.spawn(move || mesh.vote(["left", "right"][mesh.rank()], Ok(()))))
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    assert_setup(&common_error(results), 1, "left", "is in stage 'right' while rank 0");
}

#[test]
fn a_rank_that_never_votes_is_named_at_the_deadline() {
    let dir = Dir::new();
    let id = dir.id();
    let start = Instant::now();
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    let done = std::sync::Mutex::new(Some(done));
    let left = std::sync::atomic::AtomicUsize::new(2);
    let results = threads(3, |rank| {
        let mut mesh = Mesh::connect(&id, 3, rank, Duration::from_secs(3)).unwrap();
        if rank == 1 {
            let _ = wait.lock().unwrap().recv();
            return mesh.vote("stuck", Ok(()));
        }
        let result = mesh.vote("stuck", Ok(()));
        if left.fetch_sub(1, std::sync::atomic::Ordering::SeqCst) == 1 {
            done.lock().unwrap().take();
        }
        result
    });
    // The late rank, when it comes after all, gets the same verdict.
    assert_setup(&common_error(results), 1, "stuck", "did not get here within 3s");
    assert!(start.elapsed() < LONG);
}

#[test]
fn a_rank_that_drops_its_mesh_tells_the_others() {
    for leaver in 0..3 {
        let dir = Dir::new();
        let id = dir.id();
        let results = threads(3, |rank| {
            let mut mesh = Mesh::connect(&id, 3, rank, LONG).unwrap();
            if rank == leaver {
                return None;
            }
            Some(mesh.vote("deserted", Ok(())))
        });
        let error = common_error(results.into_iter().flatten().collect());
        assert!(error.to_string().contains(&format!("rank {leaver}")), "{error}");
        assert!(error.to_string().contains("left set-up"), "{error}");
    }
}
