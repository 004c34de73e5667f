//! Host memory that GPUs read and write: the host-staged lane, and records that the host polls. The pages are a lane's
//! shared mapping; each process registers its own mapping of them with its own device.

use super::context::Context;
use super::symbols::Symbols;
use crate::error::{Error, Result};
use crate::lane::{HostSlab, Mapping};
use crate::placement::prefer_node;
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

const PAGE: usize = 4096;

/// What can be registered: mapped memory, and whatever owns the mapping.
pub trait HostPages: Send + Sync {
    /// The mapping, the same as long as `self` lives.
    fn mapping(&self) -> &Mapping;
}

impl HostPages for Mapping {
    fn mapping(&self) -> &Mapping {
        self
    }
}

impl HostPages for HostSlab {
    fn mapping(&self) -> &Mapping {
        HostSlab::mapping(self)
    }
}

/// Host memory that is registered with one device. Unregistered, then unmapped, when dropped.
#[derive(Debug)]
pub struct HostMemory<P: HostPages> {
    registered: Registered<P>,
    device_ptr: u64,
}

impl HostMemory<HostSlab> {
    /// At least `bytes` of zeroes, in whole pages, on NUMA node `node` if one is named and has room.
    pub fn new(context: &Context, bytes: usize, node: Option<u32>) -> Result<Self> {
        let bytes = bytes
            .max(1)
            .checked_next_multiple_of(PAGE)
            .ok_or_else(|| Error::InvalidArgument(format!("host memory of {bytes} bytes")))?;
        let slab = HostSlab::create(bytes)?;
        // Registering touches the pages, and then they are where they are.
        if let Some(node) = node {
            prefer_node(slab.mapping(), node);
        }
        Self::register(context, slab)
    }
}

impl HostMemory<Mapping> {
    /// The memory behind a descriptor that a peer sent, of the peer's [`bytes`](Self::bytes).
    pub fn import(context: &Context, fd: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        Self::register(context, Mapping::import(fd, bytes)?)
    }
}

impl<P: HostPages> HostMemory<P> {
    /// Registers pages that somebody has mapped.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device cannot map host memory.
    pub fn register(context: &Context, pages: P) -> Result<Self> {
        if !context.device().facts().maps_host_memory {
            return Err(Error::Unsupported(format!(
                "{} cannot map host memory, so it cannot use the host-staged lane",
                context.device().facts().name
            )));
        }
        let entered = context.enter()?;
        let symbols = entered.symbols();
        let (host, bytes) = (pages.mapping().base().as_ptr(), pages.mapping().bytes());
        use cudarc::driver::sys::{CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE};
        // Portable: the other ranks of this process, on other devices, use the same registration.
        let flags = CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the range is this mapping, which outlives the registration.
        unsafe { symbols.cuMemHostRegister_v2(host.cast(), bytes, flags) }?;
        let registered = Registered { context: context.clone(), pages: ManuallyDrop::new(pages) };
        let mut device_ptr = 0;
        // SAFETY: writes one address; the memory is registered.
        unsafe { symbols.cuMemHostGetDevicePointer_v2(&mut device_ptr, host.cast(), 0) }?;
        Ok(HostMemory { registered, device_ptr })
    }

    /// Its address for kernels of this context, and under unified addressing of every device of the process.
    pub fn device_ptr(&self) -> u64 {
        self.device_ptr
    }

    /// Its address for this process. Kernels and peers write to it at any time: read it with atomics or volatile loads.
    pub fn host_ptr(&self) -> NonNull<u8> {
        self.pages().mapping().base()
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.pages().mapping().bytes()
    }

    /// What was registered; a slab's descriptor comes from it.
    pub fn pages(&self) -> &P {
        &self.registered.pages
    }

    /// Its context.
    pub fn context(&self) -> &Context {
        &self.registered.context
    }
}

/// Pages that a device may use.
#[derive(Debug)]
struct Registered<P: HostPages> {
    context: Context,
    pages: ManuallyDrop<P>,
}

impl<P: HostPages> Drop for Registered<P> {
    fn drop(&mut self) {
        let host = self.pages.mapping().base().as_ptr();
        // SAFETY: registered once, unregistered once.
        let unregister =
            |symbols: &Symbols| unsafe { symbols.cuMemHostUnregister(host.cast()) }.is_ok();
        let unregistered = self.context.give_back(unregister).unwrap_or(false);
        // Pages that the device may still reach must not become somebody else's.
        if unregistered {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.pages) };
        }
    }
}
