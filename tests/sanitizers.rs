//! ThreadSanitizer over `flagged`, whose data is plain memory: the flags must order every access to it. Each schedule,
//! push and pull, is free of races; with the order spoilt in one of four ways, races are seen.
//!
//! AddressSanitizer and UndefinedBehaviorSanitizer watch every protocol, over odd counts in buffers of exactly the call's
//! size that begin anywhere. In `ll` and `sentinel` every access is atomic, so ThreadSanitizer sees nothing there; that is
//! the explorer's part.

#![allow(clippy::unwrap_used)]

mod common;

use common::partitions::islands;
use peerlane::launch::pl_table;
use peerlane::schedule::{build, exists};
use peerlane::{Algorithm, DType, Direction, Protocol};
use std::path::{Path, PathBuf};
use std::process::Command;

/// ThreadSanitizer's exit code for a report.
const RACE: i32 = 66;

/// Compiles the ranks; `spoil` are flags for the kernel alone.
fn compile(name: &str, sanitizers: &str, spoil: &[&str]) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sanitizers");
    std::fs::create_dir_all(&dir).unwrap();
    let cxx = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let run = |args: &[&str]| {
        let out = Command::new(&cxx)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .args(["-std=c++17", "-O1", "-g", "-Icuda", "-Itests/sanitizers"])
            .arg(format!("-fsanitize={sanitizers}"))
            .args(args)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(
            out.status.success(),
            "{cxx} -fsanitize={sanitizers} (g++ brings its libraries): {text}"
        );
    };
    let object = dir.join(format!("{name}.o"));
    let program = dir.join(name);
    // ThreadSanitizer does not model the system fence; `flagged` does not use it.
    let mut args =
        vec!["-Wno-tsan", "-c", "tests/sanitizers/kernel.cpp", "-o", object.to_str().unwrap()];
    args.extend(spoil);
    run(&args);
    run(&[
        "tests/sanitizers/ranks.cpp",
        object.to_str().unwrap(),
        "-o",
        program.to_str().unwrap(),
        "-pthread",
    ]);
    program
}

/// What the ranks call; the fields of `Case` in `tests/sanitizers/ranks.cpp`.
#[derive(Clone, Copy, Debug)]
struct Calls {
    steps: u32,
    protocol: Protocol,
    one_half: bool,
    dtype: DType,
    /// Bytes between an aligned address and a buffer.
    shift: u32,
    /// Bytes that a buffer is short of what the call says.
    missing: u32,
}

const FLAGGED: Calls = Calls {
    steps: 12,
    protocol: Protocol::Flagged,
    one_half: false,
    dtype: DType::I32,
    shift: 0,
    missing: 0,
};

/// Every schedule over these ranks, changed by `change`.
fn cases(calls: Calls, direction: Direction, change: impl Fn(&mut pl_table)) -> Vec<u8> {
    let mut bytes = Vec::new();
    for sizes in [&[2][..], &[2, 1], &[2, 2], &[1, 2, 2]] {
        let n = sizes.iter().sum();
        let partition = islands(sizes, &(0..n).collect::<Vec<_>>());
        for &algorithm in Algorithm::ALL.iter().filter(|&&a| exists(a, &partition)) {
            let Calls { steps, protocol, one_half, dtype, shift, missing } = calls;
            let one_half = one_half.into();
            for word in [n as u32, steps, protocol as u32, one_half, dtype as u32, shift, missing] {
                bytes.extend(word.to_ne_bytes());
            }
            for mut table in build(algorithm, &partition).unwrap().tables(direction).unwrap() {
                change(&mut table);
                // SAFETY: a table is plain integers without padding that anybody reads.
                let raw = unsafe {
                    std::slice::from_raw_parts(
                        (&raw const table).cast::<u8>(),
                        size_of::<pl_table>(),
                    )
                };
                bytes.extend(raw);
            }
        }
    }
    bytes
}

/// Runs the cases; exit code and report.
fn run(
    program: &Path,
    direction: Direction,
    one_half: bool,
    change: impl Fn(&mut pl_table),
) -> (i32, String) {
    let file = program.with_extension(format!("{direction}-{one_half}"));
    std::fs::write(&file, cases(Calls { one_half, ..FLAGGED }, direction, change)).unwrap();
    let out = Command::new(program)
        .arg(&file)
        .env("TSAN_OPTIONS", format!("exitcode={RACE} halt_on_error=1 report_signal_unsafe=0"))
        .output()
        .unwrap();
    (out.status.code().unwrap_or(-1), String::from_utf8_lossy(&out.stderr).into_owned())
}

const BOTH: [Direction; 2] = [Direction::Push, Direction::Pull];

fn races(program: &Path, one_half: bool, change: impl Fn(&mut pl_table) + Copy) {
    for direction in BOTH {
        let (code, report) = run(program, direction, one_half, change);
        assert_eq!(code, RACE, "{direction}: {report}");
        assert!(report.contains("WARNING: ThreadSanitizer: data race"), "{direction}: {report}");
    }
}

#[test]
fn flags_order_every_access_to_data() {
    let program = compile("correct", "thread", &[]);
    for direction in BOTH {
        let (code, report) = run(&program, direction, false, |_| ());
        assert_eq!((code, report.as_str()), (0, ""), "{direction}");
    }
    // Two controls in data: one half instead of two, so that a step overwrites what the one before it may still read ...
    races(&program, true, |_| ());
    // ... and a table that waits for one arrival and reads another's data.
    races(&program, false, |t| {
        for phase in 0..usize::from(t.phases) {
            let p = t.phase[phase];
            for fold in &t.fold[usize::from(p.fold0)..][..usize::from(p.folds)] {
                let items = &mut t.item[usize::from(fold.item0)..][..usize::from(fold.items)];
                for item in items.iter_mut().filter(|i| i.from < 16) {
                    item.data = (item.data + 1) % t.slots;
                }
            }
        }
    });
}

#[test]
fn a_flag_that_is_no_release_is_a_race() {
    races(
        &compile("no-release", "thread", &["-U__ATOMIC_RELEASE", "-D__ATOMIC_RELEASE=0"]),
        false,
        |_| (),
    );
}

#[test]
fn a_flag_that_is_not_acquired_is_a_race() {
    races(
        &compile("no-acquire", "thread", &["-U__ATOMIC_ACQUIRE", "-D__ATOMIC_ACQUIRE=0"]),
        false,
        |_| (),
    );
}

#[test]
fn no_access_is_out_of_bounds_or_undefined() {
    let program = compile("bounds", "address,undefined", &["-fno-sanitize-recover=all"]);
    let run = |calls, direction, change: &dyn Fn(&mut pl_table)| {
        let file = program.with_extension("tables");
        std::fs::write(&file, cases(calls, direction, change)).unwrap();
        let out = Command::new(&program).arg(&file).output().unwrap();
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let overflows = |calls: Calls, direction, change: &dyn Fn(&mut pl_table)| {
        let (code, report) = run(calls, direction, change);
        assert_ne!(code, Some(0), "{calls:?} {direction}");
        // The kernel's own access, not that of the program around it.
        for part in ["heap-buffer-overflow", "pl_sanitized_all_reduce"] {
            assert!(report.contains(part), "{calls:?} {direction}: {report}");
        }
    };
    // A byte, half a word and a word: odd counts end inside a word, inside a pack and between packs.
    let short = [DType::U8, DType::BF16, DType::I32];
    for (protocol, direction, dtypes) in [
        (Protocol::Ll, Direction::Push, &short[..]),
        (Protocol::Sentinel, Direction::Push, &[DType::BF16, DType::F32]),
        (Protocol::Flagged, Direction::Push, &short),
        (Protocol::Flagged, Direction::Pull, &short),
    ] {
        for &dtype in dtypes {
            let calls = Calls { steps: 4, protocol, dtype, ..FLAGGED };
            for shift in [0, 3] {
                let calls = Calls { shift, ..calls };
                let outcome = run(calls, direction, &|_| ());
                assert_eq!(outcome, (Some(0), String::new()), "{calls:?} {direction}");
            }
            // The control: buffers that are one byte short.
            overflows(Calls { missing: 1, ..calls }, direction, &|_| ());
        }
    }
    // Another: pieces that reach beyond the message.
    overflows(FLAGGED, Direction::Push, &|t| t.cut_num[usize::from(t.pieces)] += 1);
}
