//! Names: exactly NCCL's, and each of them is found by whoever needs it, in the three ways of getting at a library.
#![cfg(feature = "cuda")]
#![allow(
    missing_docs,
    non_upper_case_globals,
    clippy::undocumented_unsafe_blocks,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]

mod support;

use object::{Object, ObjectSymbol};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use support::{built, folder, standin};

fn list(name: &str) -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name);
    std::fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect()
}

fn exported(library: &Path) -> BTreeSet<String> {
    let bytes = std::fs::read(library).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let names =
        file.dynamic_symbols().filter(|s| s.is_definition()).map(|s| s.name().unwrap().to_owned());
    names.filter(|name| !name.is_empty()).collect()
}

#[test]
fn the_full_library_exports_exactly_what_nccl_does_and_one_name_more() {
    let mut expected = list("nccl-2.32.3-exports.txt");
    expected.insert("peerlane_nccl_stats".into());
    assert_eq!(exported(&built("libpeerlane_libnccl.so")), expected);
    assert_eq!(exported(&built("libpeerlane_preload.so")), expected);
}

#[test]
fn the_linking_library_defines_only_what_it_intercepts_and_needs_nccl() {
    let names = exported(&built("libpeerlane_nccl.so"));
    let all = list("nccl-2.32.3-exports.txt");
    assert!(names.contains("ncclAllReduce") && names.contains("ncclCommInitRankConfig"));
    assert!(!names.contains("ncclSend") && !names.contains("pncclAllReduce"), "{names:?}");
    let strange: Vec<_> = names.iter().filter(|name| !all.contains(*name)).collect();
    assert_eq!(strange, ["peerlane_nccl_stats"]);
    let needed = needed(&built("libpeerlane_nccl.so"));
    assert!(needed.contains("libnccl.so.2"), "{needed}");
    // One that is loaded into every process must not: where NCCL is on no path, none would start.
    assert!(!needed_by_preload().contains("libnccl"));
}

fn needed(library: &Path) -> String {
    let output = Command::new("readelf").arg("-d").arg(library).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter(|line| line.contains("NEEDED")).collect::<Vec<_>>().join("\n")
}

fn needed_by_preload() -> String {
    needed(&built("libpeerlane_preload.so"))
}

/// A library that needs the functions that PyTorch 2.15 does, as PyTorch does: undefined, and NCCL in a folder of its own.
fn torch(folder: &Path) -> std::path::PathBuf {
    let names = list("torch-2.15-needs.txt");
    assert_eq!(names.len(), 51);
    let mut source = String::new();
    for name in &names {
        source.push_str(&format!("extern int {name}();\n"));
    }
    source.push_str("void* torch_needs[] = {\n");
    names.iter().for_each(|name| source.push_str(&format!("  (void*){name},\n")));
    source.push_str("};\nint torch_version(void) { int v = 0; ncclGetVersion(&v); return v; }\n");
    let (c, library) = (folder.join("torch.c"), folder.join("libtorch_cuda.so"));
    std::fs::write(&c, source).unwrap();
    let status = Command::new("gcc")
        .args(["-shared", "-fPIC", "-w", "-o"])
        .args([&library, &c])
        .arg(standin().join("libnccl.so.2"))
        .arg(format!("-Wl,--disable-new-dtags,-rpath,{}", standin().display()))
        .status()
        .unwrap();
    assert!(status.success());
    library
}

/// Loads it with every symbol bound at once, as an import does, and prints who defines the functions.
const IMPORT: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
int main(int argc, char** argv) {
  if (argc > 2 && !dlopen(argv[2], RTLD_NOW | RTLD_LOCAL)) return printf("%s\n", dlerror()), 1;
  void* torch = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!torch) return printf("%s\n", dlerror()), 1;
  void** needs = dlsym(torch, "torch_needs");
  for (int i = 0; i < 51; i++) {
    Dl_info info;
    if (!dladdr(needs[i], &info)) return 1;
    printf("%s\n", strrchr(info.dli_fname, '/') + 1);
  }
  printf("version %d\n", ((int (*)(void))dlsym(torch, "torch_version"))());
  return 0;
}
"#;

fn import(dir: &Path) -> std::path::PathBuf {
    let (c, program) = (dir.join("import.c"), dir.join("import"));
    std::fs::write(&c, IMPORT).unwrap();
    assert!(Command::new("gcc")
        .args(["-w", "-o"])
        .args([&program, &c])
        .arg("-ldl")
        .status()
        .unwrap()
        .success());
    program
}

fn lines(command: &mut Command) -> Vec<String> {
    let output = command.env("PEERLANE_LOG", "off").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text.lines().map(str::to_owned).collect()
}

#[test]
fn what_torch_needs_is_ours_by_preload_and_by_an_early_load() {
    let dir = tempfile::tempdir().unwrap();
    let (torch, import) = (torch(dir.path()), import(dir.path()));
    // Control: without us they are the real one's.
    let plain = lines(Command::new(&import).arg(&torch));
    assert!(plain[..51].iter().all(|owner| owner == "libnccl.so.2"), "{plain:?}");

    let preload =
        lines(Command::new(&import).arg(&torch).env("LD_PRELOAD", built("libpeerlane_preload.so")));
    assert!(preload[..51].iter().all(|owner| owner == "libpeerlane_preload.so"), "{preload:?}");
    assert_eq!(preload[51], "version 23203", "passed on to the real one, which is loaded already");

    let full =
        folder("nccl-full", &[("libnccl.so.2", "libpeerlane_libnccl.so")]).join("libnccl.so.2");
    let ours = std::fs::canonicalize(&full).unwrap();
    let ours = ours.file_name().unwrap().to_str().unwrap();
    let mut command = Command::new(&import);
    command.args([&torch, &full]).env("PEERLANE_NCCL_LIB", standin().join("libnccl.so.2"));
    let early = lines(&mut command);
    assert!(early[..51].iter().all(|owner| owner == "libnccl.so.2" || owner == ours), "{early:?}");
    assert_eq!(early[51], "version 23203");
    // It is ours and not the one that the library's own path leads to.
    let mut command = Command::new(&import);
    command.args([&torch, &full]).env("PEERLANE_NCCL_LIB", dir.path().join("nothing.so"));
    assert_eq!(lines(&mut command)[51], "version 23203", "alone it says which API it serves");
}

#[test]
fn a_program_without_nccl_does_not_notice_the_preload_library() {
    let output = Command::new("/bin/true")
        .env("LD_PRELOAD", built("libpeerlane_preload.so"))
        .output()
        .unwrap();
    assert!(output.status.success() && output.stderr.is_empty());
}

#[test]
fn by_a_path_in_a_variable_every_name_is_found_through_the_linking_library() {
    // As ctypes does: the symbol is looked up in the library and in what it needs.
    let program = r#"
import ctypes, sys
real = ctypes.CDLL(sys.argv[2])
ours = ctypes.CDLL(sys.argv[1])
missing = [name for name in open(sys.argv[3]).read().split() if not hasattr(ours, name)]
assert not missing, missing
version = ctypes.c_int()
assert ours.ncclGetVersion(ctypes.byref(version)) == 0 and version.value == 23203
assert ours.ncclGroupEnd() == 5
"#;
    let needs = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torch-2.15-needs.txt");
    lines(Command::new("python3").args(["-c", program]).args([
        built("libpeerlane_nccl.so"),
        standin().join("libnccl.so.2"),
        needs,
    ]));
}

#[test]
fn the_header_has_the_struct_that_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let fields = [
        "communicators",
        "set_up",
        "refused",
        "served_calls",
        "served_bytes",
        "forwarded_size",
        "forwarded_kind",
        "forwarded_unready",
        "failed",
    ];
    assert_eq!(size_of::<peerlane_nccl_core::stats::Stats>(), 8 * fields.len());
    let mut source = String::from("#include <peerlane_nccl.h>\n");
    for (at, field) in fields.iter().enumerate() {
        source.push_str(&format!(
            "_Static_assert(offsetof(peerlane_nccl_stats_t, {field}) == {}, \"\");\n",
            8 * at
        ));
    }
    source.push_str(&format!(
        "_Static_assert(sizeof(peerlane_nccl_stats_t) == {}, \"\");\n",
        8 * fields.len()
    ));
    let c = dir.path().join("stats.c");
    std::fs::write(&c, source).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../include");
    let status = Command::new("gcc")
        .args(["-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I"])
        .args([&include, &c])
        .status();
    assert!(status.unwrap().success());
}
