//! Ordered queues of work.
//!
//! An idle stream runs a call on the calling thread: handing it to another costs about 12 us (measured on a 2-core
//! machine), more than a small all-reduce. The worker thread exists for calls that find the stream busy, and starts with
//! the first of them.

use crate::error::{Error, Result};
use crate::thread::Background;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    /// A job is running, on the worker or on a caller's thread.
    running: bool,
    closing: bool,
    jobs: VecDeque<Job>,
    /// Jobs that were ever queued or claimed, and those of them that are done. They are done in order.
    accepted: u64,
    done: u64,
    /// Threads that wait for `changed`, the worker among them. Notifying is a system call even when nobody listens.
    waiting: usize,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    // A job cannot leave the state half changed (it runs outside the lock), so a poisoned lock is still good.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.waiting += 1;
        state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }
}

/// An ordered queue of work of the CPU device.
pub struct Stream {
    /// The process that made it.
    pid: u32,
    queue: Arc<Queue>,
    worker: Mutex<Option<Background>>,
}

/// The right to run one job on the caller's thread, in the stream's order. Dropping it gives the stream back, also when
/// the job unwinds.
pub(crate) struct Claim<'a>(&'a Queue);

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.0.change(|state| {
            state.running = false;
            state.done += 1;
        });
    }
}

impl Stream {
    /// A new, idle stream.
    pub fn new() -> Result<Self> {
        Ok(Stream { pid: std::process::id(), queue: Arc::default(), worker: Mutex::new(None) })
    }

    /// Waits until all work queued so far is done; what other threads queue meanwhile is not waited for.
    ///
    /// # Errors
    /// [`Error::Unsupported`] in a forked child: whoever works the queue stayed with the parent, and so did the owner of a
    /// lock that was held at the fork.
    pub fn synchronize(&self) -> Result<()> {
        if self.pid != std::process::id() {
            return Err(Error::Unsupported(
                "a stream in a forked child of the process that made it; make one after the fork"
                    .into(),
            ));
        }
        let mut state = self.queue.lock();
        let until = state.accepted;
        while state.done < until {
            state = self.queue.wait(state);
        }
        Ok(())
    }

    /// The stream, if it is idle.
    pub(crate) fn claim(&self) -> Option<Claim<'_>> {
        let mut state = self.queue.lock();
        if state.running || !state.jobs.is_empty() {
            return None;
        }
        state.running = true;
        state.accepted += 1;
        Some(Claim(&self.queue))
    }

    /// Queues a job behind all others. On an error the job has not been queued.
    pub(crate) fn push(&self, job: Job) -> Result<()> {
        self.start_worker()?;
        self.queue.change(|state| {
            state.jobs.push_back(job);
            state.accepted += 1;
        });
        Ok(())
    }

    fn start_worker(&self) -> Result<()> {
        let mut worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        if worker.is_none() {
            let queue = Arc::clone(&self.queue);
            *worker = Some(Background::spawn("peerlane-stream", move || work(&queue))?);
        }
        Ok(())
    }
}

fn work(queue: &Queue) {
    let mut state = queue.lock();
    loop {
        if !state.running {
            if let Some(job) = state.jobs.pop_front() {
                state.running = true;
                drop(state);
                let claim = Claim(queue);
                // A job that panicked must not take the queue with it: whoever waits would wait for ever.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
                drop(claim);
                state = queue.lock();
                continue;
            }
            if state.closing {
                return;
            }
        }
        state = queue.wait(state);
    }
}

impl Drop for Stream {
    /// Finishes what is queued. In a forked child it does nothing: the jobs are the parent's.
    fn drop(&mut self) {
        let worker = self.worker.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // Without a worker nothing is queued.
        let Some(worker) = worker.filter(Background::is_here) else { return };
        self.queue.change(|state| state.closing = true);
        // This may be that thread: a stream may be dropped by its own last job.
        worker.join();
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.queue.lock();
        f.debug_struct("Stream")
            .field("running", &state.running)
            .field("queued", &state.jobs.len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn an_idle_stream_can_be_claimed_once() {
        let stream = Stream::new().unwrap();
        let claim = stream.claim().unwrap();
        assert!(stream.claim().is_none());
        drop(claim);
        assert!(stream.claim().is_some());
    }

    #[test]
    fn jobs_run_in_order_and_behind_a_claim() {
        let stream = Stream::new().unwrap();
        let (tx, rx) = mpsc::channel();
        let claim = stream.claim().unwrap();
        for i in 0..20 {
            let tx = tx.clone();
            stream.push(Box::new(move || tx.send(i).unwrap())).unwrap();
        }
        assert!(rx.try_recv().is_err());
        drop(claim);
        stream.synchronize().unwrap();
        assert_eq!(rx.try_iter().collect::<Vec<_>>(), (0..20).collect::<Vec<_>>());
    }

    #[test]
    fn synchronize_waits_for_what_was_queued_before_it_and_not_for_more() {
        let stream = Stream::new().unwrap();
        let (open, gate) = mpsc::channel::<()>();
        stream.push(Box::new(|| ())).unwrap();
        stream.synchronize().unwrap();
        let claim = stream.claim().unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| stream.synchronize().unwrap());
            while stream.queue.lock().waiting < 2 {
                std::thread::yield_now();
            }
            let long = Duration::from_secs(10);
            stream.push(Box::new(move || gate.recv_timeout(long).unwrap_or(()))).unwrap();
            assert!(!waiting.is_finished(), "the claim is held");
            drop(claim);
            waiting.join().unwrap();
            assert_eq!(stream.queue.lock().done, 2, "the last job has not been waited for");
            open.send(()).unwrap();
        });
        stream.synchronize().unwrap();
        assert_eq!(stream.queue.lock().done, 3);
    }

    #[test]
    fn dropping_finishes_what_is_queued() {
        let stream = Stream::new().unwrap();
        let (tx, rx) = mpsc::channel();
        for i in 0..5 {
            let tx = tx.clone();
            stream.push(Box::new(move || tx.send(i).unwrap())).unwrap();
        }
        drop(stream);
        assert_eq!(rx.try_iter().count(), 5);
    }

    #[test]
    fn a_job_that_panics_does_not_stop_the_stream_for_claims() {
        let stream = Stream::new().unwrap();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _claim = stream.claim().unwrap();
            panic!("planned");
        }));
        assert!(result.is_err());
        assert!(stream.claim().is_some());
    }
}
