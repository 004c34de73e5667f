//! Random argument tuples through the loaded library: whatever the numbers, handles and nulls, every call returns a status,
//! a failure has a message, nothing beyond the buffers is touched, and the communicator still gets sums right.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;
#[path = "common/hostile.rs"]
mod hostile;

use hostile::*;
use proptest::prelude::*;
use std::ffi::{c_char, c_int, CStr};
use std::ptr::{null, null_mut};

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
    let sane = (0..5).contains(&op) && apart_or_same(from, to, count, dtype);
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
fn other_collectives_survive_any_arguments(
    what in what(), comm in name(), stream in prop_oneof![2 => Just(Name::Null), 1 => name()], count in count(),
    dtype in enumerator(10), op in enumerator(5), root in enumerator(1), channel in prop_oneof![4 => Just(-1), 2 => Just(0), 1 => any::<c_int>()],
    input in place(), output in place(), same_buffer: bool, grouped in prop::bool::weighted(0.2),
) {
    let world = world();
    let api = &world.api;
    let count = if count <= BUFFER { count / 2 } else { count };
    let (mut first, mut second) = (Guarded::new(), Guarded::new());
    let from = input.map_or(null_mut(), |at| first.at(at));
    let to = output.map_or(null_mut(), |at| if same_buffer { first.at(at) } else { second.at(at) });
    let call = Collective { what, from, to, count, dtype, op, root };
    // SAFETY: what is not refused fits the buffers; both outlive the synchronisation below.
    let status = unsafe {
        if grouped {
            api.checked((api.group_start)(), "peerlane_group_start");
        }
        let status = call.start(api, comm.value(&world), stream.value(&world), channel);
        if grouped {
            prop_assert_eq!(api.checked((api.group_end)(), "peerlane_group_end"), SUCCESS);
        }
        (api.stream_synchronize)(world.stream);
        status
    };
    let handles = matches!(comm, Name::Alone) && matches!(stream, Name::Null | Name::Stream);
    let sane = call.is_sane(1) && (-1..=0).contains(&channel) && apart_or_same(from, to, count, dtype);
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
fn two_ranks_of_another_collective_are_refused_alike_or_both_served(
    what in what(), count in count(), dtype in enumerator(10), op in enumerator(5), root in enumerator(2), seed in 0..100i64,
    null_input: bool,
) {
    let world = world();
    let api = &world.api;
    // The larger buffer of a gather or scatter has as many elements of either rank.
    let count = if count <= BUFFER { count / 2 } else { count };
    let mut inputs = [Guarded::new(), Guarded::new()];
    let mut outputs = [Guarded::new(), Guarded::new()];
    let value = |rank: usize, i: usize| seed + i as i64 + 1000 * rank as i64;
    for (rank, input) in inputs.iter_mut().enumerate() {
        for i in 0..BUFFER / 8 {
            // SAFETY: inside the buffer, which is made of u64.
            unsafe { input.at(8 * i).cast::<i64>().write(value(rank, i)) };
        }
    }
    let mut statuses = [0; 2];
    // SAFETY: what is not refused fits the buffers.
    unsafe {
        api.checked((api.group_start)(), "peerlane_group_start");
        for rank in 0..2 {
            // Of a broadcast only the root's input is looked at: with it NULL one rank would wait for a call that was refused.
            let looked_at = what != What::Broadcast || root == rank as c_int;
            let from = if null_input && what != What::Broadcast || !looked_at { null_mut() } else { inputs[rank].at(0) };
            let call = Collective { what, from, to: outputs[rank].at(0), count, dtype, op, root };
            statuses[rank] = call.start(api, world.pair[rank], 0, -1);
        }
        prop_assert_eq!(api.checked((api.group_end)(), "peerlane_group_end"), SUCCESS);
    }
    prop_assert_eq!(statuses[0], statuses[1]);
    for (rank, output) in outputs.iter_mut().enumerate() {
        prop_assert!(inputs[rank].guards_are_untouched() && output.guards_are_untouched());
        if statuses[0] != SUCCESS {
            prop_assert!(output.bytes().iter().all(|&b| b == UNTOUCHED));
        } else if dtype == 4 {
            let read = |output: &mut Guarded, i: usize| {
                // SAFETY: a served count fits the buffer.
                unsafe { output.at(8 * i).cast::<i64>().read() }
            };
            for i in 0..count {
                match what {
                    What::Broadcast => prop_assert_eq!(read(output, i), value(root as usize, i)),
                    What::AllGather => for other in 0..2 {
                        prop_assert_eq!(read(output, other * count + i), value(other, i));
                    },
                    What::ReduceScatter if op == 0 => {
                        let at = rank * count + i;
                        prop_assert_eq!(read(output, i), value(0, at) + value(1, at));
                    }
                    What::ReduceScatter => {}
                }
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
