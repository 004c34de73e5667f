//! `peerlane explain`: as the README shows it, and as JSON.

use crate::fixtures::{DESCRIBED, SIZES_TEXT};
use crate::{peerlane, said};
use serde_json::Value;

const DIRECT: &str = "tests/topology/fixtures/2-socket-8-gpu-direct.xml";

#[test]
fn the_readme_shows_what_it_prints() {
    let output = peerlane(&["explain", "--topology", DIRECT, "-b", "57344"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let readme = std::fs::read_to_string("README.md").unwrap();
    let command = format!("peerlane explain --topology {DIRECT} -b 57344");
    let after = readme.split(&command).nth(1).expect("the command is in the README");
    let block = after.split("```text\n").nth(1).and_then(|b| b.split("```").next()).unwrap();
    assert_eq!(said(&output), block);
}

#[test]
fn json_adds_up() {
    for name in DESCRIBED {
        for bytes in SIZES_TEXT {
            let file = format!("tests/topology/fixtures/{name}.xml");
            let output = peerlane(&["explain", "--topology", &file, "-b", bytes, "--json"]);
            let report: Value = serde_json::from_str(&said(&output)).unwrap();
            let chosen = &report["chosen"];
            let sum: f64 = chosen["phases"]
                .as_array()
                .unwrap()
                .iter()
                .map(|p| p["latency_us"].as_f64().unwrap() + p["transfer_us"].as_f64().unwrap())
                .sum();
            let time = chosen["time_us"].as_f64().unwrap();
            assert!(
                (sum + chosen["launch_us"].as_f64().unwrap() - time).abs() < 1e-6,
                "{name} {bytes}"
            );
            for other in report["others"].as_array().unwrap() {
                // A tie within 2 % goes to fewer phases; what may collapse is passed over unless it is far faster.
                let margin = if other["may_collapse"] == true { 1.5 } else { 1.0 };
                let theirs = other["time_us"].as_f64().unwrap() * margin;
                assert!(theirs * 1.02 >= time, "{name} {bytes}: {other}");
                assert!(!other["lost_because"].as_str().unwrap().is_empty());
            }
        }
    }
}

#[test]
fn ranks_may_sit_anywhere_and_islands_may_be_named() {
    let islands = |args: &[&str]| {
        let all = [&["explain", "--json", "--topology", DIRECT], args].concat();
        let output = peerlane(&all);
        let report: Value = serde_json::from_str(&said(&output))
            .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
        report["islands"].as_str().unwrap().to_owned()
    };
    assert_eq!(islands(&[]), "0-3,4-7");
    assert_eq!(islands(&["--gpus", "0,4,1,5"]), "0+2,1+3");
    assert_eq!(islands(&["--ranks", "4"]), "0-3");
    assert_eq!(islands(&["--islands", "0-1,2-7"]), "0-1,2-7");
}

#[test]
fn what_cannot_be_explained_says_why() {
    for (args, what) in [
        (
            &["--topology", "tests/topology/fixtures/hwloc-96em64t-4n4d3ca2co-pci.xml"]
                as &[&str],
            "no NVIDIA GPU is described",
        ),
        (&["--topology", DIRECT, "--gpus", "0,8"], "GPU 8 is not there"),
        (&["--topology", DIRECT, "--ranks", "17"], "17 ranks"),
        (&["--topology", DIRECT, "--ranks", "2", "--gpus", "0"], "--ranks 2 but --gpus names 1"),
        (&["--topology", "CHANGELOG.md"], "CHANGELOG.md:1: no table of GPUs"),
        (&["--topology", "/nonexistent"], "/nonexistent"),
    ] {
        let output = peerlane(&[&["explain"], args].concat());
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(error.contains(what), "{args:?}: {error}");
    }
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_peerlane"))
        .args(["explain", "--topology", DIRECT])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}
