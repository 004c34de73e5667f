//! Where the ranks' threads of a process wait for each other on the host.
//!
//! Ranks that share a GPU need it: whatever may wait for the whole GPU (allocating, freeing, loading a kernel, instantiating a
//! graph) must not be done while another rank's kernel waits there for this one.

use anyhow::Result;
use std::sync::{Condvar, Mutex, PoisonError};

#[derive(Default)]
struct State {
    here: usize,
    /// How often all were here.
    rounds: u64,
    left: bool,
}

/// A barrier that a thread may leave for good, which ends everybody's waiting.
pub struct Meeting {
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

impl Meeting {
    pub fn new(size: usize) -> Self {
        Meeting { size, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Returns when all threads are here.
    pub fn wait(&self) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let round = state.rounds;
        state.here += 1;
        if state.here == self.size {
            state.here = 0;
            state.rounds += 1;
            self.changed.notify_all();
        }
        while state.rounds == round && !state.left {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.rounds == round {
            return Err(Left.into());
        }
        Ok(())
    }

    /// This thread will not come again.
    pub fn leave(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).left = true;
        self.changed.notify_all();
    }
}

/// What the others' waiting ends with; never a run's first error.
#[derive(Debug)]
pub struct Left;

impl std::fmt::Display for Left {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("another rank has failed")
    }
}

impl std::error::Error for Left {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_leaves_ends_the_others_waiting() {
        let meeting = Meeting::new(3);
        std::thread::scope(|scope| {
            let wait =
                || scope.spawn(|| (0..100).map(|_| meeting.wait()).collect::<Result<Vec<_>>>());
            let threads = [wait(), wait(), wait()];
            threads
                .into_iter()
                .for_each(|thread| assert_eq!(thread.join().unwrap().unwrap().len(), 100));
            let waiting = scope.spawn(|| meeting.wait());
            meeting.leave();
            assert!(waiting.join().unwrap().unwrap_err().is::<Left>());
        });
    }
}
