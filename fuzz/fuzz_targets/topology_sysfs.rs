//! A copy of `/sys`: lines `path = text` and `path -> target`. Refused, or what follows from it is whole.
#![no_main]

use libfuzzer_sys::fuzz_target;
use peerlane::topology::{from_sysfs, islands, Entry, Files};

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let entry = |line: &str| {
        if let Some((path, target)) = line.split_once(" -> ") {
            return Some((path.to_owned(), Entry::Link(target.to_owned())));
        }
        line.split_once(" = ").map(|(path, held)| (path.to_owned(), Entry::File(held.replace('|', "\n").into_bytes())))
    };
    let files = Files::memory("fuzz", text.lines().filter_map(entry).collect());
    let Ok(topology) = from_sysfs(&files) else { return };
    let _ = topology.matrix();
    let ranks: Vec<usize> = (0..topology.gpus.len().min(16)).collect();
    match islands(&topology, &ranks) {
        Ok(found) => assert_eq!(found.islands.ranks(), ranks.len()),
        Err(_) => assert!(ranks.is_empty()),
    }
});
