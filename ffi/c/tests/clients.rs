//! Real C programs against the public header: plain, with AddressSanitizer, under valgrind.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::Bench;
use object::{Object, ObjectSymbol};
use std::io::Write;
use std::process::Command;
use std::time::Duration;

/// Includes a slow machine that runs other things too.
const LIMIT: Duration = Duration::from_secs(120);

/// Built as users build it.
fn plain(source: &str, arguments: &[&str]) {
    let bench = Bench::new();
    let program = bench.compile(source, &[]);
    bench.run(Command::new(program).args(arguments), LIMIT);
}

/// With AddressSanitizer in the client: what the library reads or writes beyond a client's buffer is the client's heap,
/// and every libc copy is checked.
fn with_address_sanitizer(source: &str, arguments: &[&str]) {
    let bench = Bench::new();
    let program = bench.compile(source, &["-fsanitize=address"]);
    let binary = std::fs::read(&program).unwrap();
    let file = object::File::parse(&*binary).unwrap();
    let instrumented = file
        .symbols()
        .chain(file.dynamic_symbols())
        .any(|s| s.name().is_ok_and(|name| name.starts_with("__asan_init")));
    assert!(instrumented, "the compiler accepted -fsanitize=address and left it out");
    let mut command = Command::new(program);
    // Communicators that a test leaves behind on purpose are still reachable; a real leak is not.
    bench
        .run(command.args(arguments).env("ASAN_OPTIONS", "detect_leaks=1:abort_on_error=0"), LIMIT);
}

/// Under valgrind, which sees the library's own accesses too. Forked children are followed.
fn under_valgrind(source: &str, arguments: &[&str]) {
    if Command::new("valgrind").arg("--version").output().is_err() {
        // Straight to the terminal: the test harness would keep it to itself.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: {source} under valgrind, because valgrind is not installed (apt-get install valgrind)"
        );
        return;
    }
    let bench = Bench::new();
    let program = bench.compile(source, &[]);
    let mut command = Command::new("valgrind");
    command
        .args(["--quiet", "--error-exitcode=99", "--leak-check=full", "--fair-sched=yes"])
        .args(["--errors-for-leak-kinds=definite", "--show-leak-kinds=definite"])
        .arg(program)
        .args(arguments);
    bench.run(&mut command, 4 * LIMIT);
}

macro_rules! clients {
    ($($name:ident: $source:literal $(, valgrind $argument:literal)?;)+) => {$(
        mod $name {
            #[test]
            fn plain() {
                super::plain($source, &[]);
            }
            #[test]
            fn with_address_sanitizer() {
                super::with_address_sanitizer($source, &[]);
            }
            #[test]
            fn under_valgrind() {
                super::under_valgrind($source, &[$($argument)?]);
            }
        }
    )+};
}

clients! {
    four_processes_get_exact_results: "tests/c/processes.c", valgrind "2000";
    threads_and_groups_get_exact_results: "tests/c/threads.c";
    misuse_is_refused_with_a_message: "tests/c/misuse.c";
    communicators_end_in_any_order_and_on_any_thread: "tests/c/lifecycle.c";
    fused_rows_get_the_bits_of_unfused_ones: "tests/c/fused.c";
    other_collectives_get_exact_results: "tests/c/collectives.c", valgrind "2000";
    what_others_do_wrong_is_named: "tests/c/faults.c", valgrind "20";
    the_example_adds_up: "examples/c/all_reduce.c";
}

/// The negative controls: without them a sanitizer that sees nothing would look like a client without faults.
#[test]
fn the_sanitizers_see_a_result_written_past_a_buffer() {
    let bench = Bench::new();
    let fault = bench.path().join("fault.c");
    std::fs::write(
        &fault,
        "#include <peerlane.h>\n#include <stdio.h>\n#include <stdlib.h>\n\
         int main(void) {\n  peerlane_comm_t comm;\n  int* rank = malloc(2);\n\
         \x20 if (peerlane_comm_create_local(&comm, 1, NULL)) return 3;\n\
         \x20 if (peerlane_comm_rank(comm, rank)) return 4;\n  printf(\"%d\\n\", *rank);\n  free(rank);\n\
         \x20 return peerlane_comm_destroy(comm);\n}\n",
    )
    .unwrap();
    let source = fault.to_str().unwrap();
    let caught = |run: &dyn Fn()| {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        result.map_err(|e| e.downcast_ref::<String>().cloned().unwrap_or_default())
    };
    let error = caught(&|| with_address_sanitizer(source, &[])).unwrap_err();
    assert!(error.contains("heap-buffer-overflow"), "{error}");
    if Command::new("valgrind").arg("--version").output().is_ok() {
        let error = caught(&|| under_valgrind(source, &[])).unwrap_err();
        assert!(error.contains("Invalid write"), "{error}");
    }
}
