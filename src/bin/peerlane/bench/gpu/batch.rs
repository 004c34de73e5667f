//! A batch of calls of all ranks of this process, run again and again: eager, or as a graph per rank.

use super::foreign::Foreign;
use super::library::Library;
use super::rank::GpuRank;
use crate::bench::orders::{Call, Timing};
use anyhow::Result;
use peerlane::device::cuda::{Capture, CaptureMode, Graph, GraphExec};
use std::time::Instant;

/// Iterations between two signs of life.
const LIFE: u32 = 64;

/// What an iteration consists of.
#[derive(Clone, Copy)]
pub struct Body<'a> {
    /// First the foreign kernel.
    pub foreign: Option<&'a Foreign>,
    /// Then the all-reduces.
    pub library: Option<&'a dyn Library>,
}

impl Body<'_> {
    /// Queues or records one iteration of every rank.
    pub fn queue(&self, ranks: &[GpuRank], call: &Call, aggregate: u32) -> Result<()> {
        if let Some(foreign) = self.foreign {
            foreign.queue(ranks, call)?;
        }
        match self.library {
            Some(library) => library.queue(ranks, call, aggregate),
            None => Ok(()),
        }
    }

    /// Waits for all ranks' streams; an error of a call that has run.
    pub fn finish(&self, ranks: &[GpuRank]) -> Result<()> {
        ranks.iter().try_for_each(|rank| rank.stream.synchronize())?;
        self.library.and_then(|library| library.failure()).map_or(Ok(()), Err)
    }
}

/// A batch that is ready to run.
pub enum Batch {
    Eager,
    /// By rank.
    Graphs(Vec<GraphExec>),
}

impl Batch {
    /// Captures a batch's iterations if `timing` wants graphs; `timing.iters` of them are in each.
    ///
    /// All captures of this thread are ended before the first is instantiated: NCCL demands it, and ours does not mind.
    pub fn prepare(
        body: &Body<'_>,
        ranks: &[GpuRank],
        call: &Call,
        timing: &Timing,
    ) -> Result<Self> {
        if timing.graph == 0 {
            return Ok(Batch::Eager);
        }
        let captures = ranks
            .iter()
            .map(|rank| Capture::begin(&rank.stream, CaptureMode::ThreadLocal))
            .collect::<peerlane::Result<Vec<_>>>()?;
        let recorded =
            (0..timing.iters).try_for_each(|_| body.queue(ranks, call, timing.aggregate));
        let graphs =
            captures.into_iter().map(Capture::end).collect::<peerlane::Result<Vec<Graph>>>();
        // The library's own error says more than the driver's about a capture that came to nothing.
        recorded?;
        let execs = graphs?.iter().map(Graph::instantiate).collect::<peerlane::Result<Vec<_>>>()?;
        Ok(Batch::Graphs(execs))
    }

    /// Runs it once and waits for it; microseconds of an iteration's call.
    ///
    /// Every rank's part is launched before any is waited for, and launches go round the ranks, so that what a rank waits
    /// for is always on its way.
    pub fn run(
        &self,
        body: &Body<'_>,
        ranks: &[GpuRank],
        call: &Call,
        timing: &Timing,
        busy: &mut dyn FnMut(),
    ) -> Result<f64> {
        let start = Instant::now();
        match self {
            Batch::Eager => {
                for done in 0..timing.iters {
                    body.queue(ranks, call, timing.aggregate)?;
                    if done % LIFE == LIFE - 1 {
                        busy();
                    }
                }
            }
            Batch::Graphs(execs) => {
                for _ in 0..timing.graph {
                    for (exec, rank) in execs.iter().zip(ranks) {
                        exec.launch(&rank.context.enter()?, rank.stream.as_ref())?;
                    }
                    busy();
                }
            }
        }
        body.finish(ranks)?;
        Ok(start.elapsed().as_secs_f64() * 1e6 / timing.calls())
    }
}
