//! Physical allocations, address reservations, mappings; descriptors that carry an allocation to another process.

use crate::access;
use crate::config::config;
use crate::context::connect;
use crate::device::{gpu, ordinal};
use crate::entry::{entry, lock};
use crate::errors::{put, INVALID_ARGUMENT, INVALID_RESOURCE_HANDLE, OPERATION_NOT_SUPPORTED};
use crate::table::Table;
use cudarc::driver::sys::{
    CUmemAccessDesc, CUmemAllocationProp, CUmemAllocationType, CUmemLocationType,
};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

const GRANULARITY: usize = 2 << 20;
const POSIX_FD: u32 = 1;

struct Physical {
    fd: OwnedFd,
    gpu: usize,
    bytes: usize,
    imported: bool,
}

static HANDLES: Table<Physical> = Table::new();

/// Under one lock: calls need both, and two locks would have to be taken in the same order everywhere.
struct AddressSpace {
    reserved: BTreeMap<u64, usize>,
    mapped: BTreeMap<u64, (usize, Arc<Physical>)>,
}
static ADDRESSES: Mutex<AddressSpace> =
    Mutex::new(AddressSpace { reserved: BTreeMap::new(), mapped: BTreeMap::new() });

pub fn live() -> [usize; 3] {
    let addresses = lock(&ADDRESSES);
    [HANDLES.len(), addresses.reserved.len(), addresses.mapped.len()]
}

/// Reserves or takes away pages without access at `ptr`, or anywhere for 0.
fn no_access(ptr: u64, bytes: usize) -> Result<u64, u32> {
    let fixed = if ptr == 0 { 0 } else { libc::MAP_FIXED };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    // SAFETY: a fixed address is a reservation of this process's own.
    let at = unsafe { libc::mmap(ptr as *mut c_void, bytes, libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        Err(crate::errors::OUT_OF_MEMORY)
    } else {
        Ok(at as u64)
    }
}

/// The GPU that the properties ask for.
fn location(prop: *const CUmemAllocationProp) -> Result<usize, u32> {
    // SAFETY: null or valid, as the driver API asks.
    let prop = unsafe { prop.as_ref() }.ok_or(INVALID_ARGUMENT)?;
    if !config().vmm {
        return Err(OPERATION_NOT_SUPPORTED);
    }
    if prop.type_ != CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED
        || prop.location.type_ != CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE
        || !prop.win32HandleMetaData.is_null()
    {
        return Err(INVALID_ARGUMENT);
    }
    gpu(prop.location.id)
}

entry! {
    fn cuMemGetAllocationGranularity(bytes: *mut usize, prop: *const CUmemAllocationProp, _which: u32) {
        location(prop)?;
        put(bytes, GRANULARITY)
    }
    fn cuMemCreate(handle: *mut u64, bytes: usize, prop: *const CUmemAllocationProp, flags: c_ulonglong) {
        let gpu = location(prop)?;
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || flags != 0 {
            return Err(INVALID_ARGUMENT);
        }
        let fd = access::new_pages(gpu, bytes)?;
        put(handle, HANDLES.insert(Physical { fd, gpu, bytes, imported: false }) as u64)
    }
    fn cuMemRelease(handle: u64) {
        HANDLES.remove(handle as usize).map(|_| ())
    }
    fn cuMemAddressReserve(ptr: *mut u64, bytes: usize, alignment: usize, _at: u64, flags: c_ulonglong) {
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || flags != 0 || (alignment != 0 && !alignment.is_power_of_two()) {
            return Err(INVALID_ARGUMENT);
        }
        let at = no_access(0, bytes)?;
        lock(&ADDRESSES).reserved.insert(at, bytes);
        put(ptr, at)
    }
    fn cuMemAddressFree(ptr: u64, bytes: usize) {
        let mut addresses = lock(&ADDRESSES);
        if addresses.reserved.get(&ptr) != Some(&bytes) || addresses.mapped.contains_key(&ptr) {
            return Err(INVALID_ARGUMENT);
        }
        addresses.reserved.remove(&ptr);
        access::unmap(ptr, bytes);
        Ok(())
    }
    fn cuMemMap(ptr: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) {
        let physical = HANDLES.get(handle as usize)?;
        let mut addresses = lock(&ADDRESSES);
        let whole = addresses.reserved.get(&ptr) == Some(&bytes) && bytes <= physical.bytes;
        if !whole || offset != 0 || flags != 0 || addresses.mapped.contains_key(&ptr) {
            return Err(INVALID_ARGUMENT);
        }
        // No access until it is granted.
        let (at, fixed) = (ptr as *mut c_void, libc::MAP_SHARED | libc::MAP_FIXED);
        if libc::mmap(at, bytes, libc::PROT_NONE, fixed, physical.fd.as_raw_fd(), 0) == libc::MAP_FAILED {
            return Err(INVALID_ARGUMENT);
        }
        if let Some((start, len)) = config().mirror("vmm", bytes).filter(|_| physical.imported) {
            access::mirror(&physical.fd, ptr, start, len, libc::PROT_NONE)?;
        }
        addresses.mapped.insert(ptr, (bytes, physical));
        Ok(())
    }
    fn cuMemUnmap(ptr: u64, bytes: usize) {
        let mapped = &mut lock(&ADDRESSES).mapped;
        if mapped.get(&ptr).is_none_or(|(len, _)| *len != bytes) {
            return Err(INVALID_ARGUMENT);
        }
        access::forbid(ptr);
        no_access(ptr, bytes)?;
        mapped.remove(&ptr);
        Ok(())
    }
    fn cuMemSetAccess(ptr: u64, bytes: usize, desc: *const CUmemAccessDesc, count: usize) {
        let mapped = &lock(&ADDRESSES).mapped;
        let (len, physical) = mapped.get(&ptr).ok_or(INVALID_ARGUMENT)?;
        if *len != bytes || desc.is_null() || count == 0 {
            return Err(INVALID_ARGUMENT);
        }
        for desc in std::slice::from_raw_parts(desc, count) {
            connect(gpu(desc.location.id)?, physical.gpu)?;
        }
        libc::mprotect(ptr as *mut c_void, bytes, libc::PROT_READ | libc::PROT_WRITE);
        access::allow(ptr, bytes as u64);
        Ok(())
    }
    fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: u64, kind: u32, flags: c_ulonglong) {
        if kind != POSIX_FD || flags != 0 {
            return Err(INVALID_ARGUMENT);
        }
        let physical = HANDLES.get(handle as usize)?;
        let fd = physical.fd.try_clone().map_err(|_| crate::errors::OUT_OF_MEMORY)?;
        put(shareable.cast::<c_int>(), fd.into_raw_fd())
    }
    fn cuMemImportFromShareableHandle(handle: *mut u64, shareable: *mut c_void, kind: u32) {
        let fd = shareable as usize as c_int;
        if kind != POSIX_FD || fd < 0 {
            return Err(INVALID_ARGUMENT);
        }
        let fd = BorrowedFd::borrow_raw(fd).try_clone_to_owned().map_err(|_| INVALID_RESOURCE_HANDLE)?;
        let gpu = access::owner(&fd)?;
        // A GPU that CUDA_VISIBLE_DEVICES hides cannot be reached.
        ordinal(gpu)?;
        let (bytes, _) = access::stat(&fd)?;
        put(handle, HANDLES.insert(Physical { fd, gpu, bytes, imported: true }) as u64)
    }
}
