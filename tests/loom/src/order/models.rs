//! Calls run in the order of their tickets, on whichever stream, and none is lost.

use super::{Admission, Order};
use crate::device::Stream;
use crate::{control, explore};
use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};
use loom::sync::Arc;
use loom::thread;

/// What the calls of a rank share. `done` is relaxed: it is the order that must put one call before the next.
#[derive(Default)]
struct Rank {
    order: Order,
    done: AtomicU64,
}

/// The call with the ticket `number`.
fn run(rank: &Rank, number: u64) {
    assert_eq!(rank.done.load(Relaxed), number, "out of order");
    rank.done.store(number + 1, Relaxed);
}

/// As `Inner::submit_cpu` does it. Whether the call has been queued.
fn call(rank: &Arc<Rank>, stream: &Stream) -> bool {
    let job = |number| -> Box<dyn FnOnce() + Send> {
        let rank = rank.clone();
        Box::new(move || {
            let turn = rank.order.wait_for(number);
            run(&rank, number);
            drop(turn);
        })
    };
    match rank.order.admit(stream, true, job).unwrap() {
        Admission::Now(ticket, _claim) => {
            run(rank, ticket.number);
            false
        }
        Admission::Queued => true,
    }
}

fn two_threads(name: &str, preemptions: usize, busy: bool) {
    explore(name, preemptions, move || {
        let (rank, stream) = (Arc::new(Rank::default()), Arc::new(Stream::new().unwrap()));
        let claim = busy.then(|| stream.claim().unwrap());
        let other = thread::spawn({
            let (rank, stream) = (rank.clone(), stream.clone());
            move || call(&rank, &stream)
        });
        call(&rank, &stream);
        drop(claim);
        other.join().unwrap();
        rank.order.drain();
        run(&rank, 2);
    });
}

#[test]
fn two_threads_share_an_idle_stream() {
    two_threads("two threads, an idle stream", 4, false);
}

#[test]
fn two_threads_share_a_busy_stream() {
    two_threads("two threads, a busy stream", 3, true);
}

#[test]
fn a_call_on_an_idle_stream_does_not_overtake() {
    explore("a busy stream, an idle one", 3, || {
        let rank = Arc::new(Rank::default());
        let (busy, idle) = (Stream::new().unwrap(), Stream::new().unwrap());
        let claim = busy.claim().unwrap();
        assert!(call(&rank, &busy));
        assert!(call(&rank, &idle), "it would overtake");
        drop(claim);
        rank.order.drain();
        run(&rank, 2);
    });
}

#[test]
fn without_a_safeguard_of_the_order_it_fails() {
    let idle = "order::models::two_threads_share_an_idle_stream";
    let busy = "order::models::two_threads_share_a_busy_stream";
    let overtake = "order::models::a_call_on_an_idle_stream_does_not_overtake";
    control(busy, "one lock for ticket and place", "deadlock");
    control(idle, "the order wakes who waits", "deadlock");
    control(overtake, "a call on an idle stream heeds its turn", "out of order");
    control(overtake, "a queued call waits", "out of order");
}
