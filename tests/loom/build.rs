//! Copies the library's sources that share memory between threads, with loom's types in place of `std::sync`, and with
//! switches that take one safeguard out. A source that has changed where a switch sits fails the build.

use std::path::{Path, PathBuf};

/// A piece of a source and what stands in its place.
type Edit = (&'static str, &'static str);

struct Source {
    path: &'static str,
    /// What loom cannot run as it stands.
    adapted: &'static [Edit],
    /// A safeguard's name, the piece that holds it, and the same piece with the safeguard only where `KEPT` is true.
    safeguards: &'static [(&'static str, &'static str, &'static str)],
}

const SOURCES: &[Source] = &[
    Source { path: "error.rs", adapted: &[], safeguards: &[] },
    Source { path: "types.rs", adapted: &[], safeguards: &[] },
    Source {
        path: "device/cpu/stream.rs",
        // A panic in a job is a finding here, and must get out.
        adapted: &[(
            "let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));",
            "job();",
        )],
        safeguards: &[
            ("the worker heeds a claim", "if !state.running {", "if !state.running || !KEPT {"),
            (
                "a claim heeds what is queued",
                "state.running || !state.jobs.is_empty()",
                "state.running || KEPT && !state.jobs.is_empty()",
            ),
            ("a stream wakes who waits", "if state.waiting > 0 {", "if KEPT && state.waiting > 0 {"),
            (
                "a closing stream does what is queued",
                "state.jobs.pop_front()",
                "state.jobs.pop_front().filter(|_| KEPT || !state.closing)",
            ),
        ],
    },
    Source {
        path: "comm/order.rs",
        adapted: &[],
        safeguards: &[
            (
                "one lock for ticket and place",
                "stream.push(job(number))?;\n        turn.next += 1;",
                "if KEPT { stream.push(job(number))?; turn.next += 1; } \
                 else { turn.next += 1; drop(turn); stream.push(job(number))?; }",
            ),
            (
                "a call on an idle stream heeds its turn",
                "may_run_here && turn.current == number",
                "may_run_here && (turn.current == number || !KEPT)",
            ),
            ("a queued call waits", "while !ready(&turn) {", "while KEPT && !ready(&turn) {"),
            ("the order wakes who waits", "if turn.waiting > 0 {", "if KEPT && turn.waiting > 0 {"),
        ],
    },
    Source {
        path: "comm/departures.rs",
        adapted: &[],
        safeguards: &[
            (
                "announce, then look",
                "self.running.store(step, Ordering::Relaxed);\n",
                "if !KEPT { let late = |from: &AtomicU64| from.load(Ordering::Relaxed) <= step; \
                 let late = self.missing_from.iter().position(late); fence(Ordering::SeqCst); \
                 self.running.store(step, Ordering::Relaxed); return late.map_or(Ok(()), Err); } \
                 self.running.store(step, Ordering::Relaxed);\n",
            ),
            (
                "the caller's fence",
                "fence(Ordering::SeqCst);\n        let missing",
                "if KEPT { fence(Ordering::SeqCst); }\n        let missing",
            ),
            (
                "the watch's fence",
                "fence(Ordering::SeqCst);\n        self.running.load",
                "if KEPT { fence(Ordering::SeqCst); }\n        self.running.load",
            ),
        ],
    },
    Source {
        path: "comm/fault.rs",
        // Loom's atomics are no plain words that could be zeroed or pointed to.
        adapted: &[
            ("unsafe { std::mem::zeroed() }", "pl_state::new()"),
            ("AtomicU32::from_ptr(&raw mut (*state.get()).abort)", "&(*state.get()).abort"),
        ],
        safeguards: &[(
            "the word releases the error",
            "let (set, unset) = (Ordering::Release, Ordering::Relaxed);",
            "let (set, unset) = (if KEPT { Ordering::Release } else { Ordering::Relaxed }, Ordering::Relaxed);",
        )],
    },
    Source {
        path: "bootstrap/fork.rs",
        // A registry of the model's own in place of the process's, with one slot in each part.
        adapted: &[
            ("const SLOTS: usize = 512;", "const SLOTS: usize = 1;"),
            ("const fn new() -> Self", "fn new() -> Self"),
            ("[const { AtomicI32::new(FREE) }; SLOTS]", "std::array::from_fn(|_| AtomicI32::new(FREE))"),
            (
                "static REGISTRY: Segment = Segment::new();",
                "loom::lazy_static! { static ref REGISTRY: Segment = Segment::new(); }",
            ),
            ("= Some(&REGISTRY)", "= Some(&*REGISTRY)"),
            (
                "static GENERATION: AtomicU32 = AtomicU32::new(0);",
                "loom::lazy_static! { static ref GENERATION: AtomicU32 = AtomicU32::new(0); }",
            ),
        ],
        safeguards: &[
            (
                "a slot is taken by exchange",
                "&& slot.compare_exchange(FREE, fd, Ordering::AcqRel, Ordering::Relaxed).is_ok()",
                "&& (if KEPT { slot.compare_exchange(FREE, fd, Ordering::AcqRel, Ordering::Relaxed).is_ok() } \
                 else { slot.store(fd, Ordering::Relaxed); true })",
            ),
            (
                "a part is added by exchange",
                "let null = std::ptr::null_mut();",
                "let null = std::ptr::null_mut(); \
                 if !KEPT { segment.next.store(fresh, Ordering::Release); segment = segment.next().unwrap(); continue; }",
            ),
        ],
    },
];

fn main() {
    let sources = Path::new(&std::env::var("CARGO_MANIFEST_DIR").unwrap()).join("../../src");
    let out = PathBuf::from(std::env::var("OUT_DIR").unwrap());
    println!("cargo:rerun-if-changed=build.rs");
    for source in SOURCES {
        let path = sources.join(source.path);
        println!("cargo:rerun-if-changed={}", path.display());
        let text =
            std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let name = path.file_name().unwrap();
        std::fs::write(out.join(name), rewrite(source, &text)).unwrap();
    }
}

fn rewrite(source: &Source, text: &str) -> String {
    // Its own tests run on real threads.
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    // Neither an included file nor what a macro makes can be documented.
    let text = text.replace("//!", "//").replace("///", "//");
    let mut text = text.replace("std::sync::", "crate::sync::");
    let mut put = |from: &str, to: &str| {
        let found = text.matches(from).count();
        assert_eq!(
            found, 1,
            "src/{}: {found} times `{from}`; adapt tests/loom/build.rs",
            source.path
        );
        text = text.replace(from, to);
    };
    for (from, to) in source.adapted {
        put(from, to);
    }
    for (name, from, to) in source.safeguards {
        put(from, &to.replace("KEPT", &format!("crate::kept({name:?})")));
    }
    text
}
