//! The other ways in which communicators come and go: several ids, growing, shrinking, revoking. Each is shown beside the
//! same call made past this library, which leaves NCCL to serve.
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
use std::time::Duration;
use support::{role, sum, values, Buffer, Gpu, Rank, Way, World, SMALL};

const NULL: ncclComm_t = std::ptr::null_mut();

/// One call among `ranks` of the world, of which this one is part: right, and served or NCCL's.
fn right(r: &Rank, comm: ncclComm_t, gpu: &Gpu, call: usize, ranks: &[usize], served: bool) {
    let before = (r.stats(NULL).served_calls, r.nccl_calls("ncclAllReduce"));
    let buffer = gpu.buffer(&values(r.rank, call, SMALL));
    assert_eq!(r.all_reduce(comm, gpu, &buffer), ncclSuccess, "{}", r.last_error());
    gpu.stream.synchronize().unwrap();
    assert!(buffer.get(gpu) == sum(ranks.iter().copied(), call, SMALL), "call {call} is wrong");
    let after = (r.stats(NULL).served_calls, r.nccl_calls("ncclAllReduce"));
    let expected = (before.0 + u64::from(served), before.1 + u64::from(!served));
    assert_eq!(after, expected, "(peerlane's calls, NCCL's) after call {call}");
}

fn place(r: &Rank, comm: ncclComm_t) -> (c_int, c_int) {
    let (mut n, mut rank) = (0, 0);
    unsafe {
        assert_eq!((r.api.ncclCommCount)(comm, &mut n), ncclSuccess);
        assert_eq!((r.api.ncclCommUserRank)(comm, &mut rank), ncclSuccess);
    }
    (n, rank)
}

/// A call that `missing` never makes: it waits.
fn wait_for_ever(r: &Rank, comm: ncclComm_t, gpu: &Gpu, buffer: &Buffer) {
    assert_eq!(r.all_reduce(comm, gpu, buffer), ncclSuccess, "{}", r.last_error());
    std::thread::sleep(Duration::from_millis(100));
    let entered = gpu.context.enter().unwrap();
    assert!(!gpu.stream.as_ref().is_idle(&entered).unwrap(), "nobody else has made the call");
}

fn ended_without_a_result(gpu: &Gpu, buffer: &Buffer) {
    gpu.stream.synchronize().unwrap();
    assert!(buffer.get(gpu).iter().all(|v| v.is_nan()), "no sum, and not what was there before");
}

type Scalable = unsafe extern "C" fn(
    *mut ncclComm_t,
    c_int,
    c_int,
    c_int,
    *mut ncclUniqueId,
    *mut ncclConfig_t,
) -> ncclResult_t;
type Shrink = unsafe extern "C" fn(
    ncclComm_t,
    *mut c_int,
    c_int,
    *mut ncclComm_t,
    *mut ncclConfig_t,
    c_int,
) -> ncclResult_t;
type Grow = unsafe extern "C" fn(
    ncclComm_t,
    c_int,
    *const ncclUniqueId,
    c_int,
    *mut ncclComm_t,
    *mut ncclConfig_t,
) -> ncclResult_t;

fn scalable(r: &Rank, create: Scalable, names: [&str; 2]) -> ncclComm_t {
    let (mut ids, mut comm) = (names.map(|name| r.id(name)), NULL);
    let (n, rank) = (r.n as c_int, r.rank as c_int);
    let code = unsafe { create(&mut comm, n, rank, 2, ids.as_mut_ptr(), std::ptr::null_mut()) };
    assert_eq!(code, ncclSuccess, "{}", r.last_error());
    comm
}

#[test]
fn communicators_from_several_ids_are_served() {
    const NAME: &str = "communicators_from_several_ids_are_served";
    let Some(r) = role() else {
        for way in [Way::Preload, Way::Linking] {
            World::new(NAME).run(way, 3);
        }
        return;
    };
    let gpu = Gpu::new(0);
    let comm = scalable(&r, r.api.ncclCommInitRankScalable, ["a", "b"]);
    right(&r, comm, &gpu, 0, &[0, 1, 2], true);
    // In a group, at whose end it is there.
    unsafe { (r.api.ncclGroupStart)() };
    let second = scalable(&r, r.api.ncclCommInitRankScalable, ["c", "d"]);
    unsafe { assert_eq!((r.api.ncclGroupEnd)(), ncclSuccess, "{}", r.last_error()) };
    right(&r, second, &gpu, 1, &[0, 1, 2], true);
    right(&r, comm, &gpu, 2, &[0, 1, 2], true);
    assert_eq!((r.stats(comm).served_calls, r.stats(second).served_calls), (2, 1));
    // The control: NCCL's own function, past this library.
    let past = scalable(&r, r.past_us("ncclCommInitRankScalable"), ["e", "f"]);
    right(&r, past, &gpu, 3, &[0, 1, 2], false);
    [past, second, comm].into_iter().for_each(|comm| r.destroy(comm));
}

/// `config` of a communicator whose calls return before they are done.
#[test]
fn a_nonblocking_communicator_at_a_known_address_inherits_nothing() {
    const NAME: &str = "a_nonblocking_communicator_at_a_known_address_inherits_nothing";
    let Some(r) = role() else { return World::new(NAME).run(Way::Preload, 2) };
    let (gpu, old) = r.join();
    right(&r, old, &gpu, 0, &[0, 1], true);
    // Destroyed past us; its entry stays behind.
    type Destroy = unsafe extern "C" fn(ncclComm_t) -> ncclResult_t;
    let destroy: Destroy = r.past_us("ncclCommDestroy");
    unsafe { assert_eq!(destroy(old), ncclSuccess) };
    assert_eq!(r.stats(old).served_calls, 1, "the control: it is still there");
    let (mut ids, mut config, mut comm) = ([r.id("a"), r.id("b")], r.config(), NULL);
    config.blocking = 0;
    let code = unsafe {
        let (n, rank) = (r.n as c_int, r.rank as c_int);
        (r.api.ncclCommInitRankScalable)(&mut comm, n, rank, 2, ids.as_mut_ptr(), &mut config)
    };
    assert_eq!((code, comm), (ncclInProgress, old), "the stand-in reuses addresses");
    right(&r, comm, &gpu, 1, &[0, 1], false);
    r.destroy(comm);
}

fn shrink(r: &Rank, shrink: Shrink, parent: ncclComm_t, flags: u32) -> ncclComm_t {
    let (mut excluded, mut child) = ([1 as c_int], NULL);
    let config = std::ptr::null_mut();
    let code =
        unsafe { shrink(parent, excluded.as_mut_ptr(), 1, &mut child, config, flags as c_int) };
    assert_eq!(code, ncclSuccess, "{}", r.last_error());
    assert!(child != parent && !child.is_null());
    child
}

#[test]
fn a_shrunk_communicator_is_served_and_its_parent_goes_on() {
    const NAME: &str = "a_shrunk_communicator_is_served_and_its_parent_goes_on";
    let Some(r) = role() else {
        for way in [Way::Preload, Way::Full] {
            World::new(NAME).run(way, 4);
        }
        return;
    };
    let (gpu, parent) = r.join();
    let (all, left) = ([0, 1, 2, 3], [0, 2, 3]);
    right(&r, parent, &gpu, 0, &all, true);
    if r.rank != 1 {
        let child = shrink(&r, r.api.ncclCommShrink, parent, 0);
        assert_eq!(place(&r, child), (3, [0, -1, 1, 2][r.rank]));
        right(&r, child, &gpu, 1, &left, true);
        assert_eq!((r.stats(child).served_calls, r.stats(parent).served_calls), (1, 1));
        let past = shrink(&r, r.past_us("ncclCommShrink"), parent, 0);
        right(&r, past, &gpu, 2, &left, false);
        r.destroy(past);
        r.destroy(child);
        // The address comes back with the next one, and nothing of the old.
        let again = shrink(&r, r.api.ncclCommShrink, parent, 0);
        assert!(again == child || again == past, "the stand-in reuses addresses");
        assert_eq!(r.stats(again).served_calls, 0);
        right(&r, again, &gpu, 3, &left, true);
        r.destroy(again);
    }
    right(&r, parent, &gpu, 4, &all, true);
    assert_eq!(r.async_error(parent), ncclSuccess);
    r.destroy(parent);
}

/// Rank 1 never comes. Without the flag the parent's call goes on waiting, with it it ends.
#[test]
fn shrinking_with_abort_ends_what_the_parent_waits_for() {
    const NAME: &str = "shrinking_with_abort_ends_what_the_parent_waits_for";
    let Some(r) = role() else { return World::new(NAME).run(Way::Preload, 4) };
    let (gpu, parent) = r.join();
    right(&r, parent, &gpu, 0, &[0, 1, 2, 3], true);
    if r.rank == 1 {
        for rank in [0, 2, 3] {
            r.wait_for(&format!("done-{rank}"));
        }
        unsafe { assert_eq!((r.api.ncclCommAbort)(parent), ncclSuccess) };
        return;
    }
    let buffer = gpu.buffer(&values(r.rank, 1, SMALL));
    wait_for_ever(&r, parent, &gpu, &buffer);
    // The control. (The child is not used yet: its set-up allocates, which may wait for all of the GPU.)
    let child = shrink(&r, r.api.ncclCommShrink, parent, 0);
    let entered = gpu.context.enter().unwrap();
    assert!(!gpu.stream.as_ref().is_idle(&entered).unwrap(), "it still waits");
    assert_eq!(r.async_error(parent), ncclSuccess);
    drop(entered);
    r.tell(&format!("seen-{}", r.rank));
    for rank in [0, 2, 3] {
        r.wait_for(&format!("seen-{rank}"));
    }
    let second = shrink(&r, r.api.ncclCommShrink, parent, NCCL_SHRINK_ABORT);
    ended_without_a_result(&gpu, &buffer);
    assert_eq!(r.async_error(parent), ncclRemoteError, "the parent keeps the error");
    assert_eq!(r.all_reduce(parent, &gpu, &buffer), ncclRemoteError, "and falls back to nobody");
    right(&r, second, &gpu, 2, &[0, 2, 3], true);
    right(&r, child, &gpu, 3, &[0, 2, 3], true);
    r.tell(&format!("done-{}", r.rank));
    [second, child, parent].into_iter().for_each(|comm| r.destroy(comm));
}

/// Ranks 0 and 1 have a communicator, rank 2 joins them.
fn grow(r: &Rank, grow: Grow, parent: ncclComm_t, name: &str) -> ncclComm_t {
    let mut child = NULL;
    let id = match r.rank {
        0 => {
            let mut id = ncclUniqueId { internal: [0; 128] };
            unsafe { assert_eq!((r.rest.ncclCommGetUniqueId)(parent, &mut id), ncclSuccess) };
            r.publish_id(name, &id);
            Some(id)
        }
        1 => None,
        _ => Some(r.id(name)),
    };
    let id = id.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let rank = if r.rank == 2 { 2 } else { -1 };
    let code = unsafe { grow(parent, 3, id, rank, &mut child, std::ptr::null_mut()) };
    assert_eq!(code, ncclSuccess, "{}", r.last_error());
    child
}

#[test]
fn a_grown_communicator_is_served_for_old_ranks_and_new() {
    const NAME: &str = "a_grown_communicator_is_served_for_old_ranks_and_new";
    let Some(r) = role() else {
        for way in [Way::Preload, Way::Linking] {
            World::new(NAME).run(way, 3);
        }
        return;
    };
    let gpu = Gpu::new(0);
    let mut parent = NULL;
    if r.rank < 2 {
        let id = r.id("id");
        unsafe {
            let code = (r.api.ncclCommInitRank)(&mut parent, 2, id, r.rank as c_int);
            assert_eq!(code, ncclSuccess, "{}", r.last_error());
        }
        right(&r, parent, &gpu, 0, &[0, 1], true);
    }
    let child = grow(&r, r.api.ncclCommGrow, parent, "grown");
    assert_eq!(place(&r, child), (3, r.rank as c_int));
    right(&r, child, &gpu, 1, &[0, 1, 2], true);
    // Inside a group, where the handle is there before the communicator is.
    unsafe { (r.api.ncclGroupStart)() };
    let second = grow(&r, r.api.ncclCommGrow, parent, "again");
    assert!(!second.is_null() && second != child);
    unsafe { assert_eq!((r.api.ncclGroupEnd)(), ncclSuccess, "{}", r.last_error()) };
    right(&r, second, &gpu, 2, &[0, 1, 2], true);
    let past = grow(&r, r.past_us("ncclCommGrow"), parent, "past");
    right(&r, past, &gpu, 3, &[0, 1, 2], false);
    if r.rank < 2 {
        right(&r, parent, &gpu, 4, &[0, 1], true);
        assert_eq!((r.stats(parent).served_calls, r.stats(child).served_calls), (2, 1));
        r.destroy(parent);
    }
    // The parent's end is not its children's.
    right(&r, child, &gpu, 5, &[0, 1, 2], true);
    [past, second, child].into_iter().for_each(|comm| r.destroy(comm));
}

/// A rank that runs without peerlane would leave the others waiting for its record: they give up and say why.
#[test]
fn growing_by_a_rank_without_peerlane_fails_and_leaves_the_parent() {
    const NAME: &str = "growing_by_a_rank_without_peerlane_fails_and_leaves_the_parent";
    let Some(r) = role() else {
        let world = World::new(NAME).env("PEERLANE_SETUP_DEADLINE", "2");
        let off = [("PEERLANE_DISABLE", "1")];
        let ranks: Vec<_> = (0..3)
            .map(|rank| world.start(Way::Preload, rank, 3, if rank == 2 { &off } else { &[] }))
            .collect();
        return ranks.into_iter().for_each(support::Process::succeeds);
    };
    if r.rank == 2 {
        let child = grow(&r, r.api.ncclCommGrow, NULL, "grown");
        r.wait_for("given-up");
        return r.destroy(child);
    }
    let (gpu, mut parent) = (Gpu::new(0), NULL);
    let id = r.id("id");
    unsafe { (r.api.ncclCommInitRank)(&mut parent, 2, id, r.rank as c_int) };
    let (mut id, mut child) = (ncclUniqueId { internal: [0; 128] }, NULL);
    let root = r.rank == 0;
    if root {
        unsafe { (r.rest.ncclCommGetUniqueId)(parent, &mut id) };
        r.publish_id("grown", &id);
    }
    let code = unsafe {
        let id = if root { &id } else { std::ptr::null() };
        (r.api.ncclCommGrow)(parent, 3, id, -1, &mut child, std::ptr::null_mut())
    };
    assert_ne!(code, ncclSuccess);
    assert!(r.last_error().contains("every rank must run with peerlane"), "{}", r.last_error());
    assert_eq!(r.nccl_calls("ncclCommAbort"), 1, "NCCL's half of it goes too");
    right(&r, parent, &gpu, 0, &[0, 1], true);
    r.tell("given-up");
    r.destroy(parent);
}

#[test]
fn revoking_ends_every_wait_and_what_is_revoked_serves_no_more() {
    const NAME: &str = "revoking_ends_every_wait_and_what_is_revoked_serves_no_more";
    let Some(r) = role() else {
        for way in [Way::Preload, Way::Full] {
            World::new(NAME).run(way, 3);
        }
        return;
    };
    let (gpu, comm) = r.join();
    right(&r, comm, &gpu, 0, &[0, 1, 2], true);
    let buffer = gpu.buffer(&values(r.rank, 1, SMALL));
    if r.rank != 1 {
        // The control is in here: until the revocation it waits.
        wait_for_ever(&r, comm, &gpu, &buffer);
        r.tell(&format!("waiting-{}", r.rank));
    }
    // All of them: the first to revoke would end the wait that another has only begun.
    r.wait_for("waiting-0");
    r.wait_for("waiting-2");
    unsafe { assert_eq!((r.api.ncclCommRevoke)(comm, 0), ncclSuccess) };
    assert_eq!(r.nccl_calls("ncclCommRevoke"), 1);
    if r.rank != 1 {
        ended_without_a_result(&gpu, &buffer);
    }
    // NCCL refuses what is revoked; ours has left the table, so nobody serves.
    let served = r.stats(NULL).served_calls;
    assert_eq!(r.all_reduce(comm, &gpu, &buffer), ncclInvalidUsage);
    assert_eq!(r.stats(NULL).served_calls, served);
    unsafe { assert_eq!((r.api.ncclCommFinalize)(comm), ncclInvalidUsage, "NCCL's rule") };
    // What is revoked may be shrunk, and the child is served.
    if r.rank != 1 {
        let child = shrink(&r, r.api.ncclCommShrink, comm, 0);
        right(&r, child, &gpu, 2, &[0, 2], true);
        r.destroy(child);
    }
    r.destroy(comm);
}
