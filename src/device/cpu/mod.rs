//! The CPU device: a rank is one thread that runs the whole grid.

mod stream;

pub use stream::Stream;
pub(crate) use stream::Claim;
