//! Slabs: the peer-visible buffers, their layout and how they are shared.

mod channel;
mod fan;
mod host;
mod layout;
mod unrolled;

pub use fan::{Fan, Head, PhaseMut};
pub use host::{HostSlab, Mapping};
pub use layout::{longest_piece, step_packs, step_rows, tile_packs, Layout};
pub use unrolled::{fits_a_cluster, short_row, RowUnits, Unrolled, MOST_PACKS, SQUARES_HALF_BYTES};
