//! The README says what is so: its program, its variables, its folders and the version are compared with the sources.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::path::Path;

fn text(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The first block of `language` in Markdown.
fn block(markdown: &str, language: &str) -> String {
    let start = format!("```{language}\n");
    let from = markdown.find(&start).expect("a block") + start.len();
    let to = markdown[from..].find("```").expect("its end") + from;
    markdown[from..to].to_owned()
}

#[test]
fn the_program_in_the_readme_is_the_one_that_is_built_and_run() {
    let program = text("examples/c/all_reduce.c");
    assert_eq!(block(&text("README.md"), "c"), program);
    assert!(program.lines().count() <= 40, "{} lines", program.lines().count());
}

#[test]
fn the_readme_lists_exactly_the_variables_that_are_read() {
    // Documented in the struct, and looked up.
    let source = text("src/env.rs");
    let source = source.split("#[cfg(test)]").next().unwrap();
    let quoted = |quote: char| -> BTreeSet<String> {
        source
            .split(quote)
            .filter(|piece| piece.starts_with("PEERLANE_"))
            .filter(|piece| piece.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
            .map(str::to_owned)
            .collect()
    };
    let read = quoted('"');
    assert!(read.contains("PEERLANE_LOG"), "{read:?}");
    let listed: BTreeSet<String> = text("README.md")
        .lines()
        .filter_map(|line| line.strip_prefix("| `PEERLANE_"))
        .map(|rest| format!("PEERLANE_{}", rest.split('`').next().unwrap()))
        .collect();
    assert_eq!(listed, read);
    let documented: BTreeSet<String> = source
        .lines()
        .filter_map(|line| line.trim().strip_prefix("/// `PEERLANE_"))
        .map(|rest| format!("PEERLANE_{}", rest.split('`').next().unwrap()))
        .collect();
    assert_eq!(documented, read);
}

#[test]
fn the_folders_in_the_readme_exist() {
    let readme = text("README.md");
    let named: Vec<&str> = readme
        .lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .filter_map(|rest| rest.split('`').next())
        .filter(|name| name.ends_with('/'))
        .collect();
    assert!(named.len() >= 5, "{named:?}");
    for name in named {
        assert!(Path::new(env!("CARGO_MANIFEST_DIR")).join(name).is_dir(), "{name}");
    }
}

#[test]
fn the_changelog_knows_this_version() {
    let heading = format!("## {}", env!("CARGO_PKG_VERSION"));
    let changelog = text("CHANGELOG.md");
    assert!(
        changelog.contains("## Unreleased") || changelog.contains(&heading),
        "no '{heading}' and nothing unreleased"
    );
    let header = text("include/peerlane.h");
    for (name, value) in [
        ("MAJOR", env!("CARGO_PKG_VERSION_MAJOR")),
        ("MINOR", env!("CARGO_PKG_VERSION_MINOR")),
        ("PATCH", env!("CARGO_PKG_VERSION_PATCH")),
    ] {
        assert!(header.contains(&format!("#define PEERLANE_VERSION_{name} {value}\n")), "{name}");
    }
}
