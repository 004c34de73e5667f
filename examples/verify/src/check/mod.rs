//! A GPU against the golden data: what a machine with one runs before its figures count.

pub mod golden;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
pub use gpu::check;
