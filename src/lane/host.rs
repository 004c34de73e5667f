//! Slabs in host memory: a sealed memfd, mapped by its owner and by every peer.

use crate::error::{Error, Result};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

/// A shared mapping of a whole file; unmapped on drop. It keeps the memory alive after its owner is gone, so a peer that
/// still reads or writes never faults.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain shared memory; what is done with the address is its user's matter.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives the address and nothing else.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        // SAFETY: a new mapping of our own choice of address; the kernel checks the descriptor.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(at.cast()) {
            Some(base) if at != libc::MAP_FAILED => Ok(Mapping { base, bytes }),
            _ => Err(Error::last_os(format!("mmap(slab, {bytes} bytes)"))),
        }
    }

    /// Maps a peer's slab. The peer is another process, so the descriptor is checked first: it must be sealed against
    /// shrinking (a truncated file would turn every access into SIGBUS) and as long as agreed.
    pub fn import(fd: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        // SAFETY: fcntl on a borrowed, hence open, descriptor.
        let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(Error::InvalidArgument(
                "the slab a peer sent is not sealed against shrinking".into(),
            ));
        }
        // SAFETY: stat is plain data, filled by fstat before it is read.
        let size = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            if libc::fstat(fd.as_raw_fd(), &mut stat) != 0 {
                return Err(Error::last_os("fstat(slab)"));
            }
            stat.st_size
        };
        if usize::try_from(size).ok() != Some(bytes) {
            return Err(Error::InvalidArgument(format!(
                "the slab a peer sent has {size} bytes instead of {bytes}"
            )));
        }
        Self::new(fd, bytes)
    }

    /// Where it is mapped.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly what `new` mapped, once.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// The slab of this rank.
#[derive(Debug)]
pub struct HostSlab {
    fd: OwnedFd,
    mapping: Mapping,
}

impl HostSlab {
    /// A new slab, all zero.
    pub fn create(bytes: usize) -> Result<Self> {
        // SAFETY: the name is a NUL-terminated constant.
        let raw = unsafe {
            libc::memfd_create(
                c"peerlane-slab".as_ptr(),
                libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING,
            )
        };
        if raw < 0 {
            return Err(Error::last_os("memfd_create(slab)"));
        }
        // SAFETY: memfd_create gave us this descriptor and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let length = libc::off_t::try_from(bytes)
            .map_err(|_| Error::InvalidArgument(format!("a slab of {bytes} bytes is too large")))?;
        // SAFETY: resizes our own file.
        if unsafe { libc::ftruncate(raw, length) } != 0 {
            return Err(Error::last_os(format!("ftruncate(slab, {bytes} bytes)")));
        }
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: seals our own file.
        if unsafe { libc::fcntl(raw, libc::F_ADD_SEALS, seals) } != 0 {
            return Err(Error::last_os("fcntl(slab, F_ADD_SEALS)"));
        }
        let mapping = Mapping::new(fd.as_fd(), bytes)?;
        Ok(HostSlab { fd, mapping })
    }

    /// The mapping.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// A descriptor to send to a peer.
    pub fn export(&self) -> Result<OwnedFd> {
        self.fd.try_clone().map_err(|e| Error::os("dup(slab)", &e))
    }

    /// Sets every byte of a span to ones: "not written yet" for the sentinel protocol. To be done before export, so that
    /// no peer's first word can be erased by it.
    pub fn arm(&mut self, start: u64, bytes: u64) -> Result<()> {
        let end = start.checked_add(bytes).filter(|&e| e <= self.mapping.bytes as u64);
        if end.is_none() {
            return Err(Error::Internal(format!("arming {bytes} bytes at {start} of the slab")));
        }
        // SAFETY: inside the mapping, and `&mut self` before export: nobody else touches it.
        unsafe {
            self.mapping.base.as_ptr().add(start as usize).write_bytes(0xff, bytes as usize);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_mapping_writes_the_other_reads_even_after_the_owner_is_gone() {
        let mut slab = HostSlab::create(8192).unwrap();
        slab.arm(4096, 4096).unwrap();
        let fd = slab.export().unwrap();
        let peer = Mapping::import(fd.as_fd(), 8192).unwrap();
        drop(slab);
        // SAFETY: inside the mapping.
        let (first, armed) = unsafe { (*peer.base().as_ptr(), *peer.base().as_ptr().add(4096)) };
        assert_eq!((first, armed), (0, 0xff));
    }

    #[test]
    fn a_slab_of_another_size_or_unsealed_is_refused() {
        let slab = HostSlab::create(8192).unwrap();
        let fd = slab.export().unwrap();
        let error = Mapping::import(fd.as_fd(), 4096).unwrap_err().to_string();
        assert!(error.contains("8192 bytes instead of 4096"), "{error}");
        // SAFETY: a constant name; the descriptor is ours.
        let plain = unsafe {
            OwnedFd::from_raw_fd(libc::memfd_create(c"plain".as_ptr(), libc::MFD_CLOEXEC))
        };
        let error = Mapping::import(plain.as_fd(), 0).unwrap_err().to_string();
        assert!(error.contains("sealed"), "{error}");
    }

    #[test]
    fn arming_past_the_end_is_refused() {
        assert!(HostSlab::create(4096).unwrap().arm(1, 4096).is_err());
    }
}
