//! `peerlane doctor --live` over the stand-in driver: what the probe measures takes the place of what is only possible, and
//! the tool ends whatever the driver does. The probe's figures are those that a test writes down.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

#[path = "topology/fake_box.rs"]
mod fake_box;
#[path = "common/fakecuda.rs"]
mod fakecuda;
#[path = "common/gpu_tool.rs"]
mod gpu_tool;

use fake_box::FakeBox;
use gpu_tool::{fake, lanes_that_lose_everything, scripted_probe};
use serde_json::Value;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Stores, loads, flags as Gen5 x16 has them, and what is left when four GPUs share what is between sockets.
const HEALTHY: &str = "store=52,load=44,flag=1100,together=0.4";

/// A healthy box with the stand-in driver's four GPUs, two on either socket, at the addresses that it gives them: below a
/// switch, or each on a port of its own.
fn four_gpus(name: &str, switches: bool) -> FakeBox {
    let fake = FakeBox::healthy(&format!("live-{name}"));
    std::fs::remove_dir_all(fake.root.join("sys/bus")).unwrap();
    for number in 0..4u8 {
        let (host, bus) = (if number < 2 { 0x00 } else { 0x80 }, 0x10 + number);
        let root = format!("pci0000:{host:02x}/0000:{host:02x}");
        let way = match switches {
            true => format!(
                "{root}:01.0/0000:{:02x}:00.0/0000:{:02x}:{:02x}.0/0000:{bus:02x}:00.0",
                host + 1,
                host + 2,
                number % 2
            ),
            false => format!("{root}:{:02x}.0/0000:{bus:02x}:00.0", number % 2 + 1),
        };
        fake.gpu(&way, i64::from(number / 2), number.into());
    }
    fake
}

fn run_dir(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("doctor-live-{name}"));
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path).unwrap();
    path
}

fn doctor(name: &str, args: &[&str], env: &[(&'static str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_peerlane"))
        .args([&["doctor", "--live"], args].concat())
        .env_clear()
        .envs(fake())
        .envs([
            ("FAKECUDA_DEVICES", "4"),
            ("FAKECUDA_KERNEL_MAP", &scripted_probe()),
            ("HOSTKERNELS_FABRIC", HEALTHY),
            ("PEERLANE_RUN_DIR", run_dir(name).to_str().unwrap()),
            ("PEERLANE_LOG", "off"),
        ])
        .envs(env.iter().copied())
        .output()
        .unwrap()
}

/// Status and report of the box in `fake`.
fn examine(fake: &FakeBox, env: &[(&'static str, &str)]) -> (i32, Value) {
    let name = fake.root.file_name().unwrap().to_str().unwrap();
    let output = doctor(name, &["--json", "--root", fake.path()], env);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {error}"));
    let status = output.status.code().unwrap();
    assert_eq!(report["status"], status, "the report and the exit status say the same");
    (status, report)
}

fn ids(report: &Value) -> Vec<&str> {
    report["findings"].as_array().unwrap().iter().map(|f| f["id"].as_str().unwrap()).collect()
}

fn finding<'a>(report: &'a Value, id: &str) -> &'a Value {
    let mut findings = report["findings"].as_array().unwrap().iter();
    findings.find(|f| f["id"] == id).unwrap_or_else(|| panic!("{id}: {report:#}"))
}

#[test]
fn a_healthy_box_is_measured_and_raises_no_alarm() {
    let fake = four_gpus("healthy", true);
    let (status, report) = examine(&fake, &[]);
    assert_eq!((status, ids(&report)), (0, vec!["shared-uplink"]), "{report:#}");
    let measured = &report["measured"];
    assert_eq!(measured["lane"], "vmm");
    assert_eq!(measured["islands"], serde_json::json!([[0, 1], [2, 3]]));
    assert_eq!(measured["pairs"].as_array().unwrap().len(), 2 * 4 * 3);
    assert_eq!(measured["latency_ns"][3][0], 1100.0);
    for pair in measured["pairs"].as_array().unwrap() {
        let expected = if pair["access"] == "store" { 52.0 } else { 44.0 };
        assert!((pair["gb_per_s"].as_f64().unwrap() - expected).abs() < 0.1, "{pair}");
    }
    let text = doctor("healthy-text", &["--root", fake.path()], &[]);
    let text = String::from_utf8(text.stdout).unwrap();
    for what in ["Measured: lane vmm", "a flag within islands takes 1100 ns", "0 = 0000:10:00.0"] {
        assert!(text.contains(what), "{what}: {text}");
    }
    assert!(text.ends_with("\nNothing to change.\n"), "{text}");
}

#[test]
fn a_slow_direction_names_the_pair() {
    let fake = four_gpus("direction", true);
    let slow = format!("store:2-0=2.5,{HEALTHY}");
    let (status, report) = examine(&fake, &[("HOSTKERNELS_FABRIC", &slow)]);
    assert_eq!((status, ids(&report)), (1, vec!["slow-direction", "shared-uplink"]), "{report:#}");
    let finding = finding(&report, "slow-direction");
    let evidence = finding["evidence"].as_str().unwrap();
    let pair = "GPU2 (0000:12:00.0) to GPU0 (0000:10:00.0), SYS: stores 2.5 GB/s, loads 44.1 GB/s";
    assert!(evidence.contains(pair), "{finding:#}");
    assert!(evidence.contains("carries 52.9"), "{finding:#}");
    assert!(finding["fix"].as_str().unwrap().contains("PEERLANE_DIRECTION=pull"), "{finding:#}");
}

#[test]
fn staging_by_the_driver_is_measured_where_it_was_possible() {
    let fake = four_gpus("staging", false);
    let offline = Command::new(env!("CARGO_BIN_EXE_peerlane"))
        .args(["doctor", "--json", "--root", fake.path()])
        .env_clear()
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&offline.stdout).contains("staging-possible"));
    let (status, report) = examine(&fake, &[]);
    assert_eq!((status, ids(&report)), (0, vec![]), "measured, and it does not: {report:#}");
    let staged = "store=1.1,load=0.9,flag=9000,together=0.5";
    let (status, report) = examine(&fake, &[("HOSTKERNELS_FABRIC", staged)]);
    assert_eq!((status, ids(&report)), (1, vec!["driver-staging"]), "{report:#}");
    let finding = finding(&report, "driver-staging");
    assert!(finding["what"].as_str().unwrap().contains("12 of 12 ways"), "{finding:#}");
    assert!(finding["evidence"].as_str().unwrap().contains("a flag 9000 ns"), "{finding:#}");
    assert!(finding["fix"].as_str().unwrap().contains("NVreg_RegistryDwords"), "{finding:#}");
}

#[test]
fn writes_that_collapse_when_all_send_at_once_are_found() {
    let fake = four_gpus("collapse", true);
    let collapsed = HEALTHY.replace("together=0.4", "together=0.04");
    let (status, report) = examine(&fake, &[("HOSTKERNELS_FABRIC", &collapsed)]);
    assert_eq!((status, ids(&report)[0]), (1, "collapse"), "{report:#}");
    let evidence = finding(&report, "collapse")["evidence"].as_str().unwrap();
    assert!(evidence.contains("2.1 GB/s of GPU") && evidence.contains("alone 52.0"), "{evidence}");
}

#[test]
fn a_lane_that_does_not_work_is_named_with_the_drivers_word() {
    let fake = four_gpus("second", true);
    let (status, report) = examine(&fake, &[("FAKECUDA_FAIL", "cuMemSetAccess:*:*")]);
    assert_eq!(report["measured"]["lane"], "ipc", "{report:#}");
    assert_eq!(status, 0, "{report:#}");
    let evidence = finding(&report, "lane-second-best")["evidence"].as_str().unwrap();
    assert!(evidence.contains("lane vmm: ") && evidence.contains("cuMemSetAccess"), "{evidence}");
    let both = "cuMemSetAccess:*:*,cuCtxEnablePeerAccess:*:*";
    let (status, report) = examine(&fake, &[("FAKECUDA_FAIL", both)]);
    assert_eq!(report["measured"]["lane"], "host", "{report:#}");
    assert_eq!((status, &finding(&report, "lane-broken")["severity"]), (2, &"wrong".into()));
    // Where the driver promises nothing, host memory is no surprise.
    let (status, report) = examine(&fake, &[("FAKECUDA_NO_PEER", "*")]);
    assert_eq!(report["measured"]["lane"], "host", "{report:#}");
    assert_eq!((status, ids(&report)[0]), (1, "no-peer-access"), "{report:#}");
}

#[test]
fn it_ends_where_no_lane_delivers_and_where_the_driver_hangs() {
    let fake = four_gpus("broken", true);
    let map = lanes_that_lose_everything();
    let start = Instant::now();
    let (status, report) = examine(&fake, &[("FAKECUDA_KERNEL_MAP", &map)]);
    let failed = finding(&report, "not-measured");
    assert_eq!((status, &failed["severity"]), (2, &"wrong".into()));
    assert!(failed["evidence"].as_str().unwrap().contains("no lane works"), "{failed:#}");
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    let start = Instant::now();
    let hang = [("FAKECUDA_DELAY", "cuMemCreate:1:*:600000"), ("PEERLANE_SETUP_DEADLINE", "1")];
    let (status, report) = examine(&fake, &hang);
    let evidence = finding(&report, "not-measured")["evidence"].as_str().unwrap();
    assert_eq!(status, 2);
    assert!(evidence.contains("the driver does not answer any more"), "{evidence}");
    assert!(start.elapsed() < Duration::from_secs(40), "{:?}", start.elapsed());
}

#[test]
fn where_there_is_nothing_to_measure_it_says_so() {
    let fake = four_gpus("nothing", true);
    let (status, report) = examine(&fake, &[("FAKECUDA_DEVICES", "1")]);
    assert_eq!(status, 0, "{report:#}");
    let evidence = finding(&report, "not-measured")["evidence"].as_str().unwrap();
    assert!(evidence.contains("one GPU"), "{evidence}");
    assert!(report.get("measured").is_none());
    // GPUs that the description does not know are measured, not judged.
    std::fs::remove_file(fake.root.join("sys/bus/pci/devices/0000:13:00.0")).unwrap();
    let (status, report) =
        examine(&fake, &[("HOSTKERNELS_FABRIC", "store=1,load=1,flag=1,together=1")]);
    assert_eq!(status, 0, "{report:#}");
    let evidence = finding(&report, "not-judged")["evidence"].as_str().unwrap();
    assert!(evidence.contains("0000:13:00.0"), "{evidence}");
    assert_eq!(report["measured"]["lane"], "vmm");
    // A GPU in slices takes no part.
    let (_, report) = examine(&four_gpus("slices", true), &[("FAKECUDA_MIG", "3")]);
    assert_eq!(report["measured"]["islands"], serde_json::json!([[0, 1], [2]]));
    assert_eq!(finding(&report, "not-all-measured")["what"], "1 GPU(s) were left out");
    // A variable that makes no sense is no matter of the box.
    let output = doctor("variables", &["--root", fake.path()], &[("PEERLANE_LANE", "nvlink")]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{error}");
    assert!(error.contains("PEERLANE_LANE=nvlink") && error.lines().count() == 1, "{error}");
    // Without a driver, GPUs cannot be measured.
    let (status, report) = examine(&fake, &[("LD_LIBRARY_PATH", "/nonexistent")]);
    assert_eq!((status, &finding(&report, "not-measured")["severity"]), (2, &"wrong".into()));
    finding(&report, "no-cuda");
}
