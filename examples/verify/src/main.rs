//! The verify runner: DeepSeek-V3 (and Kimi-K2) decoder layers in the shape of a speculative verify pass, tensor parallel
//! over ranks that reduce with peerlane, two all-reduces a layer.
//!
//! | file | what it is |
//! | --- | --- |
//! | `config`, `presets` | the shape of a model: `config.json`, or one built in |
//! | `weights/` | a checkpoint with the published names, or values from a seed |
//! | `shard` | which part of which tensor a rank holds |
//! | `memory` | what a run needs, and how many pools of experts fit |
//! | `device/` | the operations that a pass is made of: the seam between model and machine; `cpu/` carries them out in fp32, `cuda/` in bf16 on GPUs |
//! | `batch` | the rows of a pass: tokens, positions, what each may see; chains and trees |
//! | `attention`, `moe` | the two halves of a layer, up to a rank's partial sums |
//! | `reduce` | what stands between them: all-reduce, residual, norm |
//! | `layer`, `pass` | one layer; all of them, from tokens to chosen tokens |
//! | `observe`, `stamp` | looking into a pass: values, and where the time goes |
//! | `drafts`, `measure`, `run` | what is drafted; what a rank measures; all ranks together |
//! | `processes` | the same with a process for each rank |
//! | `check/` | a GPU against the golden data |
//! | `meeting` | where the threads of ranks that share a GPU wait for each other |
//! | `economics`, `report/` | what it is worth; table, JSON, page |
//! | `mistake` | mistakes that tests make on purpose |

mod args;
mod attention;
mod batch;
#[cfg(any(test, feature = "cuda"))]
mod check;
mod config;
mod device;
mod drafts;
mod economics;
mod layer;
mod measure;
#[cfg(feature = "cuda")]
mod meeting;
mod memory;
mod mistake;
mod moe;
mod observe;
mod pass;
mod presets;
mod processes;
mod reduce;
mod report;
mod run;
mod shard;
mod stamp;
#[cfg(test)]
mod tests;
mod weights;

use anyhow::Result;
use args::Args;
use clap::Parser;
use report::{page, table, Output, Report};
use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Standard error may be gone (a closed pipe); the exit status still tells.
            let _ = writeln!(std::io::stderr(), "peerlane-verify: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    #[cfg(feature = "cuda")]
    {
        let nccl = args.all_reduce == reduce::AllReduce::Nccl;
        device::cuda::place::prepare(nccl, args.ranks_per_gpu);
    }
    if let Some(folder) = &args.check_gpu {
        return check(args, folder);
    }
    let job = args.job()?;
    if let Some(rank) = args.as_rank {
        return processes::rank(&job, rank);
    }
    let json = args.json.as_deref().map(|path| Output::create("--json", path)).transpose()?;
    let html = args.report.as_deref().map(|path| Output::create("--report", path)).transpose()?;
    let report = Report::new(args, &job, &run::run(&job)?);
    write!(std::io::stdout(), "{}", table::text(&report))?;
    if let Some(output) = json {
        output.write(|out| report.write_json(out))?;
    }
    if let Some(output) = html {
        let page = page::html(&report)?;
        output.write(|out| Ok(out.write_all(page.as_bytes())?))?;
    }
    Ok(())
}

#[cfg(feature = "cuda")]
fn check(args: &Args, folder: &std::path::Path) -> Result<()> {
    let wanted = args.wanted()?.unwrap_or_default();
    let ranks = args.tp.map_or(vec![1, 2, 4, 8], |ranks| vec![ranks]);
    check::check(folder, &wanted, &ranks, args.replays, &mut std::io::stdout())
}

#[cfg(not(feature = "cuda"))]
fn check(args: &Args, _folder: &std::path::Path) -> Result<()> {
    args.wanted().map(drop)
}
