//! `peerlane bench --device cuda` from outside, over the stand-in driver: eager, in graphs, between foreign kernels, in one
//! process and in several, beside a stand-in NCCL.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

#[path = "common/fakecuda.rs"]
mod fakecuda;
#[path = "common/gpu_tool.rs"]
mod gpu_tool;
#[path = "common/bench.rs"]
mod tool;

use gpu_tool::{fake, fatbin, kernels_that_do_nothing, nccl, with};
use serde_json::Value;
use std::path::Path;
use std::process::Output;
use tool::{bench, folder, measured_with, text};

fn run(name: &str, line: &str, env: &[(&'static str, String)]) -> Output {
    let folder = folder(name);
    let mut command = bench(&folder, line);
    command.envs(env.iter().map(|(name, value)| (name, value))).output().unwrap()
}

fn rows(report: &Value) -> &Vec<Value> {
    report["results"].as_array().unwrap()
}

fn figures_are_there(report: &Value, count: usize) {
    assert_eq!(rows(report).len(), count);
    for row in rows(report) {
        for place in ["out_of_place", "in_place"] {
            assert_eq!(row[place]["wrong"], 0, "{row}");
            assert!(row[place]["time_us"].as_f64().is_some_and(f64::is_finite), "{row}");
        }
        assert!(row["algo"].as_str().unwrap().parse::<peerlane::Algorithm>().is_ok(), "{row}");
        assert!(row["proto"].as_str().unwrap().parse::<peerlane::Protocol>().is_ok(), "{row}");
    }
}

#[test]
fn eager_calls_of_virtual_ranks_are_measured_and_right() {
    let line = "--device cuda --ranks 3 --ranks-per-gpu 3 -b 96 -e 6K -f 8 -d all -o all -n 3 --batches 3 -w 1 -c 2";
    let (report, printed) = measured_with("eager", line, &fake());
    figures_are_there(&report, 10 * 5 * 3);
    assert!(rows(&report).iter().all(|row| row["out_of_place"]["time_us"].as_f64().unwrap() > 0.0));
    for what in [
        "cuda device",
        "ranks per GPU: 3",
        "3 in one process",
        "CUDA_DEVICE_MAX_CONNECTIONS=32 (set",
    ] {
        assert!(printed.contains(what), "{what}: {printed}");
    }
}

#[test]
fn graphs_of_calls_are_launched_measured_and_right() {
    // Odd numbers of calls, so that the halves of the slab alternate between launches.
    let line = "--device cuda --ranks 4 --ranks-per-gpu 4 -G 3 -n 5 -b 1K -e 64K -f 8 -d float,bfloat16 --batches 3 -c 3";
    let (report, printed) = measured_with("graph", line, &fake());
    figures_are_there(&report, 6);
    assert!(printed.contains("one graph per rank, launched 3 times per batch"), "{printed}");
    let line = "--device cuda --ranks 2 -G 2 -n 3 -m 2 -b 1K -e 1K -d int8 --batches 2 --algo two_shot --proto flagged";
    let (report, _) = measured_with("graph-forced", line, &fake());
    figures_are_there(&report, 1);
    assert_eq!(rows(&report)[0]["algo"], "two_shot");
    assert_eq!(rows(&report)[0]["proto"], "flagged");
}

#[test]
fn without_n_rank_0_chooses_and_a_graph_has_twenty_calls() {
    let line = "--device cuda --ranks 2 --ranks-per-gpu 2 -b 1K -e 1K";
    figures_are_there(&measured_with("auto", line, &fake()).0, 1);
    figures_are_there(&measured_with("auto-graph", &format!("{line} -G 1"), &fake()).0, 1);
}

#[test]
fn processes_are_ranks_on_gpus_of_their_own_over_every_lane() {
    for lane in ["vmm", "ipc", "host"] {
        let line = format!(
            "--device cuda --ranks 4 --processes --ranks-per-gpu 2 --lane {lane} --islands 0-1,2-3 -G 2 -n 3 -b 1K -e 32K -f 32 \
             --batches 3 -c 2 --blocks 9"
        );
        let (report, printed) = measured_with(&format!("processes-{lane}"), &line, &fake());
        figures_are_there(&report, 2);
        assert!(printed.contains("4 processes, islands: 0-1,2-3, pids: "), "{printed}");
        assert!(printed.contains("a quarter with eager ones, is lifted"), "{printed}");
    }
}

#[test]
fn between_foreign_kernels_what_these_take_alone_is_subtracted_and_told() {
    let fatbin = fatbin();
    for (name, how) in [("between-eager", ""), ("between-graph", "-G 2")] {
        // 1001 elements: the last pack is not whole.
        let line = format!(
            "--device cuda --ranks 3 --ranks-per-gpu 3 --between --foreign-kernel {} {how} -n 7 -b 2002 -e 2002 -d bfloat16 \
             --batches 5 -c 1",
            fatbin.display()
        );
        let (report, printed) = measured_with(name, &line, &fake());
        figures_are_there(&report, 1);
        assert!(rows(&report)[0]["foreign_us"].as_f64().unwrap() > 0.0);
        assert!(printed.contains("what these take alone is subtracted"), "{printed}");
    }
    let plain = "--device cuda --ranks 2 -n 3 --batches 2 -b 1K -e 1K";
    let (report, _) = measured_with("not-between", plain, &fake());
    assert!(rows(&report)[0].get("foreign_us").is_none());
}

/// The check sees what the kernels do: a run whose all-reduce does nothing must fail, eager, in graphs, and between.
#[test]
fn a_kernel_that_reduces_nothing_fails_the_run() {
    let fatbin = fatbin();
    let foreign = format!("--between --foreign-kernel {}", fatbin.display());
    for (name, how, expected) in [
        ("idle-eager", "", "FAILED"),
        ("idle-graph", "-G 1", "FAILED"),
        ("idle-between", &foreign, "FAILED"),
        ("idle-fused", "--fused --width 64", "FAILED"),
    ] {
        let broken = kernels_that_do_nothing();
        let env = with(&[("FAKECUDA_KERNEL_MAP", &broken)]);
        let line =
            format!("--device cuda --ranks 2 -n 3 --batches 2 -b 1K -e 1K -d bfloat16 {how}");
        let output = run(name, &line, &env);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output));
        assert!(text(&output).contains(expected), "{}", text(&output));
    }
}

#[test]
fn the_fused_operation_is_measured_and_checked_beside_its_unfused_twin() {
    let foreign = format!("--between --foreign-kernel {}", fatbin().display());
    for (name, how) in [
        ("fused-eager", ""),
        ("fused-graph", "-G 2"),
        ("fused-processes", "-G 2 --processes"),
        ("fused-between", foreign.as_str()),
    ] {
        let line = format!(
            "--device cuda --ranks 3 --ranks-per-gpu 3 --fused --width 264 -b 528 -e 4224 -f 8 -d half,bfloat16 -n 3 --batches 3 \
             -c 2 {how}"
        );
        let (report, printed) = measured_with(name, &line, &fake());
        figures_are_there(&report, 4);
        assert!(
            printed.contains("residual add and RMSNorm in one kernel, rows of 264"),
            "{printed}"
        );
        for row in rows(&report) {
            assert_eq!(
                (&row["rival"]["name"], &row["rival"]["wrong"]),
                (&"unfused".into(), &0.into())
            );
        }
    }
}

#[test]
fn nccl_is_measured_and_checked_beside_ours() {
    let library = nccl().display().to_string();
    let line = "--device cuda --ranks 3 --ranks-per-gpu 3 -b 1K -e 8K -f 8 -d float,int32 -o sum,max -n 4 --batches 3 --rival nccl";
    let foreign = format!("--between --foreign-kernel {}", fatbin().display());
    for (name, how) in [
        ("nccl-eager", ""),
        ("nccl-graph", "-G 2"),
        ("nccl-processes", "-G 2 --processes"),
        ("nccl-between", foreign.as_str()),
    ] {
        let env = with(&[("PEERLANE_NCCL_LIB", &library)]);
        let (report, printed) = measured_with(name, &format!("{line} {how}"), &env);
        figures_are_there(&report, 8);
        assert!(printed.contains("NCCL 2.30.7"), "{printed}");
        assert!(printed.contains("NCCL_MULTI_RANK_GPU_ENABLE=1 (set by this tool"), "{printed}");
        for row in rows(&report) {
            assert_eq!(tool::keys(&row["rival"]), ["name", "time_us", "version", "wrong"]);
            assert_eq!(
                (&row["rival"]["name"], &row["rival"]["wrong"]),
                (&"NCCL".into(), &0.into())
            );
            if !how.contains("between") {
                let ours = row["out_of_place"]["time_us"].as_f64().unwrap();
                let theirs = row["rival"]["time_us"].as_f64().unwrap();
                assert!((row["ratio"].as_f64().unwrap() - ours / theirs).abs() < 1e-9);
            }
        }
    }
}

#[test]
fn wrong_results_of_nccl_fail_the_run() {
    for how in ["", "-G 1"] {
        let line = format!(
            "--device cuda --ranks 2 -b 1K -e 1K -n 2 --batches 2 {how} --rival nccl --nccl-lib {}",
            nccl().display()
        );
        let output = run("nccl-wrong", &line, &with(&[("FAKENCCL_WRONG", "1")]));
        assert_eq!(output.status.code(), Some(1), "{}", text(&output));
        assert!(text(&output).contains("FAILED"), "{}", text(&output));
    }
}

#[test]
fn what_nccl_refuses_ends_the_run_with_the_reason() {
    let library = nccl().display().to_string();
    let line = format!(
        "--device cuda --ranks 2 -b 1K -e 1K -n 2 --batches 2 --rival nccl --nccl-lib {library}"
    );
    for (name, more, line, what) in [
        (
            "nccl-old",
            vec![("FAKENCCL_VERSION", "22809")],
            format!("{line} --ranks-per-gpu 2"),
            "NCCL 2.28.9 takes one rank per GPU",
        ),
        (
            "nccl-sharing",
            vec![("NCCL_MULTI_RANK_GPU_ENABLE", "0")],
            format!("{line} --ranks-per-gpu 2"),
            "ncclCommInitRank failed with 5 (invalid usage)",
        ),
        (
            "nccl-type",
            vec![],
            format!("{line} -d double"),
            "ncclAllReduce failed with 4 (invalid argument)",
        ),
        (
            "nccl-missing",
            vec![],
            line.replace(&library, "/nonexistent/libnccl.so.2"),
            "cannot load /nonexistent/libnccl.so.2",
        ),
        (
            "nccl-other",
            vec![],
            line.replace(
                &library,
                &fakecuda::driver_folder().join("libcuda.so.1").display().to_string(),
            ),
            "is no NCCL",
        ),
    ] {
        let output = run(name, &line, &with(&more));
        assert_eq!(output.status.code(), Some(1), "{name}: {}", text(&output));
        assert!(text(&output).contains(what), "{name}: {}", text(&output));
        assert!(!text(&output).contains("Out of bounds"), "{name}");
    }
    // An older NCCL serves a GPU per rank.
    let env = with(&[("FAKENCCL_VERSION", "22809")]);
    let (report, _) = measured_with("nccl-apart", &format!("{line} --ranks-per-gpu 1"), &env);
    assert_eq!(rows(&report)[0]["rival"]["version"], "2.28.9");
}

#[test]
fn flags_that_the_gpus_cannot_follow_are_refused_with_the_reason() {
    let none = with(&[("CUDA_VISIBLE_DEVICES", "")]);
    let mig = with(&[("FAKECUDA_MIG", "0")]);
    let empty = Path::new(env!("CARGO_TARGET_TMPDIR")).join("empty.fatbin");
    std::fs::write(&empty, b"").unwrap();
    for (name, line, env, what) in [
        (
            "too-many",
            "--ranks 5 --ranks-per-gpu 2",
            fake(),
            "takes 3 GPUs and there are 2; use --ranks-per-gpu 3",
        ),
        ("no-gpu", "--ranks 2", none, "is CUDA_VISIBLE_DEVICES empty"),
        ("mig", "--ranks 2", mig, "MIG slice"),
        ("algo", "--ranks 2 --algo staged", fake(), "staged does not exist"),
        ("threads", "--ranks 2 --block-threads 31", fake(), "32 to 512 threads"),
        ("mpi", "--ranks 2 --rival mpi", fake(), "--rival nccl"),
        (
            "kernels",
            "--ranks 2",
            with(&[("PEERLANE_KERNELS", empty.to_str().unwrap())]),
            "holds no kernels",
        ),
        (
            "foreign",
            &format!("--ranks 2 --between --foreign-kernel {}", empty.display()),
            fake(),
            "no nvcc",
        ),
    ] {
        let output = run(name, &format!("--device cuda -b 1K -e 1K -n 2 {line}"), &env);
        assert_eq!(output.status.code(), Some(1), "{name}: {}", text(&output));
        assert!(text(&output).contains(what), "{name}: {}", text(&output));
        assert!(!text(&output).contains("Out of bounds"), "{name}");
    }
}

#[test]
fn a_launch_that_the_driver_refuses_ends_the_run() {
    let env = with(&[("FAKECUDA_FAIL", "cuGraphLaunch:3:*:700")]);
    let output = run("refused", "--device cuda --ranks 2 -G 1 -n 3 --batches 2 -b 1K -e 1K", &env);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("cuGraphLaunch failed"), "{}", text(&output));
}
