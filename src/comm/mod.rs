//! Communicators: create, all-reduce, abort, destroy; groups.
//!
//! | file | what it is |
//! | --- | --- |
//! | `config` | what a caller may ask for, and what all ranks must agree on |
//! | `create` | one rank, or several of one process at once |
//! | `described` | where the ranks sit on the described box: islands, and the model that chooses |
//! | `communicator` | the public handle: call, ask, abort, destroy |
//! | `collectives` | broadcast, all-gather, reduce-scatter |
//! | `submit` | how a call reaches its device |
//! | `engine` | what carries out calls: a rank of the CPU, or one on a GPU |
//! | `departures` | ranks that leave while others still call |
//! | `order` | calls run in the order they were made, on whichever stream |
//! | `plans` | tables and geometry of every schedule in use, ready to launch |
//! | `host` | a rank of the CPU device: slabs, state, steps |
//! | `gpu` | a rank on a GPU |
//! | `fault` | the first error, kept for good |
//! | `group` | calls noted until the group's end |
//! | `fused` | all-reduce, residual add and RMSNorm in one |
//! | `signature` | differs where calls do; travels in the flags |
//! | `attempt` | outcomes of set-up that are no end of it |
//! | `probe` | what the lane does, measured by all ranks |
//! | `selftest` | the first use of the real kernels, checked by the owner of the memory |

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod attempt;
mod call;
mod collectives;
mod communicator;
mod config;
mod create;
mod departures;
mod described;
mod engine;
mod fault;
mod fused;
#[cfg(feature = "cuda")]
mod gpu;
mod group;
mod host;
mod order;
mod plans;
mod probe;
mod selftest;
mod signature;
mod stats;
mod submit;

pub use communicator::Communicator;
pub use config::Config;
pub use create::{create_all, Creation};
pub use fused::AddRmsNorm;
pub use group::{group_end, group_start};
pub use stats::Stats;
