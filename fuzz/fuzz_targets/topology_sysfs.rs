//! A copy of `/sys`: lines `path = text` (`|` stands for a new line) and `path -> target`, as in `seeds/topology_sysfs`.
//! Refused, or what follows from it is whole.
#![no_main]

#[path = "../topology.rs"]
mod topology;

use libfuzzer_sys::fuzz_target;
use peerlane::topology::{from_sysfs, Entry, Files};

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let entry = |line: &str| {
        if let Some((path, target)) = line.split_once(" -> ") {
            return Some((path.to_owned(), Entry::Link(target.to_owned())));
        }
        line.split_once(" = ").map(|(path, held)| {
            (path.to_owned(), Entry::File(held.replace('|', "\n").into_bytes()))
        })
    };
    let files = Files::memory("fuzz", text.lines().filter_map(entry).collect());
    topology::check(from_sysfs(&files));
});
