//! Failures that programs like this one have had in the field, one test each where no other test covers it; the table in
//! `docs/reliability.md` says which covers what. Against the stand-in driver.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/fakecuda.rs"]
mod fakecuda;
#[path = "common/gpu.rs"]
mod gpu;
#[path = "../examples/gpu_smoke/support.rs"]
mod support;

use fakecuda::in_child;
use gpu::{case, config, create, nothing_is_left, on_ranks, KERNELS};
use peerlane::comm::{Communicator, Config};
use peerlane::device::cuda::{memory, Capture, CaptureMode, Stream, VmmMemory};
use peerlane::probe::Scope;
use peerlane::{DType, Device, Error, Lane, Op, ProbeMode};
use std::sync::Barrier;
use std::time::{Duration, Instant};
use support::{Case, Rank};

const CASE: Case = case(DType::BF16, Op::Sum, 7168, 6);

/// An allocator that maps its segments itself (so CUDA IPC cannot export them) is none of our business: user memory is
/// never exported, so eager calls and graphs work on it.
#[test]
fn buffers_that_cannot_be_exported_serve_eager_and_captured() {
    let name = "buffers_that_cannot_be_exported_serve_eager_and_captured";
    in_child(name, &[KERNELS], || {
        let n = 3;
        let expected = CASE.expected(n, &config(n)).unwrap();
        on_ranks(Communicator::create_local(n, &config(n)).unwrap(), |comm| {
            let context = support::context(0).unwrap();
            let stream = Stream::new(&context, 0).unwrap();
            let segment = VmmMemory::new(&context, 2 * CASE.bytes()).unwrap();
            let (input, output) = (segment.ptr(), segment.ptr() + CASE.bytes() as u64);
            let entered = context.enter().unwrap();
            let call = || {
                // SAFETY: two halves of one segment, which lives until the stream is synchronised.
                unsafe {
                    comm.all_reduce_cuda(
                        input as *const _,
                        output as *mut _,
                        CASE.count,
                        CASE.dtype,
                        CASE.op,
                        stream.as_ref().as_raw(),
                        None,
                    )
                }
                .unwrap();
            };
            let check = |what: &str| {
                stream.synchronize().unwrap();
                let mut got = vec![0; CASE.bytes()];
                // SAFETY: inside the segment.
                unsafe { memory::read(&entered, output, &mut got, stream.as_ref()) }.unwrap();
                assert!(got == expected, "{what}");
                // SAFETY: as above.
                unsafe { memory::fill(&entered, output, 0x5a, got.len(), stream.as_ref()) }
                    .unwrap();
            };
            // SAFETY: as above.
            unsafe { memory::write(&entered, input, &CASE.data(comm.rank()), stream.as_ref()) }
                .unwrap();
            call();
            check("eager");
            let capture = Capture::begin(&stream, CaptureMode::ThreadLocal).unwrap();
            call();
            let graph = capture.end().unwrap().instantiate().unwrap();
            for _ in 0..3 {
                graph.launch(&entered, stream.as_ref()).unwrap();
                check("replayed");
            }
            stream.synchronize().unwrap();
        });
        nothing_is_left();
    });
}

/// A pass that is captured piece by piece, each on a stream that is destroyed at once, as frameworks recycle theirs; eager
/// calls run between the pieces.
#[test]
fn pieces_captured_on_streams_that_are_gone_replay_in_order() {
    let name = "pieces_captured_on_streams_that_are_gone_replay_in_order";
    in_child(name, &[KERNELS], || {
        let n = 3;
        let expected = CASE.expected(n, &config(n)).unwrap();
        on_ranks(Communicator::create_local(n, &config(n)).unwrap(), |comm| {
            let rank = Rank::new(&comm, 0, CASE.bytes()).unwrap();
            let pieces: Vec<_> = (0..5)
                .map(|piece| {
                    let stream = Stream::new(&rank.context, 0).unwrap();
                    let capture = Capture::begin(&stream, CaptureMode::ThreadLocal).unwrap();
                    (0..=piece).for_each(|_| rank.call_on(&stream, &CASE, None).unwrap());
                    capture.end().unwrap().instantiate().unwrap()
                })
                .collect();
            for pass in 0..7 {
                rank.fill(&CASE).unwrap();
                for (i, piece) in pieces.iter().enumerate() {
                    if (i + pass) % 3 == 0 {
                        rank.call(&CASE, None).unwrap();
                    }
                    let entered = rank.context.enter().unwrap();
                    piece.launch(&entered, rank.stream.as_ref()).unwrap();
                }
                rank.stream.synchronize().unwrap();
                assert_eq!(comm.error(), None);
                assert!(rank.result(&CASE).unwrap() == expected, "pass {pass}");
            }
        });
        nothing_is_left();
    });
}

/// Two calls back to back in one graph, and a rank that comes late to every replay: nobody may run so far ahead that it
/// writes into what the late rank still reads. Each replay has other data.
#[test]
fn a_rank_that_stalls_between_back_to_back_calls_changes_nothing() {
    let name = "a_rank_that_stalls_between_back_to_back_calls_changes_nothing";
    in_child(name, &[KERNELS], || {
        let n = 3;
        let cases: Vec<Case> = (0..12).map(|seed| Case { seed, ..CASE }).collect();
        let expected: Vec<_> = cases.iter().map(|c| c.expected(n, &config(n)).unwrap()).collect();
        on_ranks(Communicator::create_local(n, &config(n)).unwrap(), |comm| {
            let rank = Rank::new(&comm, 0, CASE.bytes()).unwrap();
            let capture = Capture::begin(&rank.stream, CaptureMode::ThreadLocal).unwrap();
            (0..2).for_each(|_| rank.call(&CASE, None).unwrap());
            let graph = capture.end().unwrap().instantiate().unwrap();
            for (replay, (case, expected)) in cases.iter().zip(&expected).enumerate() {
                rank.fill(case).unwrap();
                if replay % n == comm.rank() {
                    std::thread::sleep(Duration::from_millis(20));
                }
                graph.launch(&rank.context.enter().unwrap(), rank.stream.as_ref()).unwrap();
                rank.stream.synchronize().unwrap();
                assert!(rank.result(case).unwrap() == *expected, "replay {replay}");
            }
        });
    });
}

/// Memory that is armed late must be armed before anybody can write to it: a fill that comes after a peer's first word would
/// erase it, and the peer's reader would wait for ever.
#[test]
fn set_up_calls_that_are_held_up_on_one_rank_only_cost_time() {
    let name = "set_up_calls_that_are_held_up_on_one_rank_only_cost_time";
    const HELD_UP: &str =
        "cuMemsetD8Async:*:1:40,cuMemCreate:*:0:40,cuMemAlloc:*:2:20,cuMemcpyHtoDAsync:1:1:60,\
                           cuLaunchKernelEx:*:2:5,cuModuleLoadData:*:0:60,cuMemSetAccess:*:2:40";
    in_child(name, &[KERNELS, ("FAKECUDA_DELAY", HELD_UP), ("FAKECUDA_DEVICES", "3")], || {
        for lane in [Lane::Vmm, Lane::Ipc, Lane::Host] {
            let config = Config { lane, ..config(3) };
            let expected = CASE.expected(3, &config).unwrap();
            let comms = create(3, &config, |rank| rank as u32);
            on_ranks(comms.into_iter().map(Result::unwrap).collect(), |comm| {
                let rank = Rank::new(&comm, comm.rank() as u32, CASE.bytes()).unwrap();
                assert!(rank.reduce(&CASE).unwrap() == expected, "{lane}");
            });
        }
    });
}

/// With more GPUs than one may have peers, ranks that are joined by no schedule have no slab of each other's in which a
/// kernel could say that it gave up: the hosts tell them, and long before their own deadline.
#[test]
fn ranks_without_an_edge_learn_at_once_that_a_kernel_gave_up() {
    let name = "ranks_without_an_edge_learn_at_once_that_a_kernel_gave_up";
    let env = [KERNELS, ("FAKECUDA_DEVICES", "12"), ("FAKECUDA_PEER_LIMIT", "4")];
    in_child(name, &env, || {
        const WITHHELD: usize = 11;
        let n = 12;
        let id = peerlane::bootstrap::UniqueId::new().unwrap();
        let together = Barrier::new(n);
        let rank_main = |r: usize| {
            // The first kernel to give up is rank 0's.
            let seconds = if r == 0 { 1 } else { 40 };
            let config = Config {
                device: Device::Cuda { ordinal: Some(r as u32) },
                deadline: Duration::from_secs(seconds),
                ..config(n)
            };
            let comm = Communicator::create(&id, n, r, &config).unwrap();
            let rank = Rank::new(&comm, r as u32, CASE.bytes()).unwrap();
            rank.fill(&CASE).unwrap();
            together.wait();
            let start = Instant::now();
            if r != WITHHELD {
                rank.call(&CASE, None).unwrap();
                rank.stream.synchronize().unwrap();
            }
            let elapsed = start.elapsed();
            // Nobody asks for an error, which would tell the others, before all kernels have ended.
            together.wait();
            let error = comm.error();
            together.wait();
            (elapsed, error)
        };
        std::thread::scope(|scope| {
            let rank_main = &rank_main;
            let ranks: Vec<_> = (0..n).map(|r| scope.spawn(move || rank_main(r))).collect();
            for (r, rank) in ranks.into_iter().enumerate() {
                let (elapsed, error) = rank.join().unwrap();
                assert!(elapsed < Duration::from_secs(20), "rank {r} waited {elapsed:?}");
                let named = matches!(error, Some(Error::Deadline { rank: 0, .. }));
                assert!(named, "rank {r}: {error:?}");
            }
        });
        nothing_is_left();
    });
}

/// Several GPUs are measured at the first creation, and remembered at the next. Ranks that share one have nothing between
/// them to measure.
#[test]
fn links_between_gpus_are_measured_once() {
    let name = "links_between_gpus_are_measured_once";
    in_child(name, &[KERNELS, ("FAKECUDA_DEVICES", "4")], || {
        let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache-measured-once");
        let _ = std::fs::remove_dir_all(&dir);
        let config = Config { probe: ProbeMode::Auto, cache_dir: Some(dir), ..config(4) };
        let measured = |gpu: fn(usize) -> u32, config: &Config| {
            let start = Instant::now();
            let comms: Vec<_> = create(4, config, gpu).into_iter().map(Result::unwrap).collect();
            let took = start.elapsed();
            let expected = CASE.expected(4, config).unwrap();
            let reports = on_ranks(comms, |comm| {
                let rank = Rank::new(&comm, gpu(comm.rank()), CASE.bytes()).unwrap();
                assert!(rank.reduce(&CASE).unwrap() == expected, "a slab is not as it was");
                comm.probe().cloned()
            });
            assert!(reports.windows(2).all(|pair| pair[0] == pair[1]));
            (reports[0].clone(), took)
        };
        assert_eq!(measured(|_| 0, &config).0, None);
        let (first, took) = measured(|rank| rank as u32, &config);
        let report = first.clone().unwrap();
        assert!(report.lane == "vmm" && report.latency(Scope::Within).is_some());
        let (again, took_again) = measured(|rank| rank as u32, &config);
        // The time that it took would differ if it had been measured anew.
        assert_eq!(again, first);
        println!(
            "measuring took {:.1} ms of {took:?}, remembering {took_again:?}",
            report.milliseconds
        );
        let always = Config { probe: ProbeMode::Always, ..config };
        assert_ne!(measured(|rank| rank as u32, &always).0, first);
        nothing_is_left();
    });
}
