//! What surrounds a communicator's calls: signals, ends without destroy, limits, namespaces, strangers; and what may be done
//! with several communicators.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::exit,
    clippy::print_stdout,
    clippy::print_stderr
)]

mod process;
mod surroundings;

use peerlane::comm::Communicator;
use process::{config, start, sum, Dir, Rank};
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

/// What a survivor may take to learn of a death.
const AT_ONCE: Duration = Duration::from_secs(2);

fn working(dir: &Dir, n: usize, task: &str) -> Vec<Rank> {
    let id = dir.id();
    let mut ranks: Vec<_> = (0..n).map(|rank| start(&id, n, rank, task, &[])).collect();
    for rank in &mut ranks {
        assert!(rank.hears("working").is_some());
    }
    ranks
}

#[test]
fn a_signal_that_ends_a_rank_in_a_call_is_a_death_that_the_others_name() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let dir = Dir::new();
        let mut ranks = working(&dir, 3, "work");
        let victim = ranks.remove(1);
        let begun = Instant::now();
        victim.signal(signal);
        for rank in &mut ranks {
            assert_eq!(rank.hears("error").as_deref(), Some("rank 1 died"));
        }
        assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
        assert_eq!(victim.end().signal(), Some(signal), "the library takes no signal");
        dir.assert_empty();
    }
}

/// The control for the test above, too: the same signals, handled, harm nothing.
#[test]
fn a_signal_that_is_handled_disturbs_no_call() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let dir = Dir::new();
        let mut ranks = working(&dir, 3, "handle");
        for _ in 0..20 {
            ranks[1].signal(signal);
            std::thread::sleep(Duration::from_millis(1));
        }
        for rank in &mut ranks {
            assert!(rank.hears("ok").is_some(), "a call failed");
        }
    }
}

#[test]
fn a_rank_that_exits_without_destroy_is_named_at_once() {
    let dir = Dir::new();
    let mut ranks = working(&dir, 3, "exit");
    let begun = Instant::now();
    for rank in [0, 2] {
        assert_eq!(ranks[rank].hears("error").as_deref(), Some("rank 1 died"));
    }
    assert!(begun.elapsed() < AT_ONCE + Duration::from_secs(3), "{:?}", begun.elapsed());
    assert!(ranks.remove(1).end().success());
}

#[test]
fn a_thousand_communicators_leave_nothing_behind() {
    let dir = Dir::new();
    let measure = |task: &str| {
        let mut rank = start(&dir.id(), 1, 0, task, &[]);
        let numbers = |text: String| -> Vec<usize> {
            text.trim_matches(['[', ']']).split(", ").map(|n| n.parse().unwrap()).collect()
        };
        (numbers(rank.hears("early").unwrap()), numbers(rank.hears("late").unwrap()))
    };
    // The allocator maps and unmaps as it likes; a leak of one mapping per communicator would be hundreds.
    let is_flat =
        |early: &[usize], late: &[usize]| early[..2] == late[..2] && late[2] <= early[2] + 16;
    let (early, late) = measure("cycles 1000 -");
    println!("descriptors, threads, mappings after 100 and after 1000: {early:?} {late:?}");
    assert!(is_flat(&early, &late));
    // Control: communicators that are forgotten do show, in each of the three.
    let (early, late) = measure("cycles 20 leak");
    assert!((0..3).all(|i| late[i] > early[i] + 16), "{early:?} {late:?}");
}

#[test]
fn ranks_may_be_destroyed_in_any_order_and_on_any_thread() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let comms = Communicator::create_local(3, &config(3)).unwrap();
        std::thread::scope(|scope| {
            for comm in &comms {
                scope.spawn(|| assert_eq!(sum(comm, 1.0), Ok(3.0)));
            }
        });
        let mut comms: Vec<_> = comms.into_iter().map(Some).collect();
        for rank in order {
            let comm = comms[rank].take().unwrap();
            assert_eq!(comm.error(), None, "a goodbye after the last call is no error");
            // A thread that has never seen it.
            std::thread::spawn(move || comm.destroy().unwrap()).join().unwrap();
        }
    }
}

#[test]
fn two_communicators_over_the_same_ranks_do_not_mix() {
    let n = 3;
    let first = Communicator::create_local(n, &config(n)).unwrap();
    let second = Communicator::create_local(n, &config(n)).unwrap();
    std::thread::scope(|scope| {
        for (a, b) in first.iter().zip(&second) {
            scope.spawn(move || {
                for i in 0..100 {
                    assert_eq!(sum(a, i as f32), Ok(3.0 * i as f32));
                    assert_eq!(sum(b, 1000.0 + i as f32), Ok(3000.0 + 3.0 * i as f32));
                }
            });
        }
    });
    std::thread::scope(|scope| {
        for (offset, comm) in
            first.iter().map(|c| (0.0, c)).chain(second.iter().map(|c| (500.0, c)))
        {
            scope.spawn(move || {
                for i in 0..100 {
                    assert_eq!(sum(comm, offset + i as f32), Ok(3.0 * (offset + i as f32)));
                }
            });
        }
    });
    // The end of one is no concern of the other's.
    first[0].abort();
    drop(first);
    std::thread::scope(|scope| {
        for comm in &second {
            scope.spawn(move || assert_eq!(sum(comm, 1.0), Ok(3.0)));
        }
    });
}
