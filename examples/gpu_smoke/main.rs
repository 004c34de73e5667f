//! Runs the library on real GPUs and compares with the CPU device: `gpu_smoke [virtual|fused|probe|enqueue|faults|processes|multi]...`,
//! everything but `multi` without arguments; that takes two GPUs or more, and `multi-results` and `multi-kills` are its halves. One line per
//! check, `PASS` or `FAIL`; the exit status is 1 if any failed.
#![allow(clippy::print_stdout)]

mod enqueue;
mod faults;
mod fused;
mod probe;
mod processes;
mod rows;
mod support;
mod virtual_ranks;

use processes::Part;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

static FAILED: AtomicUsize = AtomicUsize::new(0);

/// Runs a check and prints what became of it.
pub fn check(name: &str, body: impl FnOnce() -> Result<String, String>) {
    let start = Instant::now();
    let outcome = body();
    let seconds = start.elapsed().as_secs_f64();
    match outcome {
        Ok(detail) => println!("PASS {name} ({seconds:.2} s) {detail}"),
        Err(why) => {
            FAILED.fetch_add(1, Ordering::Relaxed);
            println!("FAIL {name} ({seconds:.2} s): {why}");
        }
    }
}

fn main() -> ExitCode {
    // Virtual ranks wait for each other, so each of their streams needs a hardware queue of its own.
    if std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() {
        std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32");
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "rank") {
        return processes::rank(&arguments[1..]);
    }
    let wanted = |part: &str| arguments.is_empty() || arguments.iter().any(|a| a == part);
    if wanted("virtual") {
        virtual_ranks::run();
    }
    if wanted("fused") {
        fused::run();
    }
    if wanted("probe") {
        probe::run();
    }
    if wanted("enqueue") {
        enqueue::run();
    }
    if wanted("faults") {
        faults::run();
    }
    if wanted("processes") {
        processes::run();
    }
    let asked = |part: &str| arguments.iter().any(|a| a == "multi" || a == part);
    if asked("multi-results") {
        // The short ones first: what is cut short has seen all lanes.
        processes::run_on_all_gpus(Part::Results);
        virtual_ranks::run_on_all_gpus();
    }
    if asked("multi-kills") {
        processes::run_on_all_gpus(Part::Kills);
    }
    match FAILED.load(Ordering::Relaxed) {
        0 => {
            println!("PASS all");
            ExitCode::SUCCESS
        }
        failed => {
            println!("FAIL {failed} checks");
            ExitCode::FAILURE
        }
    }
}
