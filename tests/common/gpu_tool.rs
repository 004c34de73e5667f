//! `peerlane bench --device cuda` over the stand-in driver, beside a stand-in NCCL.

// Each test binary that includes this uses its own share of it.
#![allow(dead_code)]

use super::fakecuda;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// A file that the stand-in driver takes for a fatbin. Written once: runs of other tests may be reading it.
pub fn fatbin() -> &'static Path {
    static WRITTEN: OnceLock<PathBuf> = OnceLock::new();
    WRITTEN.get_or_init(|| {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(concat!(env!("CARGO_CRATE_NAME"), ".fatbin"));
        std::fs::write(&path, b"an image").unwrap();
        path
    })
}

/// The variables that put the stand-in driver in the place of the real one, with the host's kernels in it.
pub fn fake() -> Vec<(&'static str, String)> {
    let kernels = std::env::current_exe().unwrap().with_file_name("libhostkernels.so");
    assert!(kernels.exists(), "{} was not built with the tests", kernels.display());
    vec![
        ("LD_LIBRARY_PATH", fakecuda::driver_folder().display().to_string()),
        ("FAKECUDA_KERNELS", kernels.display().to_string()),
        ("FAKECUDA_KERNEL_MAP", hostkernels::kernel_map()),
        ("PEERLANE_KERNELS", fatbin().display().to_string()),
        ("PEERLANE_SLAB", "4M".into()),
        // Measuring would cost more than what is tested, and leave a file in the user's cache.
        ("PEERLANE_PROBE", "off".into()),
    ]
}

pub fn with(more: &[(&'static str, &str)]) -> Vec<(&'static str, String)> {
    let mut env = fake();
    env.extend(more.iter().map(|(name, value)| (*name, value.to_string())));
    env
}

/// The stand-in NCCL, compiled once.
pub fn nccl() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(concat!(
            "libfakenccl-",
            env!("CARGO_CRATE_NAME"),
            ".so"
        ));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fakenccl/nccl.c");
        let built = Command::new("cc")
            .args(["-std=gnu11", "-O2", "-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .arg("-ldl")
            .status()
            .unwrap();
        assert!(built.success());
        library
    })
}

/// A kernel map in which the probe answers what `HOSTKERNELS_FABRIC` says.
pub fn scripted_probe() -> String {
    let bytes = size_of::<peerlane::launch::pl_probe>();
    format!("pl_probe_lane=hostkernels_scripted_probe:{bytes},{}", hostkernels::kernel_map())
}

/// A kernel map in which no all-reduce moves anything, so that no lane passes its test.
pub fn lanes_that_lose_everything() -> String {
    let unrolled = [1, 3, 7, 15].map(|k| format!("pl_unrolled_{k}_"));
    doing_nothing(["pl_all_reduce_".into()].into_iter().chain(unrolled))
}

/// A kernel map in which the all-reduce of bfloat16 does nothing. The self-test of set-up uses f32, and passes.
pub fn kernels_that_do_nothing() -> String {
    let walks = ["pl_all_reduce_bf16_", "pl_all_reduce_add_rms_norm_bf16_"].map(String::from);
    let unrolled = [1, 3, 7, 15].map(|k| format!("pl_unrolled_{k}_bf16_"));
    let normed = [1, 3, 7]
        .into_iter()
        .flat_map(|k| ["norm", "rows"].map(|form| format!("pl_unrolled_{k}_{form}_bf16_")));
    doing_nothing(walks.into_iter().chain(unrolled).chain(normed))
}

/// A kernel map in which kernels whose names begin so do nothing.
fn doing_nothing(prefixes: impl Iterator<Item = String>) -> String {
    let kernels = hostkernels::kernels();
    let nothing = |prefix: String| {
        // The driver copies as many bytes as the kernel has by rights.
        let of = kernels.iter().find(|k| prefix.starts_with(k.prefix)).unwrap();
        format!("{prefix}=hostkernels_nothing:{}", of.bytes)
    };
    prefixes.map(nothing).chain([hostkernels::kernel_map()]).collect::<Vec<_>>().join(",")
}
