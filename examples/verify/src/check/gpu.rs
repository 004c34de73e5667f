//! The golden passes on GPUs in bf16. At that precision a right implementation may pick other experts, so routing is given.
//!
//! Sums are within 8 % (relative norm) of the golden ones, every row of the verify pass chooses the golden token, all ranks hold the same bits,
//! fused as apart, and a replayed graph gives the bits of the eager pass, each time.

use super::golden::{largest, relative, Golden, CACHE, CONTEXTS, PREFILL, ROWS, TREE, VERIFY};
use crate::args::Wanted;
use crate::batch::Batch;
use crate::device::cuda::place::Gpus;
use crate::device::cuda::{Cuda, Limits};
use crate::device::{Device, Recorder};
use crate::measure::graphs::{record_pass, rehearse};
use crate::meeting::Meeting;
use crate::observe::{Half, Observer, Site, Unobserved};
use crate::pass::Rank;
use crate::reduce::{AllReduce, Reduce};
use crate::run::on_threads;
use crate::shard::{Loader, Replicated};
use crate::weights::{Origin, Source};
use anyhow::{ensure, Context, Result};
use peerlane::comm::{Communicator, Config as CommConfig};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How far a sum may be from the golden one.
const WITHIN: f32 = 0.08;
/// Two of the tree's largest golden logits lie closer than bf16 can tell: there a row may choose either.
const CLOSE: f32 = 0.15;

/// What one rank saw in one pass, carried out call by call.
#[derive(Default)]
struct Seen {
    reduced: BTreeMap<Site, Vec<f32>>,
    residual: BTreeMap<Site, Vec<f32>>,
    state: State,
    /// By the host's reckoning, from what was chosen.
    accepted: Vec<u32>,
    calls: u64,
}

/// What a pass leaves.
#[derive(Clone, Default, PartialEq, Debug)]
struct State {
    /// Bits of the last normed rows, of logits, and of all caches.
    normed: Vec<u32>,
    logits: Vec<u32>,
    caches: Vec<u32>,
    chosen: Vec<u32>,
    accepted: Vec<u32>,
}

impl State {
    /// Of which two states differ first.
    fn difference(&self, other: &Self) -> Option<&'static str> {
        let parts = [
            ("cache rows", self.caches == other.caches),
            ("normed rows", self.normed == other.normed),
            ("logits", self.logits == other.logits),
            ("choices", self.chosen == other.chosen),
            ("accepted tokens", self.accepted == other.accepted),
        ];
        parts.into_iter().find(|(_, same)| !same).map(|(name, _)| name)
    }
}

impl<D: Device> Observer<D> for Seen {
    fn reduced(&mut self, d: &mut D, site: Site, x: &D::Buffer, elements: usize) -> Result<()> {
        self.reduced.insert(site, d.read(x, elements)?);
        Ok(())
    }
    fn residual(&mut self, d: &mut D, site: Site, x: &D::Buffer, elements: usize) -> Result<()> {
        self.residual.insert(site, d.read(x, elements)?);
        Ok(())
    }
}

/// The two passes of one rank, with add and norm apart or fused.
struct Outcome {
    verify: Seen,
    tree: Seen,
}

/// Checks every number of ranks; says what it finds, and fails if anything is wrong.
pub fn check(
    folder: &Path,
    wanted: &Wanted,
    ranks: &[usize],
    replays: usize,
    out: &mut dyn Write,
) -> Result<()> {
    let golden =
        Golden::answers(folder).with_context(|| format!("--check-gpu {}", folder.display()))?;
    let mut wrong = 0;
    for &n in ranks {
        let begun = Instant::now();
        let found =
            run(&golden, folder, wanted, n, replays).and_then(|outcomes| judge(&golden, &outcomes));
        let took = begun.elapsed().as_secs_f64();
        match found {
            Ok(said) => {
                writeln!(out, "PASS {n} ranks: {said}, {replays} replays the same; {took:.1} s")?
            }
            Err(error) => {
                wrong += 1;
                writeln!(out, "FAIL {n} ranks: {error:#}; {took:.1} s")?;
            }
        }
        out.flush()?;
    }
    ensure!(wrong == 0, "--check-gpu: {wrong} of {} numbers of ranks failed", ranks.len());
    Ok(())
}

/// All ranks' passes: apart, then fused.
fn run(
    golden: &Golden,
    folder: &Path,
    wanted: &Wanted,
    n: usize,
    replays: usize,
) -> Result<Vec<[Outcome; 2]>> {
    let config = golden.config()?;
    crate::shard::check_ranks(&config, n)?;
    let source = Source::open(&Origin::Folder(folder.to_owned()))?;
    let wanted = Wanted { ranks_per_gpu: wanted.ranks_per_gpu.or(Some(n)), ..wanted.clone() };
    let gpus = Gpus::new(&wanted, n)?;
    let longest = CONTEXTS.iter().max().copied().unwrap_or(0);
    let limits =
        Limits { rows: ROWS, sequences: 3, block: longest, length: longest + 8, cache: CACHE };
    let meeting = Arc::new(Meeting::new(n));
    let loader = Loader { config: &config, source: &source, progress: &|_| {} };
    let mut replicas: Vec<Arc<Replicated<_>>> = Vec::new();
    let mut loaded = Vec::new();
    for rank in 0..n {
        let gpu = Arc::clone(&gpus.gpus[gpus.of(rank)]);
        let mut device = Cuda::new(&config, rank, n, gpu, gpus.blas, limits, Arc::clone(&meeting))?;
        if gpus.of(rank) == replicas.len() {
            replicas.push(Arc::new(loader.replicated(&mut device)?));
        }
        let shard = loader.shard(&mut device, rank, n, config.num_hidden_layers)?;
        device.finish()?;
        loaded.push((device, Arc::clone(&replicas[gpus.of(rank)]), shard));
    }
    let mut comm = CommConfig::from_env(n)?;
    comm.deadline = comm.deadline.min(Duration::from_secs(30));
    let comms = gpus.communicators(&comm)?;
    on_threads(comms.into_iter().zip(loaded).collect(), |(comm, (device, replicated, shard))| {
        let gpu = Arc::clone(device.gpu());
        let work = |comm: Communicator| {
            let _current = gpu.context.enter()?;
            let reduce = Reduce { comm, by: AllReduce::Peerlane, fused: false, barrier: false };
            let mut rank = Rank::new(&config, device, replicated, shard, reduce, ROWS, CACHE)?;
            rank.device.work_together()?;
            let outcomes = passes(golden, &mut rank, replays)?;
            rank.device.meet()?;
            Ok(outcomes)
        };
        work(comm).inspect_err(|_| meeting.leave())
    })
}

fn passes(golden: &Golden, rank: &mut Rank<Cuda>, replays: usize) -> Result<[Outcome; 2]> {
    let prefill = golden.prefill()?;
    let batch = rank.device.batch(&prefill)?;
    golden.give(rank, &PREFILL, 1.0)?;
    rehearse(rank, &batch, prefill.rows(), AllReduce::Peerlane)?;
    rank.pass(&batch, prefill.rows(), false, &mut Unobserved)?;
    let mut outcome = |fused: bool| -> Result<Outcome> {
        rank.reduce.fused = fused;
        golden.give(rank, &VERIFY, 1.0)?;
        let verify = seen(rank, &golden.verify()?, replays).context("the verify pass")?;
        golden.give(rank, &TREE, 1.0)?;
        let tree = seen(rank, &golden.tree()?, 1).context("the tree")?;
        Ok(Outcome { verify, tree })
    };
    Ok([outcome(false)?, outcome(true)?])
}

/// A pass call by call, and replays of it as a graph, which must leave the same.
fn seen(rank: &mut Rank<Cuda>, batch: &Batch, replays: usize) -> Result<Seen> {
    let rows = batch.rows();
    let on_device = rank.device.batch(batch)?;
    rehearse(rank, &on_device, rows, AllReduce::Peerlane)?;
    let mut seen = Seen::default();
    let before = rank.reduce.comm.stats().calls;
    rank.pass(&on_device, rows, true, &mut seen)?;
    rank.device.finish()?;
    rank.error()?;
    seen.calls = rank.reduce.comm.stats().calls - before;
    seen.state = state(rank, &on_device, batch, true)?;
    seen.accepted = batch.accepted(&seen.state.chosen);

    let captured = record_pass(rank, &on_device, rows, AllReduce::Peerlane)?;
    let recorded = rank.device.ready(vec![captured])?.pop().context("a graph that is gone")?;
    for replay in 0..replays {
        rank.device.replay(&recorded)?;
        // All of it now and then; it is little that a replay could change in between and change back.
        let whole = replay % 100 == 0 || replay + 1 == replays;
        let mut now = state(rank, &on_device, batch, whole)?;
        if !whole {
            now.caches.clone_from(&seen.state.caches);
        }
        if let Some(what) = seen.state.difference(&now) {
            anyhow::bail!("replay {replay} leaves other {what} than the eager pass");
        }
    }
    rank.error()?;
    rank.device.meet()?;
    Ok(seen)
}

fn state(
    rank: &mut Rank<Cuda>,
    on_device: &<Cuda as Device>::Batch,
    batch: &Batch,
    caches: bool,
) -> Result<State> {
    let rows = batch.rows();
    let device = &mut rank.device;
    let (hidden, vocabulary) = (device.dims().hidden, device.dims().vocabulary.len());
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let mut state = State {
        normed: bits(device.read(&rank.act.normed, rows * hidden)?),
        logits: bits(device.read(&rank.act.logits, rows * vocabulary)?),
        chosen: device.read_chosen(rows)?,
        accepted: device.read_accepted(on_device)?,
        caches: Vec::new(),
    };
    let width = device.dims().cache_width();
    for cache in rank.cache.iter().filter(|_| caches) {
        let all = bits(device.read(cache, CACHE * width)?);
        // Behind a sequence's end stands what an earlier pass has left.
        for block in &batch.blocks {
            let length = block.context + block.rows;
            state.caches.extend(&all[block.cache * width..][..length * width]);
        }
    }
    Ok(state)
}

/// Compares all that the ranks saw with the golden data; the worst of it, for people.
fn judge(golden: &Golden, outcomes: &[[Outcome; 2]]) -> Result<String> {
    let [apart, fused] = &outcomes[0];
    let layers = golden.config()?.num_hidden_layers;
    for (rank, pair) in outcomes.iter().enumerate() {
        for (outcome, fusing) in pair.iter().zip(["apart", "fused"]) {
            for (seen, first, pass) in
                [(&outcome.verify, &apart.verify, "verify"), (&outcome.tree, &apart.tree, "tree")]
            {
                let mut other = seen.state.clone();
                // Logits are each rank's own part of the vocabulary.
                if rank > 0 {
                    other.logits.clone_from(&first.state.logits);
                }
                if let Some(what) = other.difference(&first.state) {
                    anyhow::bail!("{pass}, {fusing}: rank {rank} holds other {what} than rank 0 with the norm apart");
                }
                ensure!(
                    seen.residual == first.residual,
                    "{pass}, {fusing}: rank {rank} holds another residual"
                );
                ensure!(
                    seen.calls == 2 * layers as u64 + 1,
                    "{pass}, {fusing}: {} all-reduces",
                    seen.calls
                );
                ensure!(seen.state.accepted == seen.accepted, "{pass}, {fusing}: accepted tokens");
            }
        }
    }
    ensure!(fused.verify.reduced.is_empty(), "a fused pass shows no sums");

    let (mut worst, mut at) = (0.0f32, String::new());
    for layer in 0..layers {
        for (half, suffix) in [(Half::Attention, "attn_out"), (Half::Mlp, "mlp_out")] {
            let site = Site { layer, half };
            let whole = |s| format!("s{s}.verify.l{layer}.{suffix}");
            let parts = [
                (&apart.verify, golden.of_sequences(whole)?, "verify"),
                (&apart.tree, golden.floats(&format!("tree.l{layer}.{suffix}"))?, "tree"),
            ];
            for (seen, wanted, pass) in parts {
                let found = seen.reduced.get(&site).context("a sum that was not seen")?;
                let off = relative(found, &wanted);
                if off > worst {
                    (worst, at) = (off, format!("{pass}, layer {layer}, {suffix}"));
                }
            }
        }
    }
    ensure!(worst <= WITHIN, "a sum is off by {:.1} % of its norm ({at})", worst * 100.0);

    let mut said = format!("sums within {:.2} %", worst * 100.0);
    let logits = [
        (&apart.verify, golden.of_sequences(|s| format!("s{s}.verify.logits"))?, "verify"),
        (&apart.tree, golden.floats("tree.logits")?, "tree"),
    ];
    for (seen, wanted, pass) in logits {
        let rows = seen.state.chosen.len();
        let width = wanted.len() / rows;
        let mut same = 0;
        for (wanted, &chosen) in wanted.chunks(width).zip(&seen.state.chosen) {
            let short =
                wanted[largest(wanted)] - wanted.get(chosen as usize).copied().unwrap_or(f32::MIN);
            same += usize::from(short == 0.0);
            let enough = if pass == "tree" { short <= CLOSE } else { short == 0.0 };
            ensure!(enough, "{pass}: a row chooses token {chosen}, whose golden logit is {short:.3} below the largest ({said})");
        }
        said += &format!(", {pass} {same} of {rows} choices");
    }
    Ok(said)
}
