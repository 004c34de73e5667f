//! The fused operation on GPUs, eager and in CUDA graphs, shown against the stand-in driver.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/fakecuda.rs"]
mod fakecuda;
#[path = "common/gpu.rs"]
mod gpu;
#[path = "../examples/gpu_smoke/rows.rs"]
mod rows;
#[path = "common/sticky.rs"]
mod sticky;
#[path = "../examples/gpu_smoke/support.rs"]
mod support;

use fakecuda::in_child;
use gpu::{config, nothing_is_left, on_ranks, KERNELS};
use peerlane::comm::{group_end, group_start, Communicator, Config};
use peerlane::device::cuda::{Capture, CaptureMode, GraphExec};
use peerlane::schedule::{self, Islands};
use peerlane::{Algorithm, DType, Direction, Error, Protocol};
use rows::{differs, Form, Rows, RowsRank, SPECIAL};
use std::sync::Barrier;

const WAYS: [(Protocol, Direction); 4] = [
    (Protocol::Ll, Direction::Push),
    (Protocol::Sentinel, Direction::Push),
    (Protocol::Flagged, Direction::Push),
    (Protocol::Flagged, Direction::Pull),
];

const fn call(rows: usize, width: usize, dtype: DType, seed: u64) -> Rows {
    Rows { rows, width, dtype, seed }
}

fn capture(rank: &RowsRank, call: &Rows, fused: bool, calls: usize) -> GraphExec {
    let capture = Capture::begin(&rank.stream, CaptureMode::ThreadLocal).unwrap();
    for _ in 0..calls {
        rank.call(call, Form::Apart, fused).unwrap();
    }
    capture.end().unwrap().instantiate().unwrap()
}

fn launch(rank: &RowsRank, graph: &GraphExec) {
    graph.launch(&rank.context.enter().unwrap(), rank.stream.as_ref()).unwrap();
    rank.stream.synchronize().unwrap();
}

fn is_nan(results: &[Vec<u8>; 2]) -> bool {
    results.iter().all(|bytes| bytes.chunks_exact(2).all(|word| word == [0xff, 0x7f]))
}

#[test]
fn every_schedule_and_protocol_gives_the_bits_of_the_cpu_eager_and_replayed() {
    in_child(
        "every_schedule_and_protocol_gives_the_bits_of_the_cpu_eager_and_replayed",
        &[KERNELS],
        || {
            for n in 1..=9usize {
                let halves = [(0..n.div_ceil(2)).collect(), (n.div_ceil(2)..n).collect::<Vec<_>>()];
                let islands = match n {
                    1 => Islands::single(1).unwrap(),
                    _ => Islands::new(n, halves.to_vec()).unwrap(),
                };
                // A row of a model fits in every way.
                let slab_bytes = Some(16 << 20);
                let base = Config { islands: Some(islands.clone()), slab_bytes, ..config(n) };
                let calls = [
                    call(2, 7168, DType::BF16, 1),
                    call(5, 264, DType::F16, 2),
                    call(700, 8, DType::BF16, 3),
                ];
                let expected = calls.map(|call| call.expected(n, &base).unwrap());
                for &algorithm in Algorithm::ALL.iter().filter(|&&a| schedule::exists(a, &islands))
                {
                    for (protocol, direction) in WAYS {
                        let config = Config {
                            algorithm: Some(algorithm),
                            protocol: Some(protocol),
                            direction: Some(direction),
                            ..base.clone()
                        };
                        let said = format!("n {n} {algorithm} {protocol} {direction}");
                        let comms = Communicator::create_local(n, &config).unwrap();
                        let together = Barrier::new(n);
                        on_ranks(comms, |comm| {
                            let rank = RowsRank::new(&comm, 0, 1 << 16).unwrap();
                            for (i, (call, bits)) in calls.iter().zip(&expected).enumerate() {
                                let forms =
                                    [Form::Apart, Form::BothInPlace, Form::ResidualOverInput];
                                for (form, fused) in [(forms[i], true), (forms[2 - i], false)] {
                                    rank.fill(call).unwrap();
                                    rank.call(call, form, fused).unwrap();
                                    rank.stream.synchronize().unwrap();
                                    assert_eq!(comm.error(), None, "{said}");
                                    let got = rank.results(call, form).unwrap();
                                    differs(&got, bits, call, &said).unwrap();
                                }
                                rank.fill(call).unwrap();
                                let graph = capture(&rank, call, i != 1, 3);
                                together.wait();
                                for _ in 0..3 {
                                    launch(&rank, &graph);
                                    assert_eq!(comm.error(), None, "{said}");
                                    let got = rank.results(call, Form::Apart).unwrap();
                                    differs(&got, bits, call, &said).unwrap();
                                }
                                together.wait();
                            }
                        });
                    }
                }
            }
            nothing_is_left();
        },
    );
}

/// NaNs, infinities, subnormals, zeros of both signs and ties, also by the short path of one phase and of two.
#[test]
fn special_values_give_the_bits_of_the_cpu() {
    in_child("special_values_give_the_bits_of_the_cpu", &[KERNELS], || {
        for dtype in [DType::BF16, DType::F16] {
            let call = call(3, 264, dtype, SPECIAL);
            for n in [1, 2, 3, 8] {
                let expected = call.expected(n, &config(n)).unwrap();
                let [normed, residual_out] = &expected;
                assert!(normed != residual_out && !is_nan(&expected));
                for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
                    for protocol in [Protocol::Ll, Protocol::Sentinel] {
                        let config = Config {
                            algorithm: Some(algorithm),
                            protocol: Some(protocol),
                            ..config(n)
                        };
                        on_ranks(Communicator::create_local(n, &config).unwrap(), |comm| {
                            let rank = RowsRank::new(&comm, 0, call.bytes()).unwrap();
                            rank.fill(&call).unwrap();
                            rank.call(&call, Form::Apart, true).unwrap();
                            rank.stream.synchronize().unwrap();
                            assert_eq!(comm.error(), None);
                            let got = rank.results(&call, Form::Apart).unwrap();
                            let said = format!("n {n} {algorithm} {protocol}");
                            differs(&got, &expected, &call, &said).unwrap();
                        });
                    }
                }
            }
        }
    });
}

#[test]
fn one_thread_drives_all_ranks_in_a_group() {
    in_child("one_thread_drives_all_ranks_in_a_group", &[KERNELS], || {
        let n = 3;
        let comms = Communicator::create_local(n, &config(n)).unwrap();
        let call = call(4, 264, DType::BF16, 5);
        let expected = call.expected(n, &config(n)).unwrap();
        let ranks: Vec<_> =
            comms.iter().map(|comm| RowsRank::new(comm, 0, call.bytes()).unwrap()).collect();
        for fused in [true, false] {
            ranks.iter().for_each(|rank| rank.fill(&call).unwrap());
            group_start();
            ranks.iter().for_each(|rank| rank.call(&call, Form::Apart, fused).unwrap());
            group_end().unwrap();
            for rank in &ranks {
                rank.stream.synchronize().unwrap();
                let got = rank.results(&call, Form::Apart).unwrap();
                differs(&got, &expected, &call, "in a group").unwrap();
            }
        }
    });
}

#[test]
fn replays_after_abort_or_destroy_fill_both_outputs() {
    in_child("replays_after_abort_or_destroy_fill_both_outputs", &[KERNELS], || {
        let (n, call) = (2, call(3, 264, DType::F16, 6));
        let config = config(n);
        sticky::register_kernels();
        for aborts in [true, false] {
            sticky::after_the_end(false);
            let together = Barrier::new(n);
            on_ranks(Communicator::create_local(n, &config).unwrap(), |comm| {
                let rank = RowsRank::new(&comm, 0, call.bytes()).unwrap();
                let stream_and_graphs: Vec<_> = [true, false]
                    .map(|fused| {
                        rank.fill(&call).unwrap();
                        capture(&rank, &call, fused, 1)
                    })
                    .into_iter()
                    .collect();
                let replay_all = |rank: &RowsRank| {
                    for graph in &stream_and_graphs {
                        rank.fill(&call).unwrap();
                        launch(rank, graph);
                        assert!(is_nan(&rank.results(&call, Form::Apart).unwrap()));
                    }
                };
                together.wait();
                sticky::after_the_end(true);
                if aborts {
                    if comm.rank() == 0 {
                        comm.abort();
                    }
                    while comm.error().is_none() {
                        std::thread::yield_now();
                    }
                    replay_all(&rank);
                    let refused = rank.call(&call, Form::Apart, true);
                    assert_eq!(refused, Err(Error::Aborted { rank: 0 }));
                    together.wait();
                    return;
                }
                // A graph holds the buffers' addresses, so they are kept beyond the communicator.
                let context = rank.context.clone();
                let buffers = rank.into_buffers();
                let stream = peerlane::device::cuda::Stream::new(&context, 0).unwrap();
                comm.destroy().unwrap();
                for graph in &stream_and_graphs {
                    for buffer in &buffers[3..] {
                        buffer.write(&stream, 0, &vec![0x5a; call.bytes()]).unwrap();
                    }
                    graph.launch(&context.enter().unwrap(), stream.as_ref()).unwrap();
                    stream.synchronize().unwrap();
                    let mut results = [vec![0; call.bytes()], vec![0; call.bytes()]];
                    for (result, buffer) in results.iter_mut().zip(&buffers[3..]) {
                        buffer.read(&stream, 0, result).unwrap();
                    }
                    assert!(is_nan(&results));
                }
                together.wait();
            });
        }
    });
}
