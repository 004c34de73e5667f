//! `src/types.rs` and `src/exports.rs` come from NVIDIA's headers, by bindgen. The headers are fetched by `make bindings`, not
//! by the tests, which compare the result with NCCL's list of exports.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn exports() -> Vec<String> {
    let text = std::fs::read_to_string(file("tests/nccl-2.32.3-exports.txt")).unwrap();
    text.lines().map(str::to_owned).collect()
}

/// The names of `src/exports.rs`, as they stand there.
fn generated_names() -> Vec<String> {
    let source = std::fs::read_to_string(file("src/exports.rs")).unwrap();
    let names = source.lines().filter_map(|line| line.trim().strip_prefix("fn "));
    names
        .flat_map(|rest| {
            let (names, _) = rest.split_once('(').unwrap();
            names.split(" / ").map(|name| name.trim().to_owned()).collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn the_generated_list_is_what_nccl_2_32_3_exports() {
    let mut names = generated_names();
    names.sort();
    let expected = exports();
    assert_eq!(expected.len(), 193);
    assert_eq!(names, expected);
}

/// The names that the wheels of 2.27.3, 2.28.9, 2.29.7, 2.30.7 and 2.31.2 export, each with the first that does: a program built
/// with any of them finds all of its functions.
#[test]
fn what_older_versions_export_is_in_the_list() {
    let names = generated_names();
    let older = std::fs::read_to_string(file("tests/nccl-older-exports.txt")).unwrap();
    let since = |version| older.lines().filter(|line| line.ends_with(version)).count();
    assert_eq!(["2.27.3", "2.28.9", "2.29.7", "2.30.7", "2.31.2"].map(since), [74, 31, 32, 28, 26]);
    for line in older.lines() {
        let (name, version) = line.split_once(' ').unwrap();
        assert!(names.iter().any(|n| n == name), "{name} of NCCL {version}");
    }
}

#[test]
fn what_torch_needs_is_in_the_list() {
    let names = generated_names();
    let needed = std::fs::read_to_string(file("tests/torch-2.15-needs.txt")).unwrap();
    assert_eq!(needed.lines().count(), 51);
    for name in needed.lines() {
        assert!(names.iter().any(|n| n == name), "{name}");
    }
}

/// Calls that have a function of their own in `src/intercept.rs`: creation and its end, groups, all-reduce, and what is
/// served without a real NCCL.
const INTERCEPTED: &[&str] = &[
    "ncclAllGather",
    "ncclAllReduce",
    "ncclAllReduceConfig",
    "ncclBcast",
    "ncclBroadcast",
    "ncclCommAbort",
    "ncclCommCount",
    "ncclCommCuDevice",
    "ncclCommDestroy",
    "ncclCommFinalize",
    "ncclCommGetAsyncError",
    "ncclCommGrow",
    "ncclCommInitAll",
    "ncclCommInitRank",
    "ncclCommInitRankConfig",
    "ncclCommInitRankScalable",
    "ncclCommRevoke",
    "ncclCommShrink",
    "ncclCommSplit",
    "ncclCommUserRank",
    "ncclGetErrorString",
    "ncclGetLastError",
    "ncclGetUniqueId",
    "ncclGetVersion",
    "ncclGroupEnd",
    "ncclGroupSimulateEnd",
    "ncclGroupStart",
    "ncclReduceScatter",
];

const BLOCK: &str = "unsafe extern \"C\" {";

fn generate(include: &Path) -> (String, String) {
    let bindings = bindgen::builder()
        .header(file("bindings/nccl_all.h").to_str().unwrap())
        .clang_args(["-isystem", file("bindings/stub").to_str().unwrap()])
        .clang_args(["-isystem", include.to_str().unwrap()])
        .allowlist_function("p?nccl.*")
        .allowlist_var("NCCL_(SPLIT_NOCOLOR|SHRINK_ABORT|UNIQUE_ID_BYTES|VERSION_CODE|API_MAGIC)")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .generate_comments(false)
        .layout_tests(true)
        .formatter(bindgen::Formatter::None)
        .generate()
        .expect("bindings; libclang comes with `scripts/setup test`")
        .to_string();
    let exported = exports();
    let mut functions = BTreeMap::new();
    let mut types = String::from(
        "//! Generated from `nccl.h` 2.32.3 by bindgen (`make bindings`). Do not edit.\n\
         #![allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals, dead_code)]\n\n",
    );
    // Declarations of functions hold no braces, so a block ends at the first.
    let mut rest = bindings.as_str();
    while let Some(at) = rest.find(BLOCK) {
        types.push_str(&rest[..at]);
        let (block, after) = rest[at + BLOCK.len()..].split_once('}').unwrap();
        rest = after;
        for declaration in block.split(';') {
            let Some((_, declaration)) = declaration.split_once("pub fn ") else { continue };
            let (name, signature) = declaration.split_once('(').unwrap();
            let (inputs, output) = signature.rsplit_once(')').unwrap();
            if name.starts_with("nccl") && exported.iter().any(|e| e == name.trim()) {
                let output = output.trim().to_owned();
                functions.insert(name.trim().to_owned(), (inputs.to_owned(), output));
            }
        }
    }
    types.push_str(rest);
    let mut source = String::from(
        "//! Every function that NCCL 2.32.3 exports, with its type. Generated from its headers (`make bindings`). Do not edit.\n",
    );
    for (list, what, intercepted) in [
        (
            "for_each_intercepted",
            "Hands the functions that `intercept` defines to the macro `$then`.",
            true,
        ),
        (
            "for_each_forwarded",
            "Hands the functions that only go to NCCL to the macro `$then`.",
            false,
        ),
    ] {
        source.push_str(&format!(
            "\n/// {what}\n#[macro_export]\nmacro_rules! {list} {{\n    ($then:ident) => {{\n        $then! {{\n"
        ));
        for (name, (inputs, output)) in &functions {
            if INTERCEPTED.contains(&name.as_str()) != intercepted {
                continue;
            }
            let twin = format!("p{name}");
            let names = match exported.contains(&twin) {
                true => format!("{name} / {twin}"),
                false => name.clone(),
            };
            let compact = |text: &str| {
                let text = text.replace(":: std :: os :: raw :: ", "");
                let text = text.replace("* const", "*const").replace("* mut", "*mut");
                text.replace(" : ", ": ").replace(" ,", ",")
            };
            let output = if output.is_empty() { "-> ()".to_owned() } else { output.clone() };
            source.push_str(&format!(
                "            fn {names}({}) {};\n",
                compact(inputs),
                compact(&output)
            ));
        }
        source.push_str("        }\n    };\n}\n");
    }
    (types, source)
}

/// As rustfmt leaves it, with this repository's settings.
fn formatted(source: &str) -> String {
    use std::io::Write;
    let mut rustfmt = Command::new("rustfmt")
        .args(["--edition", "2021", "--config-path"])
        .arg(file("../../rustfmt.toml"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("rustfmt");
    rustfmt.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    let output = rustfmt.wait_with_output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

/// What `make bindings` runs, once it has fetched the headers.
#[test]
#[ignore = "writes src/types.rs and src/exports.rs; needs NVIDIA's headers"]
fn write() {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(file("../../target"), PathBuf::from);
    let include = target.join("nccl/nvidia/nccl/include");
    assert!(
        include.join("nccl.h").exists(),
        "{} holds no nccl.h; run `make bindings`",
        include.display()
    );
    let (types, exports) = generate(&include);
    std::fs::write(file("src/types.rs"), formatted(&types)).unwrap();
    std::fs::write(file("src/exports.rs"), formatted(&exports)).unwrap();
}
