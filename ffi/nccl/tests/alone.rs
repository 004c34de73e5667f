//! The full library without a real NCCL: all-reduce, broadcast, all-gather, reduce-scatter, InitAll, Split, groups.
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
use std::ffi::{c_int, c_void};
use support::{role, sum, values, Gpu, Rank, Way, World};

const NONE: cudaStream_t = std::ptr::null_mut();

fn at(values: &mut [f32]) -> *mut c_void {
    values.as_mut_ptr().cast()
}

/// Every collective once, among the ranks of `comm`; `me` and `n` in it.
fn collectives(r: &Rank, comm: ncclComm_t, me: usize, ranks: &[usize]) {
    let n = ranks.len();
    let of = |call, count| sum(ranks.iter().copied(), call, count);
    // A part of odd size, one of several chunks, nothing.
    for (call, count) in [(1, 1001), (2, 70_000), (3, 0)] {
        let mine = values(ranks[me], call, count);
        let mut buffer = mine.clone();
        unsafe {
            let to = at(&mut buffer);
            assert_eq!(
                (r.api.ncclAllReduce)(to, to, count, ncclFloat32, ncclSum, comm, NONE),
                ncclSuccess,
                "{}",
                r.last_error()
            );
            assert!(buffer == of(call, count));

            let mut all = vec![-1.0; n * count];
            assert_eq!(
                (r.api.ncclAllGather)(
                    mine.as_ptr().cast(),
                    at(&mut all),
                    count,
                    ncclFloat32,
                    comm,
                    NONE
                ),
                ncclSuccess
            );
            let expected: Vec<f32> =
                ranks.iter().flat_map(|&rank| values(rank, call, count)).collect();
            assert!(all == expected);

            let root = (n - 1) as c_int;
            let mut got = vec![f32::NAN; count];
            assert_eq!(
                (r.api.ncclBroadcast)(
                    mine.as_ptr().cast(),
                    at(&mut got),
                    count,
                    ncclFloat32,
                    root,
                    comm,
                    NONE
                ),
                ncclSuccess
            );
            assert!(got == values(ranks[n - 1], call, count));
            let mut in_place = mine.clone();
            assert_eq!(
                (r.api.ncclBcast)(at(&mut in_place), count, ncclFloat32, 0, comm, NONE),
                ncclSuccess
            );
            assert!(in_place == values(ranks[0], call, count));

            let parts = values(ranks[me], call, n * count);
            let mut part = vec![0.0; count];
            assert_eq!(
                (r.api.ncclReduceScatter)(
                    parts.as_ptr().cast(),
                    at(&mut part),
                    count,
                    ncclFloat32,
                    ncclSum,
                    comm,
                    NONE
                ),
                ncclSuccess
            );
            assert!(part == of(call, n * count)[me * count..][..count]);
        }
    }
    // What bits travel is no sum: a NaN with a payload, and -0.
    let odd = [f32::from_bits(0x7fc1_2345), -0.0, f32::from_bits(0xffff_ffff)];
    let mut buffer = if me == 0 { odd } else { [1.0; 3] };
    unsafe {
        assert_eq!((r.api.ncclBcast)(at(&mut buffer), 3, ncclFloat32, 0, comm, NONE), ncclSuccess)
    };
    assert_eq!(buffer.map(f32::to_bits), odd.map(f32::to_bits));
}

#[test]
fn processes_of_the_cpu() {
    const NAME: &str = "processes_of_the_cpu";
    let Some(r) = role() else {
        let world = World::new(NAME)
            .env("PEERLANE_DEVICE", "cpu")
            .env("PEERLANE_NCCL_LIB", "/nonexistent/libnccl.so.2");
        return world.run(Way::Alone, 4);
    };
    let comm = r.comm("id");
    let (mut n, mut rank, mut device, mut version) = (0, 0, -1, 0);
    unsafe {
        (r.api.ncclCommCount)(comm, &mut n);
        (r.api.ncclCommUserRank)(comm, &mut rank);
        (r.api.ncclCommCuDevice)(comm, &mut device);
        (r.api.ncclGetVersion)(&mut version);
    }
    assert_eq!((n, rank, device, version), (4, r.rank as c_int, 0, 23203));
    collectives(&r, comm, r.rank, &[0, 1, 2, 3]);

    // Odd and even, in reverse; rank 3 in none.
    let (color, key) = if r.rank == 3 {
        (NCCL_SPLIT_NOCOLOR, 0)
    } else {
        (r.rank as c_int % 2, -(r.rank as c_int))
    };
    let mut child = std::ptr::null_mut();
    unsafe {
        let code = (r.api.ncclCommSplit)(comm, color, key, &mut child, std::ptr::null_mut());
        assert_eq!(code, ncclSuccess, "{}", r.last_error());
    }
    match r.rank {
        0 => collectives(&r, child, 1, &[2, 0]),
        2 => collectives(&r, child, 0, &[2, 0]),
        1 => collectives(&r, child, 0, &[1]),
        _ => assert!(child.is_null()),
    }

    // What is not served says so, in NCCL's way.
    let mut buffer = [0.0f32; 4];
    unsafe {
        let code = (r.rest.ncclSend)(at(&mut buffer), 4, ncclFloat32, 0, comm, NONE);
        assert_eq!(code, ncclInvalidUsage);
        assert!(
            r.last_error().contains("ncclSend is not served without a real NCCL"),
            "{}",
            r.last_error()
        );
        let code = (r.api.ncclAllReduce)(
            at(&mut buffer),
            at(&mut buffer),
            4,
            ncclFloat8e4m3,
            ncclSum,
            comm,
            NONE,
        );
        assert_eq!(code, ncclInvalidArgument);
        assert_eq!((r.api.ncclGroupEnd)(), ncclInvalidUsage);
    }
    assert_eq!(r.async_error(comm), ncclSuccess);
    if !child.is_null() {
        r.destroy(child);
    }
    r.destroy(comm);
    // A handle that is gone is no crash.
    unsafe { assert_eq!((r.api.ncclCommDestroy)(comm), ncclInvalidArgument) };
}

#[test]
fn one_thread_drives_all_ranks_in_groups() {
    const NAME: &str = "one_thread_drives_all_ranks_in_groups";
    let Some(r) = role() else {
        let world = World::new(NAME)
            .env("PEERLANE_DEVICE", "cpu")
            .env("PEERLANE_NCCL_LIB", "/nonexistent/libnccl.so.2");
        return world.run(Way::Alone, 1);
    };
    let mut comms = [std::ptr::null_mut(); 3];
    unsafe {
        assert_eq!(
            (r.api.ncclCommInitAll)(comms.as_mut_ptr(), 3, std::ptr::null()),
            ncclSuccess,
            "{}",
            r.last_error()
        )
    };
    let mut buffers: Vec<Vec<f32>> = (0..3).map(|rank| values(rank, 4, 500)).collect();
    let mut gathered = vec![vec![0.0; 30]; 3];
    let parts: Vec<Vec<f32>> = (0..3).map(|rank| values(rank, 6, 300)).collect();
    let mut scattered = vec![vec![0.0; 100]; 3];
    unsafe {
        (r.api.ncclGroupStart)();
        for rank in 0..3 {
            let to = at(&mut buffers[rank]);
            assert_eq!(
                (r.api.ncclAllReduce)(to, to, 500, ncclFloat32, ncclSum, comms[rank], NONE),
                ncclSuccess
            );
            let mine = values(rank, 5, 10);
            gathered[rank][rank * 10..][..10].copy_from_slice(&mine);
            let all = at(&mut gathered[rank]);
            // In place, as NCCL has it.
            assert_eq!(
                (r.api.ncclAllGather)(
                    all.byte_add(rank * 40),
                    all,
                    10,
                    ncclFloat32,
                    comms[rank],
                    NONE
                ),
                ncclSuccess
            );
            let code = (r.api.ncclReduceScatter)(
                parts[rank].as_ptr().cast(),
                at(&mut scattered[rank]),
                100,
                ncclFloat32,
                ncclSum,
                comms[rank],
                NONE,
            );
            assert_eq!(code, ncclSuccess);
        }
        assert_eq!((r.api.ncclGroupEnd)(), ncclSuccess, "{}", r.last_error());
    }
    for rank in 0..3 {
        assert!(buffers[rank] == sum(0..3, 4, 500));
        let expected: Vec<f32> = (0..3).flat_map(|rank| values(rank, 5, 10)).collect();
        assert!(gathered[rank] == expected);
        assert!(scattered[rank] == sum(0..3, 6, 300)[rank * 100..][..100]);
    }
    // Communicators created in a group, from one id.
    let mut id = ncclUniqueId { internal: [0; 128] };
    let mut more = [std::ptr::null_mut(); 2];
    unsafe {
        assert_eq!((r.api.ncclGetUniqueId)(&mut id), ncclSuccess);
        (r.api.ncclGroupStart)();
        for (rank, comm) in more.iter_mut().enumerate() {
            assert_eq!((r.api.ncclCommInitRank)(comm, 2, id, rank as c_int), ncclSuccess);
        }
        assert_eq!((r.api.ncclGroupEnd)(), ncclSuccess, "{}", r.last_error());
    }
    for comm in comms.into_iter().chain(more) {
        r.destroy(comm);
    }
}

#[test]
fn ranks_on_gpus() {
    const NAME: &str = "ranks_on_gpus";
    let Some(r) = role() else {
        return World::new(NAME)
            .env("PEERLANE_NCCL_LIB", "/nonexistent/libnccl.so.2")
            .run(Way::Alone, 3);
    };
    let gpu = Gpu::new(0);
    let comm = r.comm("id");
    r.check(comm, &gpu, 0, 1001);
    // Parts that are no whole packs; a broadcast in one piece, and one in parts with a rest.
    let (mine, all) = (gpu.buffer(&values(r.rank, 1, 99)), gpu.buffer(&[0.0; 297]));
    let part = gpu.buffer(&[0.0; 33]);
    let (small, large) = (gpu.buffer(&[0.0; 99]), gpu.buffer(&vec![0.0; 20_003]));
    let graph = gpu.capture(|| unsafe {
        assert_eq!(
            (r.api.ncclAllGather)(mine.at(), all.at(), 99, ncclFloat32, comm, gpu.raw()),
            ncclSuccess
        );
        assert_eq!(
            (r.api.ncclReduceScatter)(
                mine.at(),
                part.at(),
                33,
                ncclFloat32,
                ncclSum,
                comm,
                gpu.raw()
            ),
            ncclSuccess
        );
        let stream = gpu.raw();
        for (buffer, count, root) in [(&small, 99, 2), (&large, 20_003, 1)] {
            let from = if count == 99 { mine.at() } else { buffer.at() };
            let to = buffer.at();
            let code = (r.api.ncclBroadcast)(from, to, count, ncclFloat32, root, comm, stream);
            assert_eq!(code, ncclSuccess, "{}", r.last_error());
        }
    });
    for call in 2..5 {
        mine.set(&gpu, &values(r.rank, call, 99));
        large.set(&gpu, &values(r.rank, call, 20_003));
        gpu.replay(&graph);
        let expected: Vec<f32> = (0..3).flat_map(|rank| values(rank, call, 99)).collect();
        assert!(all.get(&gpu) == expected);
        assert!(part.get(&gpu) == sum(0..3, call, 99)[r.rank * 33..][..33]);
        assert!(small.get(&gpu) == values(2, call, 99));
        assert!(large.get(&gpu) == values(1, call, 20_003));
    }
    // Eager calls on another stream wait for nothing of the graph's.
    let other = Gpu::new(0);
    let (from, to) = (other.buffer(&values(r.rank, 7, 20_003)), other.buffer(&vec![0.0; 60_009]));
    unsafe {
        let code =
            (r.api.ncclAllGather)(from.at(), to.at(), 20_003, ncclFloat32, comm, other.raw());
        assert_eq!(code, ncclSuccess, "{}", r.last_error());
    }
    other.stream.synchronize().unwrap();
    let expected: Vec<f32> = (0..3).flat_map(|rank| values(rank, 7, 20_003)).collect();
    assert!(to.get(&other) == expected);
    let mut child = std::ptr::null_mut();
    unsafe {
        assert_eq!(
            (r.api.ncclCommSplit)(comm, 0, -(r.rank as c_int), &mut child, std::ptr::null_mut()),
            ncclSuccess,
            "{}",
            r.last_error()
        );
    }
    let buffer = gpu.buffer(&values(r.rank, 9, 64));
    assert_eq!(r.all_reduce(child, &gpu, &buffer), ncclSuccess);
    gpu.stream.synchronize().unwrap();
    assert!(buffer.get(&gpu) == sum(0..3, 9, 64));
    drop(graph);
    r.destroy(child);
    r.destroy(comm);
}
