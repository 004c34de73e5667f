//! The `peerlane` command-line tool.

mod bench;
mod described;
mod doctor;
mod explain;
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
    /// Show the box, its islands, the schedule for a message, and what it will cost
    Explain(explain::Args),
    /// Say whether this box will be fast and right, and what to change
    Doctor(doctor::Args),
    /// Reduce at random for as long as asked, check every result, and watch for leaks
    Soak(soak::Args),
    /// One rank of a `bench` run; takes its orders on standard input
    #[command(hide = true)]
    BenchRank,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Bench(args) => bench::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Explain(args) => explain::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Doctor(args) => doctor::run(&args),
        Command::Soak(args) => soak::run(&args).map(|()| ExitCode::SUCCESS),
        Command::BenchRank => bench::serve_rank(),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// Says what went wrong. Words of a file that stand in it make the terminal do nothing.
fn complain(error: &anyhow::Error) {
    use std::io::Write;
    let obeyed = |c: char| c.is_control() && c != '\n' && c != '\t';
    let text = format!("peerlane: {error:#}\n").replace(obeyed, "\u{fffd}");
    // Standard error may be gone (a closed pipe); the exit status still tells.
    let _ = std::io::stderr().write_all(text.as_bytes());
}
