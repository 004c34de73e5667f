//! A rank's slab on each lane, and the ways to those of its peers.

use crate::comm::attempt::{Failed, Outcome};
use crate::device::cuda::{
    memory, open_peer, Context, Edge, HostMemory, IpcHandle, IpcMapping, IpcMemory, RelaxedThread,
    Stream, VmmMemory, IPC_HANDLE_BYTES,
};
use crate::error::{Error, Result};
use crate::lane::{HostSlab, Layout, Mapping};
use crate::types::{Lane, Protocol};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

enum Memory {
    Vmm(VmmMemory),
    Ipc(IpcMemory),
    Host(HostMemory<HostSlab>),
}

/// This rank's slab. Ranks of the same process hold it too, as long as they may write to it.
pub(super) struct Slab {
    memory: Memory,
    context: Context,
}

/// What a rank says about its slab.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Offer {
    /// The process it lives in: ranks there use it under its own address.
    process: u64,
    /// Its name in that process.
    key: u64,
    bytes: u64,
    /// An IPC handle.
    handle: Option<Vec<u8>>,
}

/// The slabs of this process by key.
static LOCAL: Mutex<BTreeMap<u64, Weak<Slab>>> = Mutex::new(BTreeMap::new());

/// A number that no other process has.
pub(super) fn this_process() -> Result<u64> {
    static DRAWN: OnceLock<(u32, u64)> = OnceLock::new();
    let drawn = match DRAWN.get() {
        Some(drawn) => *drawn,
        None => {
            let fresh = (std::process::id(), crate::comm::selftest::nonce()?);
            *DRAWN.get_or_init(|| fresh)
        }
    };
    // A forked child has its parent's memory, but not its number.
    Ok(drawn.1 ^ u64::from(drawn.0 ^ std::process::id()) << 32)
}

impl Slab {
    /// A slab that peers may write to as soon as they have it: laid out, armed, and the device is done with both. Armed
    /// later, it could erase a peer's first word. Host memory is taken from NUMA node `node`.
    pub fn new(
        lane: Lane,
        context: &Context,
        stream: &Stream,
        layout: &Layout,
        node: Option<u32>,
    ) -> Result<Self> {
        let bytes = layout.bytes() as usize;
        let memory = match lane {
            Lane::Host => Memory::Host(HostMemory::new(context, bytes, node)?),
            Lane::Ipc => Memory::Ipc(IpcMemory::new(context, bytes)?),
            Lane::Vmm | Lane::Auto => Memory::Vmm(VmmMemory::new(context, bytes)?),
        };
        let slab = Slab { memory, context: context.clone() };
        match slab.arm(stream, layout) {
            Ok(()) => Ok(slab),
            Err(error) => {
                // Fills may be on their way, and unmapping waits for nobody. Memory that the device may still write stays.
                if stream.synchronize().is_err() {
                    std::mem::forget(slab);
                }
                Err(error)
            }
        }
    }

    /// Zeroes everything but the sentinel regions, which it sets to ones, and waits.
    fn arm(&self, stream: &Stream, layout: &Layout) -> Result<()> {
        let sentinels =
            (0..layout.channels()).map(|channel| layout.region(channel, Protocol::Sentinel));
        if let Memory::Host(host) = &self.memory {
            for (start, bytes) in sentinels {
                // SAFETY: inside the slab, as the layout is, and nobody else knows it yet. The rest is zero already.
                unsafe {
                    host.host_ptr().as_ptr().add(start as usize).write_bytes(0xff, bytes as usize)
                };
            }
            return Ok(());
        }
        let entered = self.context.enter()?;
        let at = self.ptr();
        // SAFETY: the slab, and regions inside it.
        unsafe {
            memory::fill(&entered, at, 0, layout.bytes() as usize, stream.as_ref())?;
            for (start, bytes) in sentinels {
                memory::fill(&entered, at + start, 0xff, bytes as usize, stream.as_ref())?;
            }
        }
        stream.synchronize()
    }

    /// Its address for this rank's kernels.
    pub fn ptr(&self) -> u64 {
        match &self.memory {
            Memory::Vmm(memory) => memory.ptr(),
            Memory::Ipc(memory) => memory.ptr(),
            Memory::Host(memory) => memory.device_ptr(),
        }
    }

    /// What to tell the others, and the descriptor that goes with it. `importers` are the ranks of other processes that will
    /// write to it.
    pub fn offer(self: &Arc<Self>, importers: &[u32]) -> Result<(Offer, Option<OwnedFd>)> {
        let mut offer = Offer {
            process: this_process()?,
            key: crate::comm::selftest::nonce()?,
            bytes: 0,
            handle: None,
        };
        let mut fd = None;
        match &self.memory {
            Memory::Vmm(memory) => {
                offer.bytes = memory.bytes() as u64;
                if !importers.is_empty() {
                    fd = Some(memory.export()?);
                }
            }
            Memory::Ipc(memory) => {
                offer.bytes = memory.bytes() as u64;
                if !importers.is_empty() {
                    offer.handle =
                        Some(memory.export(importers.iter().copied())?.as_bytes().to_vec());
                }
            }
            Memory::Host(memory) => {
                offer.bytes = memory.bytes() as u64;
                if !importers.is_empty() {
                    fd = Some(memory.pages().export()?);
                }
            }
        }
        let mut local = LOCAL.lock().unwrap_or_else(PoisonError::into_inner);
        local.retain(|_, slab| slab.strong_count() > 0);
        local.insert(offer.key, Arc::downgrade(self));
        Ok((offer, fd))
    }

    /// Rank `importer` will not write to it any more.
    pub fn importer_gone(&self, importer: usize) {
        if let Memory::Ipc(memory) = &self.memory {
            memory.importer_gone(importer as u32);
        }
    }

    /// Whether it must stay until importers have said that they are gone.
    pub fn waits_for_importers(&self) -> bool {
        matches!(self.memory, Memory::Ipc(_))
    }

    /// Lets kernels of another GPU of this process use it.
    fn grant(&self, peer: &Context) -> Result<Edge<()>> {
        if self.context.device().facts().uuid == peer.device().facts().uuid {
            return Ok(Edge::Open(()));
        }
        match &self.memory {
            Memory::Vmm(memory) => memory.grant(peer),
            Memory::Ipc(_) => open_peer(peer, &self.context),
            // Registered for every device of the process.
            Memory::Host(_) => Ok(Edge::Open(())),
        }
    }
}

/// A peer's slab as this rank reaches it.
pub(super) enum Peer {
    Local(Arc<Slab>),
    Vmm(VmmMemory),
    Ipc(IpcMapping),
    Host(HostMemory<Mapping>),
}

impl Peer {
    /// Opens the slab behind `offer`, with the descriptor that came with it.
    pub fn open(
        lane: Lane,
        context: &Context,
        offer: &Offer,
        fd: Option<&OwnedFd>,
    ) -> Outcome<Self> {
        let entered = context.enter()?;
        let _relaxed = RelaxedThread::new(&entered)?;
        if offer.process == this_process()? {
            let local = LOCAL.lock().unwrap_or_else(PoisonError::into_inner);
            let slab = local.get(&offer.key).and_then(Weak::upgrade);
            drop(local);
            let slab =
                slab.ok_or_else(|| Error::Internal("a slab of this process is not there".into()))?;
            required(slab.grant(context)?)?;
            return Ok(Peer::Local(slab));
        }
        let bytes = offer.bytes as usize;
        let fd = || {
            fd.map(AsFd::as_fd).ok_or_else(|| Error::Internal("a peer sent no descriptor".into()))
        };
        Ok(match lane {
            Lane::Vmm | Lane::Auto => {
                Peer::Vmm(required(VmmMemory::import(context, fd()?, bytes)?)?)
            }
            Lane::Host => Peer::Host(HostMemory::import(context, fd()?, bytes)?),
            Lane::Ipc => {
                let handle: Option<[u8; IPC_HANDLE_BYTES]> =
                    offer.handle.as_deref().and_then(|bytes| bytes.try_into().ok());
                let handle =
                    handle.ok_or_else(|| Error::Internal("a peer sent no handle".into()))?;
                let handle = IpcHandle::from_bytes(handle);
                Peer::Ipc(required(IpcMapping::open(context, &handle, bytes)?)?)
            }
        })
    }

    /// Its address for this rank's kernels.
    pub fn ptr(&self) -> u64 {
        match self {
            Peer::Local(slab) => slab.ptr(),
            Peer::Vmm(memory) => memory.ptr(),
            Peer::Ipc(mapping) => mapping.ptr(),
            Peer::Host(memory) => memory.device_ptr(),
        }
    }
}

/// The edge, or why there is none: what all ranks need to know to go on alike.
fn required<T>(edge: Edge<T>) -> Outcome<T> {
    match edge {
        Edge::TooManyPeers(why) => {
            Err(Failed { too_many_peers: true, ..Error::Device(why).into() })
        }
        edge => Ok(edge.required()?),
    }
}
