//! **peerlane**: topology-aware small-message collectives over peer-to-peer buffers.
//!
//! A map of the library, from the bottom up; a module uses only what stands above it here:
//!
//! | module | what it is |
//! | --- | --- |
//! | [`error`], [`types`], [`mod@env`] | the vocabulary: one error type, data types and operations, the environment |
//! | [`launch`] | the C structs that cross from the host to a kernel, generated from `cuda/launch.h` |
//! | [`schedule`] | a collective as data: the tree, one file per algorithm, the checker, explain |
//! | [`topology`] | what the box is: GPUs, the PCIe tree, NUMA nodes; the islands that follow |
//! | [`plan`] | which schedule and protocol serve which call |
//! | [`lane`] | slabs: the peer-visible buffers, their layout and how they are shared |
//! | [`bootstrap`] | rendezvous, votes, handle exchange, liveness |
//! | [`device`] | where kernels run |
//! | [`probe`] | what the lane does, as measured; verdicts that are kept |
//! | [`comm`] | communicators: create, all-reduce, abort, destroy; groups |

pub mod bootstrap;
pub mod comm;
pub mod device;
pub mod env;
pub mod error;
pub mod lane;
#[allow(missing_docs)]
pub mod launch;
pub mod log;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod placement;
pub mod plan;
pub mod probe;
pub mod schedule;
mod thread;
pub mod topology;
pub mod types;

pub use error::{Error, Result};
pub use types::{Algorithm, DType, Device, Direction, Lane, Op, ProbeMode, Protocol};

/// The programs in the README are compiled and run with the documentation's tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
