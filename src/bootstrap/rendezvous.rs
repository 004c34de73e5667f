//! What both sides of the rendezvous share. Rank 0's side is `host.rs`, the others' is `join.rs`.
//!
//! ```text
//! rank r                          rank 0
//!   connect  ------------------>  accept, check the user
//!   preamble: token  ---------->  compare, or close
//!   hello, own pidfd  --------->  compare versions, n, rank
//!            <------------------  admitted
//!                                 ... until all are in: then the socket leaves the directory
//!            <------------------  welcome: every rank's process and pidfd
//!            <------------------  peer: one end of a new socket pair, for every other rank
//!   vote "links"  ------------->  verdict
//! ```

use super::mesh::Peer;
use super::run_dir::effective_uid;
use super::wire::Process;
use super::UniqueId;
use crate::error::{Error, Result};

/// The stage in which the ranks come together.
pub(super) const RENDEZVOUS: &str = "rendezvous";
/// The stage in which every pair of ranks gets a socket.
pub(super) const LINKS: &str = "links";

/// The outcome of a rendezvous that all ranks came to.
pub(super) struct Met {
    pub(super) peers: Vec<Option<Peer>>,
    pub(super) members: Vec<Process>,
    /// This rank's vote on whether it holds all its links.
    pub(super) outcome: Result<()>,
}

/// The only rank of a communicator meets nobody.
pub(super) fn alone() -> Result<Met> {
    Ok(Met { peers: vec![None], members: vec![Process::current()?], outcome: Ok(()) })
}

pub(super) fn check_user(id: &UniqueId) -> Result<()> {
    let uid = effective_uid();
    if id.uid() == uid {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "the unique id was made by uid {}, this process runs as uid {uid}: all ranks must run as \
         one user",
        id.uid()
    )))
}
