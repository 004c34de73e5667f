//! `peerlane bench` from outside: the table, the JSON report, the exit status, and what happens to its ranks.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/bench.rs"]
mod tool;

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tool::{bench, folder, keys, measured, text};

#[test]
fn every_type_and_operation_is_measured_and_right_over_processes() {
    let report = measured(
        "processes",
        "--device cpu --ranks 3 --processes -b 96 -e 6K -f 8 -d all -o all -n 3 --batches 3 -w 1 -c 2",
    );
    assert_eq!(keys(&report), ["command", "machine", "results", "wrong_total"]);
    let results = report["results"].as_array().unwrap();
    assert_eq!(results.len(), 10 * 5 * 3);
    for row in results {
        assert_eq!(
            keys(row),
            [
                "algo",
                "bytes",
                "count",
                "in_place",
                "out_of_place",
                "proto",
                "ratio",
                "redop",
                "rival",
                "type"
            ]
        );
        for place in ["out_of_place", "in_place"] {
            assert_eq!(keys(&row[place]), ["algbw", "busbw", "time_us", "wrong"]);
            assert_eq!(row[place]["wrong"], 0);
            assert!(row[place]["time_us"].as_f64().unwrap() > 0.0);
        }
        assert!(row["algo"].as_str().unwrap().parse::<peerlane::Algorithm>().is_ok(), "{row}");
        assert!(row["proto"].as_str().unwrap().parse::<peerlane::Protocol>().is_ok(), "{row}");
        assert!(row["rival"].is_null() && row["ratio"].is_null());
    }
}

#[test]
fn every_protocol_can_be_pinned() {
    // Also one that cannot carry every type: what the ranks say among themselves must not depend on the pin.
    for proto in ["ll", "sentinel", "flagged"] {
        let line = format!(
            "--ranks 2 --threads --proto {proto} -d float,half -b 1K -e 1K -n 3 --batches 2"
        );
        let report = measured(&format!("pinned-{proto}"), &line);
        assert!(report["results"].as_array().unwrap().iter().all(|row| row["proto"] == proto));
    }
}

#[test]
fn threads_groups_and_a_forced_algorithm_are_measured() {
    let report = measured(
        "threads",
        "--ranks 4 --threads --algo two_shot --proto flagged --direction pull -b 1K -e 4K -f 4 -n 5 -m 3 --batches 3",
    );
    for row in report["results"].as_array().unwrap() {
        assert_eq!((&row["algo"], &row["proto"]), (&"two_shot".into(), &"flagged".into()));
    }
    let report = measured(
        "islands",
        "--ranks 4 --threads --islands 0+2,1+3 --algo hierarchical -b 4K -e 4K",
    );
    assert_eq!(report["results"][0]["algo"], "hierarchical");
}

#[test]
fn a_run_that_measures_nothing_fails() {
    let folder = folder("nothing");
    let output = bench(&folder, "--ranks 2 -b 4 -e 4 -d double").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("smaller than one element"), "{}", text(&output));
}

#[test]
fn wrong_flags_are_refused_before_anything_starts() {
    let folder = folder("flags");
    for (line, code, what) in [
        ("--ranks 17", 1, "1 to 16 ranks"),
        ("--ranks 4 --islands 0-2", 1, "rank 3 is in no island"),
        ("-d floaty", 2, "bfloat16"),
        ("--json /nonexistent/report.json", 1, "/nonexistent/report.json"),
        ("--ranks 2 --rival mpi --rival-driver /nonexistent", 1, "apt-get install openmpi-bin"),
    ] {
        let output = bench(&folder, line).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{line}: {}", text(&output));
        assert!(text(&output).contains(what), "{line}: {}", text(&output));
        assert!(!text(&output).contains("Out of bounds"), "{line}");
    }
}

/// A run that will not end by itself, and the process ids of its ranks.
fn endless(folder: &Path) -> (Child, Vec<i32>) {
    let line = "--ranks 4 -b 64K -e 64K -n 1000000 --batches 1 -w 0 --deadline 30";
    let mut command = bench(folder, line);
    // A shell's background job inherits SIGINT ignored, and then the tool could not be interrupted.
    // SAFETY: signal is safe to call between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        });
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let ranks = loop {
        let line = lines.next().expect("the header names the ranks' processes").unwrap();
        if let Some((_, pids)) = line.split_once("pids: ") {
            break pids.split(' ').map(|pid| pid.parse().unwrap()).collect();
        }
    };
    // The header is complete once the columns are named; then the ranks are at work.
    lines.find(|line| line.as_ref().unwrap().contains("(elements)")).unwrap().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    (child, ranks)
}

fn alive(pid: i32) -> bool {
    // A zombie is not alive: its parent, init, has only to notice.
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or("").trim_start().starts_with('Z'))
}

fn all_end_within(pids: &[i32], limit: Duration) {
    let start = Instant::now();
    while let Some(pid) = pids.iter().find(|&&pid| alive(pid)) {
        assert!(start.elapsed() < limit, "process {pid} is still there");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_killed_rank_is_named_and_the_run_fails() {
    let folder = folder("killed");
    let (child, ranks) = endless(&folder);
    assert_eq!(ranks.len(), 4);
    // SAFETY: a signal to a process that this test's child has started and not yet waited for.
    unsafe { libc::kill(ranks[2], libc::SIGKILL) };
    let start = Instant::now();
    let output = child.wait_with_output().unwrap();
    assert!(start.elapsed() < Duration::from_secs(20), "it took {:?}", start.elapsed());
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("rank 2 was killed by signal 9"), "{error}");
    assert_eq!(error.lines().count(), 1, "one clear line: {error}");
    all_end_within(&ranks, Duration::from_secs(10));
}

#[test]
fn an_interrupted_run_leaves_no_process_behind() {
    for signal in [libc::SIGINT, libc::SIGKILL] {
        let folder = folder(&format!("interrupted-{signal}"));
        let (mut child, ranks) = endless(&folder);
        assert!(ranks.iter().all(|&pid| alive(pid)));
        // SAFETY: a signal to this test's own child, which has not been waited for.
        unsafe { libc::kill(child.id() as i32, signal) };
        assert!(!child.wait().unwrap().success());
        all_end_within(&ranks, Duration::from_secs(10));
    }
}

/// Held while an mpirun runs: two that begin or end together fall over each other's session directory.
static OPEN_MPI: Mutex<()> = Mutex::new(());

#[test]
fn open_mpi_is_measured_and_checked_beside_it() {
    let _alone = OPEN_MPI.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = folder("rival");
    let driver = folder.join("driver");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/rivals/mpi.c");
    let built = Command::new("mpicc")
        .args(["-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O2", "-o"])
        .args([&driver, &source])
        .status()
        .expect("mpicc; `scripts/setup test` installs it");
    assert!(built.success());
    let line = format!(
        "--ranks 2 -b 512 -e 512 -d float,half -o sum,avg -n 20 --batches 3 --rival mpi --rival-driver {}",
        driver.display()
    );
    let report = measured("rival-run", &line);
    for row in report["results"].as_array().unwrap() {
        if row["type"] == "float" && row["redop"] == "sum" {
            assert_eq!(keys(&row["rival"]), ["name", "time_us", "version", "wrong"]);
            assert_eq!(row["rival"]["name"], "Open MPI");
            assert_eq!(row["rival"]["wrong"], 0);
            let ours = row["out_of_place"]["time_us"].as_f64().unwrap();
            let theirs = row["rival"]["time_us"].as_f64().unwrap();
            assert!((row["ratio"].as_f64().unwrap() - ours / theirs).abs() < 1e-9);
        } else {
            assert!(row["rival"].is_null(), "MPI has no half and no avg: {row}");
        }
    }
}

/// The rival's check is no decoration: a driver whose reduction is broken on purpose is caught, and fails the run.
#[test]
fn a_rival_with_wrong_results_fails_the_run() {
    let _alone = OPEN_MPI.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = folder("wrong-rival");
    let driver = folder.join("driver");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/rivals/mpi.c");
    let source = std::fs::read_to_string(source).unwrap();
    let broken = source.replace("{MPI_SUM, MPI_PROD,", "{MPI_MAX, MPI_PROD,");
    assert_ne!(source, broken);
    std::fs::write(folder.join("broken.c"), broken).unwrap();
    let built = Command::new("mpicc")
        .args(["-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O2", "-o"])
        .args([&driver, &folder.join("broken.c")])
        .status()
        .expect("mpicc; `scripts/setup test` installs it");
    assert!(built.success());
    let line = format!("--ranks 2 -b 512 -e 512 --rival mpi --rival-driver {}", driver.display());
    let output = bench(&folder, &line).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("FAILED"), "{}", text(&output));
}
