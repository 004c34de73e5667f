//! What peerlane cannot or may not serve is NCCL's, on all ranks alike; and what goes wrong is said.
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
use std::time::{Duration, Instant};
use support::{role, sum, values, Gpu, Way, World, SMALL};

/// A rank whose calls are all right and all NCCL's.
fn nccl_serves(r: &support::Rank) {
    let (gpu, comm) = r.join();
    for call in 0..3 {
        r.check(comm, &gpu, call, SMALL);
    }
    assert_eq!(r.nccl_calls("ncclAllReduce"), 3);
    assert_eq!(r.stats(std::ptr::null_mut()).served_calls, 0);
    assert_eq!(r.async_error(comm), ncclSuccess);
    gpu.stream.synchronize().unwrap();
    r.destroy(comm);
}

#[test]
fn switched_off_every_call_is_nccls() {
    const NAME: &str = "switched_off_every_call_is_nccls";
    match role() {
        None => World::new(NAME).env("PEERLANE_DISABLE", "1").run(Way::Preload, 2),
        Some(r) => {
            nccl_serves(&r);
            assert_eq!(
                r.nccl_calls("ncclAllGather"),
                0,
                "not even the ranks' places are exchanged"
            );
        }
    }
}

#[test]
fn ranks_that_cannot_meet_leave_the_communicator_to_nccl() {
    const NAME: &str = "ranks_that_cannot_meet_leave_the_communicator_to_nccl";
    if let Some(r) = role() {
        return nccl_serves(&r);
    }
    let world = World::new(NAME);
    let elsewhere = world.dir.path().join("elsewhere");
    let ranks: Vec<_> = (0..3)
        .map(|rank| {
            let env = [("PEERLANE_RUN_DIR", elsewhere.to_str().unwrap())];
            world.start(Way::Preload, rank, 3, if rank == 2 { &env } else { &[] })
        })
        .collect();
    let logs: Vec<String> = ranks
        .into_iter()
        .map(|rank| {
            let log = world.dir.path().join(format!("log-{}", rank.what.chars().last().unwrap()));
            rank.succeeds();
            std::fs::read_to_string(log).unwrap()
        })
        .collect();
    // All say why, in the same words.
    for log in &logs {
        assert!(log.contains("rank 2 shares no run directory"), "{log}");
    }
}

#[test]
fn a_set_up_that_fails_on_one_rank_leaves_the_communicator_to_nccl() {
    const NAME: &str = "a_set_up_that_fails_on_one_rank_leaves_the_communicator_to_nccl";
    if let Some(r) = role() {
        return nccl_serves(&r);
    }
    let world = World::new(NAME);
    // Rank 1 has no module, whatever the lane.
    let fail = [("PEERLANE_KERNELS", "/nonexistent/kernels.fatbin")];
    let ranks: Vec<_> = (0..2)
        .map(|rank| world.start(Way::Full, rank, 2, if rank == 1 { &fail } else { &[] }))
        .collect();
    for rank in ranks {
        rank.succeeds();
    }
    for rank in 0..2 {
        let log = std::fs::read_to_string(world.dir.path().join(format!("log-{rank}"))).unwrap();
        assert_eq!(log.matches("NCCL serves this communicator").count(), 1, "{log}");
    }
}

/// A variable that makes no sense, on one rank: it takes part in the exchange all the same, or the others would wait.
#[test]
fn a_rank_whose_environment_makes_no_sense_keeps_nobody_waiting() {
    const NAME: &str = "a_rank_whose_environment_makes_no_sense_keeps_nobody_waiting";
    if let Some(r) = role() {
        return nccl_serves(&r);
    }
    let world = World::new(NAME);
    let wrong = [("PEERLANE_ALGO", "ring")];
    let ranks: Vec<_> = (0..2)
        .map(|rank| world.start(Way::Preload, rank, 2, if rank == 1 { &wrong } else { &[] }))
        .collect();
    for rank in ranks {
        rank.succeeds();
    }
    let log = std::fs::read_to_string(world.dir.path().join("log-0")).unwrap();
    assert!(log.contains("rank 1 cannot take part") && log.contains("PEERLANE_ALGO"), "{log}");
}

#[test]
fn nonblocking_communicators_are_nccls() {
    const NAME: &str = "nonblocking_communicators_are_nccls";
    let Some(r) = role() else { return World::new(NAME).run(Way::Preload, 2) };
    let gpu = Gpu::new(0);
    let (id, mut config, mut comm) = (r.id("id"), r.config(), std::ptr::null_mut());
    config.blocking = 0;
    let code =
        unsafe { (r.api.ncclCommInitRankConfig)(&mut comm, 2, id, r.rank as c_int, &mut config) };
    assert_eq!(code, ncclInProgress);
    r.check(comm, &gpu, 0, SMALL);
    assert_eq!((r.nccl_calls("ncclAllReduce"), r.nccl_calls("ncclAllGather")), (1, 0));
    r.destroy(comm);
}

/// More ranks than a schedule has, and one, which has nobody to exchange anything with.
#[test]
fn seventeen_ranks_and_one_are_nccls() {
    const NAME: &str = "seventeen_ranks_and_one_are_nccls";
    let Some(r) = role() else {
        return World::new(NAME).env("FAKECUDA_DEVICES", "17").run(Way::Preload, 1);
    };
    let gpus: Vec<Gpu> = (0..17).map(Gpu::new).collect();
    // The control: sixteen are served.
    for (n, served) in [(16, true), (17, false), (1, false)] {
        let before = (r.stats(std::ptr::null_mut()).served_calls, r.nccl_calls("ncclAllReduce"));
        let mut comms = vec![std::ptr::null_mut(); n];
        unsafe {
            let code = (r.api.ncclCommInitAll)(comms.as_mut_ptr(), n as c_int, std::ptr::null());
            assert_eq!(code, ncclSuccess, "{}", r.last_error());
        }
        let buffers: Vec<_> = (0..n).map(|rank| gpus[rank].buffer(&values(rank, n, 64))).collect();
        unsafe { (r.api.ncclGroupStart)() };
        for rank in 0..n {
            assert_eq!(r.all_reduce(comms[rank], &gpus[rank], &buffers[rank]), ncclSuccess);
        }
        unsafe { assert_eq!((r.api.ncclGroupEnd)(), ncclSuccess, "{}", r.last_error()) };
        for (gpu, buffer) in gpus.iter().zip(&buffers) {
            gpu.stream.synchronize().unwrap();
            assert!(buffer.get(gpu) == sum(0..n, n, 64), "{n} ranks");
        }
        let after = (r.stats(std::ptr::null_mut()).served_calls, r.nccl_calls("ncclAllReduce"));
        let (ours, theirs) = if served { (n as u64, 0) } else { (0, n as u64) };
        assert_eq!(after, (before.0 + ours, before.1 + theirs), "{n} ranks");
        comms.into_iter().for_each(|comm| r.destroy(comm));
    }
}

#[test]
fn types_and_operations_that_peerlane_lacks_are_nccls() {
    const NAME: &str = "types_and_operations_that_peerlane_lacks_are_nccls";
    let Some(r) = role() else { return World::new(NAME).run(Way::Preload, 2) };
    let (gpu, comm) = r.join();
    r.check(comm, &gpu, 0, SMALL);
    let buffer = gpu.buffer(&[1.0; 4]);
    // FP8, and an operation as `ncclRedOpCreatePreMulSum` numbers them.
    for (dtype, op) in
        [(ncclFloat8e4m3, ncclSum), (ncclFloat8e5m2, ncclMax), (ncclFloat32, ncclNumOps + 3)]
    {
        let at = buffer.at();
        let code = unsafe { (r.api.ncclAllReduce)(at, at, 4, dtype, op, comm, gpu.raw()) };
        assert_eq!(code, ncclSuccess, "{}", r.last_error());
    }
    gpu.stream.synchronize().unwrap();
    assert_eq!(r.nccl_calls("ncclAllReduce"), 3);
    assert_eq!((r.stats(comm).forwarded_kind, r.stats(comm).served_calls), (3, 1));
    r.destroy(comm);
}

#[test]
fn an_abort_ends_the_others_calls_and_both_sides_say_so() {
    const NAME: &str = "an_abort_ends_the_others_calls_and_both_sides_say_so";
    let Some(r) = role() else { return World::new(NAME).run(Way::Preload, 3) };
    let (gpu, comm) = r.join();
    r.check(comm, &gpu, 0, SMALL);
    if r.rank == 1 {
        r.wait_for("waiting-0");
        r.wait_for("waiting-2");
        unsafe { assert_eq!((r.api.ncclCommAbort)(comm), ncclSuccess) };
        assert_eq!(r.nccl_calls("ncclCommAbort"), 1);
        return;
    }
    // A call that rank 1 never makes.
    let buffer = gpu.buffer(&values(r.rank, 1, SMALL));
    assert_eq!(r.all_reduce(comm, &gpu, &buffer), ncclSuccess);
    r.tell(&format!("waiting-{}", r.rank));
    gpu.stream.synchronize().unwrap();
    assert!(
        buffer.get(&gpu).iter().all(|v| v.is_nan()),
        "not a sum, and not what was there before"
    );
    assert_eq!(r.async_error(comm), ncclRemoteError);
    assert!(r.last_error().contains("rank 1 aborted"), "{}", r.last_error());
    // It stays so: later calls fail, and none goes to NCCL in silence.
    assert_eq!(r.all_reduce(comm, &gpu, &buffer), ncclRemoteError);
    assert_eq!(r.nccl_calls("ncclAllReduce"), 0);
    unsafe { assert_eq!((r.api.ncclCommAbort)(comm), ncclSuccess) };
    // The process goes on with a new communicator.
}

#[test]
fn a_killed_rank_is_named_by_the_others() {
    const NAME: &str = "a_killed_rank_is_named_by_the_others";
    let Some(r) = role() else {
        let world = World::new(NAME);
        let mut ranks: Vec<_> =
            (0..3).map(|rank| world.start(Way::Preload, rank, 3, &[])).collect();
        let start = Instant::now();
        while !(0..3).all(|rank| world.dir.path().join(format!("ready-{rank}")).exists()) {
            assert!(start.elapsed() < Duration::from_secs(60), "{}", ranks[0].output());
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut killed = ranks.remove(1);
        killed.child.kill().unwrap();
        ranks.into_iter().for_each(support::Process::succeeds);
        return;
    };
    let (gpu, comm) = r.join();
    r.check(comm, &gpu, 0, SMALL);
    r.tell(&format!("ready-{}", r.rank));
    let start = Instant::now();
    let mut call = 1;
    // Rank 1 dies somewhere in here.
    let code = loop {
        let buffer = gpu.buffer(&values(r.rank, call, 64));
        match r.all_reduce(comm, &gpu, &buffer) {
            ncclSuccess => gpu.stream.synchronize().unwrap(),
            code => break code,
        }
        call += 1;
        assert!(start.elapsed() < Duration::from_secs(30));
    };
    assert_eq!(code, ncclRemoteError);
    assert!(r.last_error().contains("rank 1 died"), "{}", r.last_error());
    assert_eq!(r.async_error(comm), ncclRemoteError);
    unsafe { (r.api.ncclCommAbort)(comm) };
}

#[test]
fn a_forked_child_forwards_and_the_parent_goes_on() {
    const NAME: &str = "a_forked_child_forwards_and_the_parent_goes_on";
    let Some(r) = role() else { return World::new(NAME).run(Way::Preload, 2) };
    let (gpu, comm) = r.join();
    r.check(comm, &gpu, 0, SMALL);
    // SAFETY: the child calls one function that only looks something up, and _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut stats = peerlane_nccl_core::stats::Stats::default();
        // SAFETY: as above: the child has no entries.
        unsafe {
            let code = (r.api.stats)(comm, &mut stats, size_of_val(&stats));
            libc::_exit(if code == ncclInvalidArgument { 0 } else { 1 });
        }
    }
    let mut status = 0;
    // SAFETY: waits for that child.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0);
    r.check(comm, &gpu, 1, SMALL);
    r.destroy(comm);
}

/// Calls NCCL when a thread ends, as a host does whose thread-local holds a communicator.
struct AtTheEnd(Option<(Vec<Call>, std::sync::mpsc::Sender<ncclResult_t>)>);
type Call = Box<dyn Fn() -> ncclResult_t + Send>;

impl Drop for AtTheEnd {
    fn drop(&mut self) {
        let Some((calls, tell)) = self.0.take() else { return };
        calls.iter().for_each(|call| tell.send(call()).unwrap());
    }
}

thread_local! {
    static LAST: std::cell::RefCell<AtTheEnd> = const { std::cell::RefCell::new(AtTheEnd(None)) };
}

#[test]
fn a_thread_that_is_ending_may_still_call() {
    const NAME: &str = "a_thread_that_is_ending_may_still_call";
    let Some(r) = role() else {
        for way in [Way::Preload, Way::Full] {
            World::new(NAME).run(way, 1);
        }
        return;
    };
    let (tell, told) = std::sync::mpsc::channel();
    let (start, end) = (r.api.ncclGroupStart, r.api.ncclGroupEnd);
    let (passed_on, freed) = (r.rest.ncclCommGetUniqueId, r.rest.ncclMemFree);
    let ended = std::thread::spawn(move || {
        let calls: Vec<Call> = vec![
            Box::new(move || unsafe { start() }),
            Box::new(move || unsafe { end() }),
            Box::new(move || unsafe { passed_on(std::ptr::null_mut(), std::ptr::null_mut()) }),
            Box::new(move || unsafe { freed(std::ptr::null_mut()) }),
        ];
        // Before the library has anything of its own on this thread, so that it is gone when these calls come.
        LAST.with(|last| last.borrow_mut().0 = Some((calls, tell)));
        unsafe { assert_eq!((start(), end()), (ncclSuccess, ncclSuccess)) };
    });
    ended.join().unwrap();
    let told: Vec<_> = told.iter().collect();
    assert_eq!(told[..3], [ncclSuccess, ncclSuccess, ncclInvalidArgument]);
    assert_eq!(told.len(), 4);
}

#[test]
fn wrong_arguments_get_nccls_codes_and_a_text() {
    const NAME: &str = "wrong_arguments_get_nccls_codes_and_a_text";
    let Some(r) = role() else { return World::new(NAME).run(Way::Preload, 2) };
    let (gpu, comm) = r.join();
    r.check(comm, &gpu, 0, SMALL);
    let null = std::ptr::null_mut();
    let code =
        unsafe { (r.api.ncclAllReduce)(null, null, 4, ncclFloat32, ncclSum, comm, gpu.raw()) };
    assert_eq!(code, ncclInvalidArgument);
    assert!(r.last_error().contains("input is null"), "{}", r.last_error());
    // No handle of ours or NCCL's: NCCL says so.
    let mut foreign = [0u64; 8];
    let buffer = gpu.buffer(&[1.0; 4]);
    assert_eq!(r.all_reduce(foreign.as_mut_ptr().cast(), &gpu, &buffer), ncclInvalidArgument);
    assert_eq!(r.all_reduce(null.cast(), &gpu, &buffer), ncclInvalidArgument);
    unsafe { assert_eq!((r.api.ncclGroupEnd)(), ncclInvalidUsage) };
    // Refusing a call harms nobody.
    r.check(comm, &gpu, 1, SMALL);
    let expected = sum(0..2, 2, 8);
    let buffer = gpu.buffer(&values(r.rank, 2, 8));
    assert_eq!(r.all_reduce(comm, &gpu, &buffer), ncclSuccess);
    gpu.stream.synchronize().unwrap();
    assert_eq!(buffer.get(&gpu), expected);
    r.destroy(comm);
}
