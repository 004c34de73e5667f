//! `scripts/nccl-gpu` without a GPU: it believes what nccl-tests print, and nothing less. An `mpirun` of our own prints for them.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

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

/// Runs the script over an `mpirun` that prints `nccl` where peerlane is off and `preload` under the preload library.
fn run(nccl: &str, preload: &str, more: &[&str]) -> (bool, String) {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for file in [
        "libpeerlane_preload.so",
        "libpeerlane_nccl.so",
        "libpeerlane_libnccl.so",
        "libnccl.so.2",
        "all_reduce_perf",
    ] {
        std::fs::write(at(file), "").unwrap();
    }
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
    let output = Command::new("python3")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/nccl-gpu"))
        .args(["--no-torch", "--only", "^(nccl|preload) all_reduce$", "--libraries", "."])
        .args(["--nccl", "libnccl.so.2", "--tests", ".", "--ompi", "ompi", "--out", "logs"])
        .args(more)
        .current_dir(folder.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    (output.status.success(), text)
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
