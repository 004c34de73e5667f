//! Compiles the kernels: for the CPU device always, for GPUs (one fatbin) with the feature `cuda`; with the feature `cli` also
//! the kernel that stands for somebody else's in measurements.

// A build script talks to cargo through its standard output.
#![allow(clippy::print_stdout)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

/// Machine code for these; the last also as PTX, for GPUs that come later.
const GPU_ARCHITECTURES: [&str; 6] = ["80", "86", "89", "90", "100", "120"];

fn main() -> Result<(), String> {
    println!("cargo:rerun-if-changed=cuda");
    println!("cargo:rerun-if-changed=build.rs");
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

fn gpu_kernels(out: &Path) -> Result<(), String> {
    for name in ["NVCC", "CUDA_HOME", "CUDA_PATH", "PEERLANE_FATBIN", "PEERLANE_GPU_ARCHS"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let nvcc = find_nvcc();
    // The kernel between which the command-line tool measures; the library does not carry it.
    if env::var_os("CARGO_FEATURE_CLI").is_some() {
        match &nvcc {
            Some(nvcc) => compile(nvcc, "cuda/foreign.cu", &out.join("foreign.fatbin"))?,
            None => write_nothing(&out.join("foreign.fatbin"))?,
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
        return write_nothing(&fatbin);
    };
    println!("cargo:rustc-env=PEERLANE_NVCC_VERSION={}", version_of(&nvcc)?);
    compile(&nvcc, "cuda/kernels.cu", &fatbin)
}

/// An empty file, which says at run time that there was no compiler.
fn write_nothing(fatbin: &Path) -> Result<(), String> {
    fs::write(fatbin, []).map_err(|e| format!("{}: {e}", fatbin.display()))
}

fn compile(nvcc: &Path, source: &str, fatbin: &Path) -> Result<(), String> {
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-std=c++17", "-O3", "--threads", "0"]);
    // A fifth of the size; any driver that can load a 13.x cubin can unpack it.
    command.arg("-compress-mode=size");
    // The numerics of the CPU kernels: no contraction, no flush to zero, IEEE division.
    command.args(["-fmad=false", "-ftz=false", "-prec-div=true"]);
    // For a quick build: machine code for the GPUs at hand alone.
    let named = env::var("PEERLANE_GPU_ARCHS").unwrap_or_default();
    let architectures: Vec<&str> =
        match named.split(',').filter(|a| !a.is_empty()).collect::<Vec<_>>() {
            all if all.is_empty() => GPU_ARCHITECTURES.to_vec(),
            some => some,
        };
    if let Some(unknown) = architectures.iter().find(|a| !GPU_ARCHITECTURES.contains(a)) {
        return Err(format!(
            "PEERLANE_GPU_ARCHS: {unknown} is none of {}",
            GPU_ARCHITECTURES.join(",")
        ));
    }
    for arch in &architectures {
        command.arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}"));
    }
    let newest = architectures[architectures.len() - 1];
    command.arg(format!("-gencode=arch=compute_{newest},code=compute_{newest}"));
    command.arg("-o").arg(fatbin).arg(source);
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{} failed on {source}: {status}", nvcc.display())),
        Err(error) => Err(format!("{}: {error}", nvcc.display())),
    }
}

/// `13.0`, from the line that ends in `release 13.0, V13.0.88`.
fn version_of(nvcc: &Path) -> Result<String, String> {
    let said = Command::new(nvcc).arg("--version").output();
    let said = said.map_err(|e| format!("{} --version: {e}", nvcc.display()))?;
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let version = text.split("release ").nth(1).and_then(|rest| rest.split(',').next());
    version.map(str::to_owned).ok_or_else(|| format!("{} --version said: {text}", nvcc.display()))
}

fn find_nvcc() -> Option<PathBuf> {
    let named = env::var_os("NVCC").map(PathBuf::from).into_iter();
    let homes = ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .filter_map(|name| env::var_os(name).map(|home| PathBuf::from(home).join("bin/nvcc")));
    let venv = venv_packages().map(|site| site.join("nvidia/cu13/bin/nvcc")).into_iter();
    let system = [PathBuf::from("/usr/local/cuda/bin/nvcc")].into_iter();
    let path = env::var_os("PATH").unwrap_or_default();
    let path: Vec<_> = env::split_paths(&path).map(|dir| dir.join("nvcc")).collect();
    named.chain(homes).chain(venv).chain(system).chain(path).find(|nvcc| nvcc.is_file())
}

/// `.venv/lib/python3.N/site-packages` of this repository.
fn venv_packages() -> Option<PathBuf> {
    let entries: io::Result<Vec<_>> =
        fs::read_dir(Path::new(&env::var_os("CARGO_MANIFEST_DIR")?).join(".venv/lib"))
            .ok()?
            .collect();
    let mut dirs: Vec<_> = entries.ok()?.into_iter().map(|e| e.path()).collect();
    dirs.sort();
    dirs.into_iter().map(|dir| dir.join("site-packages")).find(|dir| dir.is_dir())
}
