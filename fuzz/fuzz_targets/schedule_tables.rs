//! The checker over tables of any bytes: a verdict, never a panic; and what it accepts can be printed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use peerlane::launch::pl_table;
use peerlane::schedule::{build, check, explain, Islands, Tree};
use peerlane::{Algorithm, Direction};

const N: usize = 4;
const BYTES: usize = std::mem::size_of::<pl_table>();

fuzz_target!(|data: &[u8]| {
    let [algorithm, pull, edits @ ..] = data else { return };
    let islands = Islands::parse(N, "0-1,2-3").unwrap();
    let algorithm = Algorithm::ALL[usize::from(*algorithm) % Algorithm::ALL.len()];
    let direction = Direction::ALL[usize::from(*pull) % Direction::ALL.len()];
    let mut tables = build(algorithm, &islands).unwrap().tables(direction).unwrap();
    // Bytes from nothing never get past the first rule: edits of good tables do. Four bytes are one edit.
    for edit in edits.chunks_exact(4) {
        let at = usize::from(u16::from_le_bytes([edit[1], edit[2]])) % BYTES;
        let ranks = if edit[0] & 0x80 != 0 {
            0..N
        } else {
            usize::from(edit[0]) % N..usize::from(edit[0]) % N + 1
        };
        for table in &mut tables[ranks] {
            // SAFETY: `at` lies inside the table, whose fields are all u8 and u16: any bytes make a valid one.
            unsafe { (table as *mut pl_table).cast::<u8>().add(at).write(edit[3]) };
        }
    }
    let _ = check(&tables, &Tree::new(&islands));
    let _ = explain(&tables);
});
