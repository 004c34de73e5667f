//! `src/launch.rs` is what bindgen makes of `cuda/launch.h`, so that host and kernels mean the same structs. Generated here and
//! not by the build: building the library needs no libclang.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};

fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn generated() -> String {
    bindgen::builder()
        .header(file("cuda/launch.h").to_str().expect("a path in UTF-8"))
        .allowlist_item("(pl|PL)_.*")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .generate_comments(false)
        .layout_tests(true)
        .formatter(bindgen::Formatter::None)
        .raw_line("//! Generated from `cuda/launch.h` by bindgen (`make bindings`); a test compares. Do not edit.")
        .raw_line("#![allow(non_camel_case_types, non_upper_case_globals, dead_code)]")
        .generate()
        .expect("bindings; libclang comes with `scripts/setup test`")
        .to_string()
}

/// As rustfmt leaves it, with this repository's settings.
fn formatted(source: &str) -> String {
    use std::io::Write;
    use std::process::{Command, Stdio};
    let mut rustfmt = Command::new("rustfmt")
        .args(["--edition", "2021", "--config-path"])
        .arg(file("rustfmt.toml"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("rustfmt");
    rustfmt.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    let output = rustfmt.wait_with_output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_structs_that_rust_sees_are_those_of_the_c_header() {
    let committed = std::fs::read_to_string(file("src/launch.rs")).unwrap();
    assert!(
        formatted(&generated()) == formatted(&committed),
        "src/launch.rs is not what bindgen makes of cuda/launch.h; run `make bindings`"
    );
}

/// What `make bindings` runs.
#[test]
#[ignore = "writes src/launch.rs"]
fn write() {
    std::fs::write(file("src/launch.rs"), formatted(&generated())).unwrap();
}
