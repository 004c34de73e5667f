//! Graphs of a rank's calls over the stand-in driver, and what stands between them.

// Each test binary that includes this uses its own share of it.
#![allow(dead_code)]

use crate::fakecuda::{register_kernel, Node};
use crate::rows::{differs, Form, Rows, RowsRank};
use crate::support::{Case, Rank};
use peerlane::comm::{Communicator, Config};
use peerlane::device::cuda::{
    Capture, CaptureMode, Context, CudaVersion, Function, GraphExec, LaunchShape, Module, Stream,
};

/// One rank: what its kernels do is not the point.
pub fn alone(more: Config) -> Communicator {
    Communicator::create_local(1, &more).unwrap().swap_remove(0)
}

/// What `record` puts on the stream, as a graph.
pub fn capture_on(stream: &Stream, record: impl FnOnce()) -> GraphExec {
    let capture = Capture::begin(stream, CaptureMode::ThreadLocal).unwrap();
    record();
    capture.end().unwrap().instantiate().unwrap()
}

/// The same of the rank's stream.
pub fn capture(rank: &Rank, record: impl FnOnce()) -> GraphExec {
    capture_on(&rank.stream, record)
}

fn replay_on(context: &Context, stream: &Stream, graph: &GraphExec) {
    graph.launch(&context.enter().unwrap(), stream.as_ref()).unwrap();
    stream.synchronize().unwrap();
}

pub fn replay(rank: &Rank, graph: &GraphExec) {
    replay_on(&rank.context, &rank.stream, graph);
}

/// What a replay makes of the rank's data, if it ends with a call of `case`.
pub fn replayed(rank: &Rank, graph: &GraphExec, case: &Case) -> Vec<u8> {
    rank.fill(case).unwrap();
    replay(rank, graph);
    rank.result(case).unwrap()
}

/// A replay of a graph that ends with a call of `rows`, not over its inputs, must make `expected` of the rank's data.
pub fn replays_to(rank: &RowsRank, graph: &GraphExec, rows: &Rows, expected: &[Vec<u8>; 2]) {
    rank.fill(rows).unwrap();
    replay_on(&rank.context, &rank.stream, graph);
    differs(&rank.results(rows, Form::Apart).unwrap(), expected, rows, "replay").unwrap();
}

/// Kernels of ours in a row, as many as `count`, each but the first early behind one that lets it.
pub fn is_chain(nodes: &[Node], count: usize) -> bool {
    let chained = |(at, node): (usize, &Node)| {
        (node.ours, node.early, node.lets, node.after)
            == (true, at > 0, at + 1 < count, u32::from(at > 0))
    };
    nodes.len() == count && nodes.iter().enumerate().all(chained)
}

pub fn is_marked(node: &Node) -> bool {
    node.early || node.lets
}

unsafe extern "C" fn nothing(_: *const [u64; 2]) {}

pub const SHAPE: LaunchShape = LaunchShape::plain(1, 32);

/// A kernel that is not ours.
pub fn foreign(rank: &Rank) -> Function<[u64; 2]> {
    register_kernel("foreign", nothing);
    let built_with = CudaVersion { major: 13, minor: 0 };
    Module::load(&rank.context, b"an image", built_with).unwrap().function("foreign").unwrap()
}

pub fn launch_foreign(rank: &Rank, kernel: &Function<[u64; 2]>, programmatic: bool) {
    let shape = LaunchShape { programmatic, ..SHAPE };
    // SAFETY: it looks at nothing.
    unsafe { kernel.launch(&rank.context.enter().unwrap(), rank.stream.as_ref(), &shape, &[0; 2]) }
        .unwrap();
}
