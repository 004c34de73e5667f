//! A rank's own device memory: plain allocations, never shared with another process, and stream-ordered fills and copies.
//! Allocated with `cuMemAlloc`, not from a stream-ordered pool, so a framework's allocator settings cannot reach it.

use super::context::{Context, Entered};
use super::stream::{Stream, StreamRef};
use crate::error::{Error, Result};

/// Device memory, freed when dropped. The driver's free waits for the device, so drop it after the work that uses it.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Context,
    ptr: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// `bytes` of device memory, with whatever was there before in it.
    pub fn new(context: &Context, bytes: usize) -> Result<Self> {
        let entered = context.enter()?;
        let mut ptr = 0;
        // SAFETY: writes one address, freed once by drop.
        unsafe { entered.symbols().cuMemAlloc_v2(&mut ptr, bytes) }?;
        Ok(DeviceMemory { context: context.clone(), ptr, bytes })
    }

    /// Its address on the device.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Zeroes all of it and waits.
    pub fn zero(&self, stream: &Stream) -> Result<()> {
        let entered = self.context.enter()?;
        // SAFETY: the range is this allocation.
        unsafe { fill(&entered, self.ptr, 0, self.bytes, stream.as_ref()) }?;
        stream.as_ref().synchronize(&entered)
    }

    /// Copies `data` to `offset` and waits.
    pub fn write(&self, stream: &Stream, offset: usize, data: &[u8]) -> Result<()> {
        let at = self.range(offset, data.len())?;
        let entered = self.context.enter()?;
        // SAFETY: the range was checked, and the copy is done before `data` goes.
        unsafe { write(&entered, at, data, stream.as_ref()) }
    }

    /// Copies from `offset` into `data` and waits.
    pub fn read(&self, stream: &Stream, offset: usize, data: &mut [u8]) -> Result<()> {
        let at = self.range(offset, data.len())?;
        let entered = self.context.enter()?;
        // SAFETY: the range was checked, and the copy is done before `data` is looked at.
        unsafe { read(&entered, at, data, stream.as_ref()) }
    }

    fn range(&self, offset: usize, len: usize) -> Result<u64> {
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes => Ok(self.ptr + offset as u64),
            _ => Err(Error::Internal(format!(
                "bytes {offset}+{len} of a device allocation of {} bytes",
                self.bytes
            ))),
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once.
        self.context.give_back(|symbols| unsafe { symbols.cuMemFree_v2(self.ptr) });
    }
}

/// Bytes of the current device that can still be allocated, by anybody.
pub fn available(entered: &Entered<'_>) -> Result<u64> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: writes two sizes.
    unsafe { entered.symbols().cuMemGetInfo_v2(&mut free, &mut total) }?;
    Ok(free as u64)
}

/// Queues a fill of `bytes` bytes at `ptr` with `value`; recorded where the stream is being captured.
///
/// # Safety
/// The range is device memory and stays so until the stream has passed the fill.
pub unsafe fn fill(
    entered: &Entered<'_>,
    ptr: u64,
    value: u8,
    bytes: usize,
    stream: StreamRef,
) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { entered.symbols().cuMemsetD8Async(ptr, value, bytes, stream.raw()) }?)
}

/// Queues a copy between two device addresses, of any two devices of the process, with or without peer access; recorded
/// where the stream is being captured.
///
/// # Safety
/// Both ranges are valid for `bytes` until the stream has passed the copy.
pub unsafe fn copy(
    entered: &Entered<'_>,
    to: u64,
    from: u64,
    bytes: usize,
    stream: StreamRef,
) -> Result<()> {
    // SAFETY: the caller's promise.
    Ok(unsafe { entered.symbols().cuMemcpyAsync(to, from, bytes, stream.raw()) }?)
}

/// Copies `data` to the device and waits for it, on `stream` alone.
///
/// # Safety
/// `ptr` is device memory of at least `data`'s size. `stream` is not being captured.
pub unsafe fn write(entered: &Entered<'_>, ptr: u64, data: &[u8], stream: StreamRef) -> Result<()> {
    if data.is_empty() {
        return Ok(());
    }
    // SAFETY: the caller's promise for the device's side; `data` outlives the copy, which is waited for.
    unsafe {
        entered.symbols().cuMemcpyHtoDAsync_v2(ptr, data.as_ptr().cast(), data.len(), stream.raw())
    }?;
    stream.synchronize(entered)
}

/// Copies from the device into `data` and waits for it, on `stream` alone.
///
/// # Safety
/// `ptr` is device memory of at least `data`'s size. `stream` is not being captured.
pub unsafe fn read(
    entered: &Entered<'_>,
    ptr: u64,
    data: &mut [u8],
    stream: StreamRef,
) -> Result<()> {
    if data.is_empty() {
        return Ok(());
    }
    // SAFETY: the caller's promise for the device's side; `data` outlives the copy, which is waited for.
    unsafe {
        entered.symbols().cuMemcpyDtoHAsync_v2(
            data.as_mut_ptr().cast(),
            ptr,
            data.len(),
            stream.raw(),
        )
    }?;
    stream.synchronize(entered)
}
