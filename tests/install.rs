//! `make install` and `make uninstall`: a C program finds what was installed, by pkg-config and by hand, and nothing is
//! left afterwards.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

fn make(arguments: &[&str]) -> Output {
    // What these tests were built with, so that little is left to build: what is installed is the same, only slower.
    run(Command::new("make")
        .args(["--no-print-directory", "PROFILE=test"])
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR")))
}

fn files(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            found.extend(files(&path));
        } else {
            found.push(path.to_str().unwrap().to_owned());
        }
    }
    found.sort();
    found
}

fn fresh(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

#[test]
fn a_c_program_builds_against_what_was_installed() {
    let prefix = fresh("install-prefix");
    let assignment = format!("PREFIX={}", prefix.display());
    make(&["install", &assignment]);

    let lib = prefix.join("lib");
    let version = env!("CARGO_PKG_VERSION");
    let soname = format!("libpeerlane.so.{}", env!("CARGO_PKG_VERSION_MAJOR"));
    assert!(lib.join(format!("libpeerlane.so.{version}")).is_file());
    assert_eq!(std::fs::read_link(lib.join("libpeerlane.so")).unwrap(), Path::new(&soname));
    assert!(lib.join(&soname).exists());

    let tool = run(Command::new(prefix.join("bin/peerlane")).arg("--version"));
    assert_eq!(String::from_utf8_lossy(&tool.stdout), format!("peerlane {version}\n"));

    let flags = run(Command::new("pkg-config")
        .args(["--cflags", "--libs", "peerlane"])
        .env("PKG_CONFIG_PATH", lib.join("pkgconfig")));
    let flags = String::from_utf8(flags.stdout).unwrap();
    let by_hand = format!("-I{0}/include -L{0}/lib -lpeerlane", prefix.display());
    for flags in [flags.as_str(), by_hand.as_str()] {
        let program = prefix.join("all_reduce");
        run(Command::new("gcc")
            .args(["-Wall", "-Wextra", "-Werror", "-o"])
            .arg(&program)
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/c/all_reduce.c"))
            .args(flags.split_whitespace()));
        let output = run(Command::new(&program).env("LD_LIBRARY_PATH", &lib));
        assert!(!output.stdout.is_empty());
        std::fs::remove_file(&program).unwrap();
    }

    make(&["uninstall", &assignment]);
    assert_eq!(files(&prefix), Vec::<String>::new());
}

#[test]
fn packagers_stage_an_installation_elsewhere() {
    let stage = fresh("install-stage");
    make(&["install", "PREFIX=/usr", &format!("DESTDIR={}", stage.display())]);
    let description = std::fs::read_to_string(stage.join("usr/lib/pkgconfig/peerlane.pc")).unwrap();
    assert!(description.contains("prefix=/usr\n"), "{description}");
    assert!(
        description.contains(concat!("Version: ", env!("CARGO_PKG_VERSION"), "\n")),
        "{description}"
    );
    assert!(!description.contains(stage.to_str().unwrap()), "{description}");
    assert!(stage.join("usr/include/peerlane.h").is_file());
}
