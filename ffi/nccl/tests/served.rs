//! All-reduces in the place of NCCL: served where they should be, NCCL's where they should not, right in both cases.
#![cfg(feature = "cuda")]
#![allow(
    missing_docs,
    non_upper_case_globals,
    clippy::undocumented_unsafe_blocks,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]

mod support;

use peerlane_nccl_core::types::*;
use std::ffi::c_int;
use support::{role, sum, values, Gpu, Way, World, SMALL};

/// Beyond what is served among so many ranks.
const LARGE: usize = 600_000;

#[test]
fn eight_processes_created_in_a_group_are_served_the_three_ways() {
    const NAME: &str = "eight_processes_created_in_a_group_are_served_the_three_ways";
    let Some(r) = role() else {
        for (way, n) in [(Way::Preload, 8), (Way::Linking, 2), (Way::Full, 3)] {
            World::new(NAME).run(way, n);
        }
        return;
    };
    let gpu = Gpu::new(0);
    let (id, mut config, mut comm) = (r.id("id"), r.config(), std::ptr::null_mut());
    config.nvlinkCentricSched = 1;
    unsafe {
        assert_eq!((r.api.ncclGroupStart)(), ncclSuccess);
        let code = (r.api.ncclCommInitRankConfig)(
            &mut comm,
            r.n as c_int,
            id,
            r.rank as c_int,
            &mut config,
        );
        assert_eq!(code, ncclSuccess);
        assert!(!comm.is_null(), "the handle is there before the group ends");
        assert_eq!((r.api.ncclGroupEnd)(), ncclSuccess, "{}", r.last_error());
    }
    for call in 0..5 {
        r.check(comm, &gpu, call, SMALL);
    }
    let served = r.stats(comm);
    assert_eq!((served.served_calls, served.served_bytes), (5, 5 * 4 * SMALL as u64));
    assert_eq!(r.nccl_calls("ncclAllReduce"), 0);
    // What is larger is NCCL's, and so is what peerlane has no operation for.
    if r.n == 2 {
        r.check(comm, &gpu, 6, LARGE);
        let buffer = gpu.buffer(&values(r.rank, 0, 4));
        unsafe {
            let at = buffer.at();
            let own_op = (r.api.ncclAllReduce)(at, at, 4, ncclFloat32, 77, comm, gpu.raw());
            assert_eq!(own_op, ncclSuccess);
        }
        assert_eq!(r.nccl_calls("ncclAllReduce"), 2);
        let stats = r.stats(comm);
        assert_eq!((stats.forwarded_size, stats.forwarded_kind, stats.served_calls), (1, 1, 5));
        // NCCL's own work ends before its communicator goes.
        gpu.stream.synchronize().unwrap();
    }
    assert_eq!(r.async_error(comm), ncclSuccess);
    r.destroy(comm);
    assert_eq!(r.nccl_calls("ncclCommDestroy"), 1);
}

#[test]
fn one_thread_with_four_gpus_in_one_group() {
    const NAME: &str = "one_thread_with_four_gpus_in_one_group";
    let Some(r) = role() else {
        return World::new(NAME).env("FAKECUDA_DEVICES", "4").run(Way::Preload, 1);
    };
    let mut comms = [std::ptr::null_mut(); 4];
    let devices = [2, 0, 3, 1];
    unsafe {
        assert_eq!(
            (r.api.ncclCommInitAll)(comms.as_mut_ptr(), 4, devices.as_ptr()),
            ncclSuccess,
            "{}",
            r.last_error()
        )
    };
    let gpus: Vec<Gpu> = devices.iter().map(|&d| Gpu::new(d as u32)).collect();
    // Set-up in a group, a group of several calls, and groups in a group.
    for round in 0..3 {
        let buffers: Vec<_> =
            (0..4).map(|rank| gpus[rank].buffer(&values(rank, round, SMALL))).collect();
        let more: Vec<_> =
            (0..4).map(|rank| gpus[rank].buffer(&values(rank, round + 10, 33))).collect();
        unsafe {
            (r.api.ncclGroupStart)();
            for rank in 0..4 {
                (r.api.ncclGroupStart)();
                assert_eq!(r.all_reduce(comms[rank], &gpus[rank], &buffers[rank]), ncclSuccess);
                assert_eq!(r.all_reduce(comms[rank], &gpus[rank], &more[rank]), ncclSuccess);
                (r.api.ncclGroupEnd)();
            }
            assert_eq!((r.api.ncclGroupEnd)(), ncclSuccess, "{}", r.last_error());
        }
        for rank in 0..4 {
            gpus[rank].stream.synchronize().unwrap();
            assert!(buffers[rank].get(&gpus[rank]) == sum(0..4, round, SMALL), "rank {rank}");
            assert!(more[rank].get(&gpus[rank]) == sum(0..4, round + 10, 33), "rank {rank}");
        }
    }
    assert_eq!(r.stats(std::ptr::null_mut()).served_calls, 24);
    assert_eq!(r.nccl_calls("ncclAllReduce"), 0);
    for comm in comms {
        r.destroy(comm);
    }
}

/// What shares a group with an all-reduce differs from rank to rank, from the first call on.
#[test]
fn groups_whose_content_differs_by_rank() {
    const NAME: &str = "groups_whose_content_differs_by_rank";
    let Some(r) = role() else {
        for way in [Way::Preload, Way::Linking] {
            World::new(NAME).run(way, 2);
        }
        return;
    };
    let (gpu, comm) = r.join();
    for round in 0..3 {
        let buffer = gpu.buffer(&values(r.rank, round, SMALL));
        let letter = gpu.buffer(&values(5, round, 100));
        let got = gpu.buffer(&[0.0; 100]);
        unsafe {
            if r.rank == 0 {
                (r.api.ncclGroupStart)();
                assert_eq!(r.all_reduce(comm, &gpu, &buffer), ncclSuccess);
                assert_eq!(
                    (r.rest.ncclSend)(letter.at(), 100, ncclFloat32, 1, comm, gpu.raw()),
                    ncclSuccess
                );
                assert_eq!((r.api.ncclGroupEnd)(), ncclSuccess, "{}", r.last_error());
            } else if round == 1 {
                // The other way round: what is received is there before this rank comes to the all-reduce.
                assert_eq!(
                    (r.rest.ncclRecv)(got.at(), 100, ncclFloat32, 0, comm, gpu.raw()),
                    ncclSuccess
                );
                assert_eq!(r.all_reduce(comm, &gpu, &buffer), ncclSuccess);
            } else {
                assert_eq!(r.all_reduce(comm, &gpu, &buffer), ncclSuccess, "{}", r.last_error());
                assert_eq!(
                    (r.rest.ncclRecv)(got.at(), 100, ncclFloat32, 0, comm, gpu.raw()),
                    ncclSuccess
                );
            }
        }
        gpu.stream.synchronize().unwrap();
        assert!(buffer.get(&gpu) == sum(0..2, round, SMALL), "round {round}");
        assert!(r.rank == 0 || got.get(&gpu) == values(5, round, 100), "round {round}");
    }
    assert_eq!(r.stats(comm).served_calls, 3);
    r.destroy(comm);
}

/// The control: outside a group, on one stream, the same calls wait for each other. A group has to do more than put them in order.
#[test]
fn in_sequence_the_same_calls_wait_for_each_other_until_the_deadline() {
    const NAME: &str = "in_sequence_the_same_calls_wait_for_each_other_until_the_deadline";
    let Some(r) = role() else {
        return World::new(NAME).env("PEERLANE_DEADLINE", "1").run(Way::Preload, 2);
    };
    let (gpu, comm) = r.join();
    r.check(comm, &gpu, 0, SMALL);
    let buffer = gpu.buffer(&values(r.rank, 1, SMALL));
    let letter = gpu.buffer(&values(5, 1, 100));
    let (at, stream) = (letter.at(), gpu.raw());
    unsafe {
        if r.rank == 0 {
            assert_eq!(r.all_reduce(comm, &gpu, &buffer), ncclSuccess);
            assert_eq!((r.rest.ncclSend)(at, 100, ncclFloat32, 1, comm, stream), ncclSuccess);
        } else {
            assert_eq!((r.rest.ncclRecv)(at, 100, ncclFloat32, 0, comm, stream), ncclSuccess);
            let code = r.all_reduce(comm, &gpu, &buffer);
            assert!(matches!(code, ncclSuccess | ncclRemoteError));
        }
    }
    gpu.stream.synchronize().unwrap();
    // Rank 1 finds rank 0's data when its turn comes at last, and hears of the deadline from rank 0's process.
    let start = std::time::Instant::now();
    while r.async_error(comm) == ncclSuccess {
        assert!(start.elapsed().as_secs() < 20, "nobody noticed");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(r.async_error(comm), ncclRemoteError);
    assert!(r.last_error().contains("deadline"), "{}", r.last_error());
    unsafe { assert_eq!((r.api.ncclCommAbort)(comm), ncclSuccess) };
}

#[test]
fn calls_on_two_streams_in_a_group_are_as_if_posted_on_both() {
    const NAME: &str = "calls_on_two_streams_in_a_group_are_as_if_posted_on_both";
    let Some(r) = role() else { return World::new(NAME).run(Way::Full, 2) };
    let (gpu, other) = (Gpu::new(0), Gpu::new(0));
    let comm = r.comm("id");
    for round in 0..4 {
        let (a, b) = (
            gpu.buffer(&values(r.rank, round, SMALL)),
            other.buffer(&values(r.rank, round + 9, SMALL)),
        );
        unsafe { (r.api.ncclGroupStart)() };
        assert_eq!(r.all_reduce(comm, &gpu, &a), ncclSuccess);
        assert_eq!(r.all_reduce(comm, &other, &b), ncclSuccess);
        unsafe { assert_eq!((r.api.ncclGroupEnd)(), ncclSuccess, "{}", r.last_error()) };
        // The second is complete on the first's stream as well.
        gpu.stream.synchronize().unwrap();
        assert!(
            b.get(&gpu) == sum(0..2, round + 9, SMALL) && a.get(&gpu) == sum(0..2, round, SMALL)
        );
    }
    r.destroy(comm);
}

#[test]
fn split_with_ranks_of_no_color_and_destroyed_in_any_order() {
    const NAME: &str = "split_with_ranks_of_no_color_and_destroyed_in_any_order";
    let Some(r) = role() else { return World::new(NAME).run(Way::Preload, 4) };
    let gpu = Gpu::new(0);
    let parent = r.comm("id");
    // Ranks 0, 2 and 3 in reverse, 1 in none.
    let (color, key) =
        if r.rank == 1 { (NCCL_SPLIT_NOCOLOR, 0) } else { (3, 10 - r.rank as c_int) };
    let mut child = std::ptr::null_mut();
    unsafe {
        assert_eq!(
            (r.api.ncclCommSplit)(parent, color, key, &mut child, std::ptr::null_mut()),
            ncclSuccess
        );
    }
    assert_eq!(child.is_null(), r.rank == 1);
    if r.rank != 1 {
        let (mut n, mut rank) = (0, 0);
        unsafe {
            (r.api.ncclCommCount)(child, &mut n);
            (r.api.ncclCommUserRank)(child, &mut rank);
        }
        assert_eq!((n, rank), (3, [2, -1, 1, 0][r.rank]));
        let buffer = gpu.buffer(&values(r.rank, 1, SMALL));
        assert_eq!(r.all_reduce(child, &gpu, &buffer), ncclSuccess, "{}", r.last_error());
        gpu.stream.synchronize().unwrap();
        assert!(buffer.get(&gpu) == sum([0, 2, 3].into_iter(), 1, SMALL));
        assert_eq!(r.stats(child).served_calls, 1);
    }
    r.check(parent, &gpu, 2, SMALL);
    if r.rank == 2 {
        r.destroy(parent);
    }
    if !child.is_null() {
        r.destroy(child);
    }
    if r.rank != 2 {
        r.destroy(parent);
    }
}

#[test]
fn captured_calls_are_served_once_set_up_and_are_nccls_before() {
    const NAME: &str = "captured_calls_are_served_once_set_up_and_are_nccls_before";
    let Some(r) = role() else { return World::new(NAME).run(Way::Preload, 3) };
    let gpu = Gpu::new(0);
    let (early, comm) = (r.comm("early"), r.comm("id"));
    let buffer = gpu.buffer(&values(r.rank, 0, SMALL));
    // Nothing may be set up in a capture, so this one is NCCL's, and stays so.
    let graph = gpu.capture(|| assert_eq!(r.all_reduce(early, &gpu, &buffer), ncclSuccess));
    assert_eq!((r.nccl_calls("ncclAllReduce"), r.stats(early).forwarded_unready), (1, 1));
    gpu.replay(&graph);
    assert!(buffer.get(&gpu) == sum(0..3, 0, SMALL));
    // An eager call sets it up for later ones.
    r.check(early, &gpu, 1, SMALL);
    assert_eq!(r.stats(early).served_calls, 1);

    r.check(comm, &gpu, 2, 1);
    let (other, more) = (Gpu::new(0), gpu.buffer(&values(r.rank, 4, 50)));
    let letter = gpu.buffer(&values(r.rank, 3, 10));
    let all = gpu.buffer(&[0.0; 30]);
    let graph = gpu.capture(|| {
        assert_eq!(r.all_reduce(comm, &gpu, &buffer), ncclSuccess, "{}", r.last_error());
        // In a group beside a call of NCCL's: fork and join become part of the graph.
        unsafe { (r.api.ncclGroupStart)() };
        assert_eq!(r.all_reduce(comm, &gpu, &more), ncclSuccess);
        unsafe {
            let code =
                (r.api.ncclAllGather)(letter.at(), all.at(), 10, ncclFloat32, comm, gpu.raw());
            assert_eq!(code, ncclSuccess);
            assert_eq!((r.api.ncclGroupEnd)(), ncclSuccess, "{}", r.last_error());
        }
    });
    for call in 5..9 {
        buffer.set(&gpu, &values(r.rank, call, SMALL));
        more.set(&gpu, &values(r.rank, call + 20, 50));
        gpu.replay(&graph);
        assert!(buffer.get(&gpu) == sum(0..3, call, SMALL), "replay {call}");
        assert!(more.get(&gpu) == sum(0..3, call + 20, 50), "replay {call}");
        let gathered: Vec<f32> = (0..3).flat_map(|rank| values(rank, 3, 10)).collect();
        assert!(all.get(&gpu) == gathered);
    }
    assert_eq!(r.nccl_calls("ncclAllReduce"), 1);
    drop(other);
    drop(graph);
    r.destroy(comm);
    r.destroy(early);
}

/// NCCL orders the calls of a communicator in a capture whatever streams they are on; two at once would be an error here.
#[test]
fn calls_on_two_streams_of_a_capture_run_one_after_the_other() {
    const NAME: &str = "calls_on_two_streams_of_a_capture_run_one_after_the_other";
    let Some(r) = role() else { return World::new(NAME).run(Way::Preload, 2) };
    let (gpu, other) = (Gpu::new(0), Gpu::new(0));
    let comm = r.comm("id");
    r.check(comm, &gpu, 0, 1);
    let (a, b) = (gpu.buffer(&values(r.rank, 1, 5000)), gpu.buffer(&values(r.rank, 2, 5000)));
    let (fork, join) = (gpu.event(), gpu.event());
    let graph = gpu.capture(|| {
        let entered = gpu.context.enter().unwrap();
        fork.record(&entered, gpu.stream.as_ref()).unwrap();
        other.stream.as_ref().wait(&entered, &fork).unwrap();
        assert_eq!(r.all_reduce(comm, &gpu, &a), ncclSuccess, "{}", r.last_error());
        assert_eq!(r.all_reduce(comm, &other, &b), ncclSuccess, "{}", r.last_error());
        join.record(&entered, other.stream.as_ref()).unwrap();
        gpu.stream.as_ref().wait(&entered, &join).unwrap();
    });
    for call in 3..20 {
        a.set(&gpu, &values(r.rank, call, 5000));
        b.set(&gpu, &values(r.rank, call + 50, 5000));
        gpu.replay(&graph);
        assert!(a.get(&gpu) == sum(0..2, call, 5000) && b.get(&gpu) == sum(0..2, call + 50, 5000));
    }
    assert_eq!(r.async_error(comm), ncclSuccess);
    drop(graph);
    r.destroy(comm);
}

/// A thread that makes all ranks of two communicators in one group, from two ids.
#[test]
fn communicators_created_by_one_thread_in_one_group() {
    const NAME: &str = "communicators_created_by_one_thread_in_one_group";
    let Some(r) = role() else {
        return World::new(NAME).env("FAKECUDA_DEVICES", "3").run(Way::Linking, 1);
    };
    let gpus: Vec<Gpu> = (0..3).map(Gpu::new).collect();
    let mut comms = [[std::ptr::null_mut(); 3]; 2];
    let mut ids = [ncclUniqueId { internal: [0; 128] }; 2];
    unsafe {
        ids.iter_mut().for_each(|id| assert_eq!((r.api.ncclGetUniqueId)(id), ncclSuccess));
        (r.api.ncclGroupStart)();
        for (id, comms) in ids.iter().zip(&mut comms) {
            for rank in 0..3 {
                let entered = gpus[rank].context.enter().unwrap();
                let code = (r.api.ncclCommInitRank)(&mut comms[rank], 3, *id, rank as c_int);
                assert_eq!(code, ncclSuccess);
                drop(entered);
            }
        }
        assert_eq!((r.api.ncclGroupEnd)(), ncclSuccess, "{}", r.last_error());
    }
    let buffers: Vec<Vec<_>> = (0..2)
        .map(|c| (0..3).map(|rank| gpus[rank].buffer(&values(rank, c, SMALL))).collect())
        .collect();
    unsafe { (r.api.ncclGroupStart)() };
    for (comms, buffers) in comms.iter().zip(&buffers) {
        for rank in 0..3 {
            assert_eq!(r.all_reduce(comms[rank], &gpus[rank], &buffers[rank]), ncclSuccess);
        }
    }
    unsafe { assert_eq!((r.api.ncclGroupEnd)(), ncclSuccess, "{}", r.last_error()) };
    for (c, buffers) in buffers.iter().enumerate() {
        for (gpu, buffer) in gpus.iter().zip(buffers) {
            gpu.stream.synchronize().unwrap();
            assert!(buffer.get(gpu) == sum(0..3, c, SMALL));
        }
    }
    assert_eq!(r.stats(std::ptr::null_mut()).served_calls, 6);
    // A simulated end launches nothing, and leaves no group open.
    unsafe {
        (r.api.ncclGroupStart)();
        assert_eq!(r.all_reduce(comms[0][0], &gpus[0], &buffers[0][0]), ncclSuccess);
        (r.api.ncclGroupSimulateEnd)(std::ptr::null_mut());
    }
    assert_eq!(r.stats(std::ptr::null_mut()).served_calls, 6);
    comms.iter().flatten().for_each(|&comm| r.destroy(comm));
}

#[test]
fn threads_of_a_process_are_ranks_of_their_own() {
    const NAME: &str = "threads_of_a_process_are_ranks_of_their_own";
    let Some(r) = role() else {
        return World::new(NAME).env("FAKECUDA_DEVICES", "4").run(Way::Full, 1);
    };
    let mut id = ncclUniqueId { internal: [0; 128] };
    unsafe { assert_eq!((r.api.ncclGetUniqueId)(&mut id), ncclSuccess) };
    std::thread::scope(|scope| {
        for rank in 0..4usize {
            let r = &r;
            scope.spawn(move || {
                let gpu = Gpu::new(rank as u32);
                let entered = gpu.context.enter().unwrap();
                let mut comm = std::ptr::null_mut();
                let code = unsafe { (r.api.ncclCommInitRank)(&mut comm, 4, id, rank as c_int) };
                assert_eq!(code, ncclSuccess, "{}", r.last_error());
                for call in 0..20 {
                    let buffer = gpu.buffer(&values(rank, call, SMALL));
                    assert_eq!(
                        r.all_reduce(comm, &gpu, &buffer),
                        ncclSuccess,
                        "{}",
                        r.last_error()
                    );
                    gpu.stream.synchronize().unwrap();
                    assert!(buffer.get(&gpu) == sum(0..4, call, SMALL));
                }
                r.destroy(comm);
                drop(entered);
            });
        }
    });
    assert_eq!(r.stats(std::ptr::null_mut()).served_calls, 80);
    assert_eq!(r.nccl_calls("ncclAllReduce"), 0);
}

/// The stand-in gives the next communicator the address of the last: nothing of the old one is left there.
#[test]
fn an_address_that_comes_back_is_a_new_communicator() {
    const NAME: &str = "an_address_that_comes_back_is_a_new_communicator";
    let Some(r) = role() else { return World::new(NAME).run(Way::Preload, 2) };
    let gpu = Gpu::new(0);
    let first = r.comm("a");
    r.check(first, &gpu, 0, SMALL);
    r.destroy(first);
    let second = r.comm("b");
    assert_eq!(first, second, "the stand-in reuses addresses");
    assert_eq!(r.stats(second).served_calls, 0);
    r.check(second, &gpu, 1, SMALL);
    assert_eq!(r.stats(second).served_calls, 1);
    // Destroyed past us, as through NCCL's second name: what we kept for it goes when the address comes back.
    unsafe { (r.api.ncclCommAbort)(second) };
    let third = r.comm("c");
    assert_eq!(second, third);
    r.check(third, &gpu, 2, SMALL);
    r.destroy(third);
}
