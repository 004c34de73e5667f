//! What a forked child may do with its parent's communicator: nothing, but nothing it tries hangs or harms the parent.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

#[path = "common/ranks.rs"]
mod ranks;

use peerlane::comm::Communicator;
use peerlane::device::Stream;
use peerlane::Error;
use ranks::{config, data, expected, sum};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The body of the test, in a process of its own: forking the test harness would fork its other threads' locks.
#[test]
fn parent() {
    if std::env::var_os("PL_TEST_FORK").is_none() {
        return;
    }
    let comms = Communicator::create_local(2, &config(2)).unwrap();
    let streams = [Stream::new().unwrap(), Stream::new().unwrap()];
    let inputs = [data(0, 0, 300), data(1, 0, 300)];
    let mut outputs = vec![vec![0.0; 300]; 3];
    let [first, second, third] = &mut outputs[..] else { unreachable!() };
    std::thread::scope(|scope| {
        // At the fork one thread is in a call and holds its locks, and another call is queued, so a worker exists.
        let waiting = scope.spawn(|| sum(&comms[0], &inputs[0], first, Some(&streams[0])));
        while !format!("{:?}", streams[0]).contains("running: true") {
            std::thread::yield_now();
        }
        sum(&comms[0], &inputs[0], second, Some(&streams[0])).unwrap();
        // SAFETY: the child only calls what this test is about, and ends without destructors of its own. glibc keeps
        // its allocator usable after a fork.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let bad = in_child(&comms, &streams);
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(bad) };
        }
        assert_eq!(status_of(child), Some(0), "the child: 1 to 7 say which check failed");
        // The parent works on: nobody has left, nothing has failed.
        assert!(!waiting.is_finished());
        sum(&comms[1], &inputs[1], third, None).unwrap();
        assert_eq!(waiting.join().unwrap(), Ok(()));
        let mut again = vec![0.0; 300];
        sum(&comms[1], &inputs[1], &mut again, None).unwrap();
        assert_eq!(again, expected(2, 0, 300));
        streams[0].synchronize().unwrap();
    });
    assert!(outputs.iter().all(|output| *output == expected(2, 0, 300)));
    assert!(comms.iter().all(|comm| comm.error().is_none()));
    for comm in comms {
        comm.destroy().unwrap();
    }
    println!("\nPL parent is done");
}

/// Everything that a child may think of. 0, or the number of the first check that failed.
fn in_child(comms: &[Communicator], streams: &[Stream]) -> i32 {
    let mut output = [5.0; 4];
    for (number, stream) in [None, Some(&streams[0]), Some(&streams[1])].into_iter().enumerate() {
        let result = sum(&comms[1], &[1.0; 4], &mut output, stream);
        if !matches!(result, Err(Error::Unsupported(_))) {
            return 1 + number as i32;
        }
    }
    for comm in comms {
        comm.abort();
        if comm.error().is_some() {
            return 4;
        }
        let _ = (comm.rank(), comm.size(), comm.stats());
    }
    if !streams.iter().all(|s| matches!(s.synchronize(), Err(Error::Unsupported(_)))) {
        return 7;
    }
    // SAFETY: bitwise copies, each dropped once; the originals are never dropped in this process.
    unsafe {
        for comm in comms {
            drop(std::ptr::read(comm));
        }
        for stream in streams {
            drop(std::ptr::read(stream));
        }
    }
    // It may have a communicator of its own.
    match Communicator::create_local(1, &config(1)) {
        Ok(own) => match sum(&own[0], &[1.0; 4], &mut output, None) {
            Ok(()) if output == [1.0; 4] => 0,
            _ => 5,
        },
        Err(_) => 6,
    }
}

/// How a child of this process ended, or `None` if it had to be killed.
fn status_of(child: i32) -> Option<i32> {
    let begun = Instant::now();
    let mut status = 0;
    // SAFETY: `status` is writable; the child is this test's own.
    unsafe {
        while libc::waitpid(child, &mut status, libc::WNOHANG) == 0 {
            if begun.elapsed() > Duration::from_secs(10) {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, &mut status, 0);
                return None;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status))
}

#[test]
fn a_forked_child_neither_hangs_nor_harms_its_parent() {
    for _ in 0..3 {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["parent", "--exact", "--nocapture", "--test-threads=1"])
            .env("PL_TEST_FORK", "1")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("PL parent is done"), "{text}\n{errors}");
    }
}
