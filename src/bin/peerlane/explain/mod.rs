//! `peerlane explain`: the box, its islands, the schedule for a message, what each phase moves and what it costs.

mod report;

use crate::described;
use anyhow::{bail, ensure, Result};
use peerlane::env::parse_bytes;
use peerlane::plan::{Model, NOMINAL};
use peerlane::schedule::Islands;
use peerlane::topology::{self, Topology};
use peerlane::types::MAX_RANKS;
use peerlane::DType;
use report::Report;
use std::path::PathBuf;

/// Flags of `peerlane explain`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Times are predicted from published figures of PCIe, not measured on this box; `peerlane bench` measures.
FILE is hwloc's XML (`lstopo box.xml`), the text of `nvidia-smi topo -m`, a directory that stands for /, or a
capture of `peerlane doctor --capture`.")]
pub struct Args {
    /// Describe this instead of the box at hand
    #[arg(long, value_name = "FILE")]
    topology: Option<PathBuf>,
    /// Number of ranks [default: one per GPU, at most 16]
    #[arg(short, long, value_name = "N")]
    ranks: Option<usize>,
    /// The GPU of each rank, by number, such as 0,1,4,5; a GPU may have several [default: rank r on GPU r]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    gpus: Option<Vec<usize>>,
    /// Size of the message, with an optional K, M or G (powers of 1024)
    #[arg(short = 'b', long = "bytes", value_name = "SIZE", value_parser = parse_bytes, default_value = "57344")]
    bytes: u64,
    /// Element type
    #[arg(short = 'd', long = "datatype", value_name = "TYPE", value_parser = dtype, default_value = "bfloat16")]
    dtype: DType,
    /// Ranks of each island, such as 0-3,4-7 [default: from the box, or PEERLANE_ISLANDS]
    #[arg(long, value_name = "ISLANDS")]
    islands: Option<String>,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

fn dtype(text: &str) -> Result<DType, String> {
    text.parse().map_err(|e: peerlane::Error| e.to_string())
}

/// Explains, on standard output.
pub fn run(args: &Args) -> Result<()> {
    let variables = peerlane::env::Env::read()?;
    let path = args.topology.as_deref().or(variables.topology.as_deref());
    let topology = described::describe(path)?;
    let gpu_of = seats(args, &topology)?;
    let (islands, reason) = match args.islands.as_deref().or(variables.islands.as_deref()) {
        Some(text) => (Islands::parse(gpu_of.len(), text)?, "as asked for".to_owned()),
        None => {
            let found = topology::islands(&topology, &gpu_of)?;
            (found.islands, found.reason)
        }
    };
    let model = Model::new(&topology, &gpu_of, &islands, &NOMINAL)?;
    let report = Report::new(
        &topology,
        &gpu_of,
        &islands,
        &reason,
        &model,
        args.bytes as usize,
        args.dtype,
    )?;
    described::say(&match args.json {
        true => serde_json::to_string_pretty(&report)? + "\n",
        false => report.text(&topology, &gpu_of),
    })
}

fn seats(args: &Args, topology: &Topology) -> Result<Vec<usize>> {
    let count = topology.gpus.len();
    if count == 0 {
        bail!(
            "{}: no NVIDIA GPU is described; name a description with --topology, such as the output of `nvidia-smi topo -m`",
            topology.source,
        );
    }
    let gpu_of = match (&args.gpus, args.ranks) {
        (Some(gpus), ranks) => {
            ensure!(
                ranks.is_none_or(|n| n == gpus.len()),
                "--ranks {} but --gpus names {}",
                ranks.unwrap_or(0),
                gpus.len()
            );
            gpus.clone()
        }
        (None, ranks) => (0..ranks.unwrap_or(count.min(MAX_RANKS))).collect(),
    };
    ensure!(
        (1..=MAX_RANKS).contains(&gpu_of.len()),
        "{} ranks; a communicator has 1 to {MAX_RANKS}",
        gpu_of.len()
    );
    if let Some(gpu) = gpu_of.iter().find(|gpu| **gpu >= count) {
        bail!("GPU {gpu} is not there: {} describes {count} GPU(s); name the GPU of each rank with --gpus", topology.source);
    }
    Ok(gpu_of)
}
