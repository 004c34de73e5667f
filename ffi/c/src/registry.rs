//! Handles. What C holds is a name, never an address: the value of the pointer encodes a slot of a table and a serial
//! number, so a stale or made-up handle is looked up and refused, and nothing of the caller's is ever dereferenced.
//!
//! ```text
//! bit 63             24 23        4 3    0
//!     | serial number  | slot      | kind |
//! ```
//!
//! Serial numbers never repeat, not even across fork(): the child goes on where the parent stood, but with empty
//! tables. That is what keeps a child from saying goodbye in its parent's name, and from waiting for a lock that another
//! thread of the parent held at the fork.

use crate::status::{Failure, Outcome};
use peerlane_core::comm::Communicator;
use peerlane_core::device::Stream;
use peerlane_core::Error;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Once, PoisonError, RwLock};

const KIND_BITS: u32 = 4;
const SLOT_BITS: u32 = 20;
const SERIAL_BITS: u32 = 40;

// The encoding needs all 64 bits.
const _: () = assert!(usize::BITS == KIND_BITS + SLOT_BITS + SERIAL_BITS);

/// The value of a `peerlane_comm_t` or `peerlane_stream_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Handle(usize);

impl Handle {
    fn new(kind: usize, slot: usize, serial: u64) -> Self {
        Handle(kind | slot << KIND_BITS | (serial as usize) << (KIND_BITS + SLOT_BITS))
    }
    /// What C passed, for what is no name of this library.
    #[cfg(feature = "cuda")]
    pub fn as_pointer(self) -> *mut std::ffi::c_void {
        self.0 as *mut _
    }
    /// Whether C passed NULL.
    pub fn is_null(self) -> bool {
        self.0 == 0
    }
    fn kind(self) -> usize {
        self.0 & ((1 << KIND_BITS) - 1)
    }
    fn slot(self) -> usize {
        self.0 >> KIND_BITS & ((1 << SLOT_BITS) - 1)
    }
    fn serial(self) -> u64 {
        (self.0 >> (KIND_BITS + SLOT_BITS)) as u64
    }
}

/// What a handle can name.
pub trait Named: Sized + Send + Sync + 'static {
    /// Distinguishes handles of different kinds; not 0 and below 16.
    const KIND: usize;
    /// What the kind is called, with its article.
    const WHAT: &'static str;
    /// The function that makes one.
    const MAKER: &'static str;
    #[doc(hidden)]
    fn table(tables: &Tables) -> &Table<Self>;
}

impl Named for Communicator {
    const KIND: usize = 5;
    const WHAT: &'static str = "a communicator";
    const MAKER: &'static str = "peerlane_comm_create";
    fn table(tables: &Tables) -> &Table<Self> {
        &tables.communicators
    }
}

impl Named for Stream {
    const KIND: usize = 11;
    const WHAT: &'static str = "a stream";
    const MAKER: &'static str = "peerlane_stream_create";
    fn table(tables: &Tables) -> &Table<Self> {
        &tables.streams
    }
}

#[doc(hidden)]
pub struct Tables {
    communicators: Table<Communicator>,
    streams: Table<Stream>,
    /// The parent's tables: kept reachable and untouched, since dropping them is the parent's business.
    inherited: AtomicPtr<Tables>,
}

#[doc(hidden)]
pub struct Table<T>(RwLock<Slots<T>>);

struct Slots<T> {
    entries: Vec<Option<(Handle, Arc<T>)>>,
    free: Vec<usize>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Table(RwLock::new(Slots { entries: Vec::new(), free: Vec::new() }))
    }
}

static TABLES: AtomicPtr<Tables> = AtomicPtr::new(std::ptr::null_mut());
static INHERITED: AtomicPtr<Tables> = AtomicPtr::new(std::ptr::null_mut());
/// The next serial number; 0 is none, so that small integers are no handles.
static NEXT_SERIAL: AtomicU64 = AtomicU64::new(1);
/// Serial numbers below this were given out by a parent of this process.
static FIRST_OWN_SERIAL: AtomicU64 = AtomicU64::new(1);

/// Runs in the child of a fork, where only async-signal-safe things are allowed: it moves numbers and pointers.
extern "C" fn after_fork_in_child() {
    FIRST_OWN_SERIAL.store(NEXT_SERIAL.load(Ordering::Relaxed), Ordering::Relaxed);
    let parents = TABLES.swap(std::ptr::null_mut(), Ordering::Relaxed);
    // SAFETY: null, or tables that are never freed.
    if let Some(tables) = unsafe { parents.as_ref() } {
        tables.inherited.store(INHERITED.load(Ordering::Relaxed), Ordering::Relaxed);
        INHERITED.store(parents, Ordering::Relaxed);
    }
}

/// This process's tables. They are made once and never freed: at exit other threads may still be in a call.
fn tables() -> &'static Tables {
    static FORK_HANDLER: Once = Once::new();
    FORK_HANDLER.call_once(|| {
        // SAFETY: the handler touches atomics only, and `-z nodelete` keeps its code in place. It fails only without
        // memory; then a child merely lacks the protection.
        unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
    });
    let mut current = TABLES.load(Ordering::Acquire);
    if current.is_null() {
        let fresh = Box::into_raw(Box::new(Tables {
            communicators: Table::default(),
            streams: Table::default(),
            inherited: AtomicPtr::new(std::ptr::null_mut()),
        }));
        current = match TABLES.compare_exchange(
            std::ptr::null_mut(),
            fresh,
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            Ok(_) => fresh,
            Err(others) => {
                // SAFETY: `fresh` came from Box::into_raw above and was published nowhere.
                drop(unsafe { Box::from_raw(fresh) });
                others
            }
        };
    }
    // SAFETY: not null, and what was published in TABLES is never freed.
    unsafe { &*current }
}

/// Gives `value` a name.
pub fn insert<T: Named>(value: T) -> Outcome<Handle> {
    let table = T::table(tables());
    let mut slots = table.0.write().unwrap_or_else(PoisonError::into_inner);
    let slot = match slots.free.pop() {
        Some(slot) => slot,
        None if slots.entries.len() < 1 << SLOT_BITS => {
            slots.entries.push(None);
            slots.entries.len() - 1
        }
        None => {
            return Err(Error::Unsupported(format!(
                "more than {} handles of one kind at a time; destroy those no longer used",
                1 << SLOT_BITS
            ))
            .into())
        }
    };
    let serial = NEXT_SERIAL.fetch_add(1, Ordering::Relaxed);
    if serial >= 1 << SERIAL_BITS {
        slots.free.push(slot);
        return Err(Error::Internal("out of handle numbers".to_owned()).into());
    }
    let handle = Handle::new(T::KIND, slot, serial);
    slots.entries[slot] = Some((handle, Arc::new(value)));
    Ok(handle)
}

/// What `handle` names; whoever holds it keeps it alive.
pub fn get<T: Named>(handle: Handle) -> Outcome<Arc<T>> {
    let slots = T::table(tables()).0.read().unwrap_or_else(PoisonError::into_inner);
    match slots.entries.get(handle.slot()) {
        Some(Some((name, value))) if *name == handle => Ok(Arc::clone(value)),
        _ => Err(refusal::<T>(handle)),
    }
}

/// Takes the name away and returns what it named, once no other thread uses it any more. The name is refused from the
/// start of this call on.
pub fn remove<T: Named>(handle: Handle) -> Outcome<T> {
    let mut shared = {
        let mut slots = T::table(tables()).0.write().unwrap_or_else(PoisonError::into_inner);
        let taken = match slots.entries.get_mut(handle.slot()) {
            Some(entry) if entry.as_ref().is_some_and(|(name, _)| *name == handle) => entry.take(),
            _ => None,
        };
        let Some((_, shared)) = taken else { return Err(refusal::<T>(handle)) };
        slots.free.push(handle.slot());
        shared
    };
    // Nobody can get it any more, so the number of users only falls. Polling costs the destroyer a little; a count with
    // a wake-up would cost every call.
    let mut rounds = 0u32;
    loop {
        match Arc::try_unwrap(shared) {
            Ok(value) => return Ok(value),
            Err(still_used) => shared = still_used,
        }
        match rounds {
            0..64 => std::thread::yield_now(),
            _ => std::thread::sleep(std::time::Duration::from_micros(200)),
        }
        rounds = rounds.saturating_add(1);
    }
}

fn refusal<T: Named>(handle: Handle) -> Failure {
    let (what, maker) = (T::WHAT, T::MAKER);
    let serial = handle.serial();
    let plausible = serial != 0 && serial < NEXT_SERIAL.load(Ordering::Relaxed);
    Failure::handle(match handle.kind() {
        _ if handle.0 == 0 => format!("NULL is not {what}; pass one from {maker}"),
        kind if kind == Communicator::KIND && kind != T::KIND && plausible => {
            format!("{:#x} is {}, not {what}", handle.0, Communicator::WHAT)
        }
        kind if kind == Stream::KIND && kind != T::KIND && plausible => {
            format!("{:#x} is {}, not {what}", handle.0, Stream::WHAT)
        }
        kind if kind == T::KIND && plausible => {
            if serial < FIRST_OWN_SERIAL.load(Ordering::Relaxed) {
                format!(
                    "{:#x} is {what} of the parent process; a child makes its own with {maker} after fork()",
                    handle.0
                )
            } else {
                format!(
                    "{:#x} is {what} that has been destroyed; use none after its destroy function",
                    handle.0
                )
            }
        }
        _ => format!("{:#x} is not {what}; pass what {maker} wrote", handle.0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::Status;

    fn refused<T: Named>(handle: Handle) -> String {
        let failure = get::<T>(handle).map(drop).unwrap_err();
        assert_eq!(failure.status, Status::InvalidHandle);
        failure.message
    }

    #[test]
    fn a_destroyed_handle_stays_refused_when_its_slot_is_used_again() {
        let first = insert(Stream::new().unwrap()).unwrap();
        get::<Stream>(first).unwrap();
        remove::<Stream>(first).unwrap();
        // Other tests share the table, so the slot may be theirs for a while.
        let mut others = Vec::new();
        while others.iter().all(|h: &Handle| h.slot() != first.slot()) {
            assert!(others.len() < 2000, "slot {} is never used again", first.slot());
            others.push(insert(Stream::new().unwrap()).unwrap());
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(refused::<Stream>(first).contains("destroyed"));
        assert!(remove::<Stream>(first).is_err());
        for handle in others {
            remove::<Stream>(handle).unwrap();
        }
    }

    #[test]
    fn what_is_no_handle_is_refused_with_the_reason() {
        let local = 0u64;
        let stream = insert(Stream::new().unwrap()).unwrap();
        assert!(refused::<Communicator>(Handle(0)).contains("NULL"));
        assert!(refused::<Communicator>(stream).contains("is a stream, not a communicator"));
        for garbage in [1, 5, 16, usize::MAX, 0xdead_beef, &raw const local as usize] {
            assert!(refused::<Communicator>(Handle(garbage)).contains("not a communicator"));
        }
        remove::<Stream>(stream).unwrap();
    }

    #[test]
    fn removal_waits_for_those_who_use_it() {
        let handle = insert(Stream::new().unwrap()).unwrap();
        let used = get::<Stream>(handle).unwrap();
        let (sent, removed) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || sent.send(remove::<Stream>(handle).is_ok()).unwrap());
            while get::<Stream>(handle).is_ok() {
                std::thread::yield_now();
            }
            assert!(removed.try_recv().is_err(), "removed under its user");
            drop(used);
            assert!(removed.recv().unwrap());
        });
    }
}
