//! `scripts/nccl-gpu` and `scripts/torch-check` without a GPU: they believe what nccl-tests and PyTorch print, and nothing less. An
//! `mpirun` and a `torch` of our own stand for them.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const RIGHT: &str = "\
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
           8             2     float     sum      -1   2069.8    0.00    0.00       0   2071.1    0.00    0.00       0
     2097152        524288  bfloat16     sum      -1   4100.2    0.51    0.51       0   4101.7    0.51    0.51     N/A
# Out of bounds values : 0 OK
";

fn served(ranks: usize, calls: usize) -> String {
    (0..ranks)
        .map(|rank| {
            format!(
                "peerlane[1] Info: rank {rank} of 2: peerlane served {calls} all-reduces (64 bytes), NCCL 3 (size 3, \
                 type or operation 0, not set up 0)\n"
            )
        })
        .collect()
}

/// A folder as the script wants it, without nccl-tests.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in
        ["libpeerlane_preload.so", "libpeerlane_nccl.so", "libpeerlane_libnccl.so", "libnccl.so.2"]
    {
        std::fs::write(folder.path().join(file), "").unwrap();
    }
    folder
}

fn script(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts").join(name)
}

/// Whether a script passed, and what it printed on stdout and stderr.
fn outcome(folder: &tempfile::TempDir, name: &str, args: &[&str]) -> (bool, String, String) {
    let output = Command::new("python3")
        .arg("-B")
        .arg(script(name))
        .args(args)
        .env_remove("CUDA_DEVICE_MAX_CONNECTIONS")
        .env("PYTHONPATH", folder.path())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(folder.path())
        .output()
        .unwrap();
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    (output.status.success(), stdout, stderr)
}

const LIBRARIES: [&str; 4] = ["--libraries", ".", "--nccl", "libnccl.so.2"];

/// Runs the script over an `mpirun` that prints `nccl` where peerlane is off and `preload` under the preload library.
fn run(nccl: &str, preload: &str, more: &[&str]) -> (bool, String) {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("all_reduce_perf"), "").unwrap();
    std::fs::create_dir_all(at("ompi/bin")).unwrap();
    std::fs::write(at("nccl"), nccl).unwrap();
    std::fs::write(at("preload"), preload).unwrap();
    let program = format!(
        "#!/bin/sh\ncase \"$*\" in *PEERLANE_DISABLE=1*) cat {0}/nccl;; *LD_PRELOAD=*) cat {0}/preload; grep -q hang {0}/preload && \
         sleep 100; exit 0;; *) exit 9;; esac\n",
        folder.path().display()
    );
    std::fs::write(at("ompi/bin/mpirun"), program).unwrap();
    std::fs::set_permissions(at("ompi/bin/mpirun"), std::fs::Permissions::from_mode(0o755))
        .unwrap();
    let only = ["--only", "^(nccl|preload) all_reduce$", "--tests", ".", "--ompi", "ompi"];
    let args = [&LIBRARIES[..], &only, &["--out", "logs"], more].concat();
    let (passed, text, errors) = outcome(&folder, "nccl-gpu", &args);
    assert!(errors.is_empty(), "{errors}");
    (passed, text)
}

/// A `torch` of which rank 1 finds no memory, and all others wait for it.
const TORCH: &str = "\
import os, sys, time
assert 'CUDA_DEVICE_MAX_CONNECTIONS' not in os.environ, 'a process of one rank needs one queue'
class cuda:
    device_count = staticmethod(lambda: 1)
    def set_device(_):
        if sys.argv[sys.argv.index('--rank') + 1] == '1':
            raise RuntimeError('CUDA error: out of memory')
        open(f'started-{os.getpid()}', 'w').close()
        time.sleep(300)
";

fn torch_that_fails() -> tempfile::TempDir {
    let folder = folder();
    std::fs::create_dir(folder.path().join("torch")).unwrap();
    std::fs::write(folder.path().join("torch/__init__.py"), TORCH).unwrap();
    // One that the loader takes.
    let built = Command::new("cc")
        .args(["-shared", "-o", "libpeerlane_preload.so", "-x", "c", "/dev/null"])
        .current_dir(folder.path())
        .status();
    assert!(built.unwrap().success());
    std::fs::write(folder.path().join("torch/distributed.py"), "").unwrap();
    folder
}

/// The processes that said so on their start are gone.
fn nobody_is_left(folder: &tempfile::TempDir, expected: usize) {
    let files = std::fs::read_dir(folder.path()).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let started: Vec<_> =
        names.filter_map(|name| name.strip_prefix("started-").map(str::to_owned)).collect();
    assert_eq!(started.len(), expected);
    for pid in started {
        assert!(!Path::new("/proc").join(&pid).exists(), "process {pid} is left");
    }
}

#[test]
fn a_rank_of_pytorch_that_fails_ends_the_others_and_is_named() {
    let folder = torch_that_fails();
    let start = Instant::now();
    let preload = "libpeerlane_preload.so";
    let (passed, _, errors) =
        outcome(&folder, "torch-check", &["--ranks", "4", "--preload", preload]);
    assert!(!passed && start.elapsed() < Duration::from_secs(60), "{errors}");
    assert!(errors.contains("CUDA error: out of memory"), "{errors}");
    let verdict =
        "rank 1 failed with exit status 1; ranks not done 5 seconds after the first failure: 0, 2, 3";
    assert!(errors.contains(verdict), "{errors}");
    nobody_is_left(&folder, 3);
}

#[test]
fn one_part_runs_by_itself_and_without_what_the_others_need() {
    let folder = torch_that_fails();
    let only = ["--only", "pytorch 2", "--out", "logs"];
    let (passed, text, errors) = outcome(&folder, "nccl-gpu", &[&LIBRARIES[..], &only].concat());
    assert!(!passed && errors.is_empty(), "{errors}");
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(lines[0].starts_with("FAIL preload pytorch 2 processes"), "{text}");
    assert!(lines[0].contains(": RuntimeError: CUDA error: out of memory"), "{text}");
    nobody_is_left(&folder, 1);

    for (args, why) in [
        (&["--skip", "pytorch"][..], "there is no all_gather_perf, no all_reduce_perf,"),
        (&["--only", "pytorch", "--skip", "processes"], "no run is left"),
        (&["--only", "nothing"], "no run is left"),
    ] {
        let (passed, text, errors) = outcome(&folder, "nccl-gpu", &[&LIBRARIES[..], args].concat());
        assert!(!passed && text.is_empty() && errors.contains(why), "{text}{errors}");
    }
}

#[test]
fn what_is_right_and_served_passes_and_says_who_served() {
    let (passed, text) = run(RIGHT, &format!("{RIGHT}{}", served(2, 12)), &[]);
    assert!(passed, "{text}");
    assert!(text.contains("0 wrong in 2 rows; all-reduces by peerlane 0, NCCL all"), "{text}");
    assert!(text.contains("0 wrong in 2 rows; all-reduces by peerlane 12, NCCL 3"), "{text}");
}

#[test]
fn every_way_to_show_nothing_fails() {
    let good = format!("{RIGHT}{}", served(2, 12));
    let wrong_in_place =
        good.replace("2071.1    0.00    0.00       0", "2071.1    0.00    0.00       5");
    let no_verdict = good.replace("# Out of bounds values : 0 OK\n", "");
    let no_rows = format!("# Out of bounds values : 0 OK\n{}", served(2, 12));
    let unserved = format!("{RIGHT}{}", served(2, 0));
    let one_rank = format!("{RIGHT}{}", served(1, 12));
    for (preload, why) in [
        (wrong_in_place.as_str(), "5 wrong in 2 rows"),
        (&no_verdict, "without a verdict"),
        (&no_rows, "no row was measured"),
        (&unserved, "peerlane should have served"),
        (RIGHT, "peerlane should have served"),
        (&one_rank, "only 1 of 2 ranks"),
        ("hang\n", "not done after 1 s"),
    ] {
        let (passed, text) = run(RIGHT, preload, &["--limit", "1"]);
        assert!(!passed && text.contains(why), "{why}: {text}");
        assert!(text.contains("1 not right: preload all_reduce"), "{text}");
    }
    // Where peerlane serves though it was switched off, the control is none.
    let (passed, text) = run(&good, &good, &[]);
    assert!(!passed && text.contains("peerlane should have been off"), "{text}");
}
