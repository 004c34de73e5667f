//! Functions beyond the driver's, for tests in the same process. They take part in no counts, rules or logs.

use crate::entry;
use crate::errors::get_text;
use crate::kernel::{register, HostKernel};
use std::ffi::c_char;

/// Makes `name` a kernel whose one parameter has `bytes` bytes.
#[no_mangle]
pub unsafe extern "C" fn fakecuda_register_kernel(
    name: *const c_char,
    run: HostKernel,
    bytes: usize,
) -> u32 {
    // SAFETY: a terminated name.
    match unsafe { get_text(name) } {
        Ok(name) => {
            register(name, run, bytes);
            0
        }
        Err(code) => code,
    }
}

/// Names the rank that the calling thread is from now on.
#[no_mangle]
pub extern "C" fn fakecuda_set_rank(rank: i32) {
    entry::set_rank(rank);
}

/// Replaces the rules of `FAKECUDA_FAIL` and starts counting calls anew.
#[no_mangle]
pub unsafe extern "C" fn fakecuda_set_fail(rules: *const c_char) {
    // SAFETY: a terminated string.
    if let Ok(rules) = unsafe { get_text(rules) } {
        entry::set_fail(&rules);
    }
}

/// How often a call was made in this process.
#[no_mangle]
pub unsafe extern "C" fn fakecuda_calls(name: *const c_char) -> u64 {
    // SAFETY: a terminated string.
    unsafe { get_text(name) }.map(|name| entry::count(&name)).unwrap_or(0)
}

/// What is alive in this process, in this order: retained contexts, allocations, physical handles, reservations, mappings,
/// opened handles, host registrations, modules, streams, events, graphs, executables, user objects.
#[no_mangle]
pub unsafe extern "C" fn fakecuda_live(counts: *mut [u64; 13]) {
    let [physical, reserved, mapped] = crate::vmm::live();
    let [graphs, execs] = crate::graph::live();
    // No lock is held while another is taken.
    let allocations = entry::lock(&crate::memory::ALLOCATIONS).len();
    let live = [
        crate::context::retained(),
        allocations,
        physical,
        reserved,
        mapped,
        crate::ipc::opened(),
        crate::memory::registered(),
        crate::kernel::live_modules(),
        crate::stream::live(),
        crate::capture::live_events(),
        graphs,
        execs,
        crate::user_object::live(),
    ];
    // SAFETY: the caller's array.
    unsafe { counts.write(live.map(|n| n as u64)) };
}

/// The graph that the calling thread has last made launchable: up to `room` nodes, see `graph::Seen`; how many it has.
#[no_mangle]
pub unsafe extern "C" fn fakecuda_graph(nodes: *mut crate::graph::Seen, room: usize) -> usize {
    let seen = crate::graph::last();
    for (at, node) in seen.iter().take(room).enumerate() {
        // SAFETY: the caller's array of `room` elements.
        unsafe { nodes.add(at).write(*node) };
    }
    seen.len()
}
