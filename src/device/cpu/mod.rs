//! The CPU device: a rank is one thread that runs the whole grid.

mod stream;

pub(crate) use stream::Claim;
pub use stream::Stream;
