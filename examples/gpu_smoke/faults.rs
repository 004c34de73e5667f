//! A rank that does not come, an abort, a destroy under a graph: everybody gets an error, and the GPU stays usable.

use crate::check;
use crate::support::{on_ranks, Case, Rank};
use crate::virtual_ranks::config;
use peerlane::comm::{Communicator, Config};
use peerlane::device::cuda::{Capture, CaptureMode, GraphExec, Stream};
use peerlane::{DType, Error, Op};
use std::sync::Barrier;
use std::time::{Duration, Instant};

const CASE: Case = Case { dtype: DType::BF16, op: Op::Sum, count: 7168, seed: 5 };
const ROUNDS: usize = 20;

pub fn run() {
    check("a withheld rank ends in the record on all others, 20 of 20", || {
        (0..ROUNDS).try_for_each(|round| {
            withheld(3 + round % 4).map_err(|e| format!("round {round}: {e}"))
        })?;
        Ok(String::new())
    });
    check("an abort ends the waits of all ranks, 20 of 20", || {
        (0..ROUNDS).try_for_each(|round| aborted(4).map_err(|e| format!("round {round}: {e}")))?;
        Ok(String::new())
    });
    check("a rank that left ends the replays of the others", || left(3).map(|()| String::new()));
    for destroy in [true, false] {
        let what = if destroy { "destroy" } else { "abort" };
        check(&format!("a replay after {what} fills its output and returns, 20 of 20"), || {
            (0..ROUNDS).try_for_each(|round| {
                replayed(2, destroy).map_err(|e| format!("round {round}: {e}"))
            })?;
            Ok(String::new())
        });
    }
}

fn create(n: usize, deadline: Duration) -> Result<Vec<Communicator>, String> {
    let config = Config { deadline, ..config(n)? };
    Communicator::create_local(n, &config).map_err(|e| e.to_string())
}

fn usable(n: usize) -> Result<(), String> {
    let expected = CASE.expected(n, &config(n)?).map_err(|e| e.to_string())?;
    let all = Barrier::new(n);
    on_ranks(create(n, Duration::from_secs(10))?, |comm| {
        let rank = Rank::new(comm, 0, CASE.bytes());
        all.wait();
        match rank?.reduce(&CASE)? == expected {
            true => Ok(()),
            false => Err(Error::Internal("wrong data afterwards".into())),
        }
    })
    .map_err(|e| format!("the next communicator: {e}"))
}

fn withheld(n: usize) -> Result<(), String> {
    let all = Barrier::new(n);
    on_ranks(create(n, Duration::from_millis(200))?, |comm| {
        // Allocations may wait for the whole GPU, hence for kernels that wait for this rank: they come before any.
        let rank = Rank::new(comm, 0, CASE.bytes());
        all.wait();
        let outcome = if comm.rank() == n - 1 {
            Ok(())
        } else {
            match rank.as_ref().map_err(Clone::clone).and_then(|rank| rank.reduce(&CASE)) {
                Err(Error::Deadline { peer, .. }) if peer as usize == n - 1 => Ok(()),
                other => Err(Error::Internal(format!(
                    "rank {} got {:?}",
                    comm.rank(),
                    other.map(|_| "data")
                ))),
            }
        };
        all.wait();
        outcome
    })
    .map_err(|e| e.to_string())?;
    usable(n)
}

fn aborted(n: usize) -> Result<(), String> {
    let all = Barrier::new(n);
    on_ranks(create(n, Duration::from_secs(60))?, |comm| {
        let rank = Rank::new(comm, 0, CASE.bytes());
        all.wait();
        let start = Instant::now();
        let outcome = if comm.rank() == 0 {
            std::thread::sleep(Duration::from_millis(20));
            comm.abort();
            Ok(())
        } else {
            match rank.as_ref().map_err(Clone::clone).and_then(|rank| rank.reduce(&CASE)) {
                Err(Error::Aborted { rank: 0 }) if start.elapsed() < Duration::from_secs(5) => {
                    Ok(())
                }
                other => Err(Error::Internal(format!(
                    "rank {} got {:?} after {:?}",
                    comm.rank(),
                    other.map(|_| "data"),
                    start.elapsed()
                ))),
            }
        };
        all.wait();
        outcome
    })
    .map_err(|e| e.to_string())?;
    usable(n)
}

fn capture(rank: &Rank) -> Result<GraphExec, Error> {
    rank.fill(&CASE)?;
    let capture = Capture::begin(&rank.stream, CaptureMode::ThreadLocal)?;
    rank.call(&CASE, None)?;
    capture.end()?.instantiate()
}

fn replay(rank: &Rank, graph: &GraphExec) -> Result<Vec<u8>, Error> {
    graph.launch(&rank.context.enter()?, rank.stream.as_ref())?;
    rank.stream.synchronize()?;
    rank.result(&CASE)
}

fn left(n: usize) -> Result<(), String> {
    let all = Barrier::new(n);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = create(n, Duration::from_secs(60))?
            .into_iter()
            .map(|comm| {
                let all = &all;
                scope.spawn(move || -> Result<(), Error> {
                    let rank = Rank::new(&comm, 0, CASE.bytes())?;
                    let graph = capture(&rank)?;
                    all.wait();
                    replay(&rank, &graph)?;
                    if comm.rank() == 0 {
                        // Freeing memory waits for the whole GPU, hence for ranks that wait for this one to leave.
                        let buffers = rank.into_buffers();
                        let destroyed = comm.destroy();
                        all.wait();
                        drop(buffers);
                        return destroyed;
                    }
                    let start = Instant::now();
                    let replayed = replay(&rank, &graph);
                    let (error, elapsed) = (comm.error(), start.elapsed());
                    all.wait();
                    replayed?;
                    match error {
                        Some(Error::RankLeft { rank: 0 }) if elapsed < Duration::from_secs(5) => {
                            Ok(())
                        }
                        other => Err(Error::Internal(format!("{other:?} after {elapsed:?}"))),
                    }
                })
            })
            .collect();
        ranks.into_iter().try_for_each(|rank| match rank.join() {
            Ok(outcome) => outcome.map_err(|e| e.to_string()),
            Err(_) => Err("a rank panicked".into()),
        })
    })?;
    usable(n)
}

fn replayed(n: usize, destroy: bool) -> Result<(), String> {
    let all = Barrier::new(n);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = create(n, Duration::from_secs(10))?
            .into_iter()
            .map(|comm| {
                let all = &all;
                scope.spawn(move || -> Result<(), Error> {
                    let (graph, context, stream, output) = {
                        let rank = Rank::new(&comm, 0, CASE.bytes())?;
                        let graph = capture(&rank)?;
                        all.wait();
                        replay(&rank, &graph)?;
                        (
                            graph,
                            rank.context.clone(),
                            Stream::new(&rank.context, 0)?,
                            rank.into_buffers(),
                        )
                    };
                    let aborted = match destroy {
                        true => comm.destroy().map(|()| None)?,
                        false => {
                            comm.abort();
                            Some(comm)
                        }
                    };
                    graph.launch(&context.enter()?, stream.as_ref())?;
                    stream.synchronize()?;
                    let mut bytes = vec![0; CASE.bytes()];
                    output.1.read(&stream, 0, &mut bytes)?;
                    drop(aborted);
                    match bytes.chunks_exact(2).all(|word| word == [0xff, 0x7f]) {
                        true => Ok(()),
                        false => Err(Error::Internal("the output is not all NaN".into())),
                    }
                })
            })
            .collect();
        ranks.into_iter().try_for_each(|rank| match rank.join() {
            Ok(outcome) => outcome.map_err(|e| e.to_string()),
            Err(_) => Err("a rank panicked".into()),
        })
    })?;
    usable(n)
}
