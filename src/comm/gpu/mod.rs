//! Ranks on GPUs.
//!
//! | file | what it is |
//! | --- | --- |
//! | `rank` | a rank: what it is made of |
//! | `launcher` | its launches, eager and captured |
//! | `trial` | its first use, tested |
//! | `probe` | its launches of the probe |
//! | `leave` | how it leaves |
//! | `setup` | set-up, stage by stage and lane by lane, each agreed on by all ranks |
//! | `verdicts` | what is known of the lanes from earlier |
//! | `facts` | what ranks tell each other about their GPUs, and the lanes that follow |
//! | `slab` | the slab of each lane, and the ways to those of the peers |
//! | `state` | what kernels and host share; kept alive by graphs |
//! | `kernels` | the fatbin, and the kernel for a call |
//! | `share` | how much of a GPU a channel may take |
//! | `delta` | sums over host memory by words that differ |
//! | `shape` | blocks and threads of a launch |
//! | `shape/spread` | the same where rows are spread over blocks |
//! | `unrolled` | launches of the kernels with unrolled loops |
//! | `chain` | which captured launches may start early |
//! | `cluster` | whether the blocks of a row may start together |

mod chain;
mod cluster;
mod delta;
mod facts;
mod kernels;
mod launcher;
mod leave;
mod probe;
mod rank;
mod setup;
mod shape;
mod share;
mod slab;
mod state;
mod trial;
mod unrolled;
mod verdicts;

pub(super) use facts::{address_of, settle_ordinal};
pub(super) use rank::GpuRank;
pub(super) use setup::{set_up, Ready};
pub(super) use state::DeviceState;
