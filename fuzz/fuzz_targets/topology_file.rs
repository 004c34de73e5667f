//! A description of a box, hwloc's XML or the text of `nvidia-smi topo -m`: refused, or what follows from it is whole.
#![no_main]

use libfuzzer_sys::fuzz_target;
use peerlane::topology::{from_bytes, islands};

fuzz_target!(|data: &[u8]| {
    let Ok(topology) = from_bytes("fuzz", data) else { return };
    let _ = topology.matrix();
    let ranks: Vec<usize> = (0..topology.gpus.len().min(16)).collect();
    match islands(&topology, &ranks) {
        Ok(found) => assert_eq!(found.islands.ranks(), ranks.len()),
        Err(_) => assert!(ranks.is_empty()),
    }
});
