//! CUDA IPC: a handle says which descriptor of which process holds the memory.

use crate::access;
use crate::capture::forbid_in_capture;
use crate::config::config;
use crate::context::{connect, current};
use crate::device::ordinal;
use crate::entry::{entry, lock};
use crate::errors::{put, INVALID_ARGUMENT, INVALID_DEVICE_CONTEXT, INVALID_RESOURCE_HANDLE};
use crate::memory::ALLOCATIONS;
use cudarc::driver::sys::CUipcMemHandle;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_uint};
use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Mutex;

const MAGIC: u64 = 0x6675_6b65_6475_6369;

/// Mappings of other processes' memory: size, inode, how often opened.
static OPENED: Mutex<BTreeMap<u64, (usize, u64, usize)>> = Mutex::new(BTreeMap::new());

pub fn opened() -> usize {
    lock(&OPENED).len()
}

fn encode(words: [u64; 5]) -> CUipcMemHandle {
    let mut reserved = [0 as c_char; 64];
    let bytes = words.iter().flat_map(|word| word.to_le_bytes());
    reserved.iter_mut().zip(bytes).for_each(|(to, byte)| *to = byte as c_char);
    CUipcMemHandle { reserved }
}

fn decode(handle: CUipcMemHandle) -> [u64; 5] {
    let bytes = handle.reserved.map(|byte| byte as u8);
    std::array::from_fn(|i| std::array::from_fn(|j| bytes[8 * i + j])).map(u64::from_le_bytes)
}

entry! {
    fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle, ptr: u64) {
        current()?;
        let mut allocations = lock(&ALLOCATIONS);
        // Memory that is not from `cuMemAlloc`, such as a framework's expandable segments, cannot be exported.
        let allocation = allocations.get_mut(&ptr).ok_or(INVALID_ARGUMENT)?;
        allocation.exported = true;
        let (bytes, inode) = access::stat(&allocation.fd)?;
        let fd = allocation.fd.as_raw_fd() as u64;
        put(handle, encode([MAGIC, std::process::id().into(), fd, bytes as u64, inode]))
    }
    fn cuIpcOpenMemHandle_v2(ptr: *mut u64, handle: CUipcMemHandle, flags: c_uint) {
        let gpu = current()?;
        forbid_in_capture()?;
        let [magic, pid, fd, bytes, inode] = decode(handle);
        if magic != MAGIC || flags != 1 {
            return Err(INVALID_ARGUMENT);
        }
        if pid == u64::from(std::process::id()) {
            return Err(INVALID_DEVICE_CONTEXT);
        }
        let mut opened = lock(&OPENED);
        if let Some((at, entry)) = opened.iter_mut().find(|(_, (_, known, _))| *known == inode) {
            entry.2 += 1;
            return put(ptr, *at);
        }
        let path = format!("/proc/{pid}/fd/{fd}");
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = OwnedFd::from(file.map_err(|_| INVALID_RESOURCE_HANDLE)?);
        if access::stat(&file)? != (bytes as usize, inode) {
            return Err(INVALID_RESOURCE_HANDLE);
        }
        let owner = access::owner(&file)?;
        ordinal(owner)?;
        connect(gpu, owner)?;
        let at = access::map(&file, bytes as usize)?;
        if let Some((start, len)) = config().mirror("ipc", bytes as usize) {
            access::mirror(&file, at, start, len, libc::PROT_READ | libc::PROT_WRITE)?;
        }
        access::allow(at, bytes);
        opened.insert(at, (bytes as usize, inode, 1));
        put(ptr, at)
    }
    fn cuIpcCloseMemHandle(ptr: u64) {
        current()?;
        let mut opened = lock(&OPENED);
        let entry = opened.get_mut(&ptr).ok_or(INVALID_ARGUMENT)?;
        entry.2 -= 1;
        if entry.2 == 0 {
            access::forbid(ptr);
            access::unmap(ptr, entry.0);
            opened.remove(&ptr);
        }
        Ok(())
    }
}
