//! Host memory that GPUs read and write: the host-staged lane, and records that the host polls. A memfd, so that several
//! processes map the same pages, each registering its own mapping with its own device.

use super::context::Context;
use crate::error::{Error, Result};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

const PAGE: usize = 4096;

/// Shared host memory, mapped and registered with one device. Unregistered and unmapped when dropped.
#[derive(Debug)]
pub struct HostMemory {
    registered: Registered,
    device_ptr: u64,
}

impl HostMemory {
    /// At least `bytes` of zeroes, in whole pages, on the NUMA node nearest to the context's device where that is known.
    pub fn new(context: &Context, bytes: usize) -> Result<Self> {
        let mapping = HostMapping::new(bytes, context.device().facts().host_numa)?;
        Self::register(context, mapping)
    }

    /// The memory behind a descriptor that a peer sent, of the peer's [`bytes`](Self::bytes).
    pub fn import(context: &Context, fd: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        Self::register(context, HostMapping::import(fd, bytes)?)
    }

    fn register(context: &Context, mapping: HostMapping) -> Result<Self> {
        if !context.device().facts().maps_host_memory {
            return Err(Error::Unsupported(format!(
                "{} cannot map host memory, so it cannot use the host-staged lane",
                context.device().facts().name
            )));
        }
        let entered = context.enter()?;
        let symbols = entered.symbols();
        let host = mapping.address.as_ptr();
        use cudarc::driver::sys::{CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE};
        // Portable: the other ranks of this process, on other devices, use the same registration.
        let flags = CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the range is this mapping, which outlives the registration.
        unsafe { symbols.cuMemHostRegister_v2(host, mapping.bytes, flags) }?;
        let registered =
            Registered { context: context.clone(), mapping: ManuallyDrop::new(mapping) };
        let mut device_ptr = 0;
        // SAFETY: writes one address; the memory is registered.
        unsafe { symbols.cuMemHostGetDevicePointer_v2(&mut device_ptr, host, 0) }?;
        Ok(HostMemory { registered, device_ptr })
    }

    /// Its address for kernels of this context, and under unified addressing of every device of the process.
    pub fn device_ptr(&self) -> u64 {
        self.device_ptr
    }

    /// Its address for this process. Kernels and peers write to it at any time: read it with atomics or volatile loads.
    pub fn host_ptr(&self) -> NonNull<u8> {
        self.registered.mapping.address.cast()
    }

    /// Its size, in whole pages.
    pub fn bytes(&self) -> usize {
        self.registered.mapping.bytes
    }

    /// The descriptor to send to a peer.
    pub fn fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.registered.mapping.fd.as_fd()
    }

    /// Its context.
    pub fn context(&self) -> &Context {
        &self.registered.context
    }
}

// SAFETY: plain shared memory; what is written to it concurrently is read through raw pointers.
unsafe impl Send for HostMapping {}
// SAFETY: as above.
unsafe impl Sync for HostMapping {}
/// A mapping that a device may use.
#[derive(Debug)]
struct Registered {
    context: Context,
    mapping: ManuallyDrop<HostMapping>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        let host = self.mapping.address.as_ptr();
        let unregistered = self.context.enter().is_ok_and(|entered| {
            // SAFETY: registered once, unregistered once.
            unsafe { entered.symbols().cuMemHostUnregister(host) }.is_ok()
        });
        // Pages that the device may still reach must not become somebody else's.
        if unregistered {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.mapping) };
        }
    }
}

#[derive(Debug)]
struct HostMapping {
    fd: OwnedFd,
    address: NonNull<c_void>,
    bytes: usize,
}

impl HostMapping {
    fn new(bytes: usize, numa: Option<u32>) -> Result<Self> {
        let bytes = bytes
            .max(1)
            .checked_next_multiple_of(PAGE)
            .ok_or_else(|| Error::InvalidArgument(format!("host memory of {bytes} bytes")))?;
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: a terminated name and valid flags.
        let fd = unsafe { libc::memfd_create(c"peerlane-host".as_ptr(), flags) };
        if fd < 0 {
            return Err(Error::last_os("memfd_create(peerlane-host)"));
        }
        // SAFETY: just made, and nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // Sealed, so that no holder of the descriptor can shrink it under a kernel or a peer.
        // SAFETY: the descriptor is open.
        unsafe {
            if libc::ftruncate(fd.as_raw_fd(), bytes as libc::off_t) < 0 {
                return Err(Error::last_os(format!("ftruncate(peerlane-host, {bytes})")));
            }
            let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
            if libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) < 0 {
                return Err(Error::last_os("fcntl(F_ADD_SEALS, peerlane-host)"));
            }
        }
        let mapping = Self::map(fd, bytes)?;
        if let Some(node) = numa.filter(|node| *node < 64) {
            mapping.prefer_node(node);
        }
        Ok(mapping)
    }

    fn import(fd: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        let fd = fd.try_clone_to_owned().map_err(|e| Error::os("dup(host memory)", &e))?;
        // SAFETY: all-zero is a valid `stat`, and the call fills it.
        let size = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            if libc::fstat(fd.as_raw_fd(), &mut stat) < 0 {
                return Err(Error::last_os("fstat(host memory)"));
            }
            stat.st_size
        };
        // A mapping beyond the end of the file would fault when it is touched.
        if usize::try_from(size).is_ok_and(|size| size >= bytes) && bytes > 0 {
            Self::map(fd, bytes)
        } else {
            Err(Error::Device(format!(
                "a peer's host memory has {size} bytes where {bytes} were announced"
            )))
        }
    }

    fn map(fd: OwnedFd, bytes: usize) -> Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(address) {
            Some(address) if address.as_ptr() != libc::MAP_FAILED => {
                Ok(HostMapping { fd, address, bytes })
            }
            _ => Err(Error::last_os(format!("mmap(peerlane-host, {bytes})"))),
        }
    }

    /// Asks for pages near the device. A wish: containers often forbid it, and far memory is slower, not wrong.
    fn prefer_node(&self, node: u32) {
        const MPOL_PREFERRED: libc::c_long = 1;
        let mask: u64 = 1 << node;
        // SAFETY: the range is this mapping, and the mask has the 64 bits announced (the kernel counts one more).
        unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.address.as_ptr(),
                self.bytes,
                MPOL_PREFERRED,
                &mask as *const u64,
                65 as libc::c_ulong,
                0 as libc::c_uint,
            );
        }
    }
}

impl Drop for HostMapping {
    fn drop(&mut self) {
        // SAFETY: mapped once, unmapped once.
        unsafe { libc::munmap(self.address.as_ptr(), self.bytes) };
    }
}
