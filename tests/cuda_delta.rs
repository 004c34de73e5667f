//! Sums over host memory, which go by words that differ from the last ones, shown against the stand-in driver.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/fakecuda.rs"]
mod fakecuda;
#[path = "common/gpu.rs"]
mod gpu;
#[path = "../examples/gpu_smoke/support.rs"]
mod support;

use fakecuda::{in_child, live};
use gpu::{case, config, nothing_is_left, on_ranks, KERNELS};
use peerlane::comm::{Communicator, Config};
use peerlane::device::cuda::{Capture, CaptureMode, DeviceMemory, GraphExec, Stream};
use peerlane::{Algorithm, DType, Lane, Op, Protocol};
use std::sync::Barrier;
use support::{context, Case};

fn staged(n: usize, algorithm: Algorithm) -> Config {
    Config {
        lane: Lane::Host,
        algorithm: Some(algorithm),
        protocol: Some(Protocol::Sentinel),
        ..config(n)
    }
}

/// Buffers that begin `shift` bytes into memory of their own.
struct Shifted<'a> {
    comm: &'a Communicator,
    stream: Stream,
    input: DeviceMemory,
    output: DeviceMemory,
    shift: usize,
}

impl<'a> Shifted<'a> {
    fn new(comm: &'a Communicator, shift: usize, bytes: usize) -> Self {
        let context = context(0).unwrap();
        let memory = || DeviceMemory::new(&context, bytes + 16).unwrap();
        let stream = Stream::new(&context, 0).unwrap();
        Shifted { comm, stream, input: memory(), output: memory(), shift }
    }

    fn fill(&self, case: &Case) {
        self.input.write(&self.stream, self.shift, &case.data(self.comm.rank())).unwrap();
        self.output.write(&self.stream, 0, &vec![0x5a; case.bytes() + 16]).unwrap();
    }

    fn call(&self, case: &Case, in_place: bool) {
        let shift = self.shift as u64;
        let input = (self.input.ptr() + shift) as *const _;
        let output = if in_place { self.input.ptr() } else { self.output.ptr() } + shift;
        let Case { dtype, op, count, .. } = *case;
        let stream = self.stream.as_ref().as_raw();
        // SAFETY: both buffers are device memory of at least `count` elements, kept until the stream is synchronised.
        unsafe {
            self.comm.all_reduce_cuda(input, output as *mut _, count, dtype, op, stream, None)
        }
        .unwrap();
    }

    fn result(&self, case: &Case, in_place: bool) -> Vec<u8> {
        self.stream.synchronize().unwrap();
        assert!(self.comm.error().is_none(), "{:?}", self.comm.error());
        let from = if in_place { &self.input } else { &self.output };
        let mut bytes = vec![0; case.bytes() + 16];
        from.read(&self.stream, 0, &mut bytes).unwrap();
        if !in_place {
            let (before, after) = (&bytes[..self.shift], &bytes[self.shift + case.bytes()..]);
            assert!(before.iter().chain(after).all(|byte| *byte == 0x5a), "wrote outside");
        }
        bytes[self.shift..][..case.bytes()].to_vec()
    }
}

/// Every call again, so that words come that have been there before; between calls that go by `sentinel`, and of several steps.
#[test]
fn sums_have_the_bits_of_the_cpu_wherever_each_ranks_buffers_begin() {
    in_child("sums_have_the_bits_of_the_cpu_wherever_each_ranks_buffers_begin", &[KERNELS], || {
        let cases = [
            case(DType::BF16, Op::Sum, 7168, 1),
            case(DType::BF16, Op::Sum, 7167, 2),
            case(DType::F32, Op::Sum, 1000, 3),
            case(DType::F16, Op::Avg, 512, 4),
            case(DType::BF16, Op::Sum, 300_000, 5),
            case(DType::F16, Op::Sum, 8, 6),
        ];
        for (n, algorithm) in
            [(2, Algorithm::OneShot), (3, Algorithm::TwoShot), (3, Algorithm::OneShot)]
        {
            let config = staged(n, algorithm);
            let expected = cases.map(|case| case.expected(n, &config).unwrap());
            let ready = Barrier::new(n);
            on_ranks(Communicator::create_local(n, &config).unwrap(), |comm| {
                // Taking and giving back memory waits for the whole GPU, and so for ranks that wait for this one.
                let shifts = [0, 4, 4 * comm.rank()];
                let ranks = shifts.map(|shift| Shifted::new(&comm, shift, 600_000));
                ready.wait();
                for rank in &ranks {
                    let shift = rank.shift;
                    for (case, want) in cases.iter().zip(&expected) {
                        for in_place in [false, false, true] {
                            rank.fill(case);
                            rank.call(case, in_place);
                            let said = format!("{case:?} shifted by {shift}, in place: {in_place}");
                            assert!(rank.result(case, in_place) == *want, "{said}");
                        }
                    }
                    let capture = Capture::begin(&rank.stream, CaptureMode::ThreadLocal).unwrap();
                    (0..3).for_each(|_| rank.call(&cases[0], false));
                    let graph = capture.end().unwrap().instantiate().unwrap();
                    for _ in 0..3 {
                        rank.fill(&cases[0]);
                        launch(&graph, &rank.stream);
                        assert!(rank.result(&cases[0], false) == expected[0], "replayed, {shift}");
                    }
                }
                ready.wait();
                drop(ranks);
                comm.destroy().unwrap();
            });
        }
        nothing_is_left();
    });
}

/// Large slabs have room for steps of more packs than the short path takes, which has their places in halves of words.
#[test]
fn sums_of_more_packs_than_the_short_path_takes_are_several_steps() {
    in_child("sums_of_more_packs_than_the_short_path_takes_are_several_steps", &[KERNELS], || {
        let case = case(DType::BF16, Op::Sum, 1_200_000, 1);
        // A launch of so many blocks has threads for 98,304 packs in pieces of a third.
        let (slab_bytes, blocks) = (Some(256 << 20), Some(64));
        let config = Config { slab_bytes, blocks, ..staged(3, Algorithm::TwoShot) };
        let expected = case.expected(3, &config).unwrap();
        on_ranks(Communicator::create_local(3, &config).unwrap(), |comm| {
            let rank = Shifted::new(&comm, 0, case.bytes());
            rank.fill(&case);
            rank.call(&case, false);
            assert!(rank.result(&case, false) == expected);
            drop(rank);
            comm.destroy().unwrap();
        });
    });
}

fn launch(graph: &GraphExec, stream: &Stream) {
    graph.launch(&context(0).unwrap().enter().unwrap(), stream.as_ref()).unwrap();
}

/// What it reads and writes before it has seen that all is over is as alive as the graph.
#[test]
fn a_replay_after_destroy_fills_its_output_wherever_that_begins() {
    in_child("a_replay_after_destroy_fills_its_output_wherever_that_begins", &[KERNELS], || {
        const CASE: Case = case(DType::BF16, Op::Sum, 7168, 7);
        for shift in [0, 4] {
            let ready = Barrier::new(2);
            let comms = Communicator::create_local(2, &staged(2, Algorithm::OneShot)).unwrap();
            on_ranks(comms, |comm| {
                let rank = Shifted::new(&comm, shift, CASE.bytes());
                rank.fill(&CASE);
                let capture = Capture::begin(&rank.stream, CaptureMode::ThreadLocal).unwrap();
                rank.call(&CASE, false);
                let graph = capture.end().unwrap().instantiate().unwrap();
                launch(&graph, &rank.stream);
                rank.result(&CASE, false);
                let Shifted { stream, output, input, .. } = rank;
                ready.wait();
                comm.destroy().unwrap();
                launch(&graph, &stream);
                stream.synchronize().unwrap();
                let mut bytes = vec![0; CASE.bytes()];
                output.read(&stream, shift, &mut bytes).unwrap();
                assert!(bytes.chunks_exact(2).all(|word| word == [0xff, 0x7f]), "{shift}");
                // The graph is all that keeps the state, and with it that memory, alive.
                assert!(live()[7] > 0);
                drop((graph, input));
            });
            nothing_is_left();
        }
    });
}
