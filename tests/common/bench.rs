//! `peerlane bench` from outside.

// Each test binary that includes this uses its own share of it.
#![allow(dead_code)]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder of this test's own, with an empty run directory in it.
pub fn folder(name: &str) -> PathBuf {
    use std::os::unix::fs::DirBuilderExt;
    let path =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", env!("CARGO_CRATE_NAME")));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path.join("run")).unwrap();
    path
}

pub fn bench(folder: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_peerlane"));
    command.arg("bench").args(line.split_whitespace());
    command.env("PEERLANE_RUN_DIR", folder.join("run")).env("PEERLANE_LOG", "off");
    command
}

pub fn text(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    format!("{}\n{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err))
}

pub fn report(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The keys of an object, in order of the alphabet.
pub fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

/// Runs `line` with a report; the run must succeed with nothing wrong.
pub fn measured(name: &str, line: &str) -> Value {
    measured_with(name, line, &[]).0
}

/// The same with variables in the environment; the report, and what was printed.
pub fn measured_with(name: &str, line: &str, env: &[(&str, String)]) -> (Value, String) {
    let folder = folder(name);
    let json = folder.join("report.json");
    let mut command = bench(&folder, line);
    command.envs(env.iter().map(|(name, value)| (name, value)));
    let output = command.arg("--json").arg(&json).output().unwrap();
    let printed = text(&output);
    assert!(output.status.success(), "{line}: {}\n{printed}", output.status);
    assert!(printed.contains("# Out of bounds values : 0 OK"), "{printed}");
    assert!(printed.contains("# Avg bus bandwidth"), "{printed}");
    let left: Vec<_> = std::fs::read_dir(folder.join("run")).unwrap().collect();
    assert!(left.is_empty(), "left in the run directory: {left:?}");
    let report = report(&json);
    assert_eq!(report["wrong_total"], 0);
    (report, printed)
}
