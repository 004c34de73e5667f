//! Programmatic launches: which kernels of a graph may start early, shown against the stand-in driver. It makes no graph
//! launchable in which a kernel of the library's would start too early; see `hazard` there.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/fakecuda.rs"]
mod fakecuda;
#[path = "common/gpu.rs"]
mod gpu;
#[path = "common/graphs.rs"]
mod graphs;
#[path = "../examples/gpu_smoke/rows.rs"]
mod rows;
#[path = "../examples/gpu_smoke/support.rs"]
mod support;

use fakecuda::{calls, graph, in_child, register_kernel, set_fail, Node};
use gpu::{case, config, nothing_is_left, on_ranks, KERNELS};
use graphs::{
    alone, capture, capture_on, foreign, is_chain, is_marked, launch_foreign, replay, replayed,
    replays_to, SHAPE,
};
use peerlane::comm::{Communicator, Config};
use peerlane::device::cuda::{
    memory, Capture, CaptureMode, CudaVersion, Event, Function, LaunchShape, Module, Stream,
};
use peerlane::env::Env;
use peerlane::launch::pl_step;
use peerlane::{Algorithm, DType, Error, Op, Protocol};
use rows::{Form, Rows, RowsRank};
use support::{Case, Rank};

const SMALL: Case = case(DType::BF16, Op::Sum, 7168, 6);

/// Something else on the stream: a copy of a word onto another.
fn copy(rank: &Rank, stream: &Stream) {
    let at = rank.pointers().1;
    // SAFETY: the two words are in the rank's buffer, which outlives the graph.
    unsafe { memory::copy(&rank.context.enter().unwrap(), at, at + 8, 8, stream.as_ref()) }
        .unwrap();
}

#[test]
fn our_kernel_behind_ours_starts_early_and_the_last_one_lets_nobody() {
    let name = "our_kernel_behind_ours_starts_early_and_the_last_one_lets_nobody";
    in_child(name, &[KERNELS], || {
        for n in 1..=3 {
            for protocol in [Protocol::Ll, Protocol::Sentinel, Protocol::Flagged] {
                for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
                    let config = Config {
                        protocol: Some(protocol),
                        algorithm: Some(algorithm),
                        ..config(n)
                    };
                    let odd = case(DType::BF16, Op::Sum, 7001, 6);
                    let [small, odd_bits] =
                        [SMALL, odd].map(|case| case.expected(n, &config).unwrap());
                    on_ranks(Communicator::create_local(n, &config).unwrap(), |comm| {
                        let rank = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
                        // One that is unrolled, one that walks a table.
                        let graphs = [(SMALL, &small), (odd, &odd_bits)].map(|(case, bits)| {
                            let graph = capture(&rank, || {
                                (0..5).for_each(|_| rank.call(&case, None).unwrap());
                            });
                            let nodes = fakecuda::graph();
                            assert!(is_chain(&nodes, 5), "{n} {protocol} {algorithm}: {nodes:?}");
                            (graph, case, bits)
                        });
                        for round in 0..6 {
                            let (graph, case, bits) = &graphs[round % 2];
                            let result = replayed(&rank, graph, case);
                            assert!(result == **bits, "{protocol} {round}");
                            assert!(rank.reduce(&SMALL).unwrap() == small, "eager, {round}");
                        }
                        assert_eq!(comm.error(), None);
                    });
                    nothing_is_left();
                }
            }
        }
    });
}

#[test]
fn the_steps_of_one_call_are_a_chain_too() {
    in_child("the_steps_of_one_call_are_a_chain_too", &[KERNELS], || {
        let n = 2;
        let config = Config { slab_bytes: Some(3 << 20), blocks: Some(8), ..config(n) };
        let large = case(DType::F32, Op::Sum, 600_000, 7);
        let bits = large.expected(n, &config).unwrap();
        on_ranks(Communicator::create_local(n, &config).unwrap(), |comm| {
            let rank = Rank::new(&comm, 0, large.bytes()).unwrap();
            let graph = capture(&rank, || rank.call(&large, None).unwrap());
            let nodes = fakecuda::graph();
            assert!(nodes.len() > 2 && is_chain(&nodes, nodes.len()), "{nodes:?}");
            for _ in 0..3 {
                assert!(replayed(&rank, &graph, &large) == bits);
            }
            assert_eq!(comm.error(), None);
        });
    });
}

#[test]
fn the_fused_operation_and_the_norm_by_itself_are_links_of_the_chain() {
    let name = "the_fused_operation_and_the_norm_by_itself_are_links_of_the_chain";
    in_child(name, &[KERNELS], || {
        let n = 2;
        let rows = Rows { rows: 2, width: 7168, dtype: DType::BF16, seed: 1 };
        let config = config(n);
        let bits = rows.expected(n, &config).unwrap();
        on_ranks(Communicator::create_local(n, &config).unwrap(), |comm| {
            let rank = RowsRank::new(&comm, 0, 1 << 16).unwrap();
            // The second takes two kernels: the sum, and the norm behind it.
            let graph = capture_on(&rank.stream, || {
                for fused in [true, false, true] {
                    rank.call(&rows, Form::Apart, fused).unwrap();
                }
            });
            let nodes = fakecuda::graph();
            assert!(is_chain(&nodes, 4), "{nodes:?}");
            (0..3).for_each(|_| replays_to(&rank, &graph, &rows, &bits));
            assert_eq!(comm.error(), None);
        });
    });
}

#[test]
fn what_is_not_ours_breaks_the_chain_and_neither_side_is_marked() {
    let name = "what_is_not_ours_breaks_the_chain_and_neither_side_is_marked";
    in_child(name, &[KERNELS], || {
        let comm = alone(config(1));
        let rank = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
        let kernel = foreign(&rank);
        let between: [&dyn Fn(); 3] = [
            &|| launch_foreign(&rank, &kernel, false),
            // It may start early behind a kernel that lets it, and ours does not.
            &|| launch_foreign(&rank, &kernel, true),
            &|| copy(&rank, &rank.stream),
        ];
        for (i, between) in between.into_iter().enumerate() {
            capture(&rank, || {
                for _ in 0..3 {
                    rank.call(&SMALL, None).unwrap();
                    between();
                }
            });
            let nodes = graph();
            assert_eq!(nodes.len(), 6);
            let ours = nodes.iter().filter(|node| node.ours);
            assert!(
                ours.clone().count() == 3 && !ours.into_iter().any(is_marked),
                "{i}: {nodes:?}"
            );
            // Up to it and from it on there are chains.
            capture(&rank, || {
                (0..2).for_each(|_| rank.call(&SMALL, None).unwrap());
                between();
                (0..3).for_each(|_| rank.call(&SMALL, None).unwrap());
                between();
            });
            let nodes = graph();
            assert!(is_chain(&nodes[..2], 2), "{i}: {nodes:?}");
            let [mut second, others] = [nodes[3], nodes[2]];
            assert!(!others.ours && second.after == 1 && !second.early);
            second.after = 0;
            assert!(is_chain(&[second, nodes[4], nodes[5]], 3), "{i}: {nodes:?}");
        }
        assert_eq!(comm.error(), None);
    });
}

#[test]
fn what_a_collective_copies_itself_is_not_a_link() {
    in_child("what_a_collective_copies_itself_is_not_a_link", &[KERNELS], || {
        let n = 2;
        let count = 3000;
        on_ranks(Communicator::create_local(n, &config(n)).unwrap(), |comm| {
            let rank = Rank::new(&comm, 0, n * count * 4).unwrap();
            let (input, output) = rank.pointers();
            capture(&rank, || {
                for _ in 0..2 {
                    let stream = rank.stream.as_ref().as_raw();
                    // SAFETY: both buffers have room for all ranks' elements; nothing of this is run.
                    unsafe {
                        let (from, to) = (input as *const _, output as *mut _);
                        comm.all_gather_cuda(from, to, count, DType::F32, stream, None)
                    }
                    .unwrap();
                }
            });
            let nodes = fakecuda::graph();
            let copies: Vec<_> = (0..nodes.len()).filter(|&at| !nodes[at].ours).collect();
            assert!(copies.len() == 2 && copies[0] == 0, "{nodes:?}");
            assert!(!nodes[1].early && !nodes[copies[1] - 1].lets && !nodes[copies[1] + 1].early);
        });
    });
}

#[test]
fn forks_and_joins_begin_as_usual() {
    in_child("forks_and_joins_begin_as_usual", &[KERNELS], || {
        let comm = alone(config(1));
        let rank = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
        let side = Stream::new(&rank.context, 0).unwrap();
        let [fork, join] = [0, 1].map(|_| Event::new(&rank.context).unwrap());
        let exec = capture(&rank, || {
            let entered = rank.context.enter().unwrap();
            rank.call(&SMALL, None).unwrap();
            fork.record(&entered, rank.stream.as_ref()).unwrap();
            side.as_ref().wait(&entered, &fork).unwrap();
            // Behind our kernel, but on another stream.
            rank.call_on(&side, &SMALL, Some(2)).unwrap();
            // Behind our kernel, but not behind the last one.
            rank.call(&SMALL, None).unwrap();
            join.record(&entered, side.as_ref()).unwrap();
            rank.stream.as_ref().wait(&entered, &join).unwrap();
            // Behind two.
            rank.call(&SMALL, None).unwrap();
            // Behind one again.
            rank.call(&SMALL, None).unwrap();
        });
        let nodes = graph();
        let after: Vec<u32> = nodes.iter().map(|node| node.after).collect();
        assert_eq!(after, [0, 1, 1, 2, 1]);
        assert!(
            nodes.iter().all(|node| node.ours) && !nodes[..3].iter().any(is_marked),
            "{nodes:?}"
        );
        assert!(!nodes[3].early && nodes[3].lets && nodes[4].early && !nodes[4].lets, "{nodes:?}");
        replay(&rank, &exec);
        assert_eq!(comm.error(), None);
    });
}

#[test]
fn what_waits_for_a_fork_with_nothing_in_it_stays_in_the_chain() {
    let name = "what_waits_for_a_fork_with_nothing_in_it_stays_in_the_chain";
    in_child(name, &[KERNELS], || {
        let comm = alone(config(1));
        let rank = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
        let event = Event::new(&rank.context).unwrap();
        capture(&rank, || {
            let entered = rank.context.enter().unwrap();
            rank.call(&SMALL, None).unwrap();
            event.record(&entered, rank.stream.as_ref()).unwrap();
            rank.stream.as_ref().wait(&entered, &event).unwrap();
            rank.call(&SMALL, None).unwrap();
        });
        assert!(is_chain(&graph(), 2), "{:?}", graph());
    });
}

#[test]
fn another_communicators_kernel_is_foreign() {
    in_child("another_communicators_kernel_is_foreign", &[KERNELS], || {
        let comms = [alone(config(1)), alone(config(1))];
        let [a, b] = [0, 1].map(|at| Rank::new(&comms[at], 0, SMALL.bytes()).unwrap());
        capture(&a, || {
            for _ in 0..2 {
                a.call(&SMALL, None).unwrap();
                b.call_on(&a.stream, &SMALL, None).unwrap();
            }
        });
        let nodes = graph();
        assert!(nodes.len() == 4 && !nodes.iter().any(is_marked), "{nodes:?}");
    });
}

#[test]
fn a_chain_does_not_reach_from_one_graph_into_another() {
    in_child("a_chain_does_not_reach_from_one_graph_into_another", &[KERNELS], || {
        let comm = alone(config(1));
        let rank = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
        for _ in 0..2 {
            capture(&rank, || (0..2).for_each(|_| rank.call(&SMALL, None).unwrap()));
            assert!(is_chain(&graph(), 2), "{:?}", graph());
        }
        // A foreign kernel may have the node that ours had in a graph that is gone.
        let kernel = foreign(&rank);
        for _ in 0..3 {
            capture(&rank, || rank.call(&SMALL, None).unwrap());
            capture(&rank, || {
                launch_foreign(&rank, &kernel, false);
                rank.call(&SMALL, None).unwrap();
            });
            assert!(graph().len() == 2 && !graph().iter().any(is_marked), "{:?}", graph());
        }
        // And it was not tried to change that node.
        capture(&rank, || (0..2).for_each(|_| rank.call(&SMALL, None).unwrap()));
        assert!(is_chain(&graph(), 2), "{:?}", graph());
        // Two captures at a time, each with a call of the other in between, and an eager call.
        let others = [0, 1].map(|_| Stream::new(&rank.context, 0).unwrap());
        let captures = [0, 1].map(|i| Capture::begin(&others[i], CaptureMode::Relaxed).unwrap());
        for _ in 0..2 {
            others.iter().for_each(|stream| rank.call_on(stream, &SMALL, None).unwrap());
            rank.reduce(&SMALL).unwrap();
        }
        for capture in captures {
            let _exec = capture.end().unwrap().instantiate().unwrap();
            assert!(graph().len() == 2 && !graph().iter().any(is_marked), "{:?}", graph());
        }
    });
}

/// Two calls of a rank with `more`, in a graph.
fn two_calls(more: Config) -> Vec<Node> {
    let comm = alone(more);
    let rank = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
    let exec = capture(&rank, || (0..2).for_each(|_| rank.call(&SMALL, None).unwrap()));
    let expected = SMALL.expected(1, &config(1)).unwrap();
    assert!(replayed(&rank, &exec, &SMALL) == expected && comm.error().is_none());
    graph()
}

#[test]
fn gpus_that_cannot_and_code_that_does_not_wait_are_never_launched_early() {
    let name = "gpus_that_cannot_and_code_that_does_not_wait_are_never_launched_early";
    // Not in turn in one process: the stand-in driver plays one box.
    let child = std::env::var("FAKECUDA_CHAINED").is_ok();
    for (variable, value, chained) in [
        ("FAKECUDA_CAPABILITY", "8.9", false),
        // From the family of 8.0, by whoever: a fatbin of the caller's, or PTX that the driver compiles.
        ("FAKECUDA_PTX_VERSION", "80", false),
        ("FAKECUDA_PTX_VERSION", "89", false),
        // Unknown.
        ("FAKECUDA_PTX_VERSION", "0", false),
        // An edge that the caller has made otherwise.
        ("FAKECUDA_EDGE_TYPE", "1", false),
        ("FAKECUDA_CAPABILITY", "12.0", true),
        ("FAKECUDA_PTX_VERSION", "100", true),
    ] {
        if child && std::env::var(variable).as_deref() != Ok(value) {
            continue;
        }
        let is = if chained { "1" } else { "0" };
        in_child(name, &[KERNELS, (variable, value), ("FAKECUDA_CHAINED", is)], || {
            let nodes = two_calls(config(1));
            if std::env::var("FAKECUDA_CHAINED").as_deref() == Ok("1") {
                assert!(is_chain(&nodes, 2), "{nodes:?}");
            } else {
                assert!(nodes.len() == 2 && !nodes.iter().any(is_marked), "{nodes:?}");
            }
        });
    }
}

#[test]
fn the_switch_turns_it_off() {
    in_child("the_switch_turns_it_off", &[KERNELS], || {
        let vars = |value: &'static str| {
            let look = move |name: &str| (name == "PEERLANE_PROGRAMMATIC").then(|| value.into());
            Config::from_vars(1, &Env::from_lookup(look).unwrap()).unwrap().programmatic
        };
        assert_eq!(["0", "1", ""].map(vars), [false, true, true]);
        let nodes = two_calls(Config { programmatic: false, ..config(1) });
        assert!(nodes.len() == 2 && !nodes.iter().any(is_marked), "{nodes:?}");
        assert!(is_chain(&two_calls(config(1)), 2));
    });
}

#[test]
fn ranks_may_differ_in_the_switch() {
    in_child("ranks_may_differ_in_the_switch", &[KERNELS], || {
        let n = 2;
        let id = peerlane::bootstrap::UniqueId::new().unwrap();
        let bits = SMALL.expected(n, &config(n)).unwrap();
        std::thread::scope(|scope| {
            for rank in 0..n {
                let (id, bits) = (&id, &bits);
                scope.spawn(move || {
                    let config = Config { programmatic: rank == 0, ..config(n) };
                    let comm = Communicator::create(id, n, rank, &config).unwrap();
                    let rank = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
                    let exec =
                        capture(&rank, || (0..4).for_each(|_| rank.call(&SMALL, None).unwrap()));
                    assert_eq!(is_chain(&graph(), 4), comm.rank() == 0, "{:?}", graph());
                    for _ in 0..3 {
                        assert!(replayed(&rank, &exec, &SMALL) == *bits);
                    }
                });
            }
        });
    });
}

#[test]
fn kernels_that_would_not_fit_twice_run_one_after_the_other() {
    in_child("kernels_that_would_not_fit_twice_run_one_after_the_other", &[KERNELS], || {
        // All on one GPU of 132 multiprocessors that hold 8 such blocks each: two kernels of each rank fit it, or do not.
        for (blocks, fits) in [(132, true), (133, false)] {
            let n = 4;
            let slab_bytes = Some(128 << 20);
            let config =
                Config { blocks: Some(blocks), threads: Some(256), slab_bytes, ..config(n) };
            let large = case(DType::F32, Op::Sum, 600_000, 7);
            let bits = large.expected(n, &config).unwrap();
            on_ranks(Communicator::create_local(n, &config).unwrap(), |comm| {
                let rank = Rank::new(&comm, 0, large.bytes()).unwrap();
                let exec = capture(&rank, || (0..3).for_each(|_| rank.call(&large, None).unwrap()));
                let nodes = graph();
                assert_eq!(is_chain(&nodes, nodes.len()), fits, "{blocks}: {nodes:?}");
                assert!(fits || !nodes.iter().any(is_marked), "{nodes:?}");
                assert!(replayed(&rank, &exec, &large) == bits);
            });
        }
    });
}

#[test]
fn a_driver_that_refuses_costs_the_early_start_and_no_call() {
    in_child("a_driver_that_refuses_costs_the_early_start_and_no_call", &[KERNELS], || {
        set_fail("cuGraphKernelNodeSetParams:*:*:801");
        let nodes = two_calls(config(1));
        assert!(nodes.len() == 2 && !nodes.iter().any(is_marked), "{nodes:?}");
        let comm = alone(config(1));
        let rank = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
        set_fail("cuGraphKernelNodeSetParams:*:*:801");
        capture(&rank, || (0..9).for_each(|_| rank.call(&SMALL, None).unwrap()));
        assert_eq!(calls("cuGraphKernelNodeSetParams"), 1, "it is not asked again");
        assert!(!graph().iter().any(is_marked), "{:?}", graph());
    });
}

#[test]
fn a_launch_that_fails_leaves_nobody_who_lets_others_start() {
    in_child("a_launch_that_fails_leaves_nobody_who_lets_others_start", &[KERNELS], || {
        let comm = alone(config(1));
        let rank = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
        let kernel = foreign(&rank);
        set_fail("cuLaunchKernelEx:3:*:719");
        capture(&rank, || {
            (0..2).for_each(|_| rank.call(&SMALL, None).unwrap());
            let error = rank.call(&SMALL, None).unwrap_err();
            assert!(matches!(error, Error::Device(_)), "{error}");
            launch_foreign(&rank, &kernel, true);
        });
        let nodes = graph();
        assert!(nodes.len() == 3 && is_chain(&nodes[..2], 2), "{nodes:?}");
    });
}

#[test]
fn a_captured_call_asks_the_driver_for_no_more_than_it_must() {
    in_child("a_captured_call_asks_the_driver_for_no_more_than_it_must", &[KERNELS], || {
        let comm = alone(config(1));
        let rank = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
        let occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        capture(&rank, || {
            rank.call(&SMALL, None).unwrap();
            set_fail("");
            (0..8).for_each(|_| rank.call(&SMALL, None).unwrap());
            for (name, times) in [
                ("cuLaunchKernelEx", 8),
                // Before a launch, and behind it.
                ("cuStreamGetCaptureInfo_v3", 16),
                ("cuStreamGetCaptureInfo_v2", 0),
                ("cuGraphKernelNodeSetParams_v2", 8),
                // Once per kernel, and it is the first call's.
                (occupancy, 0),
            ] {
                assert_eq!(calls(name), times, "{name}");
            }
        });
    });
}

/// The stand-in driver sees what the others rely on it to see.
#[test]
fn a_graph_with_a_hazard_is_refused() {
    in_child("a_graph_with_a_hazard_is_refused", &[KERNELS], || {
        let comm = alone(config(1));
        let rank = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
        let kernel = foreign(&rank);
        register_kernel("ours", ours);
        let built_with = CudaVersion { major: 13, minor: 0 };
        let module = Module::load(&rank.context, b"an image", built_with).unwrap();
        let ours: Function<pl_step> = module.function("ours").unwrap();
        // SAFETY: integers and raw pointers, for which zero is a value.
        let step: pl_step = unsafe { std::mem::zeroed() };
        let entered = rank.context.enter().unwrap();
        let launch = |dependents, programmatic| {
            let (shape, step) =
                (LaunchShape { programmatic, ..SHAPE }, pl_step { dependents, ..step });
            // SAFETY: it looks at nothing.
            unsafe { ours.launch(&entered, rank.stream.as_ref(), &shape, &step) }
        };
        let made = |record: &dyn Fn()| {
            let capture = Capture::begin(&rank.stream, CaptureMode::ThreadLocal).unwrap();
            record();
            capture.end().unwrap().instantiate().is_ok()
        };
        let good = |dependents, early| launch(dependents, early).unwrap();
        assert!(made(&|| (good(1, false), good(1, true), good(0, true)).2));
        // Its predecessor says nothing of what came before it.
        assert!(!made(&|| (launch_foreign(&rank, &kernel, true), good(0, true)).1));
        // Its predecessor is ours, and was not told.
        assert!(!made(&|| (good(0, false), good(0, true)).1));
        // It has none.
        assert!(!made(&|| good(0, true)));
        // Nobody is behind it; a foreign one is.
        assert!(!made(&|| good(1, false)));
        assert!(!made(&|| (good(1, false), launch_foreign(&rank, &kernel, false)).1));
        // Outside a graph.
        assert!(launch(0, true).is_err() && launch(1, false).is_err() && launch(0, false).is_ok());
        rank.stream.synchronize().unwrap();
    });
}

unsafe extern "C" fn ours(_: *const pl_step) {}
