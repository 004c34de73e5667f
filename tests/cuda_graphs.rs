//! Communicators on GPUs inside CUDA graphs, shown against the stand-in driver.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/fakecuda.rs"]
mod fakecuda;
#[path = "common/gpu.rs"]
mod gpu;
#[path = "common/sticky.rs"]
mod sticky;
#[path = "../examples/gpu_smoke/support.rs"]
mod support;

use fakecuda::{in_child, live};
use gpu::{case, config, nothing_is_left, on_ranks, soon, KERNELS};
use peerlane::comm::{Communicator, Config};
use peerlane::device::cuda::{Capture, CaptureMode, Event, GraphExec, Stream};
use peerlane::{Algorithm, DType, Error, Op, Protocol};
use std::sync::Barrier;
use std::time::{Duration, Instant};
use support::{Case, Rank};

const SMALL: Case = case(DType::BF16, Op::Sum, 7168, 6);
const LARGE: Case = case(DType::F32, Op::Sum, 60_000, 7);

fn create(n: usize) -> Vec<Communicator> {
    Communicator::create_local(n, &config(n)).unwrap()
}

/// A graph of `calls` calls.
fn capture(rank: &Rank, case: &Case, calls: usize, channel: Option<usize>) -> GraphExec {
    let capture = Capture::begin(&rank.stream, CaptureMode::ThreadLocal).unwrap();
    for _ in 0..calls {
        rank.call(case, channel).unwrap();
    }
    capture.end().unwrap().instantiate().unwrap()
}

fn launch(rank: &Rank, graph: &GraphExec) {
    graph.launch(&rank.context.enter().unwrap(), rank.stream.as_ref()).unwrap();
}

fn is_nan(bytes: &[u8]) -> bool {
    bytes.chunks_exact(2).all(|word| word == [0xff, 0x7f])
}

#[test]
fn odd_numbers_of_calls_replay_right_beside_eager_ones() {
    in_child("odd_numbers_of_calls_replay_right_beside_eager_ones", &[KERNELS], || {
        let n = 3;
        for protocol in [Protocol::Ll, Protocol::Sentinel, Protocol::Flagged] {
            let config = Config {
                protocol: Some(protocol),
                algorithm: Some(Algorithm::TwoShot),
                ..config(n)
            };
            let (small, large) =
                (SMALL.expected(n, &config).unwrap(), LARGE.expected(n, &config).unwrap());
            on_ranks(Communicator::create_local(n, &config).unwrap(), |comm| {
                let rank = Rank::new(&comm, 0, LARGE.bytes()).unwrap();
                // Grids differ between the graphs, and between a graph and the eager calls.
                let graphs = [
                    (capture(&rank, &SMALL, 1, None), SMALL, &small),
                    (capture(&rank, &LARGE, 3, None), LARGE, &large),
                    (capture(&rank, &SMALL, 5, Some(2)), SMALL, &small),
                ];
                for round in 0..24 {
                    let (graph, case, expected) = &graphs[round % 3];
                    rank.fill(case).unwrap();
                    launch(&rank, graph);
                    rank.stream.synchronize().unwrap();
                    assert!(rank.result(case).unwrap() == **expected, "{protocol}, replay {round}");
                    if round % 4 == 1 {
                        assert!(rank.reduce(&SMALL).unwrap() == small, "{protocol}, eager {round}");
                    }
                }
                assert_eq!(comm.error(), None);
            });
            nothing_is_left();
        }
    });
}

#[test]
fn a_graph_replays_while_another_is_captured() {
    in_child("a_graph_replays_while_another_is_captured", &[KERNELS], || {
        let n = 2;
        let expected = SMALL.expected(n, &config(n)).unwrap();
        on_ranks(create(n), |comm| {
            let rank = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
            let first = capture(&rank, &SMALL, 1, None);
            let other = Stream::new(&rank.context, 0).unwrap();
            // Under the strictest mode: whatever the library did beside launching would break the capture.
            let capturing = Capture::begin(&other, CaptureMode::Relaxed).unwrap();
            rank.call_on(&other, &SMALL, None).unwrap();
            rank.fill(&SMALL).unwrap();
            launch(&rank, &first);
            rank.stream.synchronize().unwrap();
            assert!(rank.result(&SMALL).unwrap() == expected);
            rank.call_on(&other, &SMALL, None).unwrap();
            let second = capturing.end().unwrap().instantiate().unwrap();
            rank.fill(&SMALL).unwrap();
            launch(&rank, &second);
            launch(&rank, &first);
            rank.stream.synchronize().unwrap();
            assert!(rank.result(&SMALL).unwrap() == expected);
            assert_eq!(comm.error(), None);
        });
        nothing_is_left();
    });
}

#[test]
fn a_capture_may_fork_and_join() {
    in_child("a_capture_may_fork_and_join", &[KERNELS], || {
        let n = 2;
        let expected = SMALL.expected(n, &config(n)).unwrap();
        on_ranks(create(n), |comm| {
            let rank = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
            let side = Stream::new(&rank.context, 0).unwrap();
            let (fork, join) =
                (Event::new(&rank.context).unwrap(), Event::new(&rank.context).unwrap());
            // Not global: the other rank's thread may still allocate, which a global capture forbids to all threads.
            let capture = Capture::begin(&rank.stream, CaptureMode::ThreadLocal).unwrap();
            {
                let entered = rank.context.enter().unwrap();
                fork.record(&entered, rank.stream.as_ref()).unwrap();
                side.as_ref().wait(&entered, &fork).unwrap();
                rank.call_on(&side, &SMALL, None).unwrap();
                join.record(&entered, side.as_ref()).unwrap();
                rank.stream.as_ref().wait(&entered, &join).unwrap();
            }
            rank.call(&SMALL, None).unwrap();
            let graph = capture.end().unwrap().instantiate().unwrap();
            rank.fill(&SMALL).unwrap();
            launch(&rank, &graph);
            rank.stream.synchronize().unwrap();
            assert!(rank.result(&SMALL).unwrap() == expected);
        });
        nothing_is_left();
    });
}

#[test]
fn replays_on_channels_of_their_own_may_overlap() {
    in_child("replays_on_channels_of_their_own_may_overlap", &[KERNELS], || {
        let n = 2;
        let expected = SMALL.expected(n, &config(n)).unwrap();
        let together = Barrier::new(n);
        on_ranks(create(n), |comm| {
            let target = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
            let draft = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
            let graphs = [
                (&target, capture(&target, &SMALL, 1, Some(2))),
                (&draft, capture(&draft, &SMALL, 1, Some(3))),
            ];
            for rank in [&target, &draft] {
                rank.fill(&SMALL).unwrap();
            }
            together.wait();
            // Launched in opposite orders, each on a stream of its own: on one channel that would be an error.
            for i in 0..2 {
                let (rank, graph) = &graphs[(i + comm.rank()) % 2];
                launch(rank, graph);
            }
            for rank in [&target, &draft] {
                rank.stream.synchronize().unwrap();
                assert!(rank.result(&SMALL).unwrap() == expected);
            }
            assert_eq!(comm.error(), None);
        });
    });
}

#[test]
fn replays_that_meet_on_one_channel_are_an_error_on_all_ranks() {
    in_child("replays_that_meet_on_one_channel_are_an_error_on_all_ranks", &[KERNELS], || {
        let n = 2;
        let met = Barrier::new(n);
        let expected = SMALL.expected(n, &config(n)).unwrap();
        on_ranks(create(n), |comm| {
            let [a, b] = [0, 1].map(|_| Rank::new(&comm, 0, SMALL.bytes()).unwrap());
            let graphs = [capture(&a, &SMALL, 1, None), capture(&b, &SMALL, 1, None)];
            a.fill(&SMALL).unwrap();
            b.fill(&SMALL).unwrap();
            if comm.rank() == 0 {
                // Neither can finish without the other rank, so the second finds the first.
                launch(&a, &graphs[0]);
                launch(&b, &graphs[1]);
                soon("the launches did not meet", || comm.error().is_some());
            }
            met.wait();
            launch(&a, &graphs[0]);
            a.stream.synchronize().unwrap();
            b.stream.synchronize().unwrap();
            soon("the other rank is not told", || comm.error().is_some());
            let error = comm.error();
            met.wait();
            assert_eq!(error, Some(Error::Concurrent { rank: 0 }));
            // What rank 0 had sent before may have been enough for the other rank's step.
            let output = a.result(&SMALL).unwrap();
            assert!(is_nan(&output) || (comm.rank() == 1 && output == expected));
        });
    });
}

#[test]
fn a_replay_after_abort_or_destroy_fills_its_output_and_returns() {
    let name = "a_replay_after_abort_or_destroy_fills_its_output_and_returns";
    in_child(name, &[KERNELS], || {
        sticky::register_kernels();
        for round in 0..10 {
            let destroy = round % 2 == 0;
            let ready = Barrier::new(2);
            sticky::after_the_end(false);
            on_ranks(create(2), |comm| {
                let (graph, context, stream, buffers) = {
                    let rank = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
                    rank.fill(&SMALL).unwrap();
                    let graph = capture(&rank, &SMALL, 3, None);
                    launch(&rank, &graph);
                    rank.stream.synchronize().unwrap();
                    assert!(!is_nan(&rank.result(&SMALL).unwrap()));
                    let stream = Stream::new(&rank.context, 0).unwrap();
                    (graph, rank.context.clone(), stream, rank.into_buffers())
                };
                ready.wait();
                sticky::after_the_end(true);
                let kept = if destroy {
                    comm.destroy().unwrap();
                    None
                } else {
                    comm.abort();
                    assert!(matches!(comm.error(), Some(Error::Aborted { .. })));
                    Some(comm)
                };
                let start = Instant::now();
                graph.launch(&context.enter().unwrap(), stream.as_ref()).unwrap();
                stream.synchronize().unwrap();
                assert!(start.elapsed() < Duration::from_secs(20));
                let mut bytes = vec![0; SMALL.bytes()];
                buffers.1.read(&stream, 0, &mut bytes).unwrap();
                assert!(is_nan(&bytes), "after {}", if destroy { "destroy" } else { "abort" });
                drop(kept);
                // The graph is all that keeps the state, and the kernels, alive.
                assert!(live()[7] > 0 && live()[12] > 0);
            });
            nothing_is_left();
        }
    });
}

#[test]
fn a_rank_that_left_ends_the_replays_of_the_others() {
    in_child("a_rank_that_left_ends_the_replays_of_the_others", &[KERNELS], || {
        let n = 3;
        let together = Barrier::new(n);
        on_ranks(create(n), |comm| {
            let rank = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
            rank.fill(&SMALL).unwrap();
            let graph = capture(&rank, &SMALL, 1, None);
            launch(&rank, &graph);
            rank.stream.synchronize().unwrap();
            together.wait();
            if comm.rank() == 2 {
                let buffers = rank.into_buffers();
                comm.destroy().unwrap();
                together.wait();
                drop(buffers);
                return;
            }
            let start = Instant::now();
            launch(&rank, &graph);
            rank.stream.synchronize().unwrap();
            let (error, elapsed) = (comm.error(), start.elapsed());
            let output = rank.result(&SMALL).unwrap();
            together.wait();
            assert_eq!(error, Some(Error::RankLeft { rank: 2 }));
            assert!(elapsed < Duration::from_secs(20) && is_nan(&output));
        });
        nothing_is_left();
    });
}

#[test]
fn graphs_let_go_of_what_they_kept() {
    in_child("graphs_let_go_of_what_they_kept", &[KERNELS], || {
        let comm = create(1).swap_remove(0);
        let rank = Rank::new(&comm, 0, SMALL.bytes()).unwrap();
        let graphs: Vec<_> = (0..20).map(|_| capture(&rank, &SMALL, 4, None)).collect();
        assert_eq!(live()[12], 20, "one object per graph, however many calls it has");
        drop(graphs);
        soon("objects are left", || live()[12] == 0);
    });
}
