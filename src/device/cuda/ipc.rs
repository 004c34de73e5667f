//! CUDA IPC, for drivers that cannot export memory as a descriptor. The driver leaves it undefined what happens when the
//! exporter frees memory that an importer still has open, so here the exporter keeps it until every importer is known to be
//! gone, and otherwise for good.

use super::context::Context;
use super::peer::Edge;
use crate::error::{Error, Result};
use cudarc::driver::sys;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Bytes of an IPC handle.
pub const IPC_HANDLE_BYTES: usize = 64;

/// `cuMemAlloc` cuts small allocations out of blocks of this size, and a handle opens the whole block: a slab that fills its
/// blocks shares nothing but itself.
const BLOCK: usize = 2 << 20;

/// Names an allocation to other processes of the box.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct IpcHandle([u8; IPC_HANDLE_BYTES]);

impl IpcHandle {
    /// A handle that came from a peer.
    pub fn from_bytes(bytes: [u8; IPC_HANDLE_BYTES]) -> Self {
        IpcHandle(bytes)
    }

    /// The bytes to send to a peer.
    pub fn as_bytes(&self) -> &[u8; IPC_HANDLE_BYTES] {
        &self.0
    }
}

impl std::fmt::Debug for IpcHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IpcHandle")
    }
}

static KEPT: AtomicUsize = AtomicUsize::new(0);

/// Allocations that this process keeps until it ends, because an importer never said that it was done with them.
pub fn kept_until_exit() -> usize {
    KEPT.load(Ordering::Relaxed)
}

/// Device memory that other processes may have open.
#[derive(Debug)]
pub struct IpcMemory {
    context: Context,
    ptr: u64,
    bytes: usize,
    /// Ranks that may still write to it.
    importers: Mutex<BTreeSet<u32>>,
}

impl IpcMemory {
    /// At least `bytes`, rounded up to whole blocks of the driver's allocator.
    pub fn new(context: &Context, bytes: usize) -> Result<Self> {
        let bytes = bytes
            .max(1)
            .checked_next_multiple_of(BLOCK)
            .ok_or_else(|| Error::InvalidArgument(format!("a slab of {bytes} bytes")))?;
        let entered = context.enter()?;
        let mut ptr = 0;
        // SAFETY: writes one address, freed once by drop or kept for good.
        unsafe { entered.symbols().cuMemAlloc_v2(&mut ptr, bytes) }?;
        Ok(IpcMemory {
            context: context.clone(),
            ptr,
            bytes,
            importers: Mutex::new(BTreeSet::new()),
        })
    }

    /// A handle for the ranks named. From here on each of them counts as an importer until
    /// [`importer_gone`](Self::importer_gone), whether it has opened the handle or not: nobody here could know.
    pub fn export(&self, importers: impl IntoIterator<Item = u32>) -> Result<IpcHandle> {
        let entered = self.context.enter()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; IPC_HANDLE_BYTES] };
        // SAFETY: writes one handle for an allocation that lives.
        unsafe { entered.symbols().cuIpcGetMemHandle(&mut handle, self.ptr) }?;
        self.importers.lock().unwrap_or_else(PoisonError::into_inner).extend(importers);
        Ok(IpcHandle(handle.reserved.map(|b| b as u8)))
    }

    /// Rank `importer` has closed its mapping and said so, or its process is dead.
    pub fn importer_gone(&self, importer: u32) {
        self.importers.lock().unwrap_or_else(PoisonError::into_inner).remove(&importer);
    }

    /// Its address, in this process.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for IpcMemory {
    fn drop(&mut self) {
        let importers = self.importers.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !importers.is_empty() {
            KEPT.fetch_add(1, Ordering::Relaxed);
            // The memory dies with its context as well, so that is kept too.
            std::mem::forget(self.context.clone());
            return;
        }
        // SAFETY: allocated once, freed once, and no importer is left.
        self.context.give_back(|symbols| unsafe { symbols.cuMemFree_v2(self.ptr) });
    }
}

/// A peer's allocation, mapped here. Closed when dropped; the peer must be told after that, not before.
#[derive(Debug)]
pub struct IpcMapping {
    context: Context,
    ptr: u64,
    bytes: usize,
}

impl IpcMapping {
    /// Opens a peer's handle for this context's device. `bytes` is the exporter's size. The exporting process itself uses
    /// its own pointer: the driver refuses to open a handle there.
    pub fn open(context: &Context, handle: &IpcHandle, bytes: usize) -> Result<Edge<Self>> {
        let entered = context.enter()?;
        let mut ptr = 0;
        let handle = sys::CUipcMemHandle { reserved: handle.0.map(|b| b as std::ffi::c_char) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: writes one address, closed once by drop.
        let opened = unsafe { entered.symbols().cuIpcOpenMemHandle_v2(&mut ptr, handle, flags) };
        Edge::sort(opened.map(|()| IpcMapping { context: context.clone(), ptr, bytes }))
    }

    /// Its address, in this process.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    /// The exporter's size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for IpcMapping {
    fn drop(&mut self) {
        // SAFETY: opened once, closed once.
        self.context.give_back(|symbols| unsafe { symbols.cuIpcCloseMemHandle(self.ptr) });
    }
}
