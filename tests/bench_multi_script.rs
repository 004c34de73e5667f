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
use std::time::Instant;

/// The folder that `make bench-multi-build` fills, but for the verify runner and the NCCL replacement.
fn carried(name: &str, smoke: &str) -> PathBuf {
    carried::folder(name, "bench-multi", smoke)
}

fn run(folder: &Path, more: &[(&'static str, &str)]) -> (Output, String) {
    let output = Command::new("python3")
        .arg(folder.join("bench-multi"))
        .args(["--ranks", "2", "--calls", "3", "--batches", "2", "--sizes", "1024", "131072"])
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
                let cells = |line: &'_ str| line.split(',').map(str::to_owned).collect::<Vec<_>>();
                let rows: Vec<_> =
                    table.lines().filter(|l| l.starts_with(&begins)).map(cells).collect();
                // Everything was compared with the oracle, and NCCL stands beside what is chosen, with both protocols.
                let kinds: &[&str] = if schedule == "auto" { &["default", "LL"] } else { &[""] };
                for kind in kinds {
                    let rows = rows.iter().filter(|c| c[12].is_empty() && c[13] == *kind);
                    assert_eq!(rows.count(), 2, "{begins} {kind}\n{table}");
                }
                for row in &rows {
                    assert_eq!(row[8], "0", "{row:?}");
                    assert_eq!(row[11].starts_with("NCCL"), schedule == "auto", "{row:?}");
                }
            }
        }
    }
    for protocol in ["sentinel", "flagged"] {
        assert!(text.contains(&format!("staged, bare, one_shot/{protocol}: 1024: ")), "{text}");
    }
    // Over host memory `ll` is asked for small messages alone.
    for (lane, sizes) in [("direct", vec!["1024", "131072"]), ("staged", vec!["1024"])] {
        let cells = table.lines().map(|line| line.split(',').collect::<Vec<_>>());
        let ll: Vec<_> = cells
            .filter(|c| (c[0], c[3], c[12]) == (lane, "one_shot", "ll"))
            .map(|c| c[4])
            .collect();
        assert_eq!(ll, sizes, "{lane}\n{table}");
    }
    let row = format!("{:<8}{:<9}{:>9}", "staged", "between", 1024);
    assert!(text.lines().any(|line| line.starts_with(&row)), "{text}");
    let kept = std::fs::read_to_string(folder.join("out/multi.txt")).unwrap();
    assert!(text.contains(kept.trim_end()), "{kept}");
    assert_eq!(std::fs::read_dir(folder.join("out")).unwrap().count(), 4);
}

#[test]
fn a_failed_check_or_a_wrong_result_is_told_and_is_the_exit_status() {
    let failing = "FAIL a process per rank over vmm (0.1 s): rubbish\\nFAIL 1 checks\\n";
    let script = carried("multi-smoke", &format!("{failing}'; exit '1"));
    let (output, text) = run(&script, &[("PEERLANE_NCCL_LIB", "/nowhere/libnccl.so.2")]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("rubbish") && text.contains("WRONG: gpu_smoke multi-results failed"),
        "{text}"
    );

    let map = gpu_tool::kernels_that_do_nothing();
    let (output, text) = run(&carried("multi-wrong", PASSED), &[("FAKECUDA_KERNEL_MAP", &map)]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("elements were wrong"), "{text}");
}

#[test]
fn a_part_that_hangs_is_ended_with_what_is_left_to_it_and_the_next_has_its_turn() {
    const SECONDS: f64 = 30.0;
    let smoke = "'; [ $1 = multi-kills ] || printf 'PASS n=2 GPUs\\n'; sleep 1000; exit '0";
    let folder = carried("multi-hangs", smoke);
    let begun = Instant::now();
    let output = Command::new("python3")
        .arg(folder.join("bench-multi"))
        .args(["--ranks", "2", "--parts", "results,kills,box", "--seconds", &SECONDS.to_string()])
        .arg("--out")
        .arg(folder.join("out"))
        .envs(gpu_tool::fake())
        .env("PEERLANE_RUN_DIR", folder.join("run"))
        .output()
        .unwrap();
    let took = begun.elapsed().as_secs_f64();
    let text = tool::text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("WRONG: gpu_smoke multi-kills was not done in its time"), "{text}");
    assert!(text.contains("# gpu_smoke multi-results was stopped after 1 checks"), "{text}");
    assert!(took < SECONDS, "{took} s\n{text}");

    // 0.06, 0.14 and 0.18 of what is not kept for the end are until when each may go on; what the box left went to the kills.
    let until = |part: &str| -> [f64; 2] {
        let line = text.lines().find(|line| line.starts_with(&format!("== {part} ["))).unwrap();
        let words = line.split(['[', ' ']).filter_map(|word| word.parse().ok());
        words.collect::<Vec<_>>().try_into().unwrap()
    };
    let (kills, results) = (until("kills"), until("results"));
    assert_eq!([kills[1], results[1]], [15.0, 28.0], "{text}");
    assert!((14.0..18.0).contains(&results[0]), "{text}");
    assert!(results[0] - kills[0] > 28.0 * 0.14 / 0.38, "{text}");
}
