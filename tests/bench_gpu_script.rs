//! `scripts/bench-gpu`, as it runs from its folder on a machine with a GPU, over the stand-in driver.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

#[path = "common/carried.rs"]
mod carried;
#[path = "common/fakecuda.rs"]
mod fakecuda;
#[path = "common/gpu_tool.rs"]
mod gpu_tool;
#[path = "common/bench.rs"]
mod tool;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The folder that `make bench-gpu-build` fills.
fn carried(name: &str, smoke: &str) -> PathBuf {
    carried::folder(name, "bench-gpu", smoke)
}

fn run(folder: &Path, more: &[(&'static str, &str)], flags: &[&str]) -> (Output, String) {
    let output = Command::new("python3")
        .arg(folder.join("bench-gpu"))
        .args(["--calls", "3", "--batches", "2", "--seconds", "500", "--sizes", "1024", "14336"])
        .args(flags)
        .envs(gpu_tool::with(more))
        .env("PEERLANE_RUN_DIR", folder.join("run"))
        .current_dir("/")
        .output()
        .unwrap();
    let text = tool::text(&output);
    (output, text)
}

const PASSED: &str =
    "PASS n=1 islands 0 (0.1 s) 8 ways\\nPASS n=2 islands 0-1 (0.1 s) 8 ways\\nPASS all\\n";

#[test]
fn every_schedule_and_nccl_are_in_one_table() {
    let folder = carried("script", PASSED);
    let nccl = gpu_tool::nccl().display().to_string();
    let (output, text) = run(&folder, &[("PEERLANE_NCCL_LIB", &nccl)], &["--ranks", "2", "4"]);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("2 sets of checks passed, 0 failed"), "{text}");
    assert!(text.contains("ratio: auto over NCCL 2.30.7"), "{text}");
    for (ranks, mode, figures) in
        [(2, "bare", 6), (2, "between", 6), (4, "bare", 9), (4, "between", 9)]
    {
        let rows: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>())
            .filter(|cells| cells.len() > 3 && cells[0] == ranks.to_string() && cells[1] == mode)
            .collect();
        assert_eq!(rows.len(), 2, "{text}");
        for row in rows {
            // Ranks, mode, size; then auto, the schedules that exist, NCCL and the ratio; then what auto was.
            let cells = &row[3..row.len() - 1];
            let (ratio, times) = cells.split_last().unwrap();
            let known = times.iter().filter(|cell| cell.parse::<f64>().is_ok()).count();
            assert_eq!(known, figures - 1, "{row:?}\n{text}");
            // Noise between foreign kernels can leave NCCL no time at all, and then there is no ratio.
            let nccl: f64 = times.last().unwrap().parse().unwrap();
            if nccl.abs() >= 0.01 {
                assert_eq!(ratio.parse::<f64>().is_ok(), nccl > 0.0, "{row:?}\n{text}");
            }
        }
    }
}

#[test]
fn what_fails_is_told_and_is_the_exit_status() {
    let failing =
        "PASS n=1 islands 0 (0.1 s)\\nFAIL n=2 islands 0-1 (0.1 s): rubbish\\nFAIL 1 checks\\n";
    let (output, text) =
        run(&carried("script-smoke", failing), &[], &["--ranks", "2", "--no-nccl"]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("1 sets of checks passed, 1 failed"), "{text}");
    assert!(text.contains("WRONG: FAIL n=2 islands 0-1 (0.1 s): rubbish"), "{text}");

    let folder = carried("script-wrong", PASSED);
    let map = gpu_tool::kernels_that_do_nothing();
    let (output, text) =
        run(&folder, &[("FAKECUDA_KERNEL_MAP", &map)], &["--ranks", "2", "--no-nccl"]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("elements were wrong"), "{text}");

    let (output, text) =
        run(&folder, &[("CUDA_VISIBLE_DEVICES", "")], &["--ranks", "2", "--no-nccl"]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("no device") && text.contains("# 0 runs"), "{text}");
}

#[test]
fn without_time_it_stops_and_says_so() {
    let folder = carried("script-time", PASSED);
    let (output, text) = run(&folder, &[], &["--ranks", "2", "--no-nccl", "--seconds", "0"]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("no time left for auto"), "{text}");
}
