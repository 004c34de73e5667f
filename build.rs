//! Compiles the kernels: for the CPU device always, for GPUs (one fatbin) with the feature `cuda`; with the feature `cli` also
//! the kernel that stands for somebody else's in measurements.

// A build script talks to cargo through its standard output.
#![allow(clippy::print_stdout)]

#[path = "build/nvcc.rs"]
mod nvcc;

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() -> Result<(), String> {
    println!("cargo:rerun-if-changed=cuda");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build/nvcc.rs");
    let out = PathBuf::from(env::var("OUT_DIR").map_err(|e| format!("OUT_DIR: {e}"))?);
    host_kernels();
    if env::var_os("CARGO_FEATURE_CUDA").is_some() {
        gpu_kernels(&out)?;
    }
    Ok(())
}

/// One object for every CPU of the architecture, and on x86-64 one for AVX2, chosen at run time.
fn host_kernels() {
    let build = |name: &str, namespace: &str, extra: &[&str]| {
        let mut build = cc::Build::new();
        build
            .cpp(true)
            .cpp_link_stdlib(None)
            .std("c++17")
            .opt_level(3)
            .pic(true)
            // Debug information of this many instantiations is 20 MB, and half of the compile time.
            .debug(false)
            // No contraction: a fused multiply-add would round differently from a GPU without it.
            .flag("-ffp-contract=off")
            .flag("-fno-exceptions")
            .flag("-fno-rtti")
            .flag("-fvisibility=hidden")
            .define("PL_NAMESPACE", namespace)
            .warnings(true)
            .extra_warnings(true)
            .file("cuda/host.cpp");
        for flag in extra {
            build.flag(flag);
        }
        build.compile(name);
    };
    build("peerlane_host", "peerlane_base", &[]);
    if env::var("CARGO_CFG_TARGET_ARCH").as_deref() == Ok("x86_64") {
        let avx2 = ["-DPL_HOST_AVX2", "-mavx2", "-mf16c"];
        build("peerlane_host_avx2", "peerlane_avx2", &avx2);
    }
}

/// The numerics of the CPU kernels: no contraction, no flush to zero, IEEE division.
const NUMERICS: [&str; 3] = ["-fmad=false", "-ftz=false", "-prec-div=true"];

fn gpu_kernels(out: &Path) -> Result<(), String> {
    println!("cargo:rerun-if-env-changed=PEERLANE_FATBIN");
    let nvcc = nvcc::find(Path::new("."));
    // The kernel between which the command-line tool measures; the library does not carry it.
    if env::var_os("CARGO_FEATURE_CLI").is_some() {
        let foreign = out.join("foreign.fatbin");
        match &nvcc {
            Some(nvcc) => nvcc::compile(nvcc, "cuda/foreign.cu", &foreign, &NUMERICS)?,
            None => nvcc::write_nothing(&foreign)?,
        }
    }
    let fatbin = out.join("kernels.fatbin");
    // A fatbin of this very source, made before: nvcc takes minutes, and several profiles need not pay for it each.
    if let Some(made) = env::var_os("PEERLANE_FATBIN").filter(|path| !path.is_empty()) {
        println!("cargo:rerun-if-changed={}", Path::new(&made).display());
        println!("cargo:rustc-env=PEERLANE_NVCC_VERSION=0.0");
        let copied = fs::copy(&made, &fatbin);
        return copied
            .map(drop)
            .map_err(|e| format!("PEERLANE_FATBIN={}: {e}", Path::new(&made).display()));
    }
    let Some(nvcc) = nvcc else {
        println!(
            "cargo:warning=no nvcc found (NVCC, CUDA_HOME, CUDA_PATH, .venv, /usr/local/cuda, PATH): \
             building without GPU kernels; `pip install -r cuda/requirements.txt` into .venv provides it"
        );
        println!("cargo:rustc-env=PEERLANE_NVCC_VERSION=0.0");
        return nvcc::write_nothing(&fatbin);
    };
    println!("cargo:rustc-env=PEERLANE_NVCC_VERSION={}", nvcc::version(&nvcc)?);
    nvcc::compile(&nvcc, "cuda/kernels.cu", &fatbin, &NUMERICS)
}
