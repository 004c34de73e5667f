//! What the threads of a rank share, in every interleaving and with every value that the memory model lets a load
//! return: loom runs the library's own sources, which `build.rs` copies here. Each model is run once more for every
//! safeguard, without it, and must then find something.
//!
//! The votes of set-up are not here: their threads and processes share sockets and no memory.

#![cfg(test)]
// The models use a part of what they include.
#![allow(dead_code)]

mod sync;
mod thread;

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

macro_rules! source {
    ($name:literal) => {
        include!(concat!(env!("OUT_DIR"), "/", $name));
    };
}

mod error {
    source!("error.rs");
}
mod types {
    source!("types.rs");
}
mod schedule {
    /// A fault prints it, and no more.
    pub type Goal = &'static str;
}
#[path = "../../../src/launch.rs"]
mod generated;
mod launch {
    pub use crate::generated::*;

    /// The CPU device's state, with an abort word that loom follows.
    #[allow(non_camel_case_types)]
    pub struct pl_state {
        pub abort: crate::sync::atomic::AtomicU32,
        pub record: pl_record,
    }

    impl pl_state {
        pub fn new() -> Self {
            let abort = crate::sync::atomic::AtomicU32::new(0);
            // SAFETY: plain integers, for which zero is a value.
            pl_state { abort, record: unsafe { std::mem::zeroed() } }
        }
    }
}
mod stream {
    source!("stream.rs");
    mod models;
}
mod device {
    pub use crate::stream::Stream;
    pub mod cpu {
        pub(crate) use crate::stream::Claim;
    }
}
mod order {
    source!("order.rs");
    mod models;
}
mod departures {
    source!("departures.rs");
    mod models;
}
mod fault {
    source!("fault.rs");
    mod models;
}
mod fork {
    source!("fork.rs");
    mod models;
}

/// The variable that names the safeguard which a run does without.
const WITHOUT: &str = "PL_TEST_WITHOUT";

/// Whether this run has the safeguard.
fn kept(safeguard: &str) -> bool {
    static WITHOUT_IT: OnceLock<Option<String>> = OnceLock::new();
    WITHOUT_IT.get_or_init(|| std::env::var(WITHOUT).ok()).as_deref() != Some(safeguard)
}

/// Runs `model` in every interleaving with at most `preemptions` switches away from a thread that could go on.
fn explore(name: &str, preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    let runs = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&runs);
    builder.check(move || {
        count.fetch_add(1, Relaxed);
        model();
    });
    println!("{name}: {} interleavings", runs.load(Relaxed));
}

/// The test `model` without `safeguard` fails, and says `finding`. In a process of its own: what loom unwinds may end it.
fn control(model: &str, safeguard: &str, finding: &str) {
    let run = Command::new(std::env::current_exe().unwrap())
        .args([model, "--exact", "--nocapture"])
        .env(WITHOUT, safeguard)
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap();
    let said = [run.stdout, run.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(!run.status.success(), "without '{safeguard}' {model} finds nothing");
    assert!(said.contains(finding), "without '{safeguard}': {said}");
}
