//! Communicators: a mapped file that all ranks share, and handles.

use crate::cuda::Gpu;
use crate::lock;
use std::collections::HashMap;
use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

pub const SLOT: usize = 64 << 10;
pub const MAIL: usize = 4096;
/// More than peerlane serves, so that a test can go beyond.
pub const RANKS: usize = 20;
const WORDS: usize = 4096;
const MAIL_AT: usize = WORDS + RANKS * SLOT;
const BYTES: usize = MAIL_AT + RANKS * RANKS * (MAIL + 64);

/// What the ranks share.
pub struct Region(*mut u8);

// SAFETY: all accesses are to atomics, or ordered by them.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn path(token: &str) -> String {
        format!("/dev/shm/standin-nccl-{token}")
    }

    pub fn open(token: &str) -> Self {
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(Self::path(token))
            .expect("a file in /dev/shm");
        file.set_len(BYTES as u64).expect("room in /dev/shm");
        // SAFETY: a fresh mapping of a file of this size.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert!(at != libc::MAP_FAILED);
        Region(at.cast())
    }

    pub fn forget_name(token: &str) {
        let _ = std::fs::remove_file(Self::path(token));
    }

    /// A counter: 0 who has come, 1 the barrier on streams, 2 the barrier of splits, from 16 on colors and keys,
    /// from 64 on the ids of communicators that grow.
    pub fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: inside the mapping, aligned, and only ever used as an atomic.
        unsafe { &*self.0.add(at * 8).cast() }
    }

    pub fn slot(&self, rank: usize) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe { self.0.add(WORDS + rank * SLOT) }
    }

    /// From whom to whom: messages posted, messages taken, data.
    pub fn mail(&self, from: usize, to: usize) -> (&AtomicU64, &AtomicU64, *mut u8) {
        // SAFETY: inside the mapping, aligned.
        unsafe {
            let at = self.0.add(MAIL_AT + (from * RANKS + to) * (MAIL + 64));
            (&*at.cast(), &*at.add(8).cast(), at.add(64))
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped once, unmapped once.
        unsafe { libc::munmap(self.0.cast(), BYTES) };
    }
}

/// What is known once the communicator has been created.
pub struct Made {
    pub n: usize,
    pub rank: usize,
    pub token: String,
    pub region: Region,
}

pub struct Comm {
    pub gpu: Gpu,
    pub made: OnceLock<Made>,
    pub aborted: AtomicBool,
    /// Barriers passed on streams; held by the collective that runs.
    pub passed: Mutex<u64>,
    pub revoked: AtomicBool,
    pub splits: AtomicU64,
    pub shrinks: AtomicU64,
    pub grows: AtomicU64,
}

static HANDLES: Mutex<Option<HashMap<usize, Arc<Comm>>>> = Mutex::new(None);
/// Addresses of communicators that are gone: the next ones get them.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());

pub fn insert(ordinal: c_int) -> Option<(usize, Arc<Comm>)> {
    let comm = Arc::new(Comm {
        gpu: Gpu::new(ordinal)?,
        made: OnceLock::new(),
        aborted: AtomicBool::new(false),
        passed: Mutex::new(0),
        revoked: AtomicBool::new(false),
        splits: AtomicU64::new(0),
        shrinks: AtomicU64::new(0),
        grows: AtomicU64::new(0),
    });
    let handle = lock(&FREE).pop().unwrap_or_else(|| Box::into_raw(Box::new([0u64; 8])) as usize);
    lock(&HANDLES).get_or_insert_with(HashMap::new).insert(handle, Arc::clone(&comm));
    Some((handle, comm))
}

pub fn find(handle: usize) -> Option<Arc<Comm>> {
    lock(&HANDLES).as_ref()?.get(&handle).cloned()
}

pub fn remove(handle: usize) -> Option<Arc<Comm>> {
    let comm = lock(&HANDLES).as_mut()?.remove(&handle)?;
    lock(&FREE).push(handle);
    Some(comm)
}

impl Comm {
    pub fn made(&self) -> &Made {
        self.made.get().expect("a communicator whose group has ended")
    }

    /// Waits until `ready`; false if the communicator is aborted first.
    pub fn wait(&self, ready: impl Fn() -> bool) -> bool {
        let mut spins = 0u32;
        while !ready() {
            if self.aborted.load(SeqCst) {
                return false;
            }
            spins += 1;
            if spins < 100 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        true
    }
}
