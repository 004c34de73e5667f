//! Where kernels run.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

pub use cpu::Stream;
