//! Where kernels run.

pub mod cpu;

pub use cpu::Stream;
