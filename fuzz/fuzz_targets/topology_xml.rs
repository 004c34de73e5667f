//! hwloc's XML: refused, or what follows from it is whole.
#![no_main]

#[path = "../topology.rs"]
mod topology;

use libfuzzer_sys::fuzz_target;
use peerlane::topology::from_hwloc_xml;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    topology::check(from_hwloc_xml("fuzz", text));
});
