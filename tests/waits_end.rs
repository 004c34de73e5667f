//! Whatever does not come, a wait ends; whatever is old, a wait does not end early. Over the explorer, whose clock jumps
//! over a deadline exactly when nothing can happen any more: no test here sleeps.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

#[path = "explorer/cases/mod.rs"]
mod cases;
mod common;

use cases::boxes::boxes;
use cases::layout::geometry;
use cases::plan::{fused_plan, plain_plan, Plan};
use cases::random::Random;
use cases::runner::Runner;
use cases::verdict::{epoch_after, Verdict};
use cases::{Way, WAYS};
use common::world::mix;
use explorer::control;
use peerlane::launch::*;
use peerlane::{Algorithm, Protocol};
use std::collections::BTreeSet;

const LL: Way = WAYS[0];

/// Whether `rank` waits for `peer` in `phase` of its table.
fn waits_for(table: &pl_table, phase: u32, peer: u32) -> bool {
    let phase = &table.phase[phase as usize];
    let folds = &table.fold[usize::from(phase.fold0)..][..usize::from(phase.folds)];
    folds.iter().any(|f| {
        let items = &table.item[usize::from(f.item0)..][..usize::from(f.items)];
        items.iter().any(|i| u32::from(i.from) == peer)
    })
}

/// After a step in which somebody was not heard: every verdict names a wait of the table, the step and its size, and
/// every peer has been told by whoever reached a verdict of its own. Returns the peers that were named.
fn verdicts_are_true(plan: &Plan, k: usize, verdict: &Verdict) -> Result<BTreeSet<u32>, String> {
    let step = &plan.steps[k];
    let mut named = BTreeSet::new();
    for (rank, state) in verdict.states.iter().enumerate() {
        if state.abort == 0 {
            continue;
        }
        let r = &state.record;
        let truth = (
            PL_REASON_DEADLINE,
            1,
            epoch_after(plan.epoch, k as u32),
            (step.count * step.dtype.size()) as u64,
        );
        if (r.reason, r.valid, r.step, r.bytes) != truth || state.abort != r.reason {
            return Err(format!("rank {rank} holds {r:?}, not {truth:?}"));
        }
        if !waits_for(&step.tables[r.rank as usize], r.phase, r.peer) {
            return Err(format!(
                "rank {rank} holds {r:?}, but that rank does not wait for that peer there"
            ));
        }
        named.insert(r.peer);
        if r.rank as usize == rank {
            for (at, records) in verdict.records.iter().enumerate().filter(|(at, _)| *at != rank) {
                let told = &records[rank];
                if (told.valid, told.peer, told.phase) != (1, r.peer, r.phase) {
                    return Err(format!(
                        "rank {at} was told {told:?} by rank {rank}, which holds {r:?}"
                    ));
                }
            }
        }
        let c = &verdict.channels[rank];
        if (c.launch(), c.entered) != (0, 0) {
            return Err(format!("rank {rank} left its channel claimed: {c:?}"));
        }
    }
    Ok(named)
}

/// Two steps; in the second `silent` sends nothing from `phase` on.
fn starved(mut plan: Plan, silent: usize, phase: usize) -> Plan {
    plan.steps.truncate(2);
    plan.rank_steps = vec![2; plan.n];
    plan.check = false;
    let table = &mut plan.steps[1].tables[silent];
    table.phase[phase..].iter_mut().for_each(|p| p.sends = 0);
    plan
}

/// Each phase, each rank, each schedule, each way: the deadline fires and the record is true. The control is the same
/// plan without the silence, which must be clean.
#[test]
fn a_wait_for_a_silent_rank_ends_and_says_what_it_waited_for() {
    let boxes = boxes();
    let mut runner = Runner::new();
    let (mut cases, mut verdicts) = (0, 0);
    for &algorithm in Algorithm::ALL {
        for way in WAYS {
            for b in boxes.iter().filter(|b| b.tables(algorithm, way.1).is_some()) {
                let tables = b.tables(algorithm, way.1).unwrap();
                for (silent, table) in tables.iter().enumerate() {
                    for phase in 0..usize::from(table.phases) {
                        if table.phase[phase].sends == 0 {
                            continue;
                        }
                        let mut named = BTreeSet::new();
                        for seed in 0..200 {
                            let seed = mix(seed ^ (silent * 64 + phase) as u64) >> 8;
                            let one = std::slice::from_ref(b);
                            let mut whole = plain_plan(one, algorithm, way, seed);
                            // Every piece has something in it, so that every send counts.
                            for s in &mut whole.steps {
                                s.count = s.count.max(16 * b.n / s.dtype.size());
                            }
                            let plan = starved(whole.clone(), silent, phase);
                            let at = format!(
                                "{}, rank {silent} silent from phase {phase}, seed {seed}",
                                plan.name
                            );
                            let verdict = runner.run(&plan);
                            assert_eq!((verdict.outcome.stuck, &verdict.wrong), (0, &None), "{at}");
                            assert!(verdict.gave_up(), "{at}: nobody noticed");
                            named.extend(
                                verdicts_are_true(&plan, 1, &verdict)
                                    .map_err(|e| format!("{at}: {e}"))
                                    .unwrap(),
                            );
                            cases += 1;
                            verdicts += verdict.states.iter().filter(|s| s.abort != 0).count();
                            if seed.is_multiple_of(16) {
                                whole.check = false;
                                assert_eq!(
                                    runner.run(&whole).complaint(),
                                    None,
                                    "{at}: the control"
                                );
                            }
                            if named.contains(&(silent as u32)) {
                                break;
                            }
                        }
                        let at = format!("{algorithm} {} {}, ranks {}", way.0, way.1, b.name);
                        assert!(
                            named.contains(&(silent as u32)),
                            "{at}: rank {silent} silent in phase {phase}, named {named:?}"
                        );
                    }
                }
            }
        }
    }
    println!("{cases} starved steps, {verdicts} verdicts");
}

/// A rank that does not make the call at all.
#[test]
fn a_wait_for_an_absent_rank_ends() {
    let boxes = boxes();
    let mut runner = Runner::new();
    for &algorithm in Algorithm::ALL {
        for way in WAYS {
            for seed in 0..60 {
                let mut plan = plain_plan(&boxes, algorithm, way, seed);
                plan.check = false;
                let absent = Random(seed).below(plan.n as u64) as usize;
                plan.rank_steps[absent] = 2;
                // An absent rank's piece must not be empty, or nobody needs it.
                plan.steps
                    .iter_mut()
                    .for_each(|s| s.count = s.count.max(16 * plan.n / s.dtype.size()));
                let verdict = runner.run(&plan);
                let at = format!("{}, rank {absent} absent, seed {seed}", plan.name);
                assert_eq!((verdict.outcome.stuck, &verdict.wrong), (0, &None), "{at}");
                verdicts_are_true(&plan, 2, &verdict).map_err(|e| format!("{at}: {e}")).unwrap();
                for rank in (0..plan.n).filter(|&r| r != absent) {
                    assert_eq!(verdict.finished[rank], 2, "{at}: every result needs every rank");
                    assert_ne!(verdict.states[rank].abort, 0, "{at}");
                }
            }
        }
    }
}

/// Where rows are spread over blocks: a write is lost, so one block waits for a peer, and others, whose own data is there, for that
/// block. The verdict that counts names the peer.
#[test]
fn a_wait_for_another_block_ends_and_the_verdict_names_a_peer() {
    let boxes = boxes();
    let mut runner = Runner::new();
    let mut verdicts = 0;
    for algorithm in [Algorithm::OneShot, Algorithm::TwoShot, Algorithm::DualOwner] {
        for way in &WAYS[..2] {
            for seed in 0..400 {
                let mut plan = fused_plan(&boxes, algorithm, *way, seed);
                (plan.blocks, plan.threads, plan.cpu_shape) = (2, 1 + seed as u32 % 2, false);
                (plan.check, plan.host_staged) = (false, false);
                let writes = runner.run(&plan).outcome.writes;
                plan.drop_at = 1 + Random(seed).below(writes) as u32;
                let verdict = runner.run(&plan);
                let at = format!("{}, write {} lost, seed {seed}", plan.name, plan.drop_at);
                assert_eq!((verdict.outcome.stuck, &verdict.wrong), (0, &None), "{at}");
                for state in verdict.states.iter().filter(|s| s.abort != 0) {
                    let r = &state.record;
                    assert_eq!(r.reason, PL_REASON_DEADLINE, "{at}: {r:?}");
                    let step = (0..plan.steps.len())
                        .find(|&k| epoch_after(plan.epoch, k as u32) == r.step)
                        .unwrap();
                    let table = &plan.steps[step].tables[r.rank as usize];
                    assert!(waits_for(table, r.phase, r.peer), "{at}: {r:?}");
                    verdicts += 1;
                }
            }
        }
    }
    println!("{verdicts} verdicts");
    assert!(verdicts > 3000);
}

/// Fills what the steps poll with words of an old step, and keeps one rank away from step `k`.
fn old_words(mut plan: Plan, k: usize, age: u64) -> Plan {
    let old = epoch_after(plan.epoch, k as u32).wrapping_sub(age);
    for rank in 0..plan.n {
        let step = &plan.steps[k];
        let geo = geometry(step.protocol, &step.tables[rank], plan.late_rearms);
        let mut plant = |at, value| plan.planted.push((rank, at, value));
        if step.protocol == Protocol::Ll {
            (0..2 * geo.half_bytes)
                .step_by(8)
                .for_each(|at| plant(geo.data + at, old << 32 | 0x4040_4040));
        } else {
            let flags = 2 * geo.flags_half_bytes;
            (0..flags).step_by(64).for_each(|at| plant(geo.flags + at, old));
        }
    }
    plan.check = false;
    plan.steps.iter_mut().for_each(|s| s.count = s.count.max(16 * plan.n / s.dtype.size()));
    plan
}

/// Runs plans with old words in the half that step 1 is the first to use, and a rank that is absent from it; with the comparison spoilt some wait must end too early.
fn old_words_do_not_end_a_wait(way: Way, age: u64, epoch: u64, spoilt: u32) {
    let boxes = boxes();
    let mut runner = Runner::new();
    let mut fooled = 0;
    for seed in 0..200 {
        let algorithm = Algorithm::ALL[(seed % 6) as usize];
        let mut plan =
            old_words(Plan { epoch, ..plain_plan(&boxes, algorithm, way, seed) }, 1, age);
        let absent = Random(seed).below(plan.n as u64) as usize;
        plan.rank_steps[absent] = 1;
        let at = format!("{}, {age:#x} steps old, rank {absent} absent, seed {seed}", plan.name);
        let verdict = runner.run(&plan);
        assert_eq!((verdict.outcome.stuck, &verdict.wrong), (0, &None), "{at}");
        for rank in (0..plan.n).filter(|&r| r != absent) {
            assert_eq!(verdict.finished[rank], 1, "{at}");
        }
        verdicts_are_true(&plan, 1, &verdict).map_err(|e| format!("{at}: {e}")).unwrap();
        plan.control = spoilt;
        fooled += u32::from(runner.run(&plan).wrong.is_some());
    }
    println!("{} {}, {age:#x} steps old: the control is fooled in {fooled} of 200", way.0, way.1);
    assert!(fooled > 100, "the words were not where the steps look");
}

const HALF_PERIOD: u64 = (1 << 31) + 1;
const PERIOD: u64 = 1 << 32;

#[test]
fn an_old_flag_does_not_end_a_wait() {
    for way in [WAYS[2], WAYS[3]] {
        for age in [HALF_PERIOD, PERIOD] {
            for epoch in [(7 << 32) + 5, (7 << 32) - 4, (7 << 32) + (1 << 30) - 3] {
                old_words_do_not_end_a_wait(way, age, epoch, control::FLAG_NOT_LESS);
            }
        }
    }
}

#[test]
fn an_old_tag_does_not_end_a_wait() {
    for epoch in [(7 << 32) + 5, (7 << 32) + (1 << 29)] {
        old_words_do_not_end_a_wait(LL, HALF_PERIOD, epoch, control::TAG_WRAPS);
    }
}

/// A tag is the same again after 2^32 steps; by then its word has been cleared, here in the step just before.
#[test]
fn a_tag_one_period_old_has_been_cleared() {
    for epoch in [(7 << 32) + (1 << 30) - 2, (5 << 32) + (3 << 30) - 2] {
        old_words_do_not_end_a_wait(LL, PERIOD, epoch, control::NO_CLEAR);
    }
}
