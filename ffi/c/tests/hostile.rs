//! Random argument tuples through the loaded library: whatever the numbers, handles and nulls, every call returns a status,
//! a failure has a message, nothing beyond the buffers is touched, and the communicator still gets sums right.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::library;
use libloading::os::unix::{Library, Symbol};
use proptest::prelude::*;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, OnceLock};

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 1;
const INTERNAL: c_int = 12;
const INVALID_HANDLE: c_int = 13;
const LAST_STATUS: c_int = 14;

/// Bytes of a buffer, and of the guard on either side of it.
const BUFFER: usize = 4096;
const GUARD: usize = 64;
const UNTOUCHED: u8 = 0xa5;

macro_rules! api {
    ($($name:ident($($arg:ty),*) -> $ret:ty;)+) => {
        struct Api { $($name: Symbol<unsafe extern "C" fn($($arg),*) -> $ret>,)+ }
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
    fn checked(&self, status: c_int, function: &str) -> c_int {
        // SAFETY: the text stays until this thread's next call.
        let message = unsafe { CStr::from_ptr((self.last_error)()) }.to_str().unwrap();
        assert!((SUCCESS..=LAST_STATUS).contains(&status), "{function} returned {status}");
        assert_eq!(status == SUCCESS, message.is_empty(), "{function}: {status} '{message}'");
        assert!(status == SUCCESS || message.contains(function), "'{message}' not from {function}");
        status
    }
}

/// A live communicator of two ranks, one of one rank, and a stream. The tests share them one at a time.
struct World {
    api: Api,
    pair: [usize; 2],
    alone: usize,
    stream: usize,
    destroyed: usize,
}

fn world() -> std::sync::MutexGuard<'static, World> {
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
struct Guarded(Vec<u64>);

impl Guarded {
    fn new() -> Self {
        Guarded(vec![u64::from_ne_bytes([UNTOUCHED; 8]); (BUFFER + 2 * GUARD) / 8])
    }
    fn at(&mut self, offset: usize) -> *mut c_void {
        self.0.as_mut_ptr().cast::<u8>().wrapping_add(GUARD + offset).cast()
    }
    fn bytes(&self) -> &[u8] {
        // SAFETY: a vector of integers is as many bytes.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * 8) }
    }
    fn guards_are_untouched(&self) -> bool {
        let bytes = self.bytes();
        let outside = bytes[..GUARD].iter().chain(&bytes[GUARD + BUFFER..]);
        outside.into_iter().all(|&b| b == UNTOUCHED)
    }
}

/// Numbers of an enum with `n` enumerators, and others.
fn enumerator(n: c_int) -> impl Strategy<Value = c_int> {
    prop_oneof![6 => 0..n, 1 => any::<c_int>(), 1 => prop::sample::select(vec![-1, n, 255, 256, c_int::MIN, c_int::MAX])]
}

#[derive(Clone, Copy, Debug)]
enum Name {
    Alone,
    Null,
    Destroyed,
    Stream,
    Any(usize),
}

impl Name {
    fn value(self, world: &World) -> usize {
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

fn name() -> impl Strategy<Value = Name> {
    prop_oneof![
        6 => Just(Name::Alone),
        1 => Just(Name::Null),
        1 => Just(Name::Destroyed),
        1 => Just(Name::Stream),
        1 => any::<usize>().prop_map(Name::Any),
    ]
}

/// Counts that fit the buffer at any dtype, and counts that no memory holds; what lies between cannot be told from right.
fn count() -> impl Strategy<Value = usize> {
    let huge = vec![usize::MAX, usize::MAX / 2 + 1, usize::MAX - 7, isize::MAX as usize + 1];
    prop_oneof![8 => 0..=BUFFER / 8, 1 => Just(0), 1 => prop::sample::select(huge)]
}

/// Where a buffer is: null, or at an offset that leaves half of it.
fn place() -> impl Strategy<Value = Option<usize>> {
    prop_oneof![1 => Just(None), 3 => Just(Some(0)), 4 => (0..BUFFER / 2).prop_map(Some)]
}

fn size_of(dtype: c_int) -> Option<usize> {
    [1, 1, 4, 4, 8, 8, 2, 4, 8, 2].get(usize::try_from(dtype).ok()?).copied()
}

proptest! {
#![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

#[test]
fn all_reduce_survives_any_arguments(
    comm in name(), stream in prop_oneof![2 => Just(Name::Null), 1 => name()], count in count(), dtype in enumerator(10),
    op in enumerator(5), input in place(), output in place(), same_buffer: bool, grouped in prop::bool::weighted(0.2),
) {
    let world = world();
    let api = &world.api;
    // With both in one buffer of which an offset leaves half, counts of half the buffer stay inside.
    let count = if count <= BUFFER { count / 2 } else { count };
    let (mut first, mut second) = (Guarded::new(), Guarded::new());
    let from = input.map_or(null_mut(), |at| first.at(at));
    let to = output.map_or(null_mut(), |at| if same_buffer { first.at(at) } else { second.at(at) });
    // SAFETY: what is not refused fits the buffers; both outlive the synchronisation below.
    let status = unsafe {
        if grouped {
            api.checked((api.group_start)(), "peerlane_group_start");
        }
        let status = (api.all_reduce)(comm.value(&world), from, to, count, dtype, op, stream.value(&world));
        let status = api.checked(status, "peerlane_all_reduce");
        if grouped {
            prop_assert_eq!(api.checked((api.group_end)(), "peerlane_group_end"), SUCCESS);
        }
        (api.stream_synchronize)(world.stream);
        status
    };
    let handles = matches!(comm, Name::Alone) && matches!(stream, Name::Null | Name::Stream);
    let size = size_of(dtype);
    let bytes = size.and_then(|size| count.checked_mul(size));
    let sane = (0..5).contains(&op) && bytes.is_some_and(|bytes| {
        let aligned = |p: *mut c_void| (p as usize).is_multiple_of(size.unwrap_or(1));
        let apart = (from as usize).abs_diff(to as usize);
        bytes == 0 || bytes <= isize::MAX as usize && !from.is_null() && !to.is_null() && aligned(from) && aligned(to)
            && (apart == 0 || apart >= bytes)
    });
    match status {
        SUCCESS => prop_assert!(handles && sane),
        INVALID_HANDLE => prop_assert!(!handles),
        other => {
            prop_assert_eq!(other, INVALID_ARGUMENT);
            prop_assert!(!sane);
        }
    }
    prop_assert!(first.guards_are_untouched() && second.guards_are_untouched());
    if status != SUCCESS {
        prop_assert!(first.bytes().iter().chain(second.bytes()).all(|&b| b == UNTOUCHED));
    }
}

#[test]
fn two_ranks_are_refused_alike_or_both_served(
    count in count(), dtype in enumerator(10), op in enumerator(5), seed in 0..100i64, null_input: bool,
) {
    let world = world();
    let api = &world.api;
    let mut buffers = [Guarded::new(), Guarded::new()];
    for (rank, buffer) in buffers.iter_mut().enumerate() {
        for i in 0..BUFFER / 8 {
            let value = seed + i as i64 + 1000 * rank as i64;
            // SAFETY: inside the buffer, which is made of u64.
            unsafe { buffer.at(8 * i).cast::<i64>().write(value) };
        }
    }
    let mut statuses = [0; 2];
    // SAFETY: what is not refused fits the buffers.
    unsafe {
        api.checked((api.group_start)(), "peerlane_group_start");
        for rank in 0..2 {
            let to = buffers[rank].at(0);
            let from = if null_input { null_mut() } else { to };
            let status = (api.all_reduce)(world.pair[rank], from, to, count, dtype, op, 0);
            statuses[rank] = api.checked(status, "peerlane_all_reduce");
        }
        prop_assert_eq!(api.checked((api.group_end)(), "peerlane_group_end"), SUCCESS);
    }
    prop_assert_eq!(statuses[0], statuses[1]);
    for buffer in &mut buffers {
        prop_assert!(buffer.guards_are_untouched());
        if statuses[0] == SUCCESS && (dtype, op) == (4, 0) {
            for i in 0..count {
                // SAFETY: a served count fits the buffer.
                let value = unsafe { buffer.at(8 * i).cast::<i64>().read() };
                prop_assert_eq!(value, 2 * (seed + i as i64) + 1000);
            }
        }
    }
}

#[test]
fn everything_else_survives_any_arguments(
    comm in name(), stream in name(), number in enumerator(16), size: usize, dtype in enumerator(10),
    rank in enumerator(16), bytes: [u8; 32], nulls: u8, capacity in 0..200usize, grouped: bool,
) {
    let world = world();
    let api = &world.api;
    let absent = |bit: u8| nulls >> bit & 1 == 1;
    let (handle, stream) = (comm.value(&world), stream.value(&world));
    let (mut value, mut length, mut made) = (77, 78usize, 79usize);
    let mut text = [UNTOUCHED as c_char; 200];
    let mut id = [0; 128];
    id[..32].copy_from_slice(&bytes);
    let mut config = [0u64; 512];
    config[0] = size as u64 % 4096;
    // SAFETY: pointers are null or valid; the config struct is as long as its size field can say.
    unsafe {
        let out = if absent(0) { null_mut() } else { &raw mut value };
        let status = api.checked((api.comm_rank)(handle, out), "peerlane_comm_rank");
        prop_assert_eq!(status == SUCCESS, matches!(comm, Name::Alone) && !absent(0));
        prop_assert_eq!(value, if status == SUCCESS { 0 } else { 77 });

        let buffer = if absent(1) { null_mut() } else { text.as_mut_ptr() };
        let out = if absent(2) { null_mut() } else { &raw mut length };
        let status = (api.comm_explain)(handle, size >> 20, dtype, buffer, capacity, out);
        if api.checked(status, "peerlane_comm_explain") == SUCCESS && !absent(1) && capacity > 0 {
            prop_assert!(text[..capacity].contains(&0));
        }
        prop_assert!(text[capacity..].iter().all(|&c| c == UNTOUCHED as c_char));
        let status = (api.comm_probe)(handle, buffer, capacity, out);
        api.checked(status, "peerlane_comm_probe");
        prop_assert!(text[capacity..].iter().all(|&c| c == UNTOUCHED as c_char));

        if grouped {
            api.checked((api.group_start)(), "peerlane_group_start");
        }
        let out = if absent(3) { null_mut() } else { &raw mut made };
        let from = if absent(4) { null() } else { id.as_ptr() };
        let how = if absent(5) { null() } else { config.as_ptr().cast() };
        let status = (api.comm_create)(out, number, from, rank, how);
        prop_assert_eq!(api.checked(status, "peerlane_comm_create"), INVALID_ARGUMENT);
        if !matches!(comm, Name::Alone) {
            prop_assert_ne!(api.checked((api.comm_destroy)(handle), "peerlane_comm_destroy"), SUCCESS);
            prop_assert_ne!(api.checked((api.comm_abort)(handle), "peerlane_comm_abort"), SUCCESS);
        }
        if stream != world.stream {
            let status = (api.stream_destroy)(stream);
            prop_assert_ne!(api.checked(status, "peerlane_stream_destroy"), SUCCESS);
        }
        if grouped {
            prop_assert_eq!(api.checked((api.group_end)(), "peerlane_group_end"), SUCCESS);
        }
        prop_assert!(!CStr::from_ptr((api.status_string)(number)).is_empty());
        prop_assert_eq!((api.comm_async_error)(world.alone, &mut value), SUCCESS);
        prop_assert_eq!(value, SUCCESS, "the communicator is hurt");
    }
    prop_assert_eq!(made, 79);
}}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_config_makes_a_communicator_or_is_refused(
        n in enumerator(5), size in prop_oneof![3 => Just(64usize), 1 => any::<usize>(), 1 => 0..4200usize],
        islands in prop_oneof![3 => Just(None), 1 => prop::sample::select(vec![Some(c"0"), Some(c"0-1,2-3"), Some(c"0+2,1"), Some(c",-+"), Some(c"\xff"), Some(c"0-99999999999999999999")])],
        slab in prop_oneof![4 => Just(0), 1 => prop::sample::select(vec![1, 4096, 1 << 20, 3 << 20, 1 << 31, u64::MAX])],
        deadlines in prop::array::uniform2(prop_oneof![3 => Just(0.0), 1 => Just(30.0), 1 => prop::num::f64::ANY.prop_filter("patience", |s| !(0.0..0.5).contains(s))]),
        pins in prop::array::uniform4(prop_oneof![6 => Just(-1), 2 => enumerator(3)]), later in prop::bool::weighted(0.1),
    ) {
        let world = world();
        let api = &world.api;
        let mut comms = [79usize; 16];
        // As long as any size that is not refused.
        let mut config = [0u64; 512];
        config[0] = size as u64;
        config[1] = islands.map_or(0, |text: &CStr| text.as_ptr() as u64);
        config[2] = slab;
        config[3..5].copy_from_slice(&deadlines.map(f64::to_bits));
        for (at, pin) in pins.into_iter().enumerate() {
            config[5 + at / 2] |= u64::from(pin as u32) << (32 * (at % 2));
        }
        config[8] = u64::from(later);
        // SAFETY: the array has room for every number of ranks, the struct for every size.
        unsafe {
            let status = (api.comm_create_local)(comms.as_mut_ptr(), n, config.as_ptr().cast());
            let made = if api.checked(status, "peerlane_comm_create_local") == SUCCESS { n as usize } else { 0 };
            prop_assert_ne!(status, INTERNAL);
            for &comm in &comms[..made] {
                prop_assert_eq!((api.comm_destroy)(comm), SUCCESS);
            }
            prop_assert!(comms[made..].iter().all(|&c| c == 79));
        }
    }
}
