//! The `peerlane` command-line tool.

mod bench;
mod soak;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Topology-aware small-message collectives for PCIe-only multi-GPU boxes.
#[derive(Parser)]
#[command(name = "peerlane", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure and check all-reduce; flags and table as in nccl-tests
    Bench(Box<bench::Args>),
    /// Reduce at random for as long as asked, check every result, and watch for leaks
    Soak(soak::Args),
    /// One rank of a `bench` run; takes its orders on standard input
    #[command(hide = true)]
    BenchRank,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Bench(args) => bench::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Soak(args) => soak::run(&args).map(|()| ExitCode::SUCCESS),
        Command::BenchRank => bench::serve_rank(),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            // Standard error may be gone (a closed pipe); the exit status still tells.
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "peerlane: {error:#}");
            ExitCode::FAILURE
        }
    }
}
