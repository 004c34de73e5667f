//! `scripts/bench-multi`, as it runs from its folder on a machine with several GPUs, over the stand-in driver.
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

/// The folder that `make bench-multi-build` fills, but for the verify runner and the NCCL replacement.
fn carried(name: &str, smoke: &str) -> PathBuf {
    carried::folder(name, "bench-multi", smoke)
}

fn run(folder: &Path, more: &[(&'static str, &str)]) -> (Output, String) {
    let output = Command::new("python3")
        .arg(folder.join("bench-multi"))
        .args(["--ranks", "2", "--calls", "3", "--batches", "2", "--sizes", "1024", "14336"])
        .arg("--out")
        .arg(folder.join("out"))
        .envs(gpu_tool::with(more))
        .env("PEERLANE_RUN_DIR", folder.join("run"))
        .current_dir("/")
        .output()
        .unwrap();
    let text = tool::text(&output);
    (output, text)
}

const PASSED: &str = "PASS n=2 GPUs over vmm (0.1 s)\\nPASS all\\n";

#[test]
fn both_lanes_are_measured_a_rank_on_each_gpu_beside_nccl() {
    let folder = carried("multi", PASSED);
    let nccl = gpu_tool::nccl().display().to_string();
    let (output, text) = run(&folder, &[("PEERLANE_NCCL_LIB", &nccl)]);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("PASS n=2 GPUs over vmm"), "{text}");
    let table = std::fs::read_to_string(folder.join("out/multi.csv")).unwrap();
    for lane in ["direct", "staged"] {
        for mode in ["bare", "between"] {
            for schedule in ["auto", "one_shot", "two_shot"] {
                let begins = format!("{lane},{mode},2,{schedule},");
                let rows: Vec<&str> =
                    table.lines().filter(|line| line.starts_with(&begins)).collect();
                assert_eq!(rows.len(), 2, "{begins}\n{table}");
                // Everything was compared with the oracle, and NCCL stands beside what is chosen.
                for row in rows {
                    let cells: Vec<&str> = row.split(',').collect();
                    assert_eq!(cells[8], "0", "{row}");
                    assert_eq!(cells[11].starts_with("NCCL"), schedule == "auto", "{row}");
                }
            }
        }
    }
    let kept = std::fs::read_to_string(folder.join("out/multi.txt")).unwrap();
    assert!(text.contains(kept.trim_end()), "{kept}");
}

#[test]
fn a_failed_check_or_a_wrong_result_is_told_and_is_the_exit_status() {
    let failing = "FAIL a process per rank over vmm (0.1 s): rubbish\\nFAIL 1 checks\\n";
    let script = carried("multi-smoke", &format!("{failing}'; exit '1"));
    let (output, text) = run(&script, &[("PEERLANE_NCCL_LIB", "/nowhere/libnccl.so.2")]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("rubbish") && text.contains("WRONG: gpu_smoke multi failed"), "{text}");

    let map = gpu_tool::kernels_that_do_nothing();
    let (output, text) = run(&carried("multi-wrong", PASSED), &[("FAKECUDA_KERNEL_MAP", &map)]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("elements were wrong"), "{text}");
}
