//! What an all-reduce call costs the calling thread, eager and while capturing.

use crate::check;
use crate::support::{Case, Rank};
use crate::virtual_ranks::config;
use peerlane::comm::Communicator;
use peerlane::device::cuda::{Capture, CaptureMode};
use peerlane::{DType, Error, Op};
use std::time::{Duration, Instant};

const CASE: Case = Case { dtype: DType::BF16, op: Op::Sum, count: 7168, seed: 21 };
const BURSTS: usize = 60;
/// Few at a time: what is measured is queueing, not a full queue.
const BURST: usize = 16;

pub fn run() {
    for n in [1, 2, 8] {
        check(&format!("enqueue, n={n}"), || measure(n));
    }
}

fn measure(n: usize) -> Result<String, String> {
    let config = config(n)?;
    measured(n, &config).map_err(|e| e.to_string())
}

fn measured(n: usize, config: &peerlane::comm::Config) -> Result<String, Error> {
    let comms = Communicator::create_local(n, config)?;
    let ranks = comms.iter().map(|c| Rank::new(c, 0, CASE.bytes()));
    let ranks: Vec<Rank<'_>> = ranks.collect::<Result<_, _>>()?;
    for rank in &ranks {
        rank.fill(&CASE)?;
    }
    let mut eager = Vec::new();
    for _ in 0..BURSTS {
        for _ in 0..BURST {
            for rank in &ranks {
                let start = Instant::now();
                rank.call(&CASE, None)?;
                eager.push(start.elapsed());
            }
        }
        for rank in &ranks {
            rank.stream.synchronize()?;
        }
    }
    let mut captured = Vec::new();
    for rank in &ranks {
        let capture = Capture::begin(&rank.stream, CaptureMode::ThreadLocal)?;
        for _ in 0..BURSTS * BURST / n {
            let start = Instant::now();
            rank.call(&CASE, None)?;
            captured.push(start.elapsed());
        }
        drop(capture.end()?);
    }
    let (eager, captured) = (quantiles(eager), quantiles(captured));
    Ok(format!("14336 bytes; eager {eager}, captured {captured} (us, median and 90 %)"))
}

fn quantiles(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |part: usize| times[times.len() * part / 10].as_secs_f64() * 1e6;
    format!("{:.2} / {:.2}", at(5), at(9))
}
