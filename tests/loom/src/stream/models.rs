//! A stream: jobs one at a time, in order, all of them.

use super::Stream;
use crate::{control, explore};
use loom::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use loom::sync::Arc;
use loom::thread;

/// Notes what runs. Relaxed: it is the stream that must order one job before the next.
#[derive(Default)]
struct Log {
    begun: AtomicUsize,
    ended: AtomicUsize,
}

impl Log {
    /// A job; none other may be running.
    fn run(&self) {
        let begun = self.begun.load(Relaxed);
        assert_eq!(begun, self.ended.load(Relaxed), "two jobs at once");
        self.begun.store(begun + 1, Relaxed);
        thread::yield_now();
        self.ended.store(begun + 1, Relaxed);
    }

    /// A job of which `before` others must have run.
    fn run_as(&self, before: usize) {
        assert_eq!(self.ended.load(Relaxed), before, "out of order");
        self.run();
    }
}

#[test]
fn jobs_run_one_at_a_time_in_order_and_behind_a_claim() {
    explore("a claim, then two jobs", 5, || {
        let (stream, log) = (Stream::new().unwrap(), Arc::new(Log::default()));
        let claim = stream.claim().unwrap();
        for before in [1, 2] {
            let log = log.clone();
            stream.push(Box::new(move || log.run_as(before))).unwrap();
        }
        log.run_as(0);
        drop(claim);
        stream.synchronize().unwrap();
        log.run_as(3);
    });
}

#[test]
fn a_claim_is_had_by_one_and_never_before_what_is_queued() {
    explore("two threads claim, one behind its own job", 5, || {
        let (stream, log) = (Arc::new(Stream::new().unwrap()), Arc::new(Log::default()));
        let other = thread::spawn({
            let (stream, log) = (stream.clone(), log.clone());
            move || {
                if let Some(_claim) = stream.claim() {
                    log.run();
                }
            }
        });
        let mine = Arc::new(AtomicUsize::new(0));
        let (logged, done) = (log.clone(), mine.clone());
        stream
            .push(Box::new(move || {
                logged.run();
                done.store(1, Relaxed);
            }))
            .unwrap();
        if let Some(_claim) = stream.claim() {
            assert_eq!(mine.load(Relaxed), 1, "before its own job");
            log.run();
        }
        other.join().unwrap();
    });
}

#[test]
fn a_stream_that_closes_has_done_what_was_queued() {
    explore("two jobs, then the end", 5, || {
        let (stream, log) = (Stream::new().unwrap(), Arc::new(Log::default()));
        for before in [0, 1] {
            let log = log.clone();
            stream.push(Box::new(move || log.run_as(before))).unwrap();
        }
        drop(stream);
        log.run_as(2);
    });
}

#[test]
fn without_a_safeguard_of_the_stream_it_fails() {
    let claims = "stream::models::a_claim_is_had_by_one_and_never_before_what_is_queued";
    let order = "stream::models::jobs_run_one_at_a_time_in_order_and_behind_a_claim";
    let end = "stream::models::a_stream_that_closes_has_done_what_was_queued";
    control(claims, "a claim heeds what is queued", "before its own job");
    control(order, "the worker heeds a claim", "out of order");
    control(order, "a stream wakes who waits", "deadlock");
    control(end, "a stream wakes who waits", "deadlock");
    control(end, "a closing stream does what is queued", "out of order");
}
