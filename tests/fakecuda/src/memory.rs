//! Plain allocations, fills and copies, and registered host memory.

use crate::access::{self, allow, check, forbid};
use crate::capture::forbid_in_capture;
use crate::config::config;
use crate::context::current;
use crate::entry::{entry, lock};
use crate::errors::{
    put, INVALID_ARGUMENT, OPERATION_NOT_SUPPORTED, OUT_OF_MEMORY,
    PART_OR_ALL_OF_THE_RANGE_IS_ALREADY_REGISTERED, POINTER_IS_NOT_REGISTERED,
};
use crate::stream::{enqueue, resolve, synchronize, synchronize_device};
use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

pub struct Allocation {
    pub fd: OwnedFd,
    pub gpu: usize,
    pub bytes: usize,
    /// A handle of it has gone out.
    pub exported: bool,
}

/// Of every GPU. Pages cost nothing until they are written.
pub const MEMORY_BYTES: usize = 80 << 30;

pub static ALLOCATIONS: Mutex<BTreeMap<u64, Allocation>> = Mutex::new(BTreeMap::new());
/// Registered host ranges: size and whether devices may use them.
static REGISTERED: Mutex<BTreeMap<u64, (usize, bool)>> = Mutex::new(BTreeMap::new());

pub fn registered() -> usize {
    lock(&REGISTERED).len()
}

const DEVICEMAP: c_uint = 2;

entry! {
    fn cuMemAlloc_v2(ptr: *mut u64, bytes: usize) {
        let gpu = current()?;
        forbid_in_capture()?;
        if bytes == 0 {
            return Err(INVALID_ARGUMENT);
        }
        if bytes > 8 << 30 {
            return Err(OUT_OF_MEMORY);
        }
        let fd = access::new_pages(gpu, bytes)?;
        let at = access::map(&fd, bytes)?;
        allow(at, bytes as u64);
        lock(&ALLOCATIONS).insert(at, Allocation { fd, gpu, bytes, exported: false });
        put(ptr, at)
    }
    fn cuMemFree_v2(ptr: u64) {
        current()?;
        if ptr == 0 {
            return Ok(());
        }
        forbid_in_capture()?;
        let gpu = lock(&ALLOCATIONS).get(&ptr).ok_or(INVALID_ARGUMENT)?.gpu;
        synchronize_device(gpu)?;
        let allocation = lock(&ALLOCATIONS).remove(&ptr).ok_or(INVALID_ARGUMENT)?;
        if allocation.exported {
            // What an importer that still has it open finds is undefined; here it is visible nonsense.
            access::fill(ptr, 0xdb, allocation.bytes);
        }
        forbid(ptr);
        access::unmap(ptr, allocation.bytes);
        Ok(())
    }
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let gpu = current()?;
        let used: usize = lock(&ALLOCATIONS).values().filter(|a| a.gpu == gpu).map(|a| a.bytes).sum();
        put(free, MEMORY_BYTES.saturating_sub(used))?;
        put(total, MEMORY_BYTES)
    }
    fn cuMemsetD8Async(ptr: u64, value: u8, count: usize, stream: usize) {
        check(ptr, count)?;
        enqueue(&*resolve(stream)?, Arc::new(move || access::fill(ptr, value, count)))
    }
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: usize) {
        check(to, bytes)?;
        check(from, bytes)?;
        enqueue(&*resolve(stream)?, Arc::new(move || access::copy(to, from, bytes)))
    }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: usize) {
        check(to, bytes)?;
        // Pageable memory is staged before the call returns, or read by it.
        let data = std::slice::from_raw_parts(from.cast::<u8>(), bytes).to_vec();
        let copy = move || access::copy(to, data.as_ptr() as u64, bytes);
        enqueue(&*resolve(stream)?, Arc::new(copy))
    }
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: usize) {
        check(from, bytes)?;
        let to = to as u64;
        enqueue(&*resolve(stream)?, Arc::new(move || access::copy(to, from, bytes)))
    }
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) {
        check(to, bytes)?;
        let (from, legacy) = (from as u64, resolve(0)?);
        enqueue(&legacy, Arc::new(move || access::copy(to, from, bytes)))?;
        synchronize(&legacy)
    }
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) {
        check(from, bytes)?;
        let (to, legacy) = (to as u64, resolve(0)?);
        enqueue(&legacy, Arc::new(move || access::copy(to, from, bytes)))?;
        synchronize(&legacy)
    }
    fn cuMemHostRegister_v2(ptr: *mut c_void, bytes: usize, flags: c_uint) {
        current()?;
        forbid_in_capture()?;
        if ptr.is_null() || bytes == 0 {
            return Err(INVALID_ARGUMENT);
        }
        if !config().host_map {
            return Err(OPERATION_NOT_SUPPORTED);
        }
        let start = ptr as u64;
        let mut registered = lock(&REGISTERED);
        let before = registered.range(..start + bytes as u64).next_back();
        if before.is_some_and(|(at, (len, _))| at + *len as u64 > start) {
            return Err(PART_OR_ALL_OF_THE_RANGE_IS_ALREADY_REGISTERED);
        }
        let mapped = flags & DEVICEMAP != 0;
        registered.insert(start, (bytes, mapped));
        if mapped {
            allow(start, bytes as u64);
        }
        Ok(())
    }
    fn cuMemHostUnregister(ptr: *mut c_void) {
        current()?;
        lock(&REGISTERED).remove(&(ptr as u64)).ok_or(POINTER_IS_NOT_REGISTERED)?;
        forbid(ptr as u64);
        Ok(())
    }
    fn cuMemHostGetDevicePointer_v2(device: *mut u64, host: *mut c_void, flags: c_uint) {
        current()?;
        if flags != 0 {
            return Err(INVALID_ARGUMENT);
        }
        match lock(&REGISTERED).get(&(host as u64)) {
            Some((_, true)) => put(device, host as u64),
            _ => Err(INVALID_ARGUMENT),
        }
    }
}
