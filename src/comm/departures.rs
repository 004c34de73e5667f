//! Ranks that leave while others still call: a step must not wait for a rank that has left without it.
//!
//! A rank that destroys its communicator says goodbye, and with it the first step that it has not finished. Two threads
//! of every other rank are concerned: the one that runs a call, and the one that hears the goodbye. The first announces
//! its step and then looks who has left; the second notes who has left and then looks which step is announced. Each
//! writes before it reads, with a sequentially consistent fence in between, so whichever fence comes second in the one
//! order of all such fences is followed by a read that sees the other's write. With either fence gone, or the caller's two
//! halves swapped, both may read what was there before: then the step waits for its deadline, ten minutes by default.
//!
//! Nothing but these numbers passes between the two threads, so the accesses themselves are relaxed.

use std::sync::atomic::{fence, AtomicU64, Ordering};

/// No step has this number: they start at 1.
const IDLE: u64 = 0;
/// The first step that a rank which has not left will not finish.
const NONE: u64 = u64::MAX;

/// What the threads of one rank know of the ranks that have left.
pub(crate) struct Departures {
    /// The step that is running, or [`IDLE`].
    running: AtomicU64,
    /// By rank, the first step that it has left without.
    missing_from: Vec<AtomicU64>,
}

impl Departures {
    pub fn new(ranks: usize) -> Self {
        Departures {
            running: AtomicU64::new(IDLE),
            missing_from: (0..ranks).map(|_| AtomicU64::new(NONE)).collect(),
        }
    }

    /// Announces `step`, which needs all ranks. The rank that has left without it, if one has; a rank that left after it
    /// finished the step is no obstacle: what it had to send is on its way.
    pub fn begin(&self, step: u64) -> Result<(), usize> {
        self.running.store(step, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let missing = |from: &AtomicU64| from.load(Ordering::Relaxed) <= step;
        self.missing_from.iter().position(missing).map_or(Ok(()), Err)
    }

    /// No step is running any more.
    pub fn end(&self) {
        self.running.store(IDLE, Ordering::Relaxed);
    }

    /// Notes that `rank` has left and has finished all steps before `step`. Whether the step that is running waits for it
    /// in vain.
    pub fn leave(&self, rank: usize, step: u64) -> bool {
        if let Some(from) = self.missing_from.get(rank) {
            from.store(step, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        self.running.load(Ordering::Relaxed) >= step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_steps_that_a_rank_has_not_finished_miss_it() {
        let ranks = Departures::new(3);
        assert_eq!(ranks.begin(7), Ok(()));
        assert!(!ranks.leave(2, 8), "it has finished step 7");
        ranks.end();
        assert_eq!(ranks.begin(8), Err(2));
        assert!(ranks.leave(1, 8), "step 8 was announced first");
        assert_eq!(ranks.begin(9), Err(1));
    }

    #[test]
    fn without_a_step_nobody_is_missed() {
        let ranks = Departures::new(2);
        assert!(!ranks.leave(1, 1));
        assert_eq!(ranks.begin(1), Err(1));
    }
}
