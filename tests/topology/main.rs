//! Knowing the box: descriptions, islands, the choice that follows, `explain` and `doctor`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod agreement;
mod capture;
mod doctor;
mod explain;
mod fake_box;
mod fixtures;
mod lstopo;
mod mutated;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A file of the fixtures.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/topology/fixtures").join(name)
}

/// The tool, away from whatever this machine's environment asks for.
fn peerlane(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_peerlane"))
        .args(args)
        .env_clear()
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap()
}

/// Its standard output.
fn said(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}
