//! The word of a channel: see `pl_channel` in `cuda/launch.h`, and `cuda/step.cuh` for what the kernels do with it.

use crate::launch::{pl_channel, PL_TURN_BITS};

impl pl_channel {
    /// A channel that nothing runs on, whose next step has this epoch.
    pub fn idle_at(epoch: u64) -> Self {
        pl_channel { turn: epoch << PL_TURN_BITS, entered: 0, rearming: 0 }
    }

    /// The epoch of the next step, or of the one in flight.
    pub fn epoch(&self) -> u64 {
        self.turn >> PL_TURN_BITS
    }

    /// Id and count of the launch in flight; 0 when there is none.
    pub fn launch(&self) -> u64 {
        self.turn & ((1 << PL_TURN_BITS) - 1)
    }
}
