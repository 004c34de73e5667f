//! The command line, and what can be told wrong from it alone.

use crate::batch::{Draft, MOST_ROWS};
use crate::config::Config;
use crate::device::cpu::Sums;
use crate::measure::Plan;
use crate::memory;
use crate::presets::SMALL;
use crate::reduce::AllReduce;
use crate::shard::check_ranks;
use crate::weights::Origin;
use anyhow::{bail, ensure, Context, Result};
use clap::Parser;
use peerlane::schedule::Islands;
use peerlane::{Algorithm, Protocol};
use std::path::PathBuf;

/// DeepSeek-V3 layers in the shape of a speculative verify pass, tensor parallel, two all-reduces a layer: how long a pass
/// takes, how much of it is all-reduce, and what that means for tokens per second.
#[derive(Parser, Debug)]
#[command(name = "peerlane-verify", version)]
pub struct Args {
    /// Shape of the model: deepseek-v3, kimi-k2, lean, small, or a config.json [default: small, or the one beside the weights]
    #[arg(long, value_name = "NAME|FILE")]
    pub config: Option<String>,
    /// random:SEED, or a folder of safetensors files with the published tensor names
    #[arg(long, value_name = "random:SEED|DIR", default_value = "random:0")]
    pub weights: String,
    /// Decoder layers [default: the model's]
    #[arg(long)]
    pub layers: Option<usize>,
    /// Ranks that share the model (tensor parallel) [default: 4]
    #[arg(long, value_name = "RANKS")]
    pub tp: Option<usize>,
    /// Sequences in a batch
    #[arg(long, value_name = "B", default_value_t = 2)]
    pub sequences: usize,
    /// Tokens of context: one number, a list with one for each sequence, or A-B, spread evenly over the sequences
    #[arg(long, value_name = "N|N,N,..|A-B", default_value = "48-96")]
    pub context: String,
    /// Rows of a sequence that a pass verifies: the last committed token and T - 1 drafted ones
    #[arg(long, value_name = "T", default_value_t = 8)]
    pub draft: usize,
    /// Rows of a sequence to measure [default: 1 and powers of two up to --draft]
    #[arg(long, value_name = "T,T,..", value_delimiter = ',', conflicts_with_all = ["draft", "tree"])]
    pub widths: Option<Vec<usize>>,
    /// Verify a tree instead: the parent of each row, -1 for row 0 alone
    #[arg(
        long,
        value_name = "PARENTS",
        value_delimiter = ',',
        allow_hyphen_values = true,
        conflicts_with = "draft"
    )]
    pub tree: Option<Vec<i32>>,
    /// Timed passes of each draft width
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub passes: usize,
    /// Where ranks run
    #[arg(long, value_enum, default_value_t = On::Cpu)]
    pub device: On,
    /// Ranks are processes of their own, not threads of this one
    #[arg(long)]
    pub processes: bool,
    /// This process is that rank, started by the one that the user started
    #[arg(long, hide = true, requires = "processes")]
    pub as_rank: Option<usize>,
    /// With --device cuda: ranks that share a GPU [default: as few as the GPUs allow]
    #[arg(long, value_name = "N")]
    pub ranks_per_gpu: Option<usize>,
    /// With --device cuda: cuBLAS's library [default: where the loader, a toolkit or a Python package has it]
    #[arg(long, value_name = "FILE", env = "PEERLANE_CUBLAS_LIB")]
    pub cublas: Option<PathBuf>,
    /// With --all-reduce nccl: NCCL's library [default: libnccl.so.2, wherever the loader finds it]
    #[arg(long, value_name = "FILE", env = "PEERLANE_NCCL_LIB")]
    pub nccl: Option<PathBuf>,
    /// With --device cuda: a fatbin of examples/verify/cuda/kernels.cu in place of the one that is built in
    #[arg(long, value_name = "FILE")]
    pub kernels: Option<PathBuf>,
    /// Check a GPU against the golden data in this folder, over 1, 2, 4 and 8 ranks that share it (or --tp alone), and do
    /// nothing else
    #[arg(long, value_name = "DIR")]
    pub check_gpu: Option<PathBuf>,
    /// With --check-gpu: replays whose results are compared
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub replays: usize,
    /// Who sums the ranks' partial results
    #[arg(long, value_enum, default_value_t = AllReduce::Peerlane)]
    pub all_reduce: AllReduce,
    /// Whether residual add and RMSNorm are part of the all-reduce; that takes peerlane, and on the CPU --sums bf16
    #[arg(long, value_enum, default_value_t = Fused::On)]
    pub fused: Fused,
    /// On the CPU: what sums and residuals are kept as; all else is fp32
    #[arg(long, value_enum, default_value_t = Sums::Fp32)]
    pub sums: Sums,
    /// Serve every all-reduce with this algorithm
    #[arg(long, value_name = "NAME")]
    pub algo: Option<Algorithm>,
    /// Serve every all-reduce with this protocol
    #[arg(long, value_name = "NAME")]
    pub proto: Option<Protocol>,
    /// Ranks of each island, such as 0-3,4-7
    #[arg(long, value_name = "LIST")]
    pub islands: Option<String>,
    /// How often a drafted token is the one that the model chooses
    #[arg(long, value_name = "P", default_value_t = 0.8)]
    pub hits: f64,
    /// Milliseconds that drafting takes before each verify pass
    #[arg(long, value_name = "MS", default_value_t = 0.0)]
    pub draft_time: f64,
    /// Tokens that a pass commits for a sequence [default: as measured with --hits]
    #[arg(long, value_name = "A")]
    pub acceptance: Option<f64>,
    /// Of prompts and drafts
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Memory that the model may take, such as 16G [default: what is available]
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<String>,
    /// Say what each draft width took as soon as it is measured
    #[arg(long)]
    pub live: bool,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a page with charts
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
}

/// `--device`
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum On {
    Cpu,
    /// NVIDIA GPUs
    Cuda,
}

/// What the flags say about GPUs.
#[derive(Clone, Debug, Default)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct Wanted {
    pub ranks_per_gpu: Option<usize>,
    pub cublas: Option<PathBuf>,
    pub nccl: Option<PathBuf>,
    pub kernels: Option<PathBuf>,
}

/// How long a rank on a GPU waits for another unless `PEERLANE_DEADLINE` says so: nobody is ever that late here.
const DEADLINE: std::time::Duration = std::time::Duration::from_secs(30);

/// `--fused`
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Fused {
    On,
    Off,
}

/// What the arguments come to.
pub struct Job {
    pub config: Config,
    /// The shape, for people.
    pub name: String,
    pub origin: Origin,
    pub ranks: usize,
    pub plan: Plan,
    /// What the model may take, unless it is all there is.
    pub memory: Option<u64>,
    /// Ranks are on GPUs.
    pub gpu: Option<Wanted>,
    /// Ranks are processes.
    pub processes: bool,
    pub sums: Sums,
    pub fused: bool,
    pub comm: peerlane::comm::Config,
}

impl Args {
    /// Checks everything that needs no weights.
    pub fn job(&self) -> Result<Job> {
        let origin: Origin = self.weights.parse()?;
        let (mut config, name) = match (&self.config, &origin) {
            (Some(name), _) => (Config::named(name)?, name.clone()),
            (None, Origin::Random(_)) => (Config::named(SMALL)?, SMALL.into()),
            (None, Origin::Folder(folder)) => {
                let file = folder.join("config.json");
                let config = Config::read(&file)
                    .with_context(|| format!("--weights {}", folder.display()))?;
                (config, file.display().to_string())
            }
        };
        if let Some(layers) = self.layers {
            ensure!(layers > 0, "--layers 0: there is at least one");
            if let Origin::Folder(folder) = &origin {
                let all = config.num_hidden_layers;
                ensure!(
                    layers <= all,
                    "--layers {layers}: the model in {} has {all}",
                    folder.display()
                );
            }
            config.num_hidden_layers = layers;
        }
        let ranks = self.tp.unwrap_or(4);
        check_ranks(&config, ranks)?;
        let plan = self.plan(&config)?;
        let size = self.memory.as_deref();
        let parse = |size| memory::parse(size).with_context(|| format!("--memory {size}"));
        let memory = size.map(parse).transpose()?;
        let mut comm = peerlane::comm::Config::from_env(ranks)?;
        if let Some(islands) = &self.islands {
            let islands = Islands::parse(ranks, islands);
            comm.islands =
                Some(islands.with_context(|| {
                    format!("--islands {}", self.islands.as_deref().unwrap_or(""))
                })?);
        }
        comm.algorithm = self.algo.or(comm.algorithm);
        comm.protocol = self.proto.or(comm.protocol);
        ensure!(
            comm.device == peerlane::Device::Cpu || self.device == On::Cuda,
            "PEERLANE_DEVICE is {}, but the verify runner runs where --device says, and that is the CPU",
            comm.device
        );
        ensure!(
            self.all_reduce != AllReduce::Nccl || self.device == On::Cuda,
            "--all-reduce nccl: NCCL sums on GPUs (--device cuda)"
        );
        let gpu = self.wanted()?;
        if gpu.is_some() && peerlane::env::Env::read()?.deadline.is_none() {
            comm.deadline = DEADLINE;
        }
        let sums = if gpu.is_some() { Sums::Bf16 } else { self.sums };
        let fused = self.fused == Fused::On && sums == Sums::Bf16;
        if fused {
            ensure!(
                config.hidden_size.is_multiple_of(8),
                "hidden_size is {}, but fused rows are multiples of 8 (--fused off)",
                config.hidden_size
            );
        }
        let processes = self.processes;
        Ok(Job { config, name, origin, ranks, plan, memory, gpu, processes, sums, fused, comm })
    }

    /// What is wanted of GPUs, where ranks are to run on them.
    pub fn wanted(&self) -> Result<Option<Wanted>> {
        if self.device == On::Cpu && self.check_gpu.is_none() {
            return Ok(None);
        }
        ensure!(
            cfg!(feature = "cuda"),
            "--device cuda: this runner was built for the CPU alone; build it with --features cuda"
        );
        Ok(Some(Wanted {
            ranks_per_gpu: self.ranks_per_gpu,
            cublas: self.cublas.clone(),
            nccl: self.nccl.clone(),
            kernels: self.kernels.clone(),
        }))
    }

    fn plan(&self, config: &Config) -> Result<Plan> {
        ensure!(self.passes > 0, "--passes 0: there is nothing to measure");
        ensure!(self.sequences > 0, "--sequences 0: there is nothing to verify");
        ensure!((0.0..=1.0).contains(&self.hits), "--hits {}: it takes 0 to 1", self.hits);
        ensure!(
            self.draft_time >= 0.0 && self.draft_time.is_finite(),
            "--draft-time {}: it takes milliseconds",
            self.draft_time
        );
        let widths = self.widths.as_deref().unwrap_or_default();
        ensure!(
            widths.is_sorted_by(|a, b| a < b),
            "--widths {widths:?}: they grow from one to the next"
        );
        let last = match &self.tree {
            None if !widths.is_empty() => {
                let widest = widths.last().copied().unwrap_or(1);
                Draft::chain(widest).with_context(|| format!("--widths {widest}"))?
            }
            None => Draft::chain(self.draft).with_context(|| format!("--draft {}", self.draft))?,
            Some(parents) => {
                ensure!(
                    parents.iter().filter(|&&parent| parent == crate::batch::ROOT).count() == 1,
                    "--tree: row 0 is the last committed token, so it alone has the parent -1"
                );
                Draft::tree(parents.clone()).context("--tree")?
            }
        };
        if let Some(acceptance) = self.acceptance {
            let most = last.depth();
            ensure!(
                (1.0..=most as f64).contains(&acceptance),
                "--acceptance {acceptance}: a pass commits 1 to {most} tokens of this draft"
            );
        }
        let rows = last.rows() * self.sequences;
        ensure!(
            rows <= MOST_ROWS,
            "{} sequences of {} rows are {rows} rows; a pass takes at most {MOST_ROWS} (--sequences, --draft)",
            self.sequences,
            last.rows()
        );
        let contexts = contexts(&self.context, self.sequences)?;
        let longest = contexts.iter().max().copied().unwrap_or(0) + last.rows();
        ensure!(
            longest <= config.max_position_embeddings,
            "a context and its draft are {longest} tokens; the model holds {} (--context)",
            config.max_position_embeddings
        );
        // Plain decoding first, then powers of two up to the widest.
        let powers = (0..).map(|power| 1 << power).take_while(|&rows| rows < last.rows());
        let narrower: Vec<usize> = match widths {
            [] => powers.collect(),
            // The others are compared with plain decoding.
            [narrower @ .., _] => {
                let plain = (narrower.first() != Some(&1)).then_some(1);
                plain.into_iter().chain(narrower.iter().copied()).collect()
            }
        };
        let mut drafts = match self.tree {
            None => narrower.into_iter().map(Draft::chain).collect::<Result<Vec<_>>>()?,
            Some(_) => vec![Draft::chain(1)?],
        };
        if last.rows() > 1 {
            drafts.push(last);
        } else {
            drafts = vec![Draft::chain(1)?];
        }
        Ok(Plan {
            contexts,
            drafts,
            vocabulary: config.vocab_size,
            passes: self.passes,
            by: self.all_reduce,
            hits: self.hits,
            seed: self.seed,
            live: self.live,
        })
    }
}

/// Contexts of all sequences, each of one token at least.
fn contexts(text: &str, sequences: usize) -> Result<Vec<usize>> {
    let number = |text: &str| match text.trim().parse::<usize>() {
        Ok(0) | Err(_) => bail!("--context: '{text}' is no number of tokens"),
        Ok(number) => Ok(number),
    };
    if let Some((low, high)) = text.split_once('-') {
        let (low, high) = (number(low)?, number(high)?);
        ensure!(low <= high, "--context {text}: the first number is the smaller one");
        let steps = sequences.saturating_sub(1).max(1);
        return Ok((0..sequences).map(|s| low + (high - low) * s / steps).collect());
    }
    let list = text.split(',').map(number).collect::<Result<Vec<_>>>()?;
    match list.len() {
        1 => Ok(vec![list[0]; sequences]),
        length if length == sequences => Ok(list),
        length => {
            bail!("--context names {length} sequences, but there are {sequences} (--sequences)")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Args {
        Args::try_parse_from(["peerlane-verify"].into_iter().chain(line.split_whitespace()))
            .unwrap()
    }

    #[test]
    fn contexts_are_one_each_or_spread() {
        assert_eq!(contexts("5", 3).unwrap(), [5, 5, 5]);
        assert_eq!(contexts("13,7,21", 3).unwrap(), [13, 7, 21]);
        assert_eq!(contexts("10-40", 4).unwrap(), [10, 20, 30, 40]);
        assert_eq!(contexts("10-40", 1).unwrap(), [10]);
        for text in ["0", "x", "1,2", "9-4", ""] {
            assert!(contexts(text, 3).is_err(), "{text}");
        }
    }

    #[test]
    fn widths_double_from_plain_decoding_to_the_one_asked_for() {
        let widths = |line: &str| -> Vec<usize> {
            args(line).job().unwrap().plan.drafts.iter().map(Draft::rows).collect()
        };
        assert_eq!(widths("--draft 6"), [1, 2, 4, 6]);
        assert_eq!(widths("--draft 8"), [1, 2, 4, 8]);
        assert_eq!(widths("--draft 1"), [1]);
        assert_eq!(widths("--tree -1,0,0,1"), [1, 4]);
        assert_eq!(widths("--widths 1,4,16"), [1, 4, 16]);
        assert_eq!((widths("--widths 4,6"), widths("--widths 1")), (vec![1, 4, 6], vec![1]));
        assert!(args("--widths 4,4").job().is_err() && args("--widths 65").job().is_err());
    }
}
