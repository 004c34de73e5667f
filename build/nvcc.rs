//! Finds nvcc and compiles fatbins; for build scripts.

// Not every build script that includes this uses all of it.
#![allow(dead_code, clippy::print_stdout)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

/// Each row is compiled to PTX for the first, once, and from that to machine code for the others. Compiling to PTX is the
/// slow part. The sources ask for the architecture where GPUs from 9.0 on can do more: start a kernel before the one ahead of it
/// has ended, and clusters (`cuda/dev_gpu.cuh`). `scripts/check-kernels` reads this table.
const FAMILIES: [(&str, &[&str]); 2] = [("80", &["80", "86", "89"]), ("90", &["90", "100", "120"])];

/// An empty file, which says at run time that there was no compiler.
pub fn write_nothing(fatbin: &Path) -> Result<(), String> {
    fs::write(fatbin, []).map_err(|e| format!("{}: {e}", fatbin.display()))
}

/// Compiles `source` for every GPU, or for those that `PEERLANE_GPU_ARCHS` names.
pub fn compile(nvcc: &Path, source: &str, fatbin: &Path, flags: &[&str]) -> Result<(), String> {
    println!("cargo:rerun-if-env-changed=PEERLANE_GPU_ARCHS");
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-std=c++17", "-O3", "--threads", "0"]);
    // A fifth of the size; any driver that can load a 13.x cubin can unpack it.
    command.arg("-compress-mode=size");
    command.args(flags);
    // For a quick build: machine code for the GPUs at hand alone.
    let named = env::var("PEERLANE_GPU_ARCHS").unwrap_or_default();
    let named: Vec<&str> = named.split(',').filter(|a| !a.is_empty()).collect();
    let known = || FAMILIES.iter().flat_map(|(_, machines)| *machines);
    if let Some(unknown) = named.iter().find(|a| !known().any(|k| k == *a)) {
        let known: Vec<&str> = known().copied().collect();
        return Err(format!("PEERLANE_GPU_ARCHS: {unknown} is none of {}", known.join(",")));
    }
    let wanted = |machine: &&&str| named.is_empty() || named.contains(*machine);
    let mut newest = "";
    for (family, machines) in FAMILIES {
        for machine in machines.iter().filter(wanted) {
            command.arg(format!("-gencode=arch=compute_{family},code=sm_{machine}"));
            newest = family;
        }
    }
    // As PTX too, for GPUs that come later.
    command.arg(format!("-gencode=arch=compute_{newest},code=compute_{newest}"));
    command.arg("-o").arg(fatbin).arg(source);
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{} failed on {source}: {status}", nvcc.display())),
        Err(error) => Err(format!("{}: {error}", nvcc.display())),
    }
}

/// `13.0`, from the line that ends in `release 13.0, V13.0.88`.
pub fn version(nvcc: &Path) -> Result<String, String> {
    let said = Command::new(nvcc).arg("--version").output();
    let said = said.map_err(|e| format!("{} --version: {e}", nvcc.display()))?;
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let version = text.split("release ").nth(1).and_then(|rest| rest.split(',').next());
    version.map(str::to_owned).ok_or_else(|| format!("{} --version said: {text}", nvcc.display()))
}

/// The compiler that `NVCC`, `CUDA_HOME` or `CUDA_PATH` names, of the `.venv` in the folder `repository`, or of the system.
pub fn find(repository: &Path) -> Option<PathBuf> {
    for name in ["NVCC", "CUDA_HOME", "CUDA_PATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let named = env::var_os("NVCC").map(PathBuf::from).into_iter();
    let homes = ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .filter_map(|name| env::var_os(name).map(|home| PathBuf::from(home).join("bin/nvcc")));
    let venv = venv_packages(repository).map(|site| site.join("nvidia/cu13/bin/nvcc")).into_iter();
    let system = [PathBuf::from("/usr/local/cuda/bin/nvcc")].into_iter();
    let path = env::var_os("PATH").unwrap_or_default();
    let path: Vec<_> = env::split_paths(&path).map(|dir| dir.join("nvcc")).collect();
    named.chain(homes).chain(venv).chain(system).chain(path).find(|nvcc| nvcc.is_file())
}

/// `.venv/lib/python3.N/site-packages` of the repository.
fn venv_packages(repository: &Path) -> Option<PathBuf> {
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR")?);
    let entries: io::Result<Vec<_>> =
        fs::read_dir(package.join(repository).join(".venv/lib")).ok()?.collect();
    let mut dirs: Vec<_> = entries.ok()?.into_iter().map(|e| e.path()).collect();
    dirs.sort();
    dirs.into_iter().map(|dir| dir.join("site-packages")).find(|dir| dir.is_dir())
}
