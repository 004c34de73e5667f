//! The shared object as the loader sees it, the header as a compiler sees it, and that both and the packaging agree.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{export_list, library, root, text, Bench};
use object::elf;
use object::read::elf::{Dyn, ElfFile64, FileHeader, ProgramHeader};
use object::{Object, ObjectSymbol};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Names of what a shared object exports.
fn exports(path: &Path) -> BTreeSet<String> {
    let data = std::fs::read(path).unwrap();
    let file = object::File::parse(&*data).unwrap();
    file.dynamic_symbols()
        .filter(|s| s.is_definition() && s.is_global())
        .map(|s| s.name().unwrap().to_owned())
        .collect()
}

/// What a shared object exports too much (`+name`) or too little (`-name`).
fn differences(path: &Path) -> Vec<String> {
    let expected: BTreeSet<_> = export_list().into_iter().collect();
    let found = exports(path);
    let extra = found.difference(&expected).map(|name| format!("+{name}"));
    let missing = expected.difference(&found).map(|name| format!("-{name}"));
    extra.chain(missing).collect()
}

/// The header without its comments.
fn declarations() -> String {
    let header = text("include/peerlane.h");
    let mut code = String::new();
    let mut rest = header.as_str();
    while let Some((before, after)) = rest.split_once("/*") {
        code.push_str(before);
        rest = after.split_once("*/").expect("a comment that ends").1;
    }
    code + rest
}

#[test]
fn only_the_functions_on_the_list_are_exported() {
    assert_eq!(differences(&library()), [""; 0]);
}

#[test]
fn a_planted_and_a_missing_symbol_are_noticed() {
    let bench = Bench::new();
    let (source, planted) = (bench.path().join("planted.c"), bench.path().join("planted.so"));
    let mut code = String::from("int peerlane_backdoor(void) { return 0; }\n");
    for name in export_list().iter().filter(|name| *name != "peerlane_comm_abort") {
        code += &format!("int {name}(void) {{ return 0; }}\n");
    }
    std::fs::write(&source, code).unwrap();
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&planted).arg(&source).status();
    assert!(built.unwrap().success());
    assert_eq!(differences(&planted), ["+peerlane_backdoor", "-peerlane_comm_abort"]);
}

#[test]
fn the_list_is_what_the_header_declares() {
    let code = declarations();
    let mut declared: Vec<String> = code
        .split('(')
        .filter_map(|before| before.rsplit(|c: char| c != '_' && !c.is_alphanumeric()).next())
        .filter(|name| name.starts_with("peerlane_"))
        .map(str::to_owned)
        .collect();
    declared.sort();
    assert_eq!(declared, export_list());
}

#[test]
fn the_header_is_clean_in_every_dialect() {
    let header = root().join("include/peerlane.h");
    for (compiler, language, dialect) in [
        ("cc", "c", "c99"),
        ("cc", "c", "c11"),
        ("cc", "c", "c17"),
        ("c++", "c++", "c++11"),
        ("c++", "c++", "c++17"),
        ("c++", "c++", "c++20"),
    ] {
        let output = Command::new(compiler)
            .args([&format!("-std={dialect}"), "-fsyntax-only", "-x", language])
            .args(["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"])
            .arg(&header)
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{compiler} -std={dialect}: {errors}");
    }
}

/// The macro is where panics stop and arguments are checked: a function that went around it would be exported without.
#[test]
fn every_exported_function_is_defined_by_the_one_macro() {
    for entry in std::fs::read_dir(root().join("ffi/c/src")).unwrap() {
        let path = entry.unwrap().path();
        let source = std::fs::read_to_string(&path).unwrap();
        let expected = if path.ends_with("boundary.rs") { 2 } else { 0 }; // the macro's two forms
        assert_eq!(source.matches("no_mangle").count(), expected, "{}", path.display());
        assert_eq!(source.matches("export_name").count(), 0, "{}", path.display());
    }
}

/// Entries of the dynamic section.
struct Dynamic {
    soname: String,
    needed: Vec<String>,
    flags: u64,
    flags_1: u64,
}

fn dynamic(path: &Path) -> Dynamic {
    let data = std::fs::read(path).unwrap();
    let file = ElfFile64::<object::Endianness>::parse(&*data).unwrap();
    let (header, endian) = (file.elf_header(), file.endian());
    let sections = header.sections(endian, &*data).unwrap();
    let (entries, link) = sections.dynamic(endian, &*data).unwrap().expect("a dynamic section");
    let strings = sections.strings(endian, &*data, link).unwrap();
    let mut found = Dynamic { soname: String::new(), needed: Vec::new(), flags: 0, flags_1: 0 };
    for entry in entries {
        let string = || String::from_utf8(entry.string(endian, strings).unwrap().to_vec()).unwrap();
        match entry.tag(endian) {
            elf::DT_SONAME => found.soname = string(),
            elf::DT_NEEDED => found.needed.push(string()),
            elf::DT_FLAGS => found.flags = entry.val(endian),
            elf::DT_FLAGS_1 => found.flags_1 = entry.val(endian),
            _ => {}
        }
    }
    found
}

#[test]
fn it_is_linked_as_a_system_library() {
    let found = dynamic(&library());
    assert_eq!(found.soname, format!("libpeerlane.so.{}", env!("CARGO_PKG_VERSION_MAJOR")));
    assert_ne!(found.flags_1 & elf::DF_1_NODELETE.0, 0, "not -z nodelete");
    assert_ne!(found.flags_1 & elf::DF_1_NOW.0, 0, "not -z now");
    assert_ne!(found.flags & elf::DF_BIND_NOW.0, 0, "not -z now");

    let data = std::fs::read(library()).unwrap();
    let file = ElfFile64::<object::Endianness>::parse(&*data).unwrap();
    let endian = file.endian();
    let segments = file.elf_header().program_headers(endian, &*data).unwrap();
    assert!(segments.iter().any(|s| s.p_type(endian) == elf::PT_GNU_RELRO), "not -z relro");
    let stack = segments.iter().find(|s| s.p_type(endian) == elf::PT_GNU_STACK).unwrap();
    assert_eq!((stack.p_flags(endian) & elf::PF_X).0, 0, "executable stack");
}

/// What a bare container has. In particular not libstdc++: the host kernels use nothing of it.
#[test]
fn it_needs_the_c_library_and_little_else() {
    for name in dynamic(&library()).needed {
        let lean = matches!(name.as_str(), "libc.so.6" | "libm.so.6" | "libgcc_s.so.1")
            || name.starts_with("ld-linux");
        assert!(lean, "libpeerlane.so needs {name}");
    }
}

#[test]
fn dlclose_leaves_it_in_place() {
    use libloading::os::unix::{Library, RTLD_LAZY};
    const RTLD_NOLOAD: i32 = 4;
    // SAFETY: the library has no initialisers of its own.
    let open = |flags| unsafe { Library::open(Some(library()), RTLD_LAZY | flags) };
    assert!(open(RTLD_NOLOAD).is_err(), "loaded before this test");
    open(0).unwrap().close().unwrap();
    assert!(open(RTLD_NOLOAD).is_ok(), "gone after dlclose");
}

#[test]
fn header_packages_and_pkg_config_name_one_version() {
    let version = env!("CARGO_PKG_VERSION");
    let core = text("Cargo.toml");
    let package = core.split("[workspace]").next().unwrap();
    assert!(package.contains(&format!("\nversion = \"{version}\"\n")), "Cargo.toml of the library");

    let header = text("include/peerlane.h");
    let part = |name: &str| {
        let line = format!("#define PEERLANE_VERSION_{name} ");
        header.lines().find_map(|l| l.strip_prefix(&line)).unwrap_or_default().to_owned()
    };
    assert_eq!(["MAJOR", "MINOR", "PATCH"].map(part).join("."), version, "include/peerlane.h");

    // The pkg-config file takes it from Cargo.toml when it is installed, see tests/install.rs.
    assert!(text("ffi/c/peerlane.pc.in").contains("\nVersion: @version@\n"), "peerlane.pc.in");
    // That the compiled library says the same is checked by tests/c/misuse.c.
}
