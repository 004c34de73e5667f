//! A run: load, start a thread for each rank, measure, and put together what the ranks say.

use crate::args::Job;
use crate::device::cpu::Cpu;
use crate::measure::{self, Measured};
use crate::memory::Need;
use crate::pass::Rank;
use crate::reduce::{AllReduce, Reduce};
use crate::shard::{Loader, Shard};
use crate::weights::Source;
use anyhow::{anyhow, ensure, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use peerlane::comm::{Communicator, Stats};
use peerlane::{Algorithm, Protocol};
use std::sync::Arc;
use std::thread;

/// Bytes of an element on the CPU.
const ELEMENT: usize = size_of::<f32>();

/// What a run came to.
pub struct Outcome {
    /// By rank, then by draft.
    pub ranks: Vec<Vec<Measured>>,
    /// Pools of experts, fewer than layers with experts where they are shared.
    pub pools: usize,
    pub parameters: u64,
    pub bytes: u64,
    /// Algorithms and protocols that served the all-reduces.
    pub served: String,
    pub islands: String,
}

/// Carries out `job`.
pub fn run(job: &Job) -> Result<Outcome> {
    let (config, ranks, plan) = (&job.config, job.ranks, &job.plan);
    let source = Source::open(&job.origin)?;
    let need = Need::new(config, ranks, plan.rows(), plan.cache_rows());
    let layers = config.moe_layers();
    let pools = need.pools(layers, source.may_share_experts(), ELEMENT, job.memory)?;
    let weights = Need { buffers: 0, ..need };

    let bar = bar(weights.bytes(pools, 1), "loading {wide_bar} {percent} %, {eta} left");
    let progress = |elements: usize| bar.inc(elements as u64);
    let loader = Loader { config, source: &source, progress: &progress };
    let replicated = Arc::new(loader.replicated(&mut Cpu::new(config, 0, ranks, job.sums))?);
    let load = |rank| -> Result<(Cpu, Shard<_>)> {
        let mut device = Cpu::new(config, rank, ranks, job.sums);
        let shard = loader.shard(&mut device, rank, ranks, pools)?;
        Ok((device, shard))
    };
    let loaded = on_threads((0..ranks).collect(), load)?;
    bar.finish_and_clear();

    // Only now that nothing can fail on one rank alone do ranks begin to wait for each other.
    let comms = Communicator::create_local(ranks, &job.comm)?;
    let bar = self::bar(plan.steps() as u64, "verifying {wide_bar} {pos}/{len} passes, {eta} left");
    let measure = |(comm, (device, shard)): (Communicator, (Cpu, Shard<_>))| {
        let first = comm.rank() == 0;
        let reduce = Reduce { comm, by: AllReduce::Peerlane, fused: job.fused, barrier: false };
        let replicated = Arc::clone(&replicated);
        let (rows, cache) = (plan.rows(), plan.cache_rows());
        let mut rank = Rank::new(config, device, replicated, shard, reduce, rows, cache)?;
        let measured = measure::measure(&mut rank, plan, &|| {
            if first {
                bar.inc(1);
            }
        })?;
        Ok((measured, rank.reduce.comm.stats()))
    };
    let results = on_threads(comms.into_iter().zip(loaded).collect(), measure)?;
    bar.finish_and_clear();

    let (ranks, stats): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    if plan.by == AllReduce::Peerlane {
        for (at, draft) in plan.drafts.iter().enumerate() {
            let prints: Vec<u64> =
                ranks.iter().map(|rank: &Vec<Measured>| rank[at].fingerprint).collect();
            let other = prints.iter().position(|print| *print != prints[0]);
            ensure!(
                other.is_none(),
                "rank {} does not hold the bits that rank 0 holds after verifying {} rows",
                other.unwrap_or(0),
                draft.rows()
            );
        }
    }
    Ok(Outcome {
        ranks,
        pools,
        parameters: weights.bytes(layers, 1),
        bytes: need.bytes(pools, ELEMENT),
        served: stats.first().map(served).unwrap_or_default(),
        islands: match &job.comm.islands {
            Some(islands) => islands.to_string(),
            None => "one".into(),
        },
    })
}

/// Runs `work` on a thread for each item; results in their order, or the error that came first in rank order and is not only
/// another rank's consequence.
fn on_threads<T: Send, R: Send>(
    items: Vec<T>,
    work: impl Fn(T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let work = &work;
    let results: Vec<Result<R>> = thread::scope(|scope| {
        let threads: Vec<_> = items
            .into_iter()
            .enumerate()
            .map(|(rank, item)| {
                let name = format!("rank-{rank}");
                thread::Builder::new().name(name).spawn_scoped(scope, move || work(item))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| match thread {
                Ok(thread) => thread.join().unwrap_or_else(|_| Err(anyhow!("a rank panicked"))),
                Err(error) => Err(anyhow!("cannot start a thread for a rank: {error}")),
            })
            .collect()
    });
    let consequence = |error: &anyhow::Error| {
        use peerlane::Error::{Aborted, RankDied, RankLeft};
        let cause = error.downcast_ref::<peerlane::Error>();
        matches!(cause, Some(Aborted { .. } | RankDied { .. } | RankLeft { .. }))
    };
    let (mut fine, mut errors) = (Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok(result) => fine.push(result),
            Err(error) => errors.push(error),
        }
    }
    errors.sort_by_key(consequence);
    match errors.into_iter().next() {
        None => Ok(fine),
        Some(error) => Err(error),
    }
}

/// Which algorithms and protocols served calls.
fn served(stats: &Stats) -> String {
    let algorithms = Algorithm::ALL.iter().filter(|&&a| stats.by_algorithm[a as usize] > 0);
    let protocols = Protocol::ALL.iter().filter(|&&p| stats.by_protocol[p as usize] > 0);
    let algorithms: Vec<_> = algorithms.map(|a| a.name()).collect();
    let protocols: Vec<_> = protocols.map(|p| p.name()).collect();
    format!("{} by {}", algorithms.join(", "), protocols.join(", "))
}

/// A progress bar on a terminal, and nothing elsewhere.
fn bar(length: u64, style: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template(style).unwrap_or(ProgressStyle::default_bar()));
    bar
}
