//! `peerlane doctor --capture`: the copy gives the same findings, and does not name the machine.

use crate::fake_box::{config, FakeBox};
use crate::{peerlane, said};
use std::process::Command;

#[test]
fn a_capture_gives_the_same_findings_and_names_no_machine() {
    let fake = FakeBox::healthy("captured");
    fake.put(
        "sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/config",
        config(Some(0x1d)),
    );
    fake.put("sys/kernel/iommu_groups/1/type", "DMA\n");
    fake.put(
        "sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0/serial_number",
        "SERIALNO\n",
    );
    fake.put(
        "proc/self/mountinfo",
        "1 2 0:9 /secret-host /dev/shm rw - tmpfs shm rw,size=65536k,inode64\n",
    );
    fake.put("proc/self/status", "Name:\tsecret\nNSpid:\t42\t1\nCpus_allowed_list:\t0-3\n");
    fake.put("sys/class/infiniband/mlx5_0/node_guid", "secret\n");
    fake.put("peerlane/nccl", "NCCL_ALGO=Tree\n");
    let tar = fake.root.with_extension("tar");
    let output =
        peerlane(&["doctor", "--json", "--root", fake.path(), "--capture", tar.to_str().unwrap()]);
    let original = said(&output).replace(fake.path(), "ROOT");
    assert!(
        original.contains("acs-redirect") && original.contains("iommu-translated"),
        "{original}"
    );

    // Read as it is, and unpacked by another program.
    let unpacked = fake.root.with_extension("unpacked");
    let _ = std::fs::remove_dir_all(&unpacked);
    std::fs::create_dir_all(&unpacked).unwrap();
    let status =
        Command::new("tar").arg("-xf").arg(&tar).arg("-C").arg(&unpacked).status().unwrap();
    assert!(status.success());
    for root in [&tar, &unpacked] {
        let root = root.to_str().unwrap();
        let copy = said(&peerlane(&["doctor", "--json", "--root", root])).replace(root, "ROOT");
        assert_eq!(copy, original, "{root}");
    }
    let bytes = std::fs::read(&tar).unwrap();
    for secret in ["secret", "SERIALNO", "10.1.2.3", "UUID"] {
        assert!(!bytes.windows(secret.len()).any(|w| w == secret.as_bytes()), "{secret}");
    }
}

/// What `doctor --root` says of a path, in one line; the exit status is that of a box that could not be read.
fn refused(root: &std::path::Path) -> String {
    let output = peerlane(&["doctor", "--root", root.to_str().unwrap()]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.chars().all(|c| c == '\n' || !c.is_control()), "{error:?}");
    error
}

#[test]
fn what_is_no_capture_is_refused_in_one_line() {
    let fake = FakeBox::healthy("no-capture");
    fake.put("binary", [b"\x1b[31m\xff\n\0".as_slice(); 4000].concat());
    fake.put("empty", "");
    for file in ["proc/cmdline", "binary", "empty"] {
        let error = refused(&fake.root.join(file));
        assert!(error.contains("neither a directory nor a capture"), "{error}");
    }
    // Neither is waited for: a pipe that nobody writes to, and what never ends.
    let pipe = fake.root.join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for path in [pipe.as_path(), "/dev/zero".as_ref()] {
        assert!(refused(path).contains("no plain file"));
        let path = path.to_str().unwrap();
        let output = peerlane(&["explain", "--topology", path]);
        assert!(String::from_utf8_lossy(&output.stderr).contains("no plain file"), "{output:?}");
    }
    assert!(refused(&fake.root.join("proc")).contains("there is no sys in it"));
    assert!(refused("/nonexistent.tar".as_ref()).contains("/nonexistent.tar: No such file"));
    // A capture whose words are meant for the terminal.
    fake.put("peerlane/driver.json", "{\"gpus\":\"\\u001b[31m\"}");
    assert!(refused(&fake.root).contains("driver.json: invalid type"));
    let fake = FakeBox::healthy("escapes");
    fake.put("sys/bus/pci/devices/\u{1b}[31mred\u{1b}[0m", "");
    fake.put("peerlane/nccl", "NCCL_PROTO=\u{1b}[31mLL128,LL128\n");
    let text = said(&peerlane(&["doctor", "--root", fake.path()]));
    assert!(text.contains("is no PCI address") && text.contains("nccl-ll128"), "{text}");
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
}
