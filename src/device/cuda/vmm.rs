//! Device memory that travels between processes as a POSIX file descriptor. The best lane there is: the descriptor and
//! every mapping hold a reference, so memory outlives its maker for as long as anybody can still write to it, and nobody
//! has to say goodbye.

use super::context::{Context, Entered};
use super::peer::Edge;
use super::symbols::Failure;
use crate::error::{Error, Result};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const POSIX_FD: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A mapped allocation, this process's own or a peer's. Unmapped and released when dropped; the caller sees to it that no
/// kernel of this process uses it by then.
#[derive(Debug)]
pub struct VmmMemory {
    // Dropped in this order: unmap, free the addresses, release the allocation.
    mapping: Mapping,
    allocation: Allocation,
}

impl VmmMemory {
    /// At least `bytes` of the context's device, rounded up to the granularity; readable and writable there.
    pub fn new(context: &Context, bytes: usize) -> Result<Self> {
        let entered = context.enter()?;
        let symbols = entered.symbols();
        let properties = properties(context);
        let mut granularity = 0;
        // SAFETY: writes one size; the properties are complete.
        unsafe {
            symbols.cuMemGetAllocationGranularity(
                &mut granularity,
                &properties,
                sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        }?;
        let bytes = bytes
            .max(1)
            .checked_next_multiple_of(granularity.max(1))
            .ok_or_else(|| Error::InvalidArgument(format!("a slab of {bytes} bytes")))?;
        let mut handle = 0;
        // SAFETY: writes one handle, released once by `Allocation`'s drop.
        unsafe { symbols.cuMemCreate(&mut handle, bytes, &properties, 0) }?;
        let allocation = Allocation { context: context.clone(), handle };
        let mapping = Mapping::new(&entered, &allocation, bytes)?;
        Ok(VmmMemory { mapping, allocation })
    }

    /// The allocation behind a descriptor that a peer exported, mapped for this context's device. `bytes` is the
    /// exporter's [`bytes`](Self::bytes). The descriptor may be closed afterwards.
    pub fn import(context: &Context, fd: BorrowedFd<'_>, bytes: usize) -> Result<Edge<Self>> {
        let entered = context.enter()?;
        let mut handle = 0;
        // SAFETY: the call takes the descriptor itself in place of a pointer; it writes one handle, released once.
        let imported = unsafe {
            entered.symbols().cuMemImportFromShareableHandle(
                &mut handle,
                fd.as_raw_fd() as usize as *mut c_void,
                POSIX_FD,
            )
        };
        if let Err(failure) = imported {
            return Edge::sort(Err(failure));
        }
        let allocation = Allocation { context: context.clone(), handle };
        Edge::sort(
            Mapping::new(&entered, &allocation, bytes)
                .map(|mapping| VmmMemory { mapping, allocation }),
        )
    }

    /// A new descriptor for this allocation, closed on exec. It may go to several peers.
    pub fn export(&self) -> Result<OwnedFd> {
        let entered = self.allocation.context.enter()?;
        let mut fd: i32 = -1;
        // SAFETY: for this kind of handle the call writes one int, a descriptor that is the caller's to close.
        unsafe {
            entered.symbols().cuMemExportToShareableHandle(
                (&mut fd as *mut i32).cast(),
                self.allocation.handle,
                POSIX_FD,
                0,
            )
        }?;
        if fd < 0 {
            return Err(Error::Device(format!(
                "cuMemExportToShareableHandle gave no descriptor but {fd}"
            )));
        }
        // SAFETY: just made, and nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // A child that this process starts must not hold a GPU's memory by accident.
        // SAFETY: the descriptor is open.
        if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
            return Err(Error::last_os("fcntl(FD_CLOEXEC)"));
        }
        Ok(fd)
    }

    /// Lets kernels of another device of this process use it under the same address.
    pub fn grant(&self, peer: &Context) -> Result<Edge<()>> {
        let entered = self.allocation.context.enter()?;
        Edge::sort(self.mapping.set_access(&entered, peer))
    }

    /// Its address, in this process.
    pub fn ptr(&self) -> u64 {
        self.mapping.ptr
    }

    /// Its size, a multiple of the granularity.
    pub fn bytes(&self) -> usize {
        self.mapping.bytes
    }
}

/// Pinned memory of the context's device, shareable as a descriptor.
fn properties(context: &Context) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: POSIX_FD,
        location: location(context),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn location(context: &Context) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: context.device().raw(),
    }
}

/// A reference to physical memory.
#[derive(Debug)]
struct Allocation {
    context: Context,
    handle: sys::CUmemGenericAllocationHandle,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: made once, released once; mappings keep their own reference.
        self.context.give_back(|symbols| unsafe { symbols.cuMemRelease(self.handle) });
    }
}

/// Addresses with an allocation behind them.
#[derive(Debug)]
struct Mapping {
    context: Context,
    ptr: u64,
    bytes: usize,
    mapped: bool,
}

impl Mapping {
    fn new(
        entered: &Entered<'_>,
        allocation: &Allocation,
        bytes: usize,
    ) -> std::result::Result<Self, Failure> {
        let symbols = entered.symbols();
        let mut ptr = 0;
        // SAFETY: writes one address, given back once by drop.
        unsafe { symbols.cuMemAddressReserve(&mut ptr, bytes, 0, 0, 0) }?;
        let mut mapping =
            Mapping { context: allocation.context.clone(), ptr, bytes, mapped: false };
        // SAFETY: the addresses are this reservation, which nothing is mapped to yet.
        unsafe { symbols.cuMemMap(ptr, bytes, 0, allocation.handle, 0) }?;
        mapping.mapped = true;
        mapping.set_access(entered, &allocation.context)?;
        Ok(mapping)
    }

    fn set_access(
        &self,
        entered: &Entered<'_>,
        reader: &Context,
    ) -> std::result::Result<(), Failure> {
        let access = sys::CUmemAccessDesc {
            location: location(reader),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the whole mapping, and one descriptor as the count says.
        unsafe { entered.symbols().cuMemSetAccess(self.ptr, self.bytes, &access, 1) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the whole mapping and the whole reservation, each once, in the order the driver asks for.
        self.context.give_back(|symbols| unsafe {
            if self.mapped {
                let _ = symbols.cuMemUnmap(self.ptr, self.bytes);
            }
            let _ = symbols.cuMemAddressFree(self.ptr, self.bytes);
        });
    }
}
