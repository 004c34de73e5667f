//! The text of `nvidia-smi topo -m`: refused, or what follows from it is whole.
#![no_main]

#[path = "../topology.rs"]
mod topology;

use libfuzzer_sys::fuzz_target;
use peerlane::topology::from_matrix;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    topology::check(from_matrix("fuzz", text));
});
