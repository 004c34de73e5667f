//! A C program with ranks on GPUs, over the stand-in driver: header, library and driver calls together.
#![cfg(feature = "cuda")]
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

mod common;
#[path = "../../../tests/common/fakecuda.rs"]
mod fakecuda;

use common::Bench;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

/// The kernels as a library of the host's, which the stand-in driver runs in place of those of a GPU.
fn host_kernels() -> PathBuf {
    let built = std::env::current_exe().unwrap().with_file_name("libhostkernels.so");
    assert!(built.exists(), "{} was not built with the tests", built.display());
    built
}

fn run(arguments: &[&str], env: &[(&str, &str)]) {
    let bench = Bench::new();
    let program = bench.compile("tests/c/cuda.c", &[]);
    // Anything is a fatbin to the stand-in driver.
    let image = bench.path().join("fake.fatbin");
    std::fs::write(&image, b"an image").unwrap();
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env("LD_LIBRARY_PATH", fakecuda::driver_folder())
        .env("FAKECUDA_KERNELS", host_kernels())
        .env("FAKECUDA_KERNEL_MAP", hostkernels::kernel_map())
        .env("PEERLANE_KERNELS", image)
        .env("PEERLANE_SLAB", "4M")
        .env("PEERLANE_CACHE_DIR", bench.path().join("cache"))
        .env_remove("PEERLANE_PROBE")
        .envs(env.iter().copied());
    bench.run(&mut command, LIMIT);
}

#[test]
fn eight_processes_in_c_reduce_capture_replay_and_leave_over_every_lane() {
    // As the header numbers them.
    for lane in ["1", "2", "3"] {
        run(&[lane], &[]);
    }
}

#[test]
fn survivors_in_c_learn_which_rank_was_killed_in_the_middle_of_replays() {
    run(&["1", "kill"], &[]);
}

#[test]
fn a_c_client_reads_what_was_measured() {
    run(&["1"], &[("PEERLANE_PROBE", "always")]);
}

/// The control: a client over a driver that refuses a call must not pass.
#[test]
fn a_c_client_that_cannot_launch_fails() {
    // Four steps of four kinds on four channels test the lane; then come the client's own calls.
    let refused = [("FAKECUDA_FAIL", "cuLaunchKernelEx:66:*:700")];
    let text = std::panic::catch_unwind(|| run(&["1"], &refused)).unwrap_err();
    let text = text.downcast_ref::<String>().cloned().unwrap_or_default();
    assert!(text.contains("cuLaunchKernelEx"), "{text}");
}
