//! What one rank does in a run: fill the cache, go on greedily to learn what the model chooses, and verify drafts of that,
//! timed. All ranks do the same, and decide what they decide from what all of them hold.

#[cfg(feature = "cuda")]
pub mod graphs;

use crate::batch::{Batch, Draft, MOST_DRAFT, MOST_ROWS};
use crate::device::Device;
use crate::drafts::Drafter;
use crate::observe::Unobserved;
use crate::pass::Rank;
use crate::reduce::AllReduce;
use crate::report::median;
use crate::stamp::Times;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::time::Instant;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Tokens of each sequence's prompt.
    pub contexts: Vec<usize>,
    /// What is verified behind each sequence; the first is plain decoding, a single row.
    pub drafts: Vec<Draft>,
    pub vocabulary: usize,
    /// Timed passes of each kind.
    pub passes: usize,
    pub by: AllReduce,
    pub hits: f64,
    pub seed: u64,
    /// Rank 0 says what each draft took.
    pub live: bool,
}

impl Plan {
    /// The most tokens that a pass can commit for a sequence.
    fn depth(&self) -> usize {
        self.drafts.iter().map(Draft::depth).max().unwrap_or(1)
    }

    /// Where each sequence begins in the cache, and the end.
    fn cache(&self) -> Vec<usize> {
        let widest = self.drafts.iter().map(Draft::rows).max().unwrap_or(1);
        let mut starts = vec![0];
        for context in &self.contexts {
            // The greedy continuation takes as many rows as the deepest draft.
            let end = starts.last().unwrap_or(&0) + context + widest;
            starts.push(end);
        }
        starts
    }

    /// Tokens that the cache holds.
    pub fn cache_rows(&self) -> usize {
        self.cache().last().copied().unwrap_or(0)
    }

    /// Rows of a sequence that a pass of the prefill takes.
    fn chunk(&self) -> usize {
        MOST_DRAFT.min(MOST_ROWS / self.contexts.len().max(1)).max(1)
    }

    /// What no pass exceeds.
    #[cfg(feature = "cuda")]
    pub fn limits(&self) -> crate::device::cuda::Limits {
        let widest = self.drafts.iter().map(Draft::rows).max().unwrap_or(1);
        let longest = self.contexts.iter().copied().max().unwrap_or(1);
        crate::device::cuda::Limits {
            rows: self.rows(),
            sequences: self.contexts.len(),
            block: widest.max(self.chunk().min(longest)),
            length: longest + widest,
            cache: self.cache_rows(),
        }
    }

    /// Rows of the largest pass.
    pub fn rows(&self) -> usize {
        let longest = self.contexts.iter().copied().max().unwrap_or(1);
        let drafts = self.drafts.iter().map(Draft::rows);
        drafts.chain([self.chunk().min(longest)]).max().unwrap_or(1) * self.contexts.len()
    }

    /// Passes of the whole run.
    pub fn steps(&self) -> usize {
        let longest = self.contexts.iter().copied().max().unwrap_or(1);
        longest.div_ceil(self.chunk()) + self.depth() - 1 + self.drafts.len() * (self.passes + 1)
    }
}

/// What a rank measured of one draft.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Measured {
    /// Seconds of every pass.
    pub passes: Vec<f64>,
    /// Seconds of every pass with nobody summing.
    pub bare: Vec<f64>,
    /// Seconds of a pass's all-reduces one after the other with nothing between, where passes are recorded.
    pub alone: Vec<f64>,
    /// Where the time of every pass went.
    pub times: Vec<Times>,
    /// The same for passes with a barrier before every all-reduce.
    pub times_in_step: Vec<Times>,
    /// Tokens that the passes committed for each sequence, on average.
    pub accepted: f64,
    /// Distinct experts in the last pass, by layer.
    pub experts: Vec<usize>,
    /// All-reduces of one pass.
    pub all_reduces: u64,
    /// Of the bits that every rank must hold alike.
    pub fingerprint: u64,
}

/// Fills the cache and measures every draft; `tick` hears of each pass.
pub fn measure<D: Device>(
    rank: &mut Rank<D>,
    plan: &Plan,
    tick: &dyn Fn(),
) -> Result<Vec<Measured>> {
    let mut pass = |rank: &mut Rank<D>, batch: &D::Batch, rows: usize, head: bool| {
        rank.pass(batch, rows, head, &mut Unobserved)
    };
    measure_by(rank, plan, tick, &mut pass, verify)
}

/// The same, with `pass` for what is not timed and `verify` for what is.
fn measure_by<D: Device>(
    rank: &mut Rank<D>,
    plan: &Plan,
    tick: &dyn Fn(),
    pass: &mut Pass<D>,
    verify: Verify<D>,
) -> Result<Vec<Measured>> {
    let mut drafter = Drafter::new(plan.seed, plan.hits, plan.vocabulary);
    let first = prefill(rank, plan, &mut drafter, pass, tick).context("prefill")?;
    let truth = go_on(rank, plan, &first, pass, tick).context("greedy decoding")?;
    let mut measured = Vec::with_capacity(plan.drafts.len());
    for draft in &plan.drafts {
        let mut drafting = Drafting { draft, drafter: &mut drafter, first: &first, truth: &truth };
        let one = verify(rank, plan, &mut drafting, tick);
        let one = one.with_context(|| format!("verifying {} rows", draft.rows()))?;
        if plan.live && rank.reduce.comm.rank() == 0 {
            let mut out = std::io::stdout();
            let middle = |times: &[f64]| times.get(median(times)).map_or(0.0, |time| time * 1e3);
            let (pass, bare) = (middle(&one.passes), middle(&one.bare));
            let rows = draft.rows() * plan.contexts.len();
            writeln!(out, "{rows} rows: a pass {pass:.3} ms, without all-reduces {bare:.3} ms")?;
            out.flush()?;
        }
        measured.push(one);
    }
    Ok(measured)
}

/// A way to carry out a pass over so many rows, with or without the choice of tokens.
type Pass<'a, D> = dyn FnMut(&mut Rank<D>, &<D as Device>::Batch, usize, bool) -> Result<()> + 'a;

/// A way to measure one draft.
type Verify<D> = fn(&mut Rank<D>, &Plan, &mut Drafting, &dyn Fn()) -> Result<Measured>;

/// What is drafted behind every sequence.
struct Drafting<'a> {
    draft: &'a Draft,
    drafter: &'a mut Drafter,
    /// What each sequence chose behind its prompt, and what the model chooses behind that.
    first: &'a [u32],
    truth: &'a [Vec<u32>],
}

impl Drafting<'_> {
    /// A batch in which every sequence has a new draft.
    fn batch(&mut self, plan: &Plan) -> Result<Batch> {
        let starts = plan.cache();
        let mut batch = Batch::default();
        for (s, &context) in plan.contexts.iter().enumerate() {
            let tokens = self.drafter.draft(self.draft, self.first[s], &self.truth[s]);
            batch.push(starts[s], context, self.draft, &tokens);
        }
        batch.validate(plan.vocabulary)?;
        Ok(batch)
    }
}

/// Fills the cache with random prompts; what each sequence chooses next.
fn prefill<D: Device>(
    rank: &mut Rank<D>,
    plan: &Plan,
    drafter: &mut Drafter,
    pass: &mut Pass<D>,
    tick: &dyn Fn(),
) -> Result<Vec<u32>> {
    let (starts, chunk) = (plan.cache(), plan.chunk());
    let longest = plan.contexts.iter().copied().max().unwrap_or(0);
    let mut first = vec![0; plan.contexts.len()];
    for from in (0..longest).step_by(chunk) {
        let mut batch = Batch::default();
        let mut ends = Vec::new();
        for (s, &context) in plan.contexts.iter().enumerate() {
            let rows = context.saturating_sub(from).min(chunk);
            if rows > 0 {
                let tokens: Vec<u32> = (0..rows).map(|_| drafter.any()).collect();
                batch.push(starts[s], from, &Draft::chain(rows)?, &tokens);
                if from + rows == context {
                    ends.push((s, batch.rows() - 1));
                }
            }
        }
        let rows = batch.rows();
        batch.validate(plan.vocabulary)?;
        let batch = rank.device.batch(&batch)?;
        pass(rank, &batch, rows, !ends.is_empty())?;
        if !ends.is_empty() {
            let chosen = rank.device.read_chosen(rows)?;
            ends.iter().for_each(|&(s, row)| first[s] = chosen[row]);
        }
        tick();
    }
    Ok(first)
}

/// What the model chooses behind `first`, token by token: for each sequence as many as the deepest draft could hold.
fn go_on<D: Device>(
    rank: &mut Rank<D>,
    plan: &Plan,
    first: &[u32],
    pass: &mut Pass<D>,
    tick: &dyn Fn(),
) -> Result<Vec<Vec<u32>>> {
    let (starts, one) = (plan.cache(), Draft::chain(1)?);
    let mut truth = vec![Vec::new(); first.len()];
    let mut last = first.to_vec();
    for step in 0..plan.depth() - 1 {
        let mut batch = Batch::default();
        for (s, &context) in plan.contexts.iter().enumerate() {
            batch.push(starts[s], context + step, &one, &last[s..=s]);
        }
        let batch = rank.device.batch(&batch)?;
        pass(rank, &batch, last.len(), true)?;
        last = rank.device.read_chosen(last.len())?;
        truth.iter_mut().zip(&last).for_each(|(truth, &token)| truth.push(token));
        tick();
    }
    Ok(truth)
}

/// One untimed and `plan.passes` timed rounds, each a pass as it is, one with ranks in step, and one in which nobody sums.
fn verify<D: Device>(
    rank: &mut Rank<D>,
    plan: &Plan,
    drafting: &mut Drafting,
    tick: &dyn Fn(),
) -> Result<Measured> {
    let mut measured = Measured::default();
    let mut accepted = 0;
    for round in 0..=plan.passes {
        let batch = drafting.batch(plan)?;
        let (rows, on_device) = (batch.rows(), rank.device.batch(&batch)?);

        let calls = rank.reduce.comm.stats().calls;
        let (seconds, parts) = timed(rank, &on_device, rows, plan.by, false)?;
        measured.all_reduces = rank.reduce.comm.stats().calls - calls - 1; // one was the barrier
        if round == plan.passes {
            measured.fingerprint = fingerprint(rank, rows)?;
            measured.experts = experts(rank, rows)?;
        }
        let committed = rank.device.read_accepted(&on_device)?;
        let (_, parts_in_step) = timed(rank, &on_device, rows, plan.by, true)?;
        let (bare, _) = timed(rank, &on_device, rows, AllReduce::None, false)?;
        tick();
        if round == 0 {
            continue;
        }
        measured.passes.push(seconds);
        measured.bare.push(bare);
        measured.times.push(parts);
        measured.times_in_step.push(parts_in_step);
        accepted += committed.iter().sum::<u32>();
    }
    measured.accepted = f64::from(accepted) / (plan.passes * plan.contexts.len()) as f64;
    Ok(measured)
}

/// One pass that all ranks begin together.
fn timed<D: Device>(
    rank: &mut Rank<D>,
    batch: &D::Batch,
    rows: usize,
    by: AllReduce,
    barrier: bool,
) -> Result<(f64, Times)> {
    rank.reduce.by = AllReduce::Peerlane;
    rank.device.barrier(&rank.reduce.comm)?;
    (rank.reduce.by, rank.reduce.barrier) = (by, barrier);
    rank.device.take_times()?;
    let start = Instant::now();
    rank.pass(batch, rows, true, &mut Unobserved)?;
    rank.device.finish()?;
    let seconds = start.elapsed().as_secs_f64();
    (rank.reduce.by, rank.reduce.barrier) = (AllReduce::Peerlane, false);
    Ok((seconds, rank.device.take_times()?))
}

/// Of what every rank must hold alike after a pass: the last normed rows, and the tokens chosen.
fn fingerprint<D: Device>(rank: &mut Rank<D>, rows: usize) -> Result<u64> {
    let elements = rows * rank.device.dims().hidden;
    let mut hasher = DefaultHasher::new();
    for value in rank.device.read(&rank.act.normed, elements)? {
        value.to_bits().hash(&mut hasher);
    }
    rank.device.read_chosen(rows)?.hash(&mut hasher);
    Ok(hasher.finish())
}

/// Distinct experts that the last pass went to, for each layer that has any.
fn experts<D: Device>(rank: &mut Rank<D>, rows: usize) -> Result<Vec<usize>> {
    let mut counts = Vec::new();
    for routing in rank.routing.iter().flatten() {
        let mut experts = rank.device.read_routing(routing, rows)?.experts;
        experts.sort_unstable();
        experts.dedup();
        counts.push(experts.len());
    }
    Ok(counts)
}
