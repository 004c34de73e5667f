//! The runner on GPUs, shown over the stand-in driver: its own kernels run as host functions, streams and graphs are real.
#![cfg(feature = "cuda")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/dsv3_tiny");

/// Which host function is which kernel, with the bytes of its parameter.
fn kernel_map() -> String {
    let mut map = verify_standin::kernel_map();
    let header = include_str!("../cuda/kernels.h");
    let names = header
        .lines()
        .filter_map(|line| line.trim().strip_prefix("KERNEL(verify_")?.split(',').next());
    for name in names {
        let kernel = std::ffi::CString::new(format!("verify_{name}")).unwrap();
        let bytes = verify_standin::parameter_bytes(&kernel);
        map += &format!(",verify_{name}=standin_{name}:{bytes}");
    }
    map
}

/// A folder with the stand-in driver and the stand-in cuBLAS under the names that programs look for.
fn libraries() -> PathBuf {
    let built = |name: &str| {
        let path = std::env::current_exe().unwrap().with_file_name(name);
        assert!(path.exists(), "{} was not built with the tests", path.display());
        path
    };
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("verify-standin");
    std::fs::create_dir_all(&folder).unwrap();
    for (name, library) in [
        ("libcuda.so", "libfakecuda.so"),
        ("libcuda.so.1", "libfakecuda.so"),
        ("libcublas.so.13", "libverify_standin.so"),
    ] {
        // Tests share the folder, and it stays for the next run.
        let _ = std::os::unix::fs::symlink(built(library), folder.join(name));
    }
    folder
}

/// A file that the stand-in driver takes for a fatbin. Written once: runs of other tests may be reading it.
fn fatbin() -> &'static Path {
    static WRITTEN: OnceLock<PathBuf> = OnceLock::new();
    WRITTEN.get_or_init(|| {
        let path = libraries().join("any.fatbin");
        std::fs::write(&path, b"an image").unwrap();
        path
    })
}

/// The runner over the stand-ins.
fn runner(arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_peerlane-verify"));
    command.args(arguments.split_whitespace()).arg("--kernels").arg(fatbin());
    over_the_stand_ins(&mut command)
}

fn over_the_stand_ins(command: &mut Command) -> Output {
    let (folder, fatbin) = (libraries(), fatbin());
    command
        .env("LD_LIBRARY_PATH", &folder)
        .env("FAKECUDA_KERNELS", folder.join("libcublas.so.13"))
        .env("FAKECUDA_KERNEL_MAP", kernel_map())
        .env("PEERLANE_KERNELS", fatbin)
        .env("PEERLANE_SLAB", "4M")
        .env("PEERLANE_PROBE", "off")
        .env("PEERLANE_LOG", "off")
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

fn passes_the_check(ranks: usize) {
    let output = runner(&format!("--check-gpu {GOLDEN} --tp {ranks} --replays 20"));
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.starts_with(&format!("PASS {ranks} ranks: sums within")), "{text}");
    assert!(text.contains("verify 12 of 12 choices, tree "), "{text}");
    assert!(text.contains("20 replays the same"), "{text}");
}

#[test]
fn one_rank_passes_the_check() {
    passes_the_check(1);
}

#[test]
fn two_ranks_pass_the_check() {
    passes_the_check(2);
}

#[test]
fn four_ranks_pass_the_check() {
    passes_the_check(4);
}

#[test]
fn eight_ranks_pass_the_check() {
    passes_the_check(8);
}

/// Ranks share the GPU, and some calls may wait for all of it: never between a rank's launch of a pass and another's.
#[test]
fn no_rank_disturbs_the_gpu_while_a_pass_waits_for_another_rank() {
    const RANKS: usize = 4;
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_peerlane-verify"));
    command.args(format!("--check-gpu {GOLDEN} --tp {RANKS} --replays 5").split(' '));
    command.arg("--kernels").arg(fatbin()).env("FAKECUDA_LOG", log.path());
    let output = over_the_stand_ins(&mut command);
    assert!(output.status.success(), "{}", said(&output));
    let calls = std::fs::read_to_string(log.path()).unwrap();
    let (mut launched, mut copied) = (0, 0);
    for call in calls.lines().filter_map(|line| line.split(' ').nth(2)) {
        let disturbs = ["cuMemcpy", "cuMemAlloc", "cuMemFree", "cuModule", "cuFuncLoad"];
        let of_graphs = ["cuGraphInstantiate", "cuGraphUpload", "cuGraphExecDestroy"];
        if call.starts_with("cuGraphLaunch") {
            launched += 1;
        } else if disturbs.iter().chain(&of_graphs).any(|name| call.starts_with(name)) {
            assert_eq!(launched % RANKS, 0, "{call} after {launched} launches");
            copied += usize::from(launched > 0 && call.starts_with("cuMemcpy"));
        }
    }
    // A chain and a tree, apart and fused; the chain five times.
    assert_eq!(launched, 2 * (5 + 1) * RANKS);
    assert!(copied > launched, "{copied} copies: is this the log?");
}

/// A check that could not fail would prove nothing.
#[test]
fn another_rotation_fails_the_check() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "golden.safetensors", "model.safetensors"] {
        std::fs::copy(Path::new(GOLDEN).join(file), folder.path().join(file)).unwrap();
    }
    let config = folder.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let changed = text.replace("\"rope_theta\": 10000.0", "\"rope_theta\": 1000.0");
    assert_ne!(text, changed);
    std::fs::write(&config, changed).unwrap();
    let output = runner(&format!("--check-gpu {} --tp 2 --replays 1", folder.path().display()));
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.starts_with("FAIL 2 ranks: a sum is off by"), "{text}");
}

/// A run; its JSON.
fn report(arguments: &str) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    let output = runner(&format!("--device cuda {arguments} --json {}", file.display()));
    assert!(output.status.success(), "{}", said(&output));
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

#[test]
fn a_run_reports_what_its_graphs_took() {
    let report = report(&format!("--weights {GOLDEN} --tp 2 --context 130,9 --draft 4 --passes 3"));
    assert_eq!(report["device"], "cuda");
    assert_eq!(report["sums"], "bf16");
    assert_eq!(report["fused"], true);
    for width in report["widths"].as_array().unwrap() {
        let number = |key: &str| width[key].as_f64().unwrap_or_else(|| panic!("{key}: {width}"));
        for key in
            ["pass_ms", "bare_ms", "all_reduce_ms", "all_reduce_in_step_ms", "all_reduce_alone_ms"]
        {
            assert!(number(key) > 0.0, "{key}: {width}");
        }
        assert_eq!(number("all_reduces"), 8.0);
        assert!(number("accepted") >= 1.0 && number("accepted") <= number("draft"));
    }
}

#[test]
fn a_gpu_per_rank_and_shared_gpus_choose_the_same_tokens() {
    // Two of the stand-in's GPUs, and one for both ranks.
    let run = |sharing: &str| {
        report(&format!(
            "--weights {GOLDEN} --tp 2 {sharing} --context 5-9 --draft 2 --passes 2 --fused off"
        ))
    };
    let (apart, shared) = (run(""), run("--ranks-per-gpu 2"));
    assert_ne!(apart["machine"], shared["machine"]);
    let experts = |report: &Value| report["widths"][1]["experts_mean"].clone();
    let accepted = |report: &Value| report["widths"][1]["accepted"].clone();
    assert_eq!((experts(&apart), accepted(&apart)), (experts(&shared), accepted(&shared)));
}

#[test]
fn experts_are_shared_between_layers_where_memory_is_short() {
    let model = "--weights random:1 --config small --layers 8 --tp 2 --ranks-per-gpu 2 --context 4 --sequences 1 --draft 1";
    let report = report(&format!("{model} --passes 1 --memory 200M"));
    let pools = report["expert_pools"].as_u64().unwrap();
    assert!((4..7).contains(&pools), "{pools}");
    assert!(report["notes"].to_string().contains("7 MoE layers share"), "{}", report["notes"]);
}

/// The stand-in NCCL, compiled for this test.
fn nccl() -> PathBuf {
    let library = libraries().join(format!("libfakenccl-{}.so", std::process::id()));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fakenccl/nccl.c");
    let mut compile = Command::new("cc");
    compile.args(["-std=gnu11", "-O2", "-shared", "-fPIC", "-o"]).arg(&library);
    assert!(compile.arg(source).arg("-ldl").status().unwrap().success());
    library
}

#[test]
fn nccl_sums_in_the_same_graph_and_the_tokens_are_the_same() {
    let model = format!("--weights {GOLDEN} --tp 2 --context 9,5 --draft 2 --passes 2 --fused off");
    let by_nccl =
        format!("{model} --ranks-per-gpu 2 --all-reduce nccl --nccl {}", nccl().display());
    let (peerlane, nccl) = (report(&model), report(&by_nccl));
    assert_eq!(nccl["all_reduce"], "nccl");
    assert!(nccl["machine"].as_str().unwrap().contains("NCCL 2.30.7"), "{}", nccl["machine"]);
    for at in 0..2 {
        let (ours, theirs) = (&peerlane["widths"][at], &nccl["widths"][at]);
        for key in ["all_reduces", "accepted", "experts_mean"] {
            assert_eq!(ours[key], theirs[key], "{key}");
        }
        assert!(theirs["all_reduce_ms"].as_f64().unwrap() > 0.0);
    }
}

/// Ranks that share a GPU and ranks with one each, under both libraries.
#[test]
fn ranks_as_processes_choose_what_ranks_as_threads_choose() {
    let model = format!("--weights {GOLDEN} --tp 2 --context 9,5 --draft 2 --passes 2");
    let threads = report(&model);
    let nccl = format!("--fused off --all-reduce nccl --nccl {}", nccl().display());
    for how in ["", "--ranks-per-gpu 2", &nccl] {
        let processes = report(&format!("{model} --processes {how}"));
        assert_eq!(processes["processes"], true);
        for at in 0..2 {
            for key in ["accepted", "experts_mean"] {
                assert_eq!(processes["widths"][at][key], threads["widths"][at][key], "{how} {key}");
            }
        }
    }
}

/// One clear line.
fn refusal(arguments: &str) -> String {
    let output = runner(&format!("--device cuda {arguments}"));
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

#[test]
fn what_cannot_be_on_a_gpu_is_said_in_a_line() {
    for (arguments, what) in [
        ("--memory 50M", "too little memory: the model needs"),
        ("--ranks-per-gpu 1 --tp 4", "that takes 4 GPUs and there are 2"),
        ("--ranks-per-gpu 0", "there is at least one"),
        ("--cublas /nonexistent/libcublas.so", "no cuBLAS (/nonexistent/libcublas.so"),
        ("--all-reduce nccl --nccl /nonexistent/libnccl.so", "cannot load /nonexistent/libnccl.so"),
        ("--check-gpu /nonexistent", "--check-gpu /nonexistent: cannot read"),
    ] {
        let text = refusal(arguments);
        assert!(text.contains(what), "{arguments}: {text}");
    }
}

/// A rank that cannot go on must not leave the others waiting.
#[test]
fn a_call_that_the_driver_refuses_on_one_rank_ends_the_run_with_its_error() {
    let model = format!("--weights {GOLDEN} --tp 2 --ranks-per-gpu 2 --context 9 --sequences 1 --draft 2 --passes 2");
    // While ranks wait for each other call by call, behind the some 512 launches that test the lane, and while they replay.
    for (rule, call) in
        [("cuLaunchKernelEx:660:*", "cuLaunchKernelEx"), ("cuGraphLaunch:3:*", "cuGraphLaunch")]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_peerlane-verify"));
        command.args(["--device", "cuda"]).args(model.split(' ')).arg("--kernels").arg(fatbin());
        command.env("FAKECUDA_FAIL", rule).env("PEERLANE_DEADLINE", "2");
        let output = over_the_stand_ins(&mut command);
        assert_eq!(output.status.code(), Some(1), "{rule}: {}", said(&output));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains(&format!("{call} failed: CUDA_ERROR_UNKNOWN")), "{rule}: {text}");
        assert_eq!(text.lines().count(), 1, "{rule}: {text}");
    }
}

/// `scripts/bench-verify` in a folder as `make bench-verify-build` fills it.
#[test]
fn the_script_checks_and_measures_and_writes_a_table() {
    let folder = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/bench-verify");
    std::fs::copy(script, folder.path().join("bench-verify")).unwrap();
    std::os::unix::fs::symlink(
        env!("CARGO_BIN_EXE_peerlane-verify"),
        folder.path().join("peerlane-verify"),
    )
    .unwrap();
    std::os::unix::fs::symlink(Path::new(GOLDEN).parent().unwrap(), folder.path().join("golden"))
        .unwrap();
    let out = folder.path().join("out");
    let mut command = Command::new("python3");
    command.arg(folder.path().join("bench-verify")).arg("--out").arg(&out);
    command.args("--tp 2 --widths 1,2 --context 8 --passes 2".split(' '));
    command.arg("--models").arg(Path::new(GOLDEN).join("config.json"));
    command.args(["--ranks-per-gpu", "2", "--kernels"]).arg(fatbin());
    command
        .env("PEERLANE_NCCL_LIB", nccl())
        .env("PEERLANE_CUBLAS_LIB", libraries().join("libcublas.so.13"));
    // The check is tested by itself, and takes long here.
    command.arg("--no-check");
    let output = over_the_stand_ins(&mut command);
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("  2 rows: a pass "), "{text}");
    let read = |name: &str| std::fs::read_to_string(out.join(name)).unwrap();
    let table = read("verify.csv");
    for way in ["\"peerlane, fused\"", "peerlane", "NCCL"] {
        let lines = table.lines().filter(|line| {
            line.split("config,2,").nth(1).is_some_and(|l| l.contains(&format!(",{way},")))
        });
        assert_eq!(lines.count(), 2, "{way}: {table}");
    }
    assert!(read("verify.txt").contains("config: a pass (ms)"), "{text}");
    let reports: Value = serde_json::from_str(&read("verify.json")).unwrap();
    assert_eq!(reports.as_array().unwrap().len(), 3);
    assert!(read("verify.html").contains("<main>"));
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), 4);
}
