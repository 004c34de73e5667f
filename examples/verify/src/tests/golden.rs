//! The golden data: what HuggingFace transformers answers for the same weights and tokens (see `golden/README.md`).

use crate::batch::Batch;
use crate::check::golden::{self, largest, CACHE, PREFILL, ROWS, TREE, VERIFY};
pub use crate::check::golden::{cache_start, CONTEXTS, DRAFT};
use crate::config::Config;
use crate::device::cpu::{Cpu, Sums};
use crate::device::{Device, Routed};
use crate::mistake::{self, Mistake};
use crate::observe::{Half, Observer, Site, Unobserved};
use crate::pass::Rank;
use crate::reduce::{AllReduce, Reduce};
use crate::shard::Loader;
use crate::weights::{Origin, Source};
use anyhow::Result;
use peerlane::comm::{Communicator, Config as CommConfig};
use peerlane::env::Env;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// How far values may be from the golden ones.
pub const LOGITS: f32 = 1e-5;
pub const HIDDEN: f32 = 5e-5;

fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/golden/dsv3_tiny"))
}

/// The golden data of this repository, whose tensors are there.
pub struct Golden(golden::Golden);

impl Golden {
    pub fn answers() -> &'static Self {
        static ANSWERS: OnceLock<Golden> = OnceLock::new();
        ANSWERS.get_or_init(|| Golden(golden::Golden::answers(&folder()).unwrap()))
    }

    pub fn partials() -> &'static Self {
        static PARTIALS: OnceLock<Golden> = OnceLock::new();
        let open = || golden::Golden::open(&folder(), "partials_tp8.safetensors").unwrap();
        PARTIALS.get_or_init(|| Golden(open()))
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.0.floats(name).unwrap()
    }

    pub fn of_sequences(&self, name: impl Fn(usize) -> String) -> Vec<f32> {
        self.0.of_sequences(name).unwrap()
    }

    fn tokens(&self, name: &str) -> Vec<u32> {
        self.0.tokens(name).unwrap()
    }
}

pub fn config() -> Config {
    Golden::answers().0.config().unwrap()
}

/// What one rank saw in one pass.
#[derive(Default, Clone, PartialEq)]
pub struct Seen {
    pub partial: BTreeMap<Site, Vec<f32>>,
    pub reduced: BTreeMap<Site, Vec<f32>>,
    pub residual: BTreeMap<Site, Vec<f32>>,
    pub normed: Vec<f32>,
    /// [rows, this rank's vocabulary]
    pub logits: Vec<f32>,
    pub chosen: Vec<u32>,
    pub routed: Vec<Option<Routed>>,
    /// Per layer, all rows of all sequences.
    pub cache: Vec<Vec<f32>>,
    /// All-reduces of the pass, by the library's count.
    pub calls: u64,
}

impl Observer<Cpu> for Seen {
    fn partial(&mut self, d: &mut Cpu, site: Site, x: &Vec<f32>, elements: usize) -> Result<()> {
        self.partial.insert(site, d.read(x, elements)?);
        Ok(())
    }
    fn reduced(&mut self, d: &mut Cpu, site: Site, x: &Vec<f32>, elements: usize) -> Result<()> {
        self.reduced.insert(site, d.read(x, elements)?);
        Ok(())
    }
    fn residual(&mut self, d: &mut Cpu, site: Site, x: &Vec<f32>, elements: usize) -> Result<()> {
        self.residual.insert(site, d.read(x, elements)?);
        Ok(())
    }
}

/// How the ranks are run.
#[derive(Clone)]
pub struct Setting {
    pub config: Config,
    pub ranks: usize,
    pub comm: CommConfig,
    pub mistake: Option<Mistake>,
    /// Take the golden routing in place of the router's, its weights in the verify pass times this.
    pub given: Option<f32>,
    pub sums: Sums,
    pub fused: bool,
}

impl Setting {
    pub fn new(ranks: usize) -> Self {
        let comm = CommConfig::from_vars(ranks, &Env::default()).unwrap();
        Setting {
            config: config(),
            ranks,
            comm,
            mistake: None,
            given: None,
            sums: Sums::Fp32,
            fused: true,
        }
    }
}

/// What a rank saw: verifying all three sequences as one batch, and verifying the tree behind the first.
#[derive(Clone, PartialEq)]
pub struct Outcome {
    pub verify: Seen,
    pub tree: Seen,
}

/// Runs the golden passes on `setting.ranks` threads.
pub fn run(setting: &Setting) -> Vec<Outcome> {
    let source = Source::open(&Origin::Folder(folder())).unwrap();
    let loader = Loader { config: &setting.config, source: &source, progress: &|_| {} };
    let mut device = Cpu::new(&setting.config, 0, setting.ranks, setting.sums);
    let replicated = Arc::new(loader.replicated(&mut device).unwrap());
    let comms = Communicator::create_local(setting.ranks, &setting.comm).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = comms
            .into_iter()
            .map(|comm| {
                let (loader, replicated) = (&loader, Arc::clone(&replicated));
                scope.spawn(move || {
                    mistake::make(setting.mistake);
                    let rank = comm.rank();
                    let mut device = Cpu::new(&setting.config, rank, setting.ranks, setting.sums);
                    let layers = setting.config.num_hidden_layers;
                    let shard = loader.shard(&mut device, rank, setting.ranks, layers).unwrap();
                    let reduce = Reduce {
                        comm,
                        by: AllReduce::Peerlane,
                        fused: setting.fused,
                        barrier: false,
                    };
                    let config = &setting.config;
                    let rank = Rank::new(config, device, replicated, shard, reduce, ROWS, CACHE);
                    outcome(&mut rank.unwrap(), setting.given).unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

fn outcome(rank: &mut Rank<Cpu>, given: Option<f32>) -> Result<Outcome> {
    let golden = &Golden::answers().0;
    let give = |rank: &mut Rank<Cpu>, names: &[&str], factor: Option<f32>| match factor {
        Some(factor) => golden.give(rank, names, factor),
        None => Ok(()),
    };
    give(rank, &PREFILL, given.and(Some(1.0)))?;
    let prefill = golden.prefill()?;
    let batch = rank.device.batch(&prefill)?;
    rank.pass(&batch, prefill.rows(), false, &mut Unobserved)?;
    give(rank, &VERIFY, given)?;
    let verify = seen(rank, &golden.verify()?)?;
    give(rank, &TREE, given.and(Some(1.0)))?;
    Ok(Outcome { verify, tree: seen(rank, &golden.tree()?)? })
}

fn seen(rank: &mut Rank<Cpu>, batch: &Batch) -> Result<Seen> {
    let mut seen = Seen::default();
    let (rows, before) = (batch.rows(), rank.reduce.comm.stats().calls);
    let on_device = rank.device.batch(batch)?;
    rank.pass(&on_device, rows, true, &mut seen)?;
    seen.calls = rank.reduce.comm.stats().calls - before;
    let device = &mut rank.device;
    let hidden = device.dims().hidden;
    seen.normed = device.read(&rank.act.normed, rows * hidden)?;
    seen.logits = device.read(&rank.act.logits, rows * device.dims().vocabulary.len())?;
    seen.chosen = device.read_chosen(rows)?;
    for routing in &rank.routing {
        let routed = routing.as_ref().map(|routing| device.read_routing(routing, rows));
        seen.routed.push(routed.transpose()?);
    }
    seen.cache = rank.cache.clone();
    Ok(seen)
}

/// The logits of all ranks side by side.
fn all_logits<'a>(seen: impl Iterator<Item = &'a Seen>, rows: usize) -> Vec<f32> {
    let parts: Vec<_> = seen.map(|seen| &seen.logits).collect();
    let row = |row: usize| {
        parts.iter().flat_map(move |part| {
            let width = part.len() / rows;
            part[row * width..][..width].iter().copied()
        })
    };
    (0..rows).flat_map(row).collect()
}

/// The largest difference; a NaN is infinitely far.
pub fn distance(found: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(found.len(), wanted.len());
    let off = |(a, b): (&f32, &f32)| if (a - b).is_nan() { f32::INFINITY } else { (a - b).abs() };
    found.iter().zip(wanted).map(off).fold(0.0, f32::max)
}

/// The worst differences from the golden data, each with the tensor in which it is.
pub struct Distances {
    pub logits: (f32, String),
    /// All-reduce results, residuals and cache rows.
    pub hidden: (f32, String),
    /// Rows whose experts are others, or whose weights differ by more than 1e-5.
    pub misrouted: usize,
    /// Rows whose choice is not the largest golden logit.
    pub mischosen: usize,
}

impl Distances {
    pub fn within(&self) -> bool {
        self.logits.0 <= LOGITS && self.hidden.0 <= HIDDEN && self.misrouted + self.mischosen == 0
    }
}

impl std::fmt::Display for Distances {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "logits off by {:.1e} ({}), hidden values by {:.1e} ({}), {} rows misrouted, {} mischosen",
            self.logits.0, self.logits.1, self.hidden.0, self.hidden.1, self.misrouted, self.mischosen
        )
    }
}

/// Compares all that the ranks saw with the golden data.
pub fn compare(outcomes: &[Outcome]) -> Distances {
    let golden = Golden::answers();
    let mut all = Distances {
        logits: (0.0, String::new()),
        hidden: (0.0, String::new()),
        misrouted: 0,
        mischosen: 0,
    };
    let worse = |worst: &mut (f32, String), off: f32, name: &str| {
        if off > worst.0 {
            *worst = (off, name.into());
        }
    };
    let verify = || outcomes.iter().map(|outcome| &outcome.verify);
    let tree = || outcomes.iter().map(|outcome| &outcome.tree);
    let logits = [all_logits(verify(), 3 * DRAFT), all_logits(tree(), 6)];
    // (prefix of the names, where its rows begin, how many, which pass)
    let parts: Vec<(String, usize, usize, bool)> = (0..3)
        .map(|s| (format!("s{s}.verify."), s * DRAFT, DRAFT, false))
        .chain([("tree.".into(), 0, 6, true)])
        .collect();
    for (prefix, first, rows, is_tree) in &parts {
        let name = format!("{prefix}logits");
        let wanted = golden.floats(&name);
        let width = wanted.len() / rows;
        let found = &logits[usize::from(*is_tree)][first * width..][..rows * width];
        worse(&mut all.logits, distance(found, &wanted), &name);
        for outcome in outcomes {
            let seen = if *is_tree { &outcome.tree } else { &outcome.verify };
            for (row, wanted) in wanted.chunks(width).enumerate() {
                let best = largest(wanted);
                all.mischosen += usize::from(seen.chosen[first + row] as usize != best);
            }
            for (map, half, suffix) in [
                (&seen.reduced, Half::Attention, "attn_out"),
                (&seen.reduced, Half::Mlp, "mlp_out"),
                (&seen.residual, Half::Mlp, "residual"),
            ] {
                for layer in 0..4 {
                    let name = format!("{prefix}l{layer}.{suffix}");
                    let wanted = golden.floats(&name);
                    let width = wanted.len() / rows;
                    let Some(found) = map.get(&Site { layer, half }) else { continue };
                    let found = &found[first * width..][..rows * width];
                    worse(&mut all.hidden, distance(found, &wanted), &name);
                }
            }
            for layer in 1..4 {
                let experts = golden.tokens(&format!("{prefix}l{layer}.topk_idx"));
                let weights = golden.floats(&format!("{prefix}l{layer}.topk_weight"));
                let found = seen.routed[layer].as_ref().unwrap();
                for row in 0..*rows {
                    let (here, there) = ((first + row) * 4, row * 4);
                    let same = found.experts[here..here + 4] == experts[there..there + 4]
                        && distance(&found.weights[here..here + 4], &weights[there..there + 4])
                            < 1e-5;
                    all.misrouted += usize::from(!same);
                }
            }
        }
    }
    for (s, context) in CONTEXTS.iter().enumerate() {
        for layer in 0..4 {
            let (latent, key) =
                (format!("s{s}.kv.l{layer}.c_kv"), format!("s{s}.kv.l{layer}.k_rope_hf"));
            let (latents, keys) = (golden.floats(&latent), golden.floats(&key));
            for outcome in outcomes {
                let cache = &outcome.verify.cache[layer][cache_start(s) * 80..];
                for row in 0..context + DRAFT {
                    let (found, rotated) = cache[row * 80..][..80].split_at(64);
                    worse(&mut all.hidden, distance(found, &latents[row * 64..][..64]), &latent);
                    // transformers keeps the even elements of the pairs before the odd ones.
                    let pairs = rotated.as_chunks::<2>().0;
                    let order: Vec<f32> =
                        (0..2).flat_map(|i| pairs.iter().map(move |pair| pair[i])).collect();
                    worse(&mut all.hidden, distance(&order, &keys[row * 16..][..16]), &key);
                }
            }
        }
    }
    all
}
