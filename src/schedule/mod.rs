//! A collective is a schedule, and a schedule is data.
//!
//! A builder (one file per algorithm) writes down for every rank a list of phases: what it sends to whom, and what it
//! sums in which order. [`Schedule::tables`] compiles that to one C table per rank; the [`check`](mod@check) reads only
//! the tables and proves them right; kernels, the simulator and [`explain`] read the same tables.

pub mod islands;

pub use islands::Islands;
