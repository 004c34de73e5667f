//! What a communicator on GPUs promises, shown against the stand-in driver.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/fakecuda.rs"]
mod fakecuda;
#[path = "common/gpu.rs"]
mod gpu;
#[path = "../examples/gpu_smoke/support.rs"]
mod support;

use fakecuda::{calls, in_child, set_fail};
use gpu::{case, config, create, nothing_is_left, on_ranks, KERNELS};
use peerlane::comm::{group_end, group_start, Communicator, Config};
use peerlane::device::cuda::Stream;
use peerlane::schedule::{self, Islands};
use peerlane::{Algorithm, DType, Direction, Error, Lane, Op, Protocol};
use std::time::Duration;
use support::{Case, Rank};

const WAYS: [(Protocol, Direction); 4] = [
    (Protocol::Ll, Direction::Push),
    (Protocol::Sentinel, Direction::Push),
    (Protocol::Flagged, Direction::Push),
    (Protocol::Flagged, Direction::Pull),
];

#[test]
fn every_schedule_and_protocol_gives_the_bits_of_the_cpu() {
    in_child("every_schedule_and_protocol_gives_the_bits_of_the_cpu", &[KERNELS], || {
        for n in 1..=9usize {
            let halves = [(0..n.div_ceil(2)).collect(), (n.div_ceil(2)..n).collect::<Vec<_>>()];
            let islands = match n {
                1 => Islands::single(1).unwrap(),
                _ => Islands::new(n, halves.to_vec()).unwrap(),
            };
            let base = Config { islands: Some(islands.clone()), ..config(n) };
            let cases = [
                case(DType::BF16, Op::Sum, 7168, 1),
                case(DType::F32, Op::Avg, 1001, 2),
                case(DType::F16, Op::Sum, 3, 3),
            ];
            let expected: Vec<_> = cases.iter().map(|c| c.expected(n, &base).unwrap()).collect();
            for &algorithm in Algorithm::ALL.iter().filter(|&&a| schedule::exists(a, &islands)) {
                for (protocol, direction) in WAYS {
                    let config = Config {
                        algorithm: Some(algorithm),
                        protocol: Some(protocol),
                        direction: Some(direction),
                        ..base.clone()
                    };
                    on_ranks(Communicator::create_local(n, &config).unwrap(), |comm| {
                        let rank = Rank::new(&comm, 0, 1 << 16).unwrap();
                        for (case, expected) in cases.iter().zip(&expected) {
                            let got = rank.reduce(case).unwrap();
                            assert!(
                                got == *expected,
                                "n {n} {algorithm} {protocol} {direction} {case:?}"
                            );
                        }
                    });
                }
            }
        }
        nothing_is_left();
    });
}

#[test]
fn every_type_is_served_over_every_lane() {
    in_child("every_type_is_served_over_every_lane", &[KERNELS], || {
        let n = 3;
        let cases: Vec<Case> = DType::ALL
            .iter()
            .flat_map(|&dtype| [Op::Sum, Op::Prod, Op::Max, Op::Min, Op::Avg].map(|op| (dtype, op)))
            .enumerate()
            .map(|(i, (dtype, op))| case(dtype, op, 1 + i * 37, i as u64))
            .collect();
        let expected: Vec<_> = cases.iter().map(|c| c.expected(n, &config(n)).unwrap()).collect();
        for lane in [Lane::Vmm, Lane::Ipc, Lane::Host, Lane::Auto] {
            let config = Config { lane, ..config(n) };
            on_ranks(Communicator::create_local(n, &config).unwrap(), |comm| {
                let rank = Rank::new(&comm, 0, 1 << 16).unwrap();
                for (case, expected) in cases.iter().zip(&expected) {
                    assert!(rank.reduce(case).unwrap() == *expected, "{lane} {case:?}");
                }
                let text = comm.explain(1024, DType::F32).unwrap();
                let used = if lane == Lane::Auto { "lane vmm" } else { &format!("lane {lane}") };
                assert!(text.contains(used), "{text}");
            });
            nothing_is_left();
        }
    });
}

#[test]
fn ranks_on_gpus_of_their_own_reach_each_other() {
    let name = "ranks_on_gpus_of_their_own_reach_each_other";
    in_child(name, &[KERNELS, ("FAKECUDA_DEVICES", "4")], || {
        let case = case(DType::BF16, Op::Sum, 14_336, 1);
        let expected = case.expected(4, &config(4)).unwrap();
        for lane in [Lane::Vmm, Lane::Ipc, Lane::Host] {
            let config = Config { lane, ..config(4) };
            // Two ranks share a GPU, the others have theirs.
            let gpu = |rank: usize| [3, 1, 3, 0][rank];
            let comms = create(4, &config, gpu).into_iter().map(Result::unwrap).collect();
            on_ranks(comms, |comm| {
                let rank = Rank::new(&comm, gpu(comm.rank()), case.bytes()).unwrap();
                assert!(rank.reduce(&case).unwrap() == expected, "{lane}");
            });
        }
    });
}

#[test]
fn eager_calls_on_several_streams_run_in_the_order_they_were_made() {
    let name = "eager_calls_on_several_streams_run_in_the_order_they_were_made";
    in_child(name, &[KERNELS, ("FAKECUDA_DEVICES", "3")], || {
        let n = 3;
        let case = case(DType::F32, Op::Sum, 3000, 4);
        let expected = case.expected(n, &config(n)).unwrap();
        // A GPU each: ranks that share one share its legacy default stream, and would wait for each other in it.
        let comms = create(n, &config(n), |rank| rank as u32);
        on_ranks(comms.into_iter().map(Result::unwrap).collect(), |comm| {
            let rank = Rank::new(&comm, comm.rank() as u32, case.bytes()).unwrap();
            rank.fill(&case).unwrap();
            for round in 0..30 {
                // Streams come and go, and their handles may come back; each rank uses others.
                let stream = Stream::new(&rank.context, 0).unwrap();
                rank.call_on(&stream, &case, None).unwrap();
                if (round + comm.rank()) % 3 == 0 {
                    rank.call(&case, None).unwrap();
                } else {
                    // The legacy default stream, then this thread's own.
                    rank.call_raw(std::ptr::null_mut(), &case).unwrap();
                }
                rank.call_raw(2 as *mut _, &case).unwrap();
            }
            // Every call of the channel comes before this one.
            rank.call(&case, None).unwrap();
            rank.stream.synchronize().unwrap();
            assert_eq!(comm.error(), None);
            assert!(rank.result(&case).unwrap() == expected);
        });
        nothing_is_left();
    });
}

#[test]
fn a_call_asks_the_driver_for_little_and_allocates_nothing() {
    let name = "a_call_asks_the_driver_for_little_and_allocates_nothing";
    in_child(name, &[KERNELS], || {
        let case = case(DType::BF16, Op::Sum, 512, 1);
        let comm = Communicator::create_local(1, &config(1)).unwrap().swap_remove(0);
        let rank = Rank::new(&comm, 0, case.bytes()).unwrap();
        rank.reduce(&case).unwrap();
        // Where the context is current already, as in a framework's threads.
        let entered = rank.context.enter().unwrap();
        set_fail("");
        for _ in 0..10 {
            rank.call(&case, None).unwrap();
        }
        for (call, times) in [
            ("cuCtxGetCurrent", 10),
            ("cuStreamGetCaptureInfo", 10),
            ("cuStreamGetId", 10),
            // The stream itself keeps the order.
            ("cuStreamWaitEvent", 0),
            ("cuLaunchKernelEx", 10),
            ("cuEventRecord", 10),
            ("cuCtxPushCurrent", 0),
            ("cuMemAlloc", 0),
            ("cuStreamSynchronize", 0),
            ("cuEventCreate", 0),
            ("cuModuleLoadData", 0),
        ] {
            assert_eq!(calls(call), times, "{call}");
        }
        // Another stream has to wait, and so has the first one after it.
        let other = Stream::new(&rank.context, 0).unwrap();
        rank.call_on(&other, &case, None).unwrap();
        rank.call(&case, None).unwrap();
        rank.call(&case, None).unwrap();
        assert_eq!(calls("cuStreamWaitEvent"), 2);
        // Channels are not ordered among each other: the one wait is for this channel's own test, in set-up.
        rank.call_on(&other, &case, Some(2)).unwrap();
        rank.call(&case, None).unwrap();
        rank.call_on(&other, &case, Some(2)).unwrap();
        assert_eq!(calls("cuStreamWaitEvent"), 3);
        rank.stream.synchronize().unwrap();
        other.synchronize().unwrap();
        drop(entered);
    });
}

#[test]
fn a_message_larger_than_the_slab_takes_several_steps() {
    in_child("a_message_larger_than_the_slab_takes_several_steps", &[KERNELS], || {
        let case = case(DType::BF16, Op::Sum, 1 << 20, 1);
        let expected = case.expected(2, &config(2)).unwrap();
        on_ranks(Communicator::create_local(2, &config(2)).unwrap(), |comm| {
            let rank = Rank::new(&comm, 0, case.bytes()).unwrap();
            assert!(rank.reduce(&case).unwrap() == expected);
            let stats = comm.stats();
            assert_eq!((stats.calls, stats.failed, stats.bytes), (1, 0, 2 << 20));
            assert!(stats.steps > 2, "{stats:?}");
        });
    });
}

#[test]
fn one_thread_drives_several_ranks_in_a_group() {
    in_child("one_thread_drives_several_ranks_in_a_group", &[KERNELS], || {
        let case = case(DType::F32, Op::Sum, 999, 3);
        let comms = Communicator::create_local(3, &config(3)).unwrap();
        let ranks: Vec<_> =
            comms.iter().map(|comm| Rank::new(comm, 0, case.bytes()).unwrap()).collect();
        group_start();
        for rank in &ranks {
            rank.fill(&case).unwrap();
            rank.call(&case, None).unwrap();
            assert_eq!(rank.comm.stats().steps, 0, "nothing runs before the group's end");
        }
        group_end().unwrap();
        let expected = case.expected(3, &config(3)).unwrap();
        for rank in &ranks {
            rank.stream.synchronize().unwrap();
            assert!(rank.result(&case).unwrap() == expected);
        }
    });
}

#[test]
fn a_call_that_a_group_makes_after_destroy_is_refused() {
    in_child("a_call_that_a_group_makes_after_destroy_is_refused", &[KERNELS], || {
        let case = case(DType::F32, Op::Sum, 999, 3);
        let comm = Communicator::create_local(1, &config(1)).unwrap().swap_remove(0);
        group_start();
        let buffers = {
            let rank = Rank::new(&comm, 0, case.bytes()).unwrap();
            rank.call_raw(std::ptr::null_mut(), &case).unwrap();
            rank.into_buffers()
        };
        comm.destroy().unwrap();
        assert_eq!(group_end(), Err(Error::Closed));
        drop(buffers);
        nothing_is_left();
    });
}

#[test]
fn a_rank_that_does_not_come_is_named_and_the_gpu_stays_usable() {
    let name = "a_rank_that_does_not_come_is_named_and_the_gpu_stays_usable";
    in_child(name, &[KERNELS], || {
        let case = case(DType::BF16, Op::Sum, 7168, 6);
        let expected = case.expected(4, &config(4)).unwrap();
        let short = Config { deadline: Duration::from_millis(800), ..config(4) };
        for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
            for (protocol, direction) in WAYS {
                let config = Config {
                    algorithm: Some(algorithm),
                    protocol: Some(protocol),
                    direction: Some(direction),
                    ..short.clone()
                };
                let together = std::sync::Barrier::new(4);
                on_ranks(Communicator::create_local(4, &config).unwrap(), |comm| {
                    let rank = Rank::new(&comm, 0, case.bytes()).unwrap();
                    let outcome = (comm.rank() != 2).then(|| rank.reduce(&case));
                    let output = rank.result(&case).unwrap();
                    together.wait();
                    let Some(outcome) = outcome else { return };
                    let error = outcome.unwrap_err();
                    let named =
                        matches!(error, Error::Deadline { peer: 2, phase: 0, bytes: 14_336, .. });
                    assert!(named, "{algorithm} {protocol} {direction}: {error}");
                    assert!(
                        output.chunks_exact(2).all(|word| word == [0xff, 0x7f]),
                        "not all is NaN"
                    );
                    // Sticky: no later call is launched.
                    let steps = comm.stats().steps;
                    assert_eq!(rank.call(&case, None), Err(error));
                    assert_eq!(comm.stats().steps, steps);
                });
            }
        }
        on_ranks(Communicator::create_local(4, &short).unwrap(), |comm| {
            let rank = Rank::new(&comm, 0, case.bytes()).unwrap();
            assert!(rank.reduce(&case).unwrap() == expected);
        });
        nothing_is_left();
    });
}

#[test]
fn calls_that_differ_are_an_error_on_all_ranks() {
    in_child("calls_that_differ_are_an_error_on_all_ranks", &[KERNELS], || {
        let config = Config { check: true, ..config(3) };
        on_ranks(Communicator::create_local(3, &config).unwrap(), |comm| {
            let count = if comm.rank() == 1 { 1000 } else { 2000 };
            let case = case(DType::F32, Op::Sum, count, 1);
            let rank = Rank::new(&comm, 0, 1 << 14).unwrap();
            let error = rank.reduce(&case).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, Error::Mismatch(_)) && text.contains("count"), "{text}");
        });
    });
}

#[test]
fn mistakes_are_refused_with_what_to_do() {
    in_child("mistakes_are_refused_with_what_to_do", &[KERNELS], || {
        let case = case(DType::F32, Op::Sum, 16, 1);
        let comm = Communicator::create_local(1, &config(1)).unwrap().swap_remove(0);
        let rank = Rank::new(&comm, 0, case.bytes()).unwrap();
        let text = rank.call(&case, Some(4)).unwrap_err().to_string();
        assert!(text.contains("channels 0 to 3"), "{text}");
        let cpu_stream = peerlane::device::Stream::new().unwrap();
        let mut value = 0f32;
        let at = (&raw mut value).cast();
        // SAFETY: refused before anything is touched.
        let refused = unsafe { comm.all_reduce(at, at, 1, DType::F32, Op::Sum, Some(&cpu_stream)) };
        assert!(refused.unwrap_err().to_string().contains("CUstream"));
        let cpu = Config { device: peerlane::Device::Cpu, ..config(1) };
        let cpu = Communicator::create_local(1, &cpu).unwrap().swap_remove(0);
        // SAFETY: as above.
        let refused = unsafe {
            cpu.all_reduce_cuda(at, at, 1, DType::F32, Op::Sum, std::ptr::null_mut(), None)
        };
        assert!(refused.unwrap_err().to_string().contains("CPU"));
        // None of it is sticky.
        assert_eq!((comm.error(), cpu.error()), (None, None));
        rank.reduce(&case).unwrap();
    });
}
