//! Edges between GPUs. An edge is opened when a schedule uses it, never for all pairs: a GPU has room for eight peers, and
//! every library in the process and every process on the box draws on the same eight.

use super::context::Context;
use super::device::can_access;
use super::driver::code;
use super::symbols::Failure;
use crate::error::{Error, Result};

/// What became of opening a way to a peer's memory. A closed edge is an answer that leads to another lane or schedule;
/// only what should not happen is an error.
#[derive(Debug)]
pub enum Edge<T> {
    /// It is there.
    Open(T),
    /// These two GPUs cannot reach each other; the text is the driver's.
    NoPeerAccess(String),
    /// The GPU has no room for another peer; a schedule of lower degree may still work.
    TooManyPeers(String),
}

impl<T> Edge<T> {
    /// The edge, for a caller that has no other way: a closed one becomes an error.
    pub fn required(self) -> Result<T> {
        match self {
            Edge::Open(edge) => Ok(edge),
            Edge::NoPeerAccess(why) => {
                Err(Error::Device(format!("no peer access between the two GPUs: {why}")))
            }
            Edge::TooManyPeers(why) => Err(Error::Device(format!(
                "the GPU has no room for another peer (eight per GPU, shared with every library and process): {why}"
            ))),
        }
    }

    /// Sorts the outcome of a call that opens an edge.
    pub(super) fn sort(result: std::result::Result<T, Failure>) -> Result<Self> {
        match result {
            Ok(edge) => Ok(Edge::Open(edge)),
            Err(failure) => match failure.code {
                code::TOO_MANY_PEERS => Ok(Edge::TooManyPeers(Error::from(failure).to_string())),
                // Opening a handle of a device that this one cannot reach is reported as an invalid device.
                code::PEER_ACCESS_UNSUPPORTED | code::INVALID_DEVICE => {
                    Ok(Edge::NoPeerAccess(Error::from(failure).to_string()))
                }
                _ => Err(failure.into()),
            },
        }
    }
}

/// Lets kernels of `from` reach plain (`cuMemAlloc`) memory of `to`, both in this process. An edge that somebody else has
/// opened serves as well. It stays open as long as the contexts live: they are shared with the framework, which may use
/// it too.
pub fn open_peer(from: &Context, to: &Context) -> Result<Edge<()>> {
    if from.raw() == to.raw() {
        return Ok(Edge::Open(()));
    }
    if !can_access(from.device(), to.device())? {
        return Ok(Edge::NoPeerAccess(format!(
            "cuDeviceCanAccessPeer says no for {} to {}",
            from.device().facts().uuid,
            to.device().facts().uuid
        )));
    }
    let entered = from.enter()?;
    // SAFETY: both contexts are retained.
    match unsafe { entered.symbols().cuCtxEnablePeerAccess(to.raw(), 0) } {
        Err(Failure { code: code::PEER_ACCESS_ALREADY_ENABLED, .. }) => Ok(Edge::Open(())),
        result => Edge::sort(result),
    }
}
