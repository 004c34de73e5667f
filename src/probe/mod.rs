//! The probe: what the lane between the ranks can do, measured once per box and kept until the next boot.
//!
//! | file | what it is |
//! | --- | --- |
//! | `report` | what was measured: the constants that a plan is made of |
//! | `steps` | the measurements, one after another, and who takes part in each |
//! | `verdict` | what is known about the lanes of a set of GPUs |
//! | `cache` | verdicts on disk |
//! | `machine` | what a verdict depends on beside the GPUs |
//!
//! The measuring itself belongs to a communicator (`comm::probe`), with the kernel of `cuda/probe.cuh`.

// Only lanes between GPUs have verdicts that are kept: memory of the CPU has nothing to go wrong, and is measured on demand.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod cache;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod machine;
mod report;
mod steps;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod verdict;

pub(crate) use cache::default_dir;
#[cfg(feature = "cuda")]
pub(crate) use cache::Cache;
#[cfg(feature = "cuda")]
pub(crate) use machine::{boot_id, nvidia_driver};
pub use report::{Access, PairRate, ProbeReport, Rate, Scope};
pub(crate) use steps::{steps, Kind, Step};
#[cfg(feature = "cuda")]
pub(crate) use verdict::{LaneVerdict, Verdicts};
