//! Pages behind device addresses (device addresses are addresses of this process), and which of them may be touched.

use crate::entry::lock;
use crate::errors::{INVALID_ARGUMENT, OUT_OF_MEMORY};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Mutex;

static RANGES: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());

pub fn allow(ptr: u64, bytes: u64) {
    lock(&RANGES).insert(ptr, bytes);
}

pub fn forbid(ptr: u64) {
    lock(&RANGES).remove(&ptr);
}

/// Whether all of it is memory that a device may touch.
pub fn check(ptr: u64, bytes: usize) -> Result<(), u32> {
    let ranges = lock(&RANGES);
    let (start, len) = ranges.range(..=ptr).next_back().ok_or(INVALID_ARGUMENT)?;
    let inside = (ptr - start).checked_add(bytes as u64).is_some_and(|end| end <= *len);
    inside.then_some(()).ok_or(INVALID_ARGUMENT)
}

const PREFIX: &str = "fakecuda-gpu";

/// Memory of a GPU, which its name tells to whoever gets the descriptor. Not zeroed: real device memory is not either.
pub fn new_pages(gpu: usize, bytes: usize) -> Result<OwnedFd, u32> {
    let name = CString::new(format!("{PREFIX}{gpu}-")).map_err(|_| INVALID_ARGUMENT)?;
    // SAFETY: a terminated name; the descriptor is new and nobody else's.
    let fd = unsafe {
        let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 || libc::ftruncate(fd, bytes as libc::off_t) < 0 {
            return Err(OUT_OF_MEMORY);
        }
        OwnedFd::from_raw_fd(fd)
    };
    let ptr = map(&fd, bytes)?;
    fill(ptr, 0xa5, bytes);
    unmap(ptr, bytes);
    Ok(fd)
}

/// The GPU that a descriptor's memory belongs to.
pub fn owner(fd: &OwnedFd) -> Result<usize, u32> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    let link = link.map_err(|_| INVALID_ARGUMENT)?.to_string_lossy().into_owned();
    let rest = link.split_once(PREFIX).ok_or(INVALID_ARGUMENT)?.1;
    rest.split('-').next().and_then(|gpu| gpu.parse().ok()).ok_or(INVALID_ARGUMENT)
}

/// Size and inode of what a descriptor refers to.
pub fn stat(fd: &OwnedFd) -> Result<(usize, u64), u32> {
    // SAFETY: all-zero is a valid `stat`, and the call fills it.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        if libc::fstat(fd.as_raw_fd(), &mut stat) < 0 {
            return Err(INVALID_ARGUMENT);
        }
        Ok((stat.st_size as usize, stat.st_ino))
    }
}

pub fn map(fd: &OwnedFd, bytes: usize) -> Result<u64, u32> {
    let read_write = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let ptr = unsafe {
        libc::mmap(std::ptr::null_mut(), bytes, read_write, libc::MAP_SHARED, fd.as_raw_fd(), 0)
    };
    if ptr == libc::MAP_FAILED {
        return Err(OUT_OF_MEMORY);
    }
    Ok(ptr as u64)
}

/// Makes a part of a mapping a mirror: whoever writes there reads it back, and the owner of the memory never sees it.
pub fn mirror(fd: &OwnedFd, ptr: u64, offset: usize, bytes: usize, access: i32) -> Result<(), u32> {
    let at = (ptr + offset as u64) as *mut libc::c_void;
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
    // SAFETY: a part of a mapping that is this process's own.
    let mapped =
        unsafe { libc::mmap(at, bytes, access, flags, fd.as_raw_fd(), offset as libc::off_t) };
    if mapped == libc::MAP_FAILED {
        return Err(OUT_OF_MEMORY);
    }
    Ok(())
}

pub fn unmap(ptr: u64, bytes: usize) {
    // SAFETY: a mapping that `map` or a reservation made, given up by its owner.
    unsafe { libc::munmap(ptr as *mut libc::c_void, bytes) };
}

/// Writes `bytes` bytes at a device address.
pub fn fill(ptr: u64, value: u8, bytes: usize) {
    // SAFETY: callers have checked the range, or just mapped it.
    unsafe { std::ptr::write_bytes(ptr as *mut u8, value, bytes) };
}

/// Copies between addresses; ranges may overlap.
pub fn copy(to: u64, from: u64, bytes: usize) {
    // SAFETY: callers have checked the device's side; the host's side is the caller's word.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
}
