//! The same on a device that records: every pass that is timed is the replay of a graph.

use super::{experts, fingerprint, Drafting, Measured, Plan};
use crate::device::Recorder;
use crate::observe::{Half, Site, Unobserved};
use crate::pass::Rank;
use crate::reduce::AllReduce;
use crate::stamp::Kind;
use anyhow::{bail, Result};
use std::collections::BTreeSet;

/// Fills the cache and measures every draft; `tick` hears of each pass.
pub fn measure<D: Recorder>(
    rank: &mut Rank<D>,
    plan: &Plan,
    tick: &dyn Fn(),
) -> Result<Vec<Measured>> {
    let mut known = BTreeSet::new();
    let mut pass = |rank: &mut Rank<D>, batch: &D::Batch, rows: usize, head: bool| {
        if known.insert(rows) {
            rehearse(rank, batch, rows, AllReduce::Peerlane)?;
        }
        rank.pass(batch, rows, head, &mut Unobserved)
    };
    super::measure_by(rank, plan, tick, &mut pass, verify)
}

/// A pass of this shape in which no rank waits for another, then one by `by` where that may have something to set up. A
/// library loads a kernel when it first needs it, and loading may wait for the whole GPU, hence for kernels of other ranks
/// that wait for this one.
pub fn rehearse<D: Recorder>(
    rank: &mut Rank<D>,
    batch: &D::Batch,
    rows: usize,
    by: AllReduce,
) -> Result<()> {
    let usual = std::mem::replace(&mut rank.reduce.by, AllReduce::None);
    rank.pass(batch, rows, true, &mut Unobserved)?;
    rank.device.finish()?;
    rank.device.meet()?;
    if by == AllReduce::Nccl {
        rank.reduce.by = by;
        rank.pass(batch, rows, true, &mut Unobserved)?;
        rank.device.finish()?;
        rank.device.meet()?;
    }
    rank.reduce.by = usual;
    Ok(())
}

/// What a recording is of.
#[derive(Clone, Copy)]
struct Way {
    by: AllReduce,
    /// Ranks wait for each other before every all-reduce.
    barrier: bool,
    stamps: bool,
}

/// Records what `body` does.
fn record<D: Recorder>(
    rank: &mut Rank<D>,
    way: Way,
    body: impl FnOnce(&mut Rank<D>) -> Result<()>,
) -> Result<D::Captured> {
    let usual = (rank.reduce.by, rank.reduce.barrier);
    (rank.reduce.by, rank.reduce.barrier) = (way.by, way.barrier);
    rank.device.record(way.stamps)?;
    let done = body(rank);
    let recorded = rank.device.recorded();
    (rank.reduce.by, rank.reduce.barrier) = usual;
    // What went wrong inside says more than the driver about a capture that came to nothing.
    done.and(recorded)
}

/// Records a whole pass.
pub fn record_pass<D: Recorder>(
    rank: &mut Rank<D>,
    batch: &D::Batch,
    rows: usize,
    by: AllReduce,
) -> Result<D::Captured> {
    let way = Way { by, barrier: false, stamps: false };
    record(rank, way, |rank| rank.pass(batch, rows, true, &mut Unobserved))
}

/// A pass's all-reduces, one after the other with nothing between.
fn all_reduces<D: Recorder>(rank: &mut Rank<D>, rows: usize) -> Result<()> {
    let layers = rank.shard.layers.len();
    let Rank { device, replicated, reduce, act, eps, .. } = rank;
    for layer in 0..layers {
        for half in [Half::Attention, Half::Mlp] {
            let gamma = &replicated.layers[layer].post_norm;
            if reduce.fused && reduce.by == AllReduce::Peerlane {
                let site = Site { layer, half };
                reduce.sum_and_norm(
                    device,
                    Kind::Moe,
                    site,
                    gamma,
                    *eps,
                    rows,
                    act,
                    &mut Unobserved,
                )?;
            } else if let Some(over) = reduce.over_ranks() {
                let elements = rows * device.dims().hidden;
                device.all_reduce(over, &mut act.partial, elements)?;
            }
        }
    }
    Ok(())
}

fn verify<D: Recorder>(
    rank: &mut Rank<D>,
    plan: &Plan,
    drafting: &mut Drafting,
    tick: &dyn Fn(),
) -> Result<Measured> {
    let mut measured = Measured::default();
    let batch = drafting.batch(plan)?;
    let (rows, on_device) = (batch.rows(), rank.device.batch(&batch)?);
    rehearse(rank, &on_device, rows, plan.by)?;

    let calls = rank.reduce.comm.stats().calls;
    let plain = record_pass(rank, &on_device, rows, plan.by)?;
    measured.all_reduces = match plan.by {
        // The library does not hear of NCCL's calls: two a layer, and the choice of tokens.
        AllReduce::Nccl => 2 * rank.shard.layers.len() as u64 + 1,
        _ => rank.reduce.comm.stats().calls - calls,
    };
    let pass = |rank: &mut Rank<D>| rank.pass(&on_device, rows, true, &mut Unobserved);
    let way = Way { by: plan.by, barrier: false, stamps: true };
    let bare = record_pass(rank, &on_device, rows, AllReduce::None)?;
    let parts = record(rank, way, pass)?;
    let in_step = record(rank, Way { barrier: true, ..way }, pass)?;
    let mut captured = vec![plain, bare, parts, in_step];
    if plan.by != AllReduce::None {
        let way = Way { stamps: false, ..way };
        captured.push(record(rank, way, |rank| all_reduces(rank, rows))?);
    }
    let recorded = rank.device.ready(captured)?;
    let [plain, bare, parts, in_step, alone @ ..] = &recorded[..] else {
        bail!("fewer graphs than were recorded");
    };

    let mut accepted = 0;
    for _ in 0..plan.passes {
        let batch = drafting.batch(plan)?;
        let same = rank.device.batch(&batch)?;
        rank.device.replay(plain)?;
        accepted += rank.device.read_accepted(&same)?.iter().sum::<u32>();
        tick();
    }
    rank.device.finish()?;
    rank.error()?;
    measured.accepted = f64::from(accepted) / (plan.passes * plan.contexts.len()) as f64;
    measured.fingerprint = fingerprint(rank, rows)?;
    measured.experts = experts(rank, rows)?;

    let time = |rank: &mut Rank<D>, recorded: &D::Recorded| {
        rank.device.meet()?;
        // The first of them finds the ranks at different places, and is not counted.
        rank.device.time(recorded, plan.passes + 1)
    };
    measured.passes = time(rank, plain)?;
    measured.bare = time(rank, bare)?;
    if let [alone] = alone {
        measured.alone = time(rank, alone)?;
    }
    for _ in 0..plan.passes {
        for (recorded, times) in
            [(parts, &mut measured.times), (in_step, &mut measured.times_in_step)]
        {
            rank.device.meet()?;
            // The second begins where the first ends, which is in step with the other ranks.
            rank.device.replay(recorded)?;
            rank.device.replay(recorded)?;
            times.push(rank.device.times(recorded)?);
        }
    }
    rank.device.finish()?;
    rank.error()?;
    tick();
    // The graphs go now, which may wait for the GPU.
    rank.device.meet()?;
    Ok(measured)
}
