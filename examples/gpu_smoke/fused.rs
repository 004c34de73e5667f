//! The fused operation on a GPU, eager and in graphs, over every schedule and protocol, and its unfused twin.

use crate::check;
use crate::rows::{differs, Form, Rows, RowsRank, SPECIAL};
use crate::support::on_ranks;
use crate::virtual_ranks::{config, WAYS};
use peerlane::comm::{Communicator, Config};
use peerlane::device::cuda::{Capture, CaptureMode, GraphExec};
use peerlane::schedule::{self, Islands};
use peerlane::{Algorithm, DType, Error};
use std::sync::Barrier;

/// Calls in a graph and replays of it: odd, so that halves alternate between replays.
const CALLS: usize = 3;
const REPLAYS: usize = 5;

/// Rows of a model, of a few packs, and of one pack, which is fewer than there are pieces; more rows than blocks, and than
/// a step has flags; rows that no thread holds in registers; rows of an odd number of packs that are few enough for the
/// short path; and values that arithmetic treats in its own way.
fn calls() -> Vec<Rows> {
    let mut calls = Vec::new();
    for dtype in [DType::BF16, DType::F16] {
        for (rows, width) in
            [(1, 7168), (8, 7168), (33, 264), (700, 8), (3, 10_240), (2, 264), (3, 8)]
        {
            calls.push(Rows { rows, width, dtype, seed: calls.len() as u64 });
        }
        calls.push(Rows { rows: 3, width: 264, dtype, seed: SPECIAL });
    }
    calls
}

pub fn run() {
    // Keeps the kernels loaded from one communicator to the next.
    let keeper =
        config(1).and_then(|c| Communicator::create_local(1, &c).map_err(|e| e.to_string()));
    if let Err(why) = &keeper {
        return check("a communicator of one rank", || Err(why.clone()));
    }
    for n in 1..=9 {
        let mut partitions = vec![Islands::single(n)];
        if n > 1 {
            let half = n.div_ceil(2);
            partitions.push(Islands::new(n, vec![(0..half).collect(), (half..n).collect()]));
        }
        for islands in partitions.into_iter().flatten() {
            check(&format!("fused n={n} islands {islands}"), || every_way(n, &islands));
        }
    }
}

fn every_way(n: usize, islands: &Islands) -> Result<String, String> {
    let base = Config { islands: Some(islands.clone()), ..config(n)? };
    let known = calls()
        .into_iter()
        .map(|call| call.expected(n, &base).map(|bits| (call, bits)).map_err(|e| e.to_string()))
        .collect::<Result<Vec<_>, String>>()?;
    let most = known.iter().map(|(call, _)| call.bytes()).max().unwrap_or(0);
    let mut ways = 0;
    let exists = |a: &&Algorithm| schedule::exists(**a, islands);
    for &algorithm in Algorithm::ALL.iter().filter(exists) {
        for (protocol, direction) in WAYS {
            let config = Config {
                algorithm: Some(algorithm),
                protocol: Some(protocol),
                direction: Some(direction),
                ..base.clone()
            };
            let comms = Communicator::create_local(n, &config)
                .map_err(|e| format!("{algorithm} {protocol} {direction}: {e}"))?;
            let together = Barrier::new(n);
            on_ranks(comms, |comm| {
                let rank = RowsRank::new(comm, 0, most);
                together.wait();
                let rank = rank?;
                let mut outcome = Ok(());
                for (call, bits) in &known {
                    for (form, fused) in [
                        (Form::Apart, true),
                        (Form::BothInPlace, true),
                        (Form::ResidualOverInput, true),
                        (Form::BothInPlace, false),
                    ] {
                        outcome = outcome.and(eager(&rank, call, form, fused, bits));
                    }
                    for fused in [true, false] {
                        let graph = capture(&rank, call, fused);
                        // What allocates or frees may wait for the whole GPU, hence for kernels that wait for this rank.
                        together.wait();
                        let replayed = graph
                            .as_ref()
                            .map_err(Clone::clone)
                            .and_then(|graph| replay(&rank, graph, call, fused, bits));
                        together.wait();
                        outcome = outcome.and(replayed);
                    }
                }
                outcome
            })
            .map_err(|e| format!("{algorithm} {protocol} {direction}: {e}"))?;
            ways += 1;
        }
    }
    Ok(format!(
        "{ways} ways, {} calls each, fused and not, eager and {REPLAYS} replays of {CALLS}",
        known.len()
    ))
}

fn finished(rank: &RowsRank) -> Result<(), Error> {
    rank.stream.synchronize()?;
    rank.comm.error().map_or(Ok(()), Err)
}

fn eager(
    rank: &RowsRank,
    call: &Rows,
    form: Form,
    fused: bool,
    bits: &[Vec<u8>; 2],
) -> Result<(), Error> {
    rank.fill(call)?;
    rank.call(call, form, fused)?;
    finished(rank)?;
    let how = format!("eager, {form:?}, fused {fused}");
    differs(&rank.results(call, form)?, bits, call, &how)
}

fn capture(rank: &RowsRank, call: &Rows, fused: bool) -> Result<GraphExec, Error> {
    rank.fill(call)?;
    let capture = Capture::begin(&rank.stream, CaptureMode::ThreadLocal)?;
    for _ in 0..CALLS {
        rank.call(call, Form::Apart, fused)?;
    }
    capture.end()?.instantiate()
}

fn replay(
    rank: &RowsRank,
    graph: &GraphExec,
    call: &Rows,
    fused: bool,
    bits: &[Vec<u8>; 2],
) -> Result<(), Error> {
    for _ in 0..REPLAYS {
        graph.launch(&rank.context.enter()?, rank.stream.as_ref())?;
    }
    finished(rank)?;
    let how = format!("replayed, fused {fused}");
    differs(&rank.results(call, Form::Apart)?, bits, call, &how)
}
