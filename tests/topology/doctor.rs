//! `peerlane doctor` on copies of boxes: every finding where it is due, with its evidence, and none where all is well.

use crate::fake_box::{config, FakeBox, GPUS};
use crate::{peerlane, said};
use serde_json::Value;

/// Status and findings, as its JSON has them.
fn examine(fake: &FakeBox) -> (i32, Vec<Value>) {
    let output = peerlane(&["doctor", "--json", "--root", fake.path()]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    let report: Value =
        serde_json::from_str(&said(&output)).unwrap_or_else(|e| panic!("{e}: {error}"));
    let status = output.status.code().unwrap();
    assert_eq!(report["status"], status, "the report and the exit status say the same");
    (status, report["findings"].as_array().unwrap().clone())
}

fn ids(findings: &[Value]) -> Vec<&str> {
    findings.iter().map(|f| f["id"].as_str().unwrap()).collect()
}

fn gpu(number: usize, file: &str) -> String {
    format!("sys/devices/{}/{file}", GPUS[number].0)
}

#[test]
fn a_healthy_box_raises_no_alarm() {
    let fake = FakeBox::healthy("healthy");
    let (status, findings) = examine(&fake);
    assert_eq!((status, ids(&findings)), (0, vec!["shared-uplink"]), "{findings:#?}");
    assert_eq!(findings[0]["severity"], "note");
    let text = said(&peerlane(&["doctor", "--root", fake.path()]));
    assert!(
        text.contains("4 NVIDIA GPU(s), driver 580.65.06") && text.contains("Nothing to change"),
        "{text}"
    );
}

/// Makes a healthy box sick.
type Sickness = fn(&FakeBox);

#[test]
fn every_sickness_is_found_with_its_evidence_and_a_remedy() {
    // Name of the finding, exit status, words of the evidence, words of the remedy.
    let cases: &[(&str, i32, &str, &str, Sickness)] = &[
        (
            "acs-redirect",
            1,
            "0000:12:01.0/config: ACS control 0x001d (request redirect",
            "setpci -s 0000:12:01.0 ECAP_ACS+0x6.w=0x0001",
            |b| {
                b.put(
                    "sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/config",
                    config(Some(0x1d)),
                );
            },
        ),
        ("acs-unseen", 0, "0000:81:00.0/config shows no more than 64 bytes", "as root", |b| {
            b.put("sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0/config", vec![0u8; 64]);
        }),
        (
            "iommu-translated",
            2,
            "iommu_groups/2/type = DMA-FQ (0000:83:00.0); the kernel's command line says iommu=pt",
            "iommu=pt",
            |b| {
                b.put("sys/kernel/iommu_groups/2/type", "DMA-FQ\n");
            },
        ),
        ("link-width", 1, "current_link_width = 8", "reseat", |b| {
            b.put(&gpu(1, "current_link_width"), "8\n")
        }),
        ("link-generation", 1, "0000:14:00.0/current_link_speed = 8.0 GT/s PCIe", "reseat", |b| {
            b.put(&gpu(1, "current_link_speed"), "8.0 GT/s PCIe\n")
        }),
        ("link-idle", 0, "= 2.5 GT/s PCIe", "while the GPU works", |b| {
            b.put(&gpu(1, "current_link_speed"), "2.5 GT/s PCIe\n")
        }),
        ("link-width", 1, "0000:81:00.0/current_link_speed", "reseat", |b| {
            b.put("sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0/current_link_width", "8\n");
        }),
        ("bar1-small", 1, "resource, line 2: 256 MiB (0000:13:00.0)", "Resizable BAR", |b| {
            b.put(&gpu(0, "resource"), "0x0 0x1 0x0\n0x10000000 0x1fffffff 0x14220c\n");
        }),
        ("numa-unknown", 1, "numa_node = -1, and the box has 2 nodes", "PEERLANE_ISLANDS", |b| {
            b.put(&gpu(2, "numa_node"), "-1\n")
        }),
        (
            "cpu-far",
            1,
            "Cpus_allowed_list 0-3; 0000:83:00.0 is near CPUs 8-15",
            "taskset -c 8-15",
            |b| {
                b.put("proc/self/status", "NSpid:\t42\nCpus_allowed_list:\t0-3\n");
            },
        ),
        ("shm-small", 1, "size=65536k", "--shm-size", |b| {
            b.put(
                "proc/self/mountinfo",
                "1 2 0:9 / /dev/shm rw - tmpfs shm rw,size=65536k,inode64\n",
            );
        }),
        ("pid-namespace", 0, "NSpid:\t4242\t1", "PEERLANE_RUN_DIR", |b| {
            b.put("proc/self/status", "NSpid:\t4242\t1\n")
        }),
        ("no-peer-access", 1, "GPU0 to GPU2, SYS apart", "allows peer-to-peer", |b| {
            b.peers(|x, y| x / 2 == y / 2)
        }),
        ("mig", 1, "0000:14:00.0", "-mig 0", |b| {
            b.put(
                "peerlane/driver.json",
                "{\"gpus\":[{\"address\":\"0000:14:00.0\",\"mig\":true}]}",
            );
        }),
        (
            "driver-old",
            2,
            "proc/driver/nvidia/version: 535.183.01, needed is 580",
            "install driver 580",
            |b| {
                b.put(
                    "proc/driver/nvidia/version",
                    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\n",
                );
            },
        ),
        ("no-cuda", 2, "proc/driver/nvidia/version is not there", "modprobe nvidia", |b| {
            b.remove("proc/driver/nvidia/version");
            b.remove("peerlane/driver.json");
        }),
        ("no-cuda", 2, "cuInit failed", "modprobe", |b| {
            b.put("peerlane/driver.json", "{\"error\":\"cuInit failed\"}")
        }),
        ("collapse-possible", 0, "3 root complexes", "pairwise and staged", |b| {
            b.gpu("pci0000:a0/0000:a0:01.0/0000:a1:00.0", 1, 9)
        }),
        ("no-peermem", 0, "infiniband/mlx5_0 is there", "modprobe nvidia_peermem", |b| {
            b.put("sys/class/infiniband/mlx5_0/present", "")
        }),
        ("nccl-ll128", 2, "NCCL_PROTO=LL,LL128,Simple", "LL,Simple", |b| {
            b.put("peerlane/nccl", "NCCL_PROTO=LL,LL128,Simple\n")
        }),
        ("nccl-proto", 1, "NCCL_PROTO=Simple", "unset", |b| {
            b.put("peerlane/nccl", "NCCL_PROTO=Simple\n")
        }),
        ("nccl-p2p", 1, "NCCL_P2P_DISABLE=1", "unset", |b| {
            b.put("peerlane/nccl", "NCCL_P2P_DISABLE=1\n")
        }),
        ("nccl-p2p-level", 1, "NCCL_P2P_LEVEL=PIX", "SYS", |b| {
            b.put("peerlane/nccl", "NCCL_P2P_LEVEL=PIX\n")
        }),
        ("nccl-tree", 1, "NCCL_ALGO=Tree", "unset", |b| b.put("peerlane/nccl", "NCCL_ALGO=Tree\n")),
        ("nccl-shm", 1, "NCCL_SHM_DISABLE=1", "unset", |b| {
            b.put("peerlane/nccl", "NCCL_SHM_DISABLE=1\n")
        }),
    ];
    for (number, (id, status, evidence, remedy, sicken)) in cases.iter().enumerate() {
        let fake = FakeBox::healthy(&format!("sick-{number}"));
        sicken(&fake);
        let (found_status, findings) = examine(&fake);
        let Some(finding) = findings.iter().find(|f| f["id"] == *id) else {
            panic!("{id} is not in {findings:#?}")
        };
        assert!(finding["evidence"].as_str().unwrap().contains(evidence), "{id}: {finding:#?}");
        assert!(finding["fix"].as_str().unwrap().contains(remedy), "{id}: {finding:#?}");
        assert!(
            !finding["what"].as_str().unwrap().is_empty()
                && !finding["cost"].as_str().unwrap().is_empty()
        );
        assert_eq!(found_status, *status, "{id}: {findings:#?}");
        // One sickness gives one alarm.
        let alarms = findings.iter().filter(|f| f["severity"] != "note").count();
        assert_eq!(alarms, usize::from(*status > 0), "{id}: {findings:#?}");
    }
}

#[test]
fn a_slower_slot_is_told_from_a_bad_contact() {
    let fake = FakeBox::healthy("slot");
    fake.put(&gpu(0, "current_link_speed"), "16.0 GT/s PCIe\n");
    fake.put(
        "sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/max_link_speed",
        "16.0 GT/s PCIe\n",
    );
    let (status, findings) = examine(&fake);
    assert_eq!(status, 1);
    let finding = findings.iter().find(|f| f["id"] == "link-generation").unwrap();
    assert!(
        finding["fix"].as_str().unwrap().contains("its port does no more than Gen4 x16"),
        "{finding:#?}"
    );
}

#[test]
fn a_direct_box_may_be_staged_unless_the_driver_is_told_otherwise() {
    let fake = FakeBox::healthy("direct");
    for name in std::fs::read_dir(fake.root.join("sys/bus/pci/devices")).unwrap() {
        std::fs::remove_file(name.unwrap().path()).unwrap();
    }
    fake.gpu("pci0000:10/0000:10:01.0/0000:11:00.0", 0, 0);
    fake.gpu("pci0000:20/0000:20:01.0/0000:21:00.0", 0, 1);
    assert_eq!(ids(&examine(&fake).1), ["staging-possible"]);
    fake.put("proc/driver/nvidia/params", "RegistryDwords: \"ForceP2P=0x11\"\n");
    assert!(examine(&fake).1.is_empty());
}

#[test]
fn a_box_without_gpus_is_fine_and_says_so() {
    let fake = FakeBox::healthy("bare");
    std::fs::remove_dir_all(fake.root.join("sys/bus")).unwrap();
    let (status, findings) = examine(&fake);
    assert_eq!((status, ids(&findings)), (0, vec!["no-gpu"]), "{findings:#?}");
}

#[test]
fn what_cannot_be_read_is_an_error_with_its_place() {
    let fake = FakeBox::healthy("broken");
    fake.put(&gpu(0, "numa_node"), "near\n");
    let output = peerlane(&["doctor", "--root", fake.path()]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2));
    assert!(error.contains("numa_node:1: 'near' is no number"), "{error}");
    let output = peerlane(&["doctor", "--root", "/nonexistent"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/nonexistent"));
}

/// A build without CUDA has nothing to measure GPUs with, and says so where there are some.
#[cfg(not(feature = "cuda"))]
#[test]
fn a_build_without_cuda_does_not_pretend_to_measure() {
    let fake = FakeBox::healthy("live-without-cuda");
    let output = peerlane(&["doctor", "--live", "--json", "--root", fake.path()]);
    let report: Value = serde_json::from_str(&said(&output)).unwrap();
    assert_eq!(output.status.code(), Some(2), "{report:#}");
    let findings = report["findings"].as_array().unwrap();
    let finding = findings.iter().find(|f| f["id"] == "not-measured").unwrap();
    assert!(finding["evidence"].as_str().unwrap().contains("built without CUDA"), "{finding:#}");
    assert!(report.get("measured").is_none());
}
