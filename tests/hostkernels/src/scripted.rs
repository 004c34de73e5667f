//! A probe that measures nothing and answers what a test has written down: what a box would show, at any load of this one.
//!
//! `HOSTKERNELS_FABRIC` holds items apart by commas: `store=GB`, `load=GB` and `flag=NS` for all pairs, `store:A-B=GB` for rank
//! A into the memory of rank B and likewise the others, `together=SHARE` for what is left of a rate when all ranks move bytes
//! at once.

use peerlane::launch::{pl_probe, PL_PROBE_BLOCKS, PL_PROBE_LATENCY, PL_PROBE_STORE};

/// Nanoseconds of a round without data; any number will do.
const EMPTY: u64 = 1000;
/// Round trips before the clock is read.
const WARM: u32 = 8;

/// The value for `rank` and `memory`: the pair's own, else that of all.
fn value(kind: &str, rank: u32, memory: u32) -> f64 {
    let script = std::env::var("HOSTKERNELS_FABRIC").unwrap_or_default();
    let items = || script.split(',').filter_map(|item| item.split_once('='));
    let own = format!("{kind}:{rank}-{memory}");
    let found = items().find(|(name, _)| *name == own).or(items().find(|(name, _)| *name == kind));
    match found.and_then(|(_, value)| value.parse().ok()) {
        Some(value) => value,
        None => panic!("HOSTKERNELS_FABRIC={script} does not say {own}"),
    }
}

/// In the place of the probe.
#[no_mangle]
pub unsafe extern "C" fn hostkernels_scripted_probe(probe: *const pl_probe) {
    // SAFETY: the stand-in driver passes a copy of the launch's parameter.
    let p = unsafe { &*probe };
    let rank = u32::from(p.args.table.rank);
    let slowest = |kind| {
        let peers = (0..32).filter(|peer| p.to >> peer & 1 == 1);
        peers.map(|peer| value(kind, rank, peer)).fold(f64::INFINITY, f64::min)
    };
    let mut words = vec![0u64; 1 + 2 * p.rounds as usize];
    if p.what == PL_PROBE_LATENCY {
        words[1] = EMPTY;
        let one_way = if p.to == 0 { 0.0 } else { slowest("flag") };
        words[2] = EMPTY + (2.0 * one_way * f64::from(p.rounds - WARM)) as u64;
    } else if p.to != 0 {
        let mut gb_per_s = slowest(if p.what == PL_PROBE_STORE { "store" } else { "load" });
        if p.from != 0 {
            gb_per_s *= value("together", rank, rank);
        }
        let full = (p.bytes * u64::from(p.to.count_ones())) as f64 / gb_per_s;
        for round in 0..p.rounds as usize {
            let start = EMPTY * 1000 * (1 + round as u64);
            words[1 + 2 * round] = start;
            words[2 + 2 * round] = start + EMPTY + if round % 2 == 1 { full as u64 } else { 0 };
        }
    }
    // However many blocks were asked for, the room is that of the most there are.
    for block in 0..PL_PROBE_BLOCKS as usize {
        let at = (p.result as *mut u64).wrapping_add(block * words.len());
        // SAFETY: the library's results hold the longest launch, this rank's alone until it ends.
        unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), at, words.len()) };
    }
}
