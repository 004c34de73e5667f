//! The shipped kernels over a hostile fabric: writes that are late and out of order, threads that run in any order.
//!
//! What the fabric may do, and why it may, stands in `explorer/world.h`. A seed decides everything;
//! `PL_EXPLORER_SEED=n` runs that seed alone, `PL_EXPLORER_SEEDS=n` so many of each schedule and protocol.

#![allow(clippy::unwrap_used)]

#[path = "explorer/cases.rs"]
mod cases;
mod common;

use cases::{boxes, plan, Box_, Plan, Runner, Way, WAYS};
use peerlane::Algorithm;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|v| v.parse().unwrap())
}

/// Runs `each` over all items on as many threads as there are cores.
fn in_parallel<T: Sync>(items: &[T], each: impl Fn(&mut Runner, &T) + Sync) {
    let next = AtomicU64::new(0);
    let cores = std::thread::available_parallelism().map_or(2, |c| c.get());
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                let mut runner = Runner::new();
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                    each(&mut runner, item);
                }
            });
        }
    });
}

#[test]
fn every_schedule_and_protocol_is_right_on_a_hostile_fabric() {
    let boxes = boxes();
    let only = number("PL_EXPLORER_SEED");
    let seeds = number("PL_EXPLORER_SEEDS").unwrap_or(2000);
    let (first, last) = only.map_or((0, seeds), |s| (s, s + 1));
    let cells: Vec<(Algorithm, Way)> =
        Algorithm::ALL.iter().flat_map(|&a| WAYS.map(|w| (a, w))).collect();
    let (begun, cases, steps, writes, events) = (
        Instant::now(),
        AtomicU64::new(0),
        AtomicU64::new(0),
        AtomicU64::new(0),
        AtomicU64::new(0),
    );
    in_parallel(&cells, |runner, &(algorithm, way)| {
        for seed in first..last {
            let plan = plan(&boxes, algorithm, way, seed);
            let verdict = runner.run(&plan);
            if let Some(complaint) = verdict.complaint() {
                panic!("{}: {complaint}\nreplay: PL_EXPLORER_SEED={seed}", plan.name);
            }
            cases.fetch_add(1, Ordering::Relaxed);
            steps.fetch_add(plan.steps.len() as u64, Ordering::Relaxed);
            writes.fetch_add(verdict.outcome.writes, Ordering::Relaxed);
            events.fetch_add(verdict.outcome.events, Ordering::Relaxed);
        }
    });
    let seconds = begun.elapsed().as_secs_f64();
    let cases = cases.into_inner();
    println!(
        "{} schedules and protocols, {cases} seeds, {} steps, {} writes, {} decisions in {seconds:.1} s: {:.0} seeds/s",
        cells.len(),
        steps.into_inner(),
        writes.into_inner(),
        events.into_inner(),
        cases as f64 / seconds
    );
    assert_eq!(cases, cells.len() as u64 * (last - first));
}
