//! With the feature `cuda`: compiles the runner's kernels into a fatbin.

// A build script talks to cargo through its standard output.
#![allow(clippy::print_stdout)]

#[path = "../../build/nvcc.rs"]
mod nvcc;

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() -> Result<(), String> {
    for path in ["cuda", "build.rs", "../../build/nvcc.rs"] {
        println!("cargo:rerun-if-changed={path}");
    }
    println!("cargo:rerun-if-env-changed=PEERLANE_VERIFY_FATBIN");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return Ok(());
    }
    let out = PathBuf::from(env::var("OUT_DIR").map_err(|e| format!("OUT_DIR: {e}"))?);
    let fatbin = out.join("verify.fatbin");
    // A fatbin of this very source, made before.
    if let Some(made) = env::var_os("PEERLANE_VERIFY_FATBIN").filter(|path| !path.is_empty()) {
        let made = Path::new(&made);
        println!("cargo:rerun-if-changed={}", made.display());
        let copied = fs::copy(made, &fatbin);
        return copied
            .map(drop)
            .map_err(|e| format!("PEERLANE_VERIFY_FATBIN={}: {e}", made.display()));
    }
    match nvcc::find(Path::new("../..")) {
        Some(nvcc) => nvcc::compile(&nvcc, "cuda/kernels.cu", &fatbin, &[]),
        None => {
            println!(
                "cargo:warning=no nvcc found (NVCC, CUDA_HOME, CUDA_PATH, .venv, /usr/local/cuda, PATH): building the verify \
                 runner without GPU kernels"
            );
            nvcc::write_nothing(&fatbin)
        }
    }
}
