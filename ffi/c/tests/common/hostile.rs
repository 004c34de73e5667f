//! What the tests with random arguments share: the loaded library, communicators, guarded buffers and strategies.
#![allow(missing_docs, clippy::unwrap_used)]

use super::common::library;
use libloading::os::unix::{Library, Symbol};
use proptest::prelude::*;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::ptr::null;
use std::sync::{Mutex, OnceLock};

pub const SUCCESS: c_int = 0;
pub const INVALID_ARGUMENT: c_int = 1;
pub const INTERNAL: c_int = 12;
pub const INVALID_HANDLE: c_int = 13;
pub const LAST_STATUS: c_int = 14;

/// Bytes of a buffer, and of the guard on either side of it.
pub const BUFFER: usize = 4096;
pub const GUARD: usize = 64;
pub const UNTOUCHED: u8 = 0xa5;

macro_rules! api {
    ($($name:ident($($arg:ty),*) -> $ret:ty;)+) => {
        pub struct Api { $(pub $name: Symbol<unsafe extern "C" fn($($arg),*) -> $ret>,)+ }
        impl Api {
            fn load() -> Self {
                // SAFETY: the types are the header's.
                unsafe {
                    let library = Library::new(library()).unwrap();
                    Api { $($name: library.get(concat!("peerlane_", stringify!($name)).as_bytes()).unwrap(),)+ }
                }
            }
        }
    };
}

api! {
    comm_create_local(*mut usize, c_int, *const c_void) -> c_int;
    comm_create(*mut usize, c_int, *const u8, c_int, *const c_void) -> c_int;
    comm_destroy(usize) -> c_int;
    comm_abort(usize) -> c_int;
    comm_rank(usize, *mut c_int) -> c_int;
    comm_async_error(usize, *mut c_int) -> c_int;
    comm_explain(usize, usize, c_int, *mut c_char, usize, *mut usize) -> c_int;
    comm_probe(usize, *mut c_char, usize, *mut usize) -> c_int;
    all_reduce(usize, *const c_void, *mut c_void, usize, c_int, c_int, usize) -> c_int;
    broadcast(usize, *const c_void, *mut c_void, usize, c_int, c_int, usize, c_int) -> c_int;
    all_gather(usize, *const c_void, *mut c_void, usize, c_int, usize, c_int) -> c_int;
    reduce_scatter(usize, *const c_void, *mut c_void, usize, c_int, c_int, usize, c_int) -> c_int;
    group_start() -> c_int;
    group_end() -> c_int;
    stream_create(*mut usize) -> c_int;
    stream_synchronize(usize) -> c_int;
    stream_destroy(usize) -> c_int;
    last_error() -> *const c_char;
    status_string(c_int) -> *const c_char;
}

impl Api {
    /// A status is one of the header's, and a failure has a message that names the function.
    pub fn checked(&self, status: c_int, function: &str) -> c_int {
        // SAFETY: the text stays until this thread's next call.
        let message = unsafe { CStr::from_ptr((self.last_error)()) }.to_str().unwrap();
        assert!((SUCCESS..=LAST_STATUS).contains(&status), "{function} returned {status}");
        assert_eq!(status == SUCCESS, message.is_empty(), "{function}: {status} '{message}'");
        assert!(status == SUCCESS || message.contains(function), "'{message}' not from {function}");
        status
    }
}

/// A live communicator of two ranks, one of one rank, and a stream. The tests share them one at a time.
pub struct World {
    pub api: Api,
    pub pair: [usize; 2],
    pub alone: usize,
    pub stream: usize,
    destroyed: usize,
}

pub fn world() -> std::sync::MutexGuard<'static, World> {
    static WORLD: OnceLock<Mutex<World>> = OnceLock::new();
    let world = WORLD.get_or_init(|| {
        let api = Api::load();
        let (mut pair, mut alone, mut destroyed, mut stream) = ([0; 2], 0, 0, 0);
        // SAFETY: valid arguments.
        unsafe {
            assert_eq!((api.comm_create_local)(pair.as_mut_ptr(), 2, null()), SUCCESS);
            assert_eq!((api.comm_create_local)(&mut alone, 1, null()), SUCCESS);
            assert_eq!((api.comm_create_local)(&mut destroyed, 1, null()), SUCCESS);
            assert_eq!((api.comm_destroy)(destroyed), SUCCESS);
            assert_eq!((api.stream_create)(&mut stream), SUCCESS);
        }
        Mutex::new(World { api, pair, alone, stream, destroyed })
    });
    world.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A buffer with a guard before and behind it.
pub struct Guarded(Vec<u64>);

impl Guarded {
    pub fn new() -> Self {
        Guarded(vec![u64::from_ne_bytes([UNTOUCHED; 8]); (BUFFER + 2 * GUARD) / 8])
    }
    pub fn at(&mut self, offset: usize) -> *mut c_void {
        self.0.as_mut_ptr().cast::<u8>().wrapping_add(GUARD + offset).cast()
    }
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: a vector of integers is as many bytes.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * 8) }
    }
    pub fn guards_are_untouched(&self) -> bool {
        let bytes = self.bytes();
        let outside = bytes[..GUARD].iter().chain(&bytes[GUARD + BUFFER..]);
        outside.into_iter().all(|&b| b == UNTOUCHED)
    }
}

/// Numbers of an enum with `n` enumerators, and others.
pub fn enumerator(n: c_int) -> impl Strategy<Value = c_int> {
    prop_oneof![6 => 0..n, 1 => any::<c_int>(), 1 => prop::sample::select(vec![-1, n, 255, 256, c_int::MIN, c_int::MAX])]
}

#[derive(Clone, Copy, Debug)]
pub enum Name {
    Alone,
    Null,
    Destroyed,
    Stream,
    Any(usize),
}

impl Name {
    pub fn value(self, world: &World) -> usize {
        match self {
            Name::Alone => world.alone,
            Name::Null => 0,
            Name::Destroyed => world.destroyed,
            Name::Stream => world.stream,
            // Never a live handle by accident: its bits for the kind are wrong.
            Name::Any(bits) => bits & !15,
        }
    }
}

pub fn name() -> impl Strategy<Value = Name> {
    prop_oneof![
        6 => Just(Name::Alone),
        1 => Just(Name::Null),
        1 => Just(Name::Destroyed),
        1 => Just(Name::Stream),
        1 => any::<usize>().prop_map(Name::Any),
    ]
}

/// Counts that fit the buffer at any dtype, and counts that no memory holds; what lies between cannot be told from right.
pub fn count() -> impl Strategy<Value = usize> {
    let huge = vec![usize::MAX, usize::MAX / 2 + 1, usize::MAX - 7, isize::MAX as usize + 1];
    prop_oneof![8 => 0..=BUFFER / 8, 1 => Just(0), 1 => prop::sample::select(huge)]
}

/// Where a buffer is: null, or at an offset that leaves half of it.
pub fn place() -> impl Strategy<Value = Option<usize>> {
    prop_oneof![1 => Just(None), 3 => Just(Some(0)), 4 => (0..BUFFER / 2).prop_map(Some)]
}

pub fn size_of(dtype: c_int) -> Option<usize> {
    [1, 1, 4, 4, 8, 8, 2, 4, 8, 2].get(usize::try_from(dtype).ok()?).copied()
}

/// Whether two buffers are good for as many elements: NULL only when empty, aligned, and the same or apart.
pub fn apart_or_same(from: *mut c_void, to: *mut c_void, count: usize, dtype: c_int) -> bool {
    let Some(size) = size_of(dtype) else { return false };
    let Some(bytes) = count.checked_mul(size) else { return false };
    let aligned = |p: *mut c_void| !p.is_null() && (p as usize).is_multiple_of(size);
    let distance = (from as usize).abs_diff(to as usize);
    let good = aligned(from) && aligned(to) && (distance == 0 || distance >= bytes);
    bytes == 0 || bytes <= isize::MAX as usize && good
}

/// A collective that is no all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Broadcast,
    AllGather,
    ReduceScatter,
}

pub fn what() -> impl Strategy<Value = What> {
    prop::sample::select(vec![What::Broadcast, What::AllGather, What::ReduceScatter])
}

/// The arguments of one, of which each takes what it has.
pub struct Collective {
    pub what: What,
    pub from: *mut c_void,
    pub to: *mut c_void,
    pub count: usize,
    pub dtype: c_int,
    pub op: c_int,
    pub root: c_int,
}

impl Collective {
    /// Calls it and returns its status.
    ///
    /// # Safety
    /// The buffers are good for what is not refused.
    pub unsafe fn start(&self, api: &Api, comm: usize, stream: usize, channel: c_int) -> c_int {
        let Collective { what, from, to, count, dtype, op, root } = *self;
        // SAFETY: the caller's promise.
        let (status, name) = unsafe {
            match what {
                What::Broadcast => (
                    (api.broadcast)(comm, from, to, count, dtype, root, stream, channel),
                    "peerlane_broadcast",
                ),
                What::AllGather => (
                    (api.all_gather)(comm, from, to, count, dtype, stream, channel),
                    "peerlane_all_gather",
                ),
                What::ReduceScatter => (
                    (api.reduce_scatter)(comm, from, to, count, dtype, op, stream, channel),
                    "peerlane_reduce_scatter",
                ),
            }
        };
        api.checked(status, name)
    }

    /// Whether the numbers that only some have are right for `n` ranks.
    pub fn is_sane(&self, n: c_int) -> bool {
        match self.what {
            What::Broadcast => (0..n).contains(&self.root),
            What::AllGather => true,
            What::ReduceScatter => (0..5).contains(&self.op),
        }
    }
}
