//! The CPU device: a rank is one thread that runs the whole grid.

pub mod kernel;
