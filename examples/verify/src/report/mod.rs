//! The report of a run, as data; `table`, `json` and `page` are ways to look at it.

mod chart;
pub mod page;
pub mod table;

use crate::args::{Args, Fused, Job, On};
use crate::batch::Draft;
use crate::device::cpu::Sums;
use crate::economics::Worth;
use crate::measure::Measured;
use crate::memory;
use crate::reduce::AllReduce;
use crate::run::Outcome;
use crate::stamp::{Kind, Part, Times};
use anyhow::{Context, Result};
use serde::Serialize;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// A whole run.
#[derive(Serialize)]
pub struct Report {
    pub version: &'static str,
    pub command: String,
    pub machine: String,
    /// The model, for people.
    pub model: String,
    pub parameters: u64,
    /// Bytes that the run's weights, caches and activations take.
    pub bytes: u64,
    pub dense_layers: usize,
    pub moe_layers: usize,
    /// Distinct pools of routed experts; fewer than MoE layers where layers share them.
    pub expert_pools: usize,
    pub ranks: usize,
    /// Whether they were processes.
    pub processes: bool,
    pub device: On,
    pub islands: String,
    pub all_reduce: AllReduce,
    /// Whether residual add and norm were part of the all-reduce.
    pub fused: bool,
    /// What sums and residuals were kept as.
    pub sums: Sums,
    pub served_by: String,
    pub contexts: Vec<usize>,
    pub passes: usize,
    pub hits: f64,
    pub draft_time_ms: f64,
    pub widths: Vec<Width>,
    /// What a reader must know to read the figures right.
    pub notes: Vec<String>,
}

/// One draft width.
#[derive(Serialize)]
pub struct Width {
    /// Rows of a sequence.
    pub draft: usize,
    pub tree: bool,
    /// Rows of the pass.
    pub rows: usize,
    /// Median of the passes, each as long as its slowest rank.
    pub pass_ms: f64,
    /// The same with nobody summing.
    pub bare_ms: f64,
    /// All-reduces in the layers of a pass; one more, of a few bytes, chooses the tokens.
    pub all_reduces: u64,
    pub all_reduce_bytes: u64,
    /// Time in the median pass's all-reduces, a mean over the ranks, waiting for late ranks included, and its part of the pass.
    pub all_reduce_ms: f64,
    pub all_reduce_share: f64,
    /// The same where ranks wait for each other before every all-reduce, and the wait is not counted.
    pub all_reduce_in_step_ms: f64,
    pub all_reduce_in_step_share: f64,
    /// The pass's all-reduces one after the other with nothing between; on devices that record passes.
    pub all_reduce_alone_ms: Option<f64>,
    /// What ranks waited for each other then.
    pub wait_ms: f64,
    /// Distinct experts that a MoE layer's tokens went to.
    pub experts_mean: f64,
    pub experts_least: usize,
    pub experts_most: usize,
    /// Tokens that passes committed for a sequence, as measured.
    pub accepted: Option<f64>,
    pub worth: Worth,
    pub parts: Vec<Stretch>,
}

/// The time of one part in one kind of layer, over a whole pass.
#[derive(Clone, Copy, Serialize)]
pub struct Stretch {
    pub layers: Kind,
    pub part: Part,
    pub ms: f64,
}

impl Report {
    /// What a rank was, for people.
    pub fn ranks_are(&self) -> &'static str {
        match self.processes {
            true => "processes",
            false => "threads",
        }
    }

    /// Who sums, what, and how, for people.
    pub fn sums_by(&self) -> String {
        let sums = match self.sums {
            Sums::Fp32 => "fp32",
            Sums::Bf16 => "bf16",
        };
        match (self.all_reduce, self.fused) {
            (AllReduce::None, _) => "nobody".into(),
            (AllReduce::Nccl, _) => format!("NCCL, {sums}"),
            (AllReduce::Peerlane, false) => format!("peerlane, {sums}, {}", self.served_by),
            (AllReduce::Peerlane, true) => {
                format!("peerlane, {sums}, add and RMSNorm fused, {}", self.served_by)
            }
        }
    }

    pub fn new(args: &Args, job: &Job, outcome: &Outcome) -> Self {
        let config = &job.config;
        let moe = config.moe_layers();
        let dense = config.num_hidden_layers - moe;
        let mut widths: Vec<Width> = Vec::new();
        for (at, draft) in job.plan.drafts.iter().enumerate() {
            let ranks: Vec<&Measured> = outcome.ranks.iter().map(|rank| &rank[at]).collect();
            let plain_ms = widths.first().map(|plain| plain.pass_ms);
            widths.push(Width::new(args, job, draft, &ranks, plain_ms));
        }
        Report {
            version: env!("CARGO_PKG_VERSION"),
            command: std::env::args().collect::<Vec<_>>().join(" "),
            machine: outcome.machine.clone(),
            model: format!(
                "{}: {} layers ({dense} dense, {moe} MoE), hidden {}, {} heads, {} experts, {} a token; {:.1} M parameters, {}",
                job.name,
                config.num_hidden_layers,
                config.hidden_size,
                config.num_attention_heads,
                config.n_routed_experts,
                config.num_experts_per_tok,
                outcome.parameters as f64 / 1e6,
                job.origin
            ),
            parameters: outcome.parameters,
            bytes: outcome.bytes,
            dense_layers: dense,
            moe_layers: moe,
            expert_pools: outcome.pools,
            ranks: job.ranks,
            processes: job.processes,
            islands: outcome.islands.clone(),
            all_reduce: job.plan.by,
            device: if job.gpu.is_some() { On::Cuda } else { On::Cpu },
            fused: job.fused && job.plan.by == AllReduce::Peerlane,
            sums: job.sums,
            served_by: outcome.served.clone(),
            contexts: job.plan.contexts.clone(),
            passes: job.plan.passes,
            hits: job.plan.hits,
            draft_time_ms: args.draft_time,
            widths,
            notes: notes(args, job, outcome),
        }
    }

    /// For people too: indented.
    pub fn write_json(&self, out: &mut dyn Write) -> Result<()> {
        serde_json::to_writer_pretty(&mut *out, self)?;
        Ok(out.write_all(b"\n")?)
    }
}

impl Width {
    fn new(
        args: &Args,
        job: &Job,
        draft: &Draft,
        ranks: &[&Measured],
        plain_ms: Option<f64>,
    ) -> Self {
        let rows = draft.rows() * job.plan.contexts.len();
        let passes = 0..job.plan.passes;
        let slowest = |pass: usize, of: fn(&Measured) -> &Vec<f64>| -> f64 {
            ranks.iter().map(|rank| of(rank)[pass]).fold(0.0, f64::max) * 1e3
        };
        let mean = |pass: usize, of: fn(&Measured) -> &Vec<Times>| -> Times {
            Times::mean(&ranks.iter().map(|rank| of(rank)[pass]).collect::<Vec<_>>())
        };
        let whole: Vec<f64> = passes.clone().map(|pass| slowest(pass, |r| &r.passes)).collect();
        let bare: Vec<f64> = passes.clone().map(|pass| slowest(pass, |r| &r.bare)).collect();
        let alone: Vec<f64> = match ranks.first() {
            Some(rank) => (0..rank.alone.len()).map(|pass| slowest(pass, |r| &r.alone)).collect(),
            None => Vec::new(),
        };
        // The parts are those of the median pass, so that they add up to it however far a pass was out.
        let times = mean(median(&whole), |rank| &rank.times);
        let in_step: Vec<Times> = passes.map(|pass| mean(pass, |r| &r.times_in_step)).collect();
        let in_step = in_step[median(&in_step.iter().map(Times::total).collect::<Vec<_>>())];
        let (pass_ms, bare_ms) = (whole[median(&whole)], bare[median(&bare)]);
        let share =
            |times: &Times| times.part(Part::AllReduce) / (times.total() - times.part(Part::Wait));
        let first = ranks.first();
        let experts = first.map(|rank| rank.experts.as_slice()).unwrap_or_default();
        let accepted = first.filter(|_| job.plan.by != AllReduce::None).map(|rank| rank.accepted);
        let most = draft.depth() as f64;
        let tokens = args.acceptance.or(accepted).unwrap_or(most).min(most);
        let drafting = if draft.rows() > 1 { args.draft_time } else { 0.0 };
        let parts = Kind::ALL.iter().flat_map(|&layers| {
            Part::ALL.iter().map(move |&part| Stretch {
                layers,
                part,
                ms: times.get(layers, part) * 1e3,
            })
        });
        Width {
            draft: draft.rows(),
            tree: matches!(draft, Draft::Tree(_)),
            rows,
            pass_ms,
            bare_ms,
            all_reduces: first.map_or(0, |rank| rank.all_reduces.saturating_sub(1)),
            all_reduce_bytes: (rows * job.config.hidden_size * job.sums.bytes()) as u64,
            all_reduce_ms: times.part(Part::AllReduce) * 1e3,
            all_reduce_share: share(&times),
            all_reduce_in_step_ms: in_step.part(Part::AllReduce) * 1e3,
            all_reduce_in_step_share: share(&in_step),
            all_reduce_alone_ms: alone.first().map(|_| alone[median(&alone)]),
            wait_ms: in_step.part(Part::Wait) * 1e3,
            experts_mean: experts.iter().sum::<usize>() as f64 / experts.len().max(1) as f64,
            experts_least: experts.iter().min().copied().unwrap_or(0),
            experts_most: experts.iter().max().copied().unwrap_or(0),
            accepted,
            worth: Worth::new(
                tokens,
                pass_ms / 1e3,
                drafting / 1e3,
                plain_ms.unwrap_or(pass_ms) / 1e3,
            ),
            parts: parts.filter(|stretch| stretch.ms > 0.0).collect(),
        }
    }

    /// What a sequence's rows are, for people.
    pub fn name(&self) -> String {
        match (self.draft, self.tree) {
            (1, _) => "1 (plain)".into(),
            (rows, true) => format!("{rows} (tree)"),
            (rows, false) => rows.to_string(),
        }
    }
}

fn notes(args: &Args, job: &Job, outcome: &Outcome) -> Vec<String> {
    let mut notes = Vec::new();
    if args.fused == Fused::On && !job.fused && job.plan.by == AllReduce::Peerlane {
        notes.push(
            "Add and RMSNorm ran apart from the all-reduce: the fused operation is for 16-bit floats (--sums bf16)."
                .into(),
        );
    }
    let moe = job.config.moe_layers();
    if outcome.pools < moe {
        notes.push(format!(
            "{moe} MoE layers share {} pools of routed experts: with one each the model would not fit into {}.",
            outcome.pools,
            memory::bytes(outcome.memory)
        ));
    }
    if job.plan.by == AllReduce::None {
        notes.push(
            "Nobody summed: the passes computed nonsense, and only their time means something. Tokens a pass are assumed, not \
             measured."
                .into(),
        );
    }
    if job.gpu.is_some() {
        notes.push(
            "Passes are replays of one graph. Parts are timed by a clock that the GPU reads between them, which takes time itself; \
             pass, no sums and alone are without it. Alone: the pass's all-reduces with nothing between."
                .into(),
        );
    }
    if job.plan.by == AllReduce::Nccl {
        notes.push(
            "Where ranks share a GPU, NCCL has at most 4 blocks a rank, unless NCCL_MAX_CTAS says otherwise: its waiting kernels \
             must leave room for what they wait for."
                .into(),
        );
    }
    if job.gpu.is_none() && job.ranks > cores() {
        notes.push(format!(
            "{} ranks share {} cores, so a rank's wait for another holds that one's computing too.",
            job.ranks,
            cores()
        ));
    }
    match args.acceptance {
        Some(_) => notes.push("Tokens a pass are those of --acceptance, as far as a draft is deep enough.".into()),
        None if job.plan.by != AllReduce::None => notes.push(format!(
            "Drafts held the token that the model goes on to choose with probability {}; tokens a pass are measured with them.",
            job.plan.hits
        )),
        None => {}
    }
    notes
}

/// Where the median is; of two in the middle the smaller one.
pub fn median(values: &[f64]) -> usize {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    order.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// What the run ran on, in a line.
pub fn machine() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    let model = model.clone().find(|(key, _)| key.trim() == "model name");
    let model = model.map_or("unknown CPU", |(_, value)| value.trim());
    format!("{model}, {} core(s)", cores())
}

/// A file that the run writes at its end, opened before it, so that a path that cannot be written fails at once.
pub struct Output<'a> {
    flag: &'static str,
    path: &'a Path,
    file: File,
}

impl<'a> Output<'a> {
    /// Creates or empties `path`, the value of `flag`.
    pub fn create(flag: &'static str, path: &'a Path) -> Result<Self> {
        let file = File::create(path)
            .with_context(|| format!("{flag}: cannot write {}", path.display()))?;
        Ok(Output { flag, path, file })
    }

    /// Has `write` fill the file.
    pub fn write(self, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
        let mut out = BufWriter::new(self.file);
        write(&mut out)
            .and_then(|()| Ok(out.flush()?))
            .with_context(|| format!("{}: cannot write {}", self.flag, self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_one_of_the_values() {
        assert_eq!(median(&[3.0, 9.0, 1.0]), 0);
        assert_eq!(median(&[3.0, 9.0, 1.0, 2.0]), 3);
        assert_eq!(median(&[5.0]), 0);
    }
}
