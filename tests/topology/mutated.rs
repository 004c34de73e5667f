//! Files that were damaged at random: an error or a description, never a panic, and never for long. A seed that fails is
//! printed. `PEERLANE_MUTATE_SECONDS=600` runs that long for each reader.

use crate::fixture;
use peerlane::topology::{from_bytes, from_sysfs, islands, Entry, Files, Topology};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

const WORDS: [&str; 24] = [
    "-1",
    "0",
    "18446744073709551616",
    "0x",
    "0xffffffffffffffff",
    "\"",
    "<",
    ">",
    "/",
    "../",
    "&a;",
    "\t",
    "\n",
    "GPU0",
    "SYS",
    "PIX",
    "NV18",
    "X",
    "0000:ff:1f.7",
    "pci0000:00",
    "<object type=\"Bridge\">",
    "</object>",
    "\u{fffd}",
    "nan",
];

/// A few random edits, or one: digits and bytes changed, parts removed, doubled, moved, words put in.
fn damage(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let edits = if random.below(2) == 0 { 1 } else { 1 + random.below(6) };
    for _ in 0..edits {
        let (a, b) = (random.below(bytes.len() + 1), random.below(bytes.len() + 1));
        let (a, b) = (a.min(b), a.max(b).min(a.min(b) + 400));
        match random.below(10) {
            // What still is a file of its kind gets farther than what is not.
            5.. => {
                let digit = (a..bytes.len()).find(|at| bytes[*at].is_ascii_digit());
                if let Some(at) = digit {
                    bytes[at] = b"0123456789abf-."[random.below(15)];
                }
            }
            0 if a < bytes.len() => bytes[a] = random.next() as u8,
            1 => drop(bytes.drain(a..b)),
            2 => {
                let part = bytes[a..b].to_vec();
                bytes.splice(a..a, part);
            }
            3 => bytes.truncate(a.max(bytes.len() / 2)),
            _ => {
                let word = WORDS[random.below(WORDS.len())];
                bytes.splice(a..b.min(a + 8), word.bytes());
            }
        }
    }
    bytes
}

/// What follows from a description must not fail in other ways than errors either.
fn use_it(t: &Topology) {
    let _ = t.matrix();
    let ranks: Vec<usize> = (0..t.gpus.len().min(16)).collect();
    if !ranks.is_empty() {
        let found = islands(t, &ranks).unwrap();
        assert_eq!(found.islands.ranks(), ranks.len());
        let model = peerlane::plan::Model::new(t, &ranks, &found.islands, &peerlane::plan::NOMINAL)
            .unwrap();
        assert!(model
            .choose(57_344, peerlane::DType::BF16, |_| true)
            .is_some_and(|l| l.us(57_344).is_finite()));
    }
}

#[allow(clippy::print_stdout)]
/// Damages for as long as asked; how many were refused and how many were read.
fn run(reader: &str, seed: u64, mut one: impl FnMut(&mut Random) -> bool) {
    let seconds = std::env::var("PEERLANE_MUTATE_SECONDS").ok().and_then(|s| s.parse().ok());
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(0));
    let (mut read, mut refused, mut at) = (0u64, 0u64, 0);
    while at < 600 || Instant::now() < end {
        let seed = seed.wrapping_add(at).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let outcome =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| one(&mut Random(seed))));
        match outcome {
            Ok(true) => read += 1,
            Ok(false) => refused += 1,
            Err(_) => panic!("{reader}: damage with seed {seed:#x} panics"),
        }
        at += 1;
    }
    println!("{reader}: {read} read, {refused} refused");
    assert!(
        read > 0 && refused > 0,
        "{reader}: {read} read, {refused} refused; the damage is too little or too much"
    );
}

fn damaged_file(reader: &str, seed: u64, names: &[&str]) {
    let files: Vec<Vec<u8>> =
        names.iter().map(|name| std::fs::read(fixture(name)).unwrap()).collect();
    run(reader, seed, |random| {
        let bytes = damage(&files[random.below(files.len())], random);
        from_bytes(reader, &bytes).map(|t| use_it(&t)).is_ok()
    });
}

#[test]
fn damaged_xml_is_refused_or_read() {
    damaged_file(
        "xml",
        1,
        &["2-socket-8-gpu-4-switches.xml", "hwloc-nvidiaDGX2.xml", "1-socket-4-gpu-1-switch.xml"],
    );
}

#[test]
fn damaged_text_of_the_driver_is_refused_or_read() {
    damaged_file(
        "matrix",
        2,
        &["2-socket-8-gpu-4-switches.topo.txt", "1-socket-16-gpu-4-switches.topo.txt"],
    );
}

#[test]
fn damaged_sysfs_is_refused_or_read() {
    let whole = crate::fake_box::FakeBox::healthy("mutated");
    let mut entries = BTreeMap::new();
    collect(&whole.root, &whole.root, &mut entries);
    assert!(entries.len() > 60, "{}", entries.len());
    run("sysfs", 3, |random| {
        let mut damaged = entries.clone();
        for _ in 0..1 + random.below(4) {
            let at = random.below(damaged.len());
            let (path, entry) =
                damaged.iter().nth(at).map(|(p, e)| (p.clone(), e.clone())).unwrap();
            let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
            match (random.below(4), entry) {
                (0, _) => drop(damaged.remove(&path)),
                (1, entry) => {
                    damaged.remove(&path);
                    damaged.insert(text(damage(path.as_bytes(), random)), entry);
                }
                (_, Entry::File(bytes)) => {
                    drop(damaged.insert(path, Entry::File(damage(&bytes, random))))
                }
                (_, Entry::Link(target)) => {
                    drop(damaged.insert(path, Entry::Link(text(damage(target.as_bytes(), random)))))
                }
            }
        }
        from_sysfs(&Files::memory("damaged", damaged)).map(|t| use_it(&t)).is_ok()
    });
}

#[test]
fn damaged_captures_are_refused_or_read() {
    let whole = crate::fake_box::FakeBox::healthy("mutated-capture");
    let tar = whole.root.with_extension("tar");
    let path = tar.to_str().unwrap();
    crate::peerlane(&["doctor", "--root", whole.path(), "--capture", path]);
    let bytes = std::fs::read(&tar).unwrap();
    // A process each: the archive is read by the tool.
    let mut outcomes = [0; 3];
    for seed in 1..=40u64 {
        let random = &mut Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut damaged = bytes.clone();
        match seed % 2 {
            0 => damaged = damage(&bytes, random),
            // In place; more would not get past the archive's checksums.
            _ => (0..2).for_each(|_| damaged[random.below(bytes.len())] = random.next() as u8),
        }
        std::fs::write(&tar, damaged).unwrap();
        let output = crate::peerlane(&["doctor", "--json", "--root", path]);
        let status = output.status.code().filter(|code| (0..3).contains(code));
        let status = status.unwrap_or_else(|| panic!("seed {seed}: {output:?}")) as usize;
        outcomes[status] += 1;
        let read = serde_json::from_slice::<serde_json::Value>(&output.stdout).is_ok();
        assert!(read || (status == 2 && !output.stderr.is_empty()), "seed {seed}: {output:?}");
    }
    assert!(outcomes[0] > 0 && outcomes[2] > 0, "{outcomes:?}: too little or too much damage");
}

/// The tree below `root`, as entries in memory.
fn collect(root: &Path, at: &Path, entries: &mut BTreeMap<String, Entry>) {
    for entry in std::fs::read_dir(at).unwrap() {
        let path = entry.unwrap().path();
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        let facts = std::fs::symlink_metadata(&path).unwrap();
        if facts.is_symlink() {
            entries.insert(
                name,
                Entry::Link(std::fs::read_link(&path).unwrap().to_str().unwrap().to_owned()),
            );
        } else if facts.is_dir() {
            collect(root, &path, entries);
        } else {
            entries.insert(name, Entry::File(std::fs::read(&path).unwrap()));
        }
    }
}
