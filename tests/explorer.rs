//! The shipped kernels over a hostile fabric: writes that are late and out of order, threads that run in any order.
//!
//! What the fabric may do, and why it may, stands in `explorer/world.h`. A seed decides everything;
//! `PL_EXPLORER_SEED=n` runs that seed alone, `PL_EXPLORER_SEEDS=n` so many of each schedule and protocol.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

#[path = "explorer/cases/mod.rs"]
mod cases;
mod common;

use cases::boxes::boxes;
use cases::plan::{cluster_plan, delta_plan, fused_plan, mixed_plan, plain_plan, plan, wide_plan};
use cases::random::Random;
use cases::runner::Runner;
use cases::{Way, WAYS};
use peerlane::launch::PL_REASON_DEADLINE;
use peerlane::schedule::Goal;
use peerlane::{Algorithm, Protocol};
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
    let short = AtomicU64::new(0);
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
            short.fetch_add(std::mem::take(&mut runner.short_steps), Ordering::Relaxed);
        }
    });
    let short = short.into_inner();
    let seconds = begun.elapsed().as_secs_f64();
    let cases = cases.into_inner();
    println!(
        "{} schedules and protocols, {cases} seeds, {} steps ({short} of a rank by the short path), {} writes, {} decisions \
         in {seconds:.1} s: {:.0} seeds/s",
        cells.len(),
        steps.into_inner(),
        writes.into_inner(),
        events.into_inner(),
        cases as f64 / seconds
    );
    assert_eq!(cases, cells.len() as u64 * (last - first));
    assert!(only.is_some() || short >= cases / 10, "the short path is explored: {short} steps");
}

/// Fused steps and all-reduces on one channel: rows in flight at once, several per block, outputs over inputs.
#[test]
fn fused_rows_are_right_on_a_hostile_fabric() {
    let boxes = boxes();
    let only = number("PL_EXPLORER_SEED");
    let seeds = number("PL_EXPLORER_SEEDS").unwrap_or(400);
    let (first, last) = only.map_or((0, seeds), |s| (s, s + 1));
    let cells: Vec<(Algorithm, Way)> =
        Algorithm::ALL.iter().flat_map(|&a| WAYS.map(|w| (a, w))).collect();
    let (cases, steps) = (AtomicU64::new(0), AtomicU64::new(0));
    let short = [AtomicU64::new(0), AtomicU64::new(0)];
    in_parallel(&cells, |runner, &(algorithm, way)| {
        for seed in first..last {
            let plan = fused_plan(&boxes, algorithm, way, seed);
            if let Some(complaint) = runner.run(&plan).complaint() {
                panic!("{}: {complaint}\nreplay: PL_EXPLORER_SEED={seed}", plan.name);
            }
            cases.fetch_add(1, Ordering::Relaxed);
            let fused = plan.steps.iter().filter(|step| step.norm.is_some()).count();
            steps.fetch_add(fused as u64, Ordering::Relaxed);
        }
        for (all, of_this) in short.iter().zip(std::mem::take(&mut runner.short_rows)) {
            all.fetch_add(of_this, Ordering::Relaxed);
        }
    });
    let (steps, short) = (steps.into_inner(), short.map(AtomicU64::into_inner));
    println!(
        "{} seeds, {steps} fused steps; of a rank by the short path {} in one phase, {} in two",
        cases.into_inner(),
        short[0],
        short[1]
    );
    assert!(steps >= (last - first) * cells.len() as u64);
    assert!(only.is_some() || short.iter().all(|&short| short >= last - first));
}

/// Rows over two blocks that are a cluster.
#[test]
fn rows_of_clusters_are_right_on_a_hostile_fabric() {
    let boxes = boxes();
    let only = number("PL_EXPLORER_SEED");
    let seeds = number("PL_EXPLORER_SEEDS").unwrap_or(4000);
    let (first, last) = only.map_or((0, seeds), |s| (s, s + 1));
    let mut runner = Runner::new();
    for seed in first..last {
        let plan = cluster_plan(&boxes, seed);
        if let Some(complaint) = runner.run(&plan).complaint() {
            panic!("{}: {complaint}\nreplay: PL_EXPLORER_SEED={seed}", plan.name);
        }
    }
    println!("{} steps of a rank by a cluster", runner.clusters);
    assert!(only.is_some() || runner.clusters > last - first);
}

/// Words that are new because they differ from the last ones, between steps of any kind on the same channel.
#[test]
fn words_that_differ_are_right_on_a_hostile_fabric() {
    let boxes = boxes();
    let only = number("PL_EXPLORER_SEED");
    let seeds = number("PL_EXPLORER_SEEDS").unwrap_or(3000);
    let seeds: Vec<u64> = only.map_or((0..seeds).collect(), |seed| vec![seed]);
    let (steps, last) = (AtomicU64::new(0), seeds.len() as u64);
    in_parallel(&seeds, |runner, &seed| {
        let plan = delta_plan(&boxes, seed);
        if let Some(complaint) = runner.run(&plan).complaint() {
            panic!("{}: {complaint}\nreplay: PL_EXPLORER_SEED={seed}", plan.name);
        }
        steps.fetch_add(std::mem::take(&mut runner.delta_steps), Ordering::Relaxed);
    });
    let steps = steps.into_inner();
    println!("{last} seeds, {steps} steps of a rank by delta");
    assert!(only.is_some() || steps >= last * 10);
}

/// Rows whose lanes add several packs each, which are gathered in several rounds.
#[test]
fn wide_rows_are_right_on_a_hostile_fabric() {
    let pairs: Vec<_> = boxes().into_iter().filter(|b| b.n == 2).collect();
    let mut widest = 0;
    let mut runner = Runner::new();
    for seed in 0..number("PL_EXPLORER_SEEDS").unwrap_or(20) {
        for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
            for way in &WAYS[..2] {
                let plan = wide_plan(&pairs, algorithm, *way, seed);
                if let Some(complaint) = runner.run(&plan).complaint() {
                    panic!("{}: {complaint}, seed {seed}", plan.name);
                }
                let widths = plan.steps.iter().filter_map(|s| s.norm.map(|norm| norm.width));
                widest = widths.chain([widest]).max().unwrap_or(0);
            }
        }
    }
    println!("up to {widest} elements");
    assert!(widest > 8 * 512);
}

/// Broadcasts from any root, all-gathers, reduce-scatters and all-reduces of any schedule, on one channel: slots are reused across them.
#[test]
fn any_collective_may_follow_any_other_on_a_hostile_fabric() {
    let boxes = boxes();
    let only = number("PL_EXPLORER_SEED");
    let seeds = number("PL_EXPLORER_SEEDS").unwrap_or(800);
    let (first, last) = only.map_or((0, seeds), |s| (s, s + 1));
    let blocks: Vec<(Way, u64)> =
        (0..16).flat_map(|block| [(WAYS[2], block), (WAYS[3], block)]).collect();
    let (cases, others) = (AtomicU64::new(0), AtomicU64::new(0));
    in_parallel(&blocks, |runner, &(way, block)| {
        for seed in (first..last).filter(|seed| seed % 16 == block) {
            let plan = mixed_plan(&boxes, way, seed);
            if let Some(complaint) = runner.run(&plan).complaint() {
                panic!("{}: {complaint}\nreplay: PL_EXPLORER_SEED={seed}", plan.name);
            }
            cases.fetch_add(1, Ordering::Relaxed);
            let other = plan.steps.iter().filter(|step| step.goal != Goal::AllReduce).count();
            others.fetch_add(other as u64, Ordering::Relaxed);
        }
    });
    let (cases, others) = (cases.into_inner(), others.into_inner());
    println!("{cases} seeds, {others} steps that are no all-reduce");
    assert!(cases == 2 * (last - first) && others >= 2 * cases);
}

/// A lost write in a fused step: both outputs are filled, and never hold what could be taken for a result.
#[test]
fn a_write_lost_in_a_fused_step_is_a_deadline() {
    let boxes = boxes();
    in_parallel(&WAYS[..2], |runner, &way| {
        let mut ended = 0;
        for seed in 0..300 {
            let algorithm = Algorithm::ALL[(seed % 6) as usize];
            let mut plan = fused_plan(&boxes, algorithm, way, seed);
            plan.host_staged = false;
            let writes = runner.run(&plan).outcome.writes;
            plan.drop_at = 1 + Random(seed).below(writes) as u32;
            let verdict = runner.run(&plan);
            let at = format!("{}, write {} of {writes} lost, seed {seed}", plan.name, plan.drop_at);
            assert_eq!((verdict.outcome.stuck, &verdict.wrong), (0, &None), "{at}");
            ended += u32::from(verdict.gave_up());
        }
        println!("{} {}: {ended} deadlines", way.0, way.1);
        assert!(ended > 270);
    });
}

/// A rank that makes no step at all: whoever waits, for packs, for results or for squares of another block, names that one.
/// Hardly ever another: a thread may be kept from the clock until one that waits for it has given up twice.
#[test]
fn a_rank_that_never_sends_is_the_one_that_short_rows_name() {
    let boxes = boxes();
    for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
        let (mut runner, mut short, mut others) = (Runner::new(), 0, 0);
        for seed in 0..3000 {
            let mut plan = fused_plan(&boxes, algorithm, WAYS[1], seed);
            // A rank's own words may be late where they take the link.
            (plan.host_staged, plan.late_rearms, plan.check) = (false, false, false);
            plan.steps.drain(..1);
            plan.steps.truncate(1);
            plan.rank_steps = vec![1; plan.n];
            let absent = Random(seed).below(plan.n as u64) as usize;
            plan.rank_steps[absent] = 0;
            // Where a piece is empty its owner waits for nobody, and others wait for results only.
            let least = if algorithm == Algorithm::TwoShot { plan.n } else { 1 };
            if plan.steps[0].norm.is_none_or(|norm| norm.width / 8 < least) {
                continue;
            }
            runner.short_rows = [0; 2];
            let verdict = runner.run(&plan);
            if runner.short_rows.iter().sum::<u64>() == 0 {
                continue;
            }
            short += 1;
            let at = format!("{}, rank {absent} absent, seed {seed}", plan.name);
            assert_eq!((verdict.outcome.stuck, &verdict.wrong), (0, &None), "{at}");
            let present = verdict.states.iter().enumerate().take(plan.n);
            let mut other = false;
            for (rank, state) in present.filter(|(rank, _)| *rank != absent) {
                assert_eq!(state.abort, PL_REASON_DEADLINE, "{at}, {rank}");
                other |= state.record.peer as usize != absent;
            }
            others += u32::from(other);
        }
        println!("{algorithm}: {short} steps, {others} with another name");
        assert!(short > 100 && others * 10 < short, "{short} {others}");
    }
}

/// A rank's host aborts at any time: of its blocks some wait in vain and others are refused, and those of a cluster meet all the same;
/// what they leave is no result that it is not.
#[test]
fn blocks_of_a_cluster_end_together_when_their_host_aborts() {
    let boxes = boxes();
    let (mut runner, mut ended) = (Runner::new(), 0);
    for seed in 0..3000 {
        let mut plan = cluster_plan(&boxes, seed);
        let events = runner.run(&plan).outcome.events;
        let mut random = Random(common::world::mix(seed));
        plan.abort = Some((1 + random.below(events) as u32, random.below(plan.n as u64) as u32));
        runner.clusters = 0;
        let verdict = runner.run(&plan);
        if runner.clusters < 2 {
            continue;
        }
        let at = format!("{}, {:?}, seed {seed}", plan.name, plan.abort);
        let outcome = verdict.outcome;
        assert_eq!((outcome.stuck, outcome.strayed, &verdict.wrong), (0, 0, &None), "{at}");
        ended += verdict.states.iter().filter(|state| state.abort != 0).count();
    }
    println!("{ended} ranks ended");
    assert!(ended > 1000, "{ended}");
}

#[test]
fn a_seed_decides_everything() {
    let boxes = boxes();
    let run = |seed| {
        let plan = plan(&boxes, Algorithm::TwoShot, WAYS[(seed % 4) as usize], seed);
        let o = Runner::new().run(&plan).outcome;
        (o.events, o.writes)
    };
    for seed in 0..40 {
        assert_eq!(run(seed), run(seed));
        assert_ne!(run(seed), run(seed + 4), "the control: another seed is another run");
    }
}

/// One write is lost, anywhere. `ll` and `sentinel` prove each word's arrival: a loss ends in the deadline, on all ranks
/// that need it, and never in wrong data. `flagged` proves its flags alone: lost data is for the self-test to find.
#[test]
fn a_lost_write_is_a_deadline_and_never_wrong_data() {
    let boxes = boxes();
    in_parallel(&WAYS, |runner, &way| {
        let (mut ended, mut wrong, mut harmless) = (0, 0, 0);
        for seed in 0..1200 {
            let algorithm = Algorithm::ALL[(seed % 6) as usize];
            let mut plan = plain_plan(&boxes, algorithm, way, seed);
            // A rank's own words do not get lost on a link.
            plan.host_staged = false;
            let writes = runner.run(&plan).outcome.writes;
            plan.drop_at = 1 + Random(seed).below(writes) as u32;
            let verdict = runner.run(&plan);
            let at = format!("{}, write {} of {writes} lost, seed {seed}", plan.name, plan.drop_at);
            assert_eq!(verdict.outcome.stuck, 0, "{at}");
            match (&verdict.wrong, verdict.gave_up()) {
                (Some(wrong), _) if way.0 != Protocol::Flagged => panic!("{at}: {wrong}"),
                (Some(_), _) => wrong += 1,
                (None, true) => ended += 1,
                // Its bits were there already, or are padding: every result was right.
                (None, false) => harmless += 1,
            }
        }
        println!("{} {}: {ended} deadlines, {wrong} wrong data, {harmless} harmless", way.0, way.1);
        assert!(ended > if way.0 == Protocol::Flagged { 60 } else { 1100 });
    });
}

/// All that a rank writes to a peer lands where the peer does not look: what mappings to the wrong memory do.
#[test]
fn writes_that_never_reach_their_owner_are_noticed() {
    let boxes = boxes();
    in_parallel(&WAYS, |runner, &way| {
        let (mut ended, mut wrong) = (0, 0);
        for seed in 0..600 {
            let algorithm = Algorithm::ALL[(seed % 6) as usize];
            let mut plan = plain_plan(&boxes, algorithm, way, seed);
            let mut random = Random(seed);
            let from = random.below(plan.n as u64) as usize;
            let peers: Vec<u8> = plan.steps[0].tables[from].send
                [..plan.steps[0].tables[from].phase.iter().map(|p| usize::from(p.sends)).sum()]
                .iter()
                .map(|s| s.peer)
                .collect();
            plan.mirror = Some((from as u32, u32::from(*random.of(&peers))));
            plan.steps.iter_mut().for_each(|s| s.count = s.count.max(16 * plan.n / s.dtype.size()));
            let verdict = runner.run(&plan);
            let at = format!("{}, mirrored {:?}, seed {seed}", plan.name, plan.mirror);
            assert!(verdict.complaint().is_some(), "{at}: not noticed");
            assert_eq!((verdict.outcome.stuck, &verdict.wrong), (0, &None), "{at}");
            ended += u32::from(verdict.gave_up());
            wrong += u32::from(verdict.wrong.is_some());
        }
        println!("{} {}: {ended} deadlines, {wrong} wrong data", way.0, way.1);
        assert_eq!(ended, 600);
    });
}
