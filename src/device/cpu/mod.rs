//! The CPU device: a rank is one thread that runs the whole grid.

mod kernel;
mod stream;

pub use kernel::{add_rms_norm, all_reduce, partial_bytes, probe, MAX_CHUNK_PACKS};
pub(crate) use stream::Claim;
pub use stream::Stream;
