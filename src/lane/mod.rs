//! Slabs: the peer-visible buffers, their layout and how they are shared.

mod host;
mod layout;

pub use host::{HostSlab, Mapping};
pub use layout::{longest_piece, step_packs, step_rows, Layout};
