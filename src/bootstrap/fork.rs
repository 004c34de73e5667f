//! Descriptors that a forked child must not keep.
//!
//! A child that inherits a rank's sockets would keep the rank "alive" after its death (no end of file reaches the
//! peers) and could speak in its name. Every descriptor of the bootstrap is therefore an [`Fd`], entered in a registry
//! that `pthread_atfork`'s child handler walks. Between `fork` and `exec` only async-signal-safe calls are allowed, so
//! the registry is a list of fixed arrays of atomics: no lock that another thread may hold, no allocation.
//!
//! A child made past libc (a raw `clone`) runs no handler and keeps the descriptors; it still never says anything
//! ([`Owner`]), and the peers notice the parent's death by its pidfd.

use crate::error::{Error, Result};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};
use std::sync::Once;

const SLOTS: usize = 512;
const FREE: i32 = -1;

/// A part of the registry. Parts are added when all are full and never freed: the handler may walk them at any time.
struct Segment {
    slots: [AtomicI32; SLOTS],
    next: AtomicPtr<Segment>,
}

impl Segment {
    const fn new() -> Self {
        Segment {
            slots: [const { AtomicI32::new(FREE) }; SLOTS],
            next: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    fn next(&self) -> Option<&'static Segment> {
        // SAFETY: `next` is null or a leaked box, so the reference is good for the rest of the process.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }
}

static REGISTRY: Segment = Segment::new();
/// Forks between the process that loaded the library and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Runs in the child of a `fork`, on its only thread.
extern "C" fn close_all_in_child() {
    let mut segment = Some(&REGISTRY);
    while let Some(s) = segment {
        for slot in &s.slots {
            let fd = slot.swap(FREE, Ordering::Relaxed);
            if fd != FREE {
                // SAFETY: the slot belonged to an `Fd` of the parent, which owns this descriptor; the child's copy of
                // that `Fd` sees the new generation and never uses or closes the number again. close is
                // async-signal-safe.
                unsafe { libc::close(fd) };
            }
        }
        segment = s.next();
    }
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

fn register(fd: RawFd) -> &'static AtomicI32 {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        // SAFETY: the handler is async-signal-safe and lives as long as the library, which is never unloaded. Failure
        // (no memory) leaves the pidfd as the only watch over a parent whose child lives on.
        unsafe { libc::pthread_atfork(None, None, Some(close_all_in_child)) };
    });
    let mut segment: &'static Segment = &REGISTRY;
    loop {
        for slot in &segment.slots {
            if slot.load(Ordering::Relaxed) == FREE
                && slot.compare_exchange(FREE, fd, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                return slot;
            }
        }
        segment = match segment.next() {
            Some(next) => next,
            None => {
                let fresh = Box::into_raw(Box::new(Segment::new()));
                let null = std::ptr::null_mut();
                match segment.next.compare_exchange(
                    null,
                    fresh,
                    Ordering::AcqRel,
                    Ordering::Acquire,
                ) {
                    // SAFETY: just leaked, and never freed once it is in the list.
                    Ok(_) => unsafe { &*fresh },
                    Err(theirs) => {
                        // SAFETY: the exchange failed, so nobody else has seen `fresh`; `theirs` is in the list for good.
                        unsafe {
                            drop(Box::from_raw(fresh));
                            &*theirs
                        }
                    }
                }
            }
        };
    }
}

/// The process that something belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pid: i32,
    generation: u32,
}

impl Owner {
    pub(crate) fn current() -> Self {
        // SAFETY: getpid has no preconditions.
        let pid = unsafe { libc::getpid() };
        Owner { pid, generation: GENERATION.load(Ordering::Relaxed) }
    }

    /// False in a forked child: by the generation after `fork`, by the pid after a raw `clone`.
    pub(crate) fn is_current(&self) -> bool {
        *self == Self::current()
    }

    /// Refuses a forked child. For every call, so it asks no more than memory: a child made past libc is not noticed.
    pub(crate) fn require(&self) -> Result<()> {
        if self.generation == GENERATION.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(Error::Unsupported(
            "a communicator in a forked child: it belongs to the parent; create one after the fork"
                .into(),
        ))
    }
}

/// An owned descriptor that is closed in forked children.
#[derive(Debug)]
pub(super) struct Fd {
    raw: RawFd,
    slot: &'static AtomicI32,
    owner: Owner,
}

impl From<OwnedFd> for Fd {
    fn from(fd: OwnedFd) -> Self {
        let raw = fd.into_raw_fd();
        Fd { raw, slot: register(raw), owner: Owner::current() }
    }
}

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.raw
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `raw` stays open at least as long as `self` is borrowed. (In a forked child it is closed; nothing there
        // gets as far as using it.)
        unsafe { BorrowedFd::borrow_raw(self.raw) }
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        if !self.owner.is_current() {
            // The handler has closed it, and the number may be somebody else's by now.
            return;
        }
        // Free the slot first: the other way round a fork in between would close, in the child, whatever took the number.
        self.slot.store(FREE, Ordering::Release);
        // SAFETY: `raw` came from an `OwnedFd`, is closed nowhere else in this process, and is not used after this.
        drop(unsafe { OwnedFd::from_raw_fd(self.raw) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    fn null() -> OwnedFd {
        File::open("/dev/null").unwrap().into()
    }

    /// Forks; the child returns a byte from `probe`, which may only make system calls.
    fn in_child(probe: impl Fn() -> u8) -> u8 {
        // SAFETY: the child calls only `probe` (system calls) and _exit.
        unsafe {
            let pid = libc::fork();
            assert!(pid >= 0);
            if pid == 0 {
                libc::_exit(probe().into());
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
            assert!(libc::WIFEXITED(status));
            libc::WEXITSTATUS(status) as u8
        }
    }

    fn is_open(raw: RawFd) -> bool {
        // SAFETY: F_GETFD on any number is harmless.
        unsafe { libc::fcntl(raw, libc::F_GETFD) != -1 }
    }

    #[test]
    fn a_forked_child_has_none_of_our_descriptors_open() {
        let ours: Vec<Fd> = (0..SLOTS + 10).map(|_| Fd::from(null())).collect();
        let raw: Vec<RawFd> = ours.iter().map(|fd| fd.raw).collect();
        let left = in_child(|| raw.iter().filter(|&&fd| is_open(fd)).count().min(255) as u8);
        assert_eq!(left, 0);
        assert!(raw.iter().all(|&fd| is_open(fd)), "the parent keeps them");
        // Control: one that was never registered is inherited.
        let plain = null();
        let raw = plain.as_raw_fd();
        assert_eq!(in_child(|| is_open(raw).into()), 1);
    }

    #[test]
    fn a_forked_child_does_not_close_what_took_our_number() {
        let ours = Fd::from(null());
        let raw = ours.raw;
        let still_open = in_child(|| {
            // SAFETY: dup2 of a standard descriptor onto the number that the handler has just closed, and a bitwise
            // copy of `ours` that is dropped once; the child never drops the original.
            unsafe {
                libc::dup2(0, raw);
                drop(std::ptr::read(&ours));
            }
            is_open(raw).into()
        });
        assert_eq!(still_open, 1);
    }

    #[test]
    fn slots_are_used_again() {
        // Slots that were never freed would all be different; other tests may hold and free hundreds meanwhile.
        let slot = |_| std::ptr::from_ref(Fd::from(null()).slot) as usize;
        let used: std::collections::BTreeSet<usize> = (0..SLOTS * 3).map(slot).collect();
        assert!(used.len() < SLOTS * 3, "no slot was used twice");
    }
}
