//! Rendezvous, votes, handle exchange, liveness.
//!
//! A communicator is set up in three moves, all over unix sockets in a directory that only the user can enter:
//!
//! 1. [`UniqueId`] names the communicator to be: which directory, which socket, which secret token.
//! 2. [`Mesh::connect`] brings the ranks together. Rank 0 listens, the others come; afterwards every rank has a socket
//!    to every other rank and a process descriptor (pidfd) of it, and the file system is clean again. Set-up goes
//!    on in named stages ([`Mesh::all_gather`], [`Mesh::exchange_fds`], [`Mesh::vote`]), each of which succeeds on all
//!    ranks or fails on all with the same error.
//! 3. [`Mesh::watch`] ends set-up. From then on one thread per communicator notices within milliseconds when a
//!    process ends without a goodbye, and carries errors between the ranks.
//!
//! How long things take: the rendezvous has the deadline `D` given to [`Mesh::connect`], all later stages together
//! have `D` again, both held by rank 0, which names the rank it waited for. The other ranks wait for its verdict at most
//! `2 D` (rank 0 may have started up to `D` later), so nothing here waits for ever.

mod fork;
mod host;
mod join;
mod link;
mod mesh;
mod rendezvous;
mod run_dir;
mod socket;
mod unique_id;
mod vote;
mod watch;
mod wire;

pub(crate) use fork::Owner;
pub use mesh::Mesh;
pub(crate) use unique_id::random;
pub use unique_id::{UniqueId, UNIQUE_ID_BYTES};
pub use watch::Watch;
pub use wire::{Steps, CHANNELS};
