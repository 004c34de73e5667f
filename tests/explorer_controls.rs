//! What the explorer is worth: with a safeguard taken out it must find the fault, within so many seeds.
//!
//! A safeguard is taken out where the kernels meet the device (the back end tells a lie), in a table, or in the layout;
//! the kernels themselves carry no hook for it.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

#[path = "explorer/cases/mod.rs"]
mod cases;
mod common;

use cases::boxes::{boxes, Box_};
use cases::layout::geometry;
use cases::plan::{cluster_plan, delta_plan, fused_plan, plain_plan, plan, Plan};
use cases::random::Random;
use cases::runner::Runner;
use cases::step::{collective, step, Step};
use cases::{Way, WAYS};
use common::world::mix;
use explorer::control;
use peerlane::launch::*;
use peerlane::schedule::Goal;
use peerlane::{Algorithm, DType, Direction, Op, Protocol};

const LL: Way = WAYS[0];
const SENTINEL: Way = WAYS[1];
const PUSH: Way = WAYS[2];
const PULL: Way = WAYS[3];

fn any_algorithm(seed: u64) -> Algorithm {
    Algorithm::ALL[(seed % Algorithm::ALL.len() as u64) as usize]
}

/// Tries seeds until one fails: a wrong bit, a rank that gives up, or a store to a block that does not run. The same plans are clean with the safeguard in.
fn caught(name: &str, within: u64, plan_of: impl Fn(u64) -> Plan, sabotage: impl Fn(&mut Plan)) {
    let mut runner = Runner::new();
    for seed in 0..within {
        let mut plan = plan_of(seed);
        if let Some(complaint) = runner.run(&plan).complaint() {
            panic!(
                "{name}: {} is not clean with the safeguard in: {complaint} (seed {seed})",
                plan.name
            );
        }
        sabotage(&mut plan);
        let complaint = runner.run(&plan).complaint();
        if let Some(c) = complaint
            .filter(|c| ["element", "gave up", "stored to"].iter().any(|what| c.contains(what)))
        {
            println!("{name}: caught by seed {} of {within}: {}: {c}", seed + 1, plan.name);
            return;
        }
    }
    panic!("{name}: not caught within {within} seeds");
}

/// The plans of any schedule over this way.
fn any(boxes: &[Box_], way: Way) -> impl Fn(u64) -> Plan + '_ {
    move |seed| plan(boxes, any_algorithm(seed), way, seed)
}

/// A thread that norms a row before the others have added their lanes takes an old sum of squares.
#[test]
fn lanes_must_meet_before_their_sum() {
    let boxes = boxes();
    let plan_of = |seed| {
        let mut plan = fused_plan(&boxes, any_algorithm(seed), LL, seed);
        (plan.blocks, plan.threads, plan.cpu_shape) = (1, 2, false);
        plan
    };
    caught("no barrier between lanes", 60, plan_of, |p| p.control = control::NO_BARRIER);
}

/// Rows over two blocks, which tell each other their squares.
fn spread(boxes: &[Box_], algorithm: Algorithm, way: Way, seed: u64) -> Plan {
    let mut plan = fused_plan(boxes, algorithm, way, seed);
    (plan.blocks, plan.threads, plan.cpu_shape) = (2, 1 + seed as u32 % 2, false);
    plan
}

#[test]
fn squares_must_be_of_this_step() {
    let boxes = boxes();
    for (way, algorithm) in [(LL, Algorithm::OneShot), (SENTINEL, Algorithm::TwoShot)] {
        let name = format!("squares of any step, {} {algorithm}", way.0);
        let plan_of = |seed| spread(&boxes, algorithm, way, seed);
        caught(&name, 20, plan_of, |p| p.control = control::ANY_SQUARES);
    }
}

/// By `sentinel`, so that nothing else has tags.
#[test]
fn squares_that_may_recur_must_be_cleared() {
    let boxes = boxes();
    // Eight steps and more across a clear; the words hold the tag of a later one, as they would 2^32 steps after it.
    let planted = |seed: u64| {
        let mut p = spread(&boxes, Algorithm::OneShot, SENTINEL, seed);
        let first = p.steps.clone();
        p.steps.extend(first);
        p.rank_steps = vec![p.steps.len() as u32; p.n];
        p.steps[..5].iter_mut().for_each(|s| s.norm = None);
        p.epoch = (1 << 30) - 3;
        p.squares = ((1 << 30) + 2 + seed % 2) << 32 | 0x4040_4040;
        p
    };
    caught("no clear of squares", 60, planted, |p| p.control = control::NO_CLEAR);
}

#[test]
fn blocks_of_a_cluster_must_wait_for_each_other_twice() {
    let boxes = boxes();
    let plan_of = |seed| cluster_plan(&boxes, seed);
    caught("stores too early", 20, plan_of, |p| p.control = control::BLOCKS_TOO_EARLY);
    caught("squares too early", 20, plan_of, |p| p.control = control::SQUARES_TOO_EARLY);
}

#[test]
fn one_half_is_not_enough() {
    let boxes = boxes();
    for way in WAYS {
        let name = format!("one half, {} {}", way.0, way.1);
        caught(&name, 100, any(&boxes, way), |p| p.one_half = true);
    }
}

#[test]
fn words_must_be_armed_again() {
    caught("no re-arm", 10, any(&boxes(), SENTINEL), |p| p.control = control::NO_REARM);
}

/// What `delta` rests on: two buffers, a region for each schedule, words that come again sent as all ones, both ends' memory, and
/// the wait for a word that differs.
#[test]
fn words_that_differ_need_each_of_their_safeguards() {
    let boxes = boxes();
    let plan_of = |seed| delta_plan(&boxes, seed);
    // Of these two the other protocols would be caught as well.
    let alone = |seed| {
        let mut plan = delta_plan(&boxes, seed);
        plan.steps.retain(|step| step.delta);
        plan.rank_steps = vec![plan.steps.len() as u32; plan.n];
        plan
    };
    caught("delta, one half", 100, alone, |p| p.one_half = true);
    caught("delta, one region", 100, plan_of, |p| p.one_delta = true);
    caught("delta, same word not sent", 20, alone, |p| p.control = control::NO_REARM);
    caught("delta, nothing remembered", 20, plan_of, |p| p.control = control::FORGETS);
    caught("delta, old words taken", 20, plan_of, |p| p.control = control::ALL_IS_NEW);
    // Words armed again four steps ago, with steps by delta alone between, which would not have fenced by themselves.
    let between = |seed: u64| {
        let mut plan = delta_plan(&boxes, seed);
        let mut r = Random(mix(seed ^ 0x0fe9));
        (plan.host_staged, plan.late_rearms) = (true, true);
        let deltas: Vec<_> = plan.steps.iter().filter(|step| step.delta).cloned().collect();
        let armed = deltas.first().map(|first| step(&mut r, &first.tables, Protocol::Sentinel));
        let (Some(armed), Some(delta)) = (armed, deltas.first()) else { return plan };
        plan.steps = (0..3)
            .flat_map(|_| [armed.clone(), delta.clone(), delta.clone(), delta.clone()])
            .collect();
        plan.rank_steps = vec![plan.steps.len() as u32; plan.n];
        plan
    };
    caught("delta, re-arms under way", 400, between, |p| p.control = control::NO_WORD_OF_REARMS);
}

#[test]
fn a_nan_of_all_ones_must_not_be_sent_as_it_is() {
    caught("raw NaN", 20, any(&boxes(), SENTINEL), |p| p.control = control::RAW_NAN);
}

#[test]
fn the_epoch_must_advance() {
    let boxes = boxes();
    for way in [LL, PUSH, PULL] {
        let name = format!("epoch stands, {} {}", way.0, way.1);
        caught(&name, 20, any(&boxes, way), |p| p.control = control::EPOCH_STANDS);
    }
}

#[test]
fn tags_must_be_equal_not_merely_later() {
    let boxes = boxes();
    let wrapping = |seed| Plan { epoch: (1 << 32) - 4, ..any(&boxes, LL)(seed) };
    caught("tag >=", 50, wrapping, |p| p.control = control::TAG_NOT_LESS);
}

#[test]
fn a_sum_must_wait_for_its_data() {
    let boxes = boxes();
    for way in WAYS {
        let name = format!("no wait, {} {}", way.0, way.1);
        caught(&name, 10, any(&boxes, way), |p| p.control = control::NO_WAIT);
    }
}

#[test]
fn a_flag_must_be_a_release() {
    let boxes = boxes();
    for way in [PUSH, PULL] {
        let name = format!("plain flag, {} {}", way.0, way.1);
        caught(&name, 50, any(&boxes, way), |p| p.control = control::PLAIN_FLAG);
    }
}

#[test]
fn a_flag_must_wait_for_all_threads_of_the_block() {
    let boxes = boxes();
    let two_threads = |seed| Plan { threads: 2, cpu_shape: false, ..any(&boxes, PUSH)(seed) };
    caught("no barrier", 100, two_threads, |p| p.control = control::NO_BARRIER);
}

#[test]
fn a_word_and_its_tag_must_travel_together() {
    caught("torn words", 50, any(&boxes(), LL), |p| p.control = control::TORN_WORDS);
}

#[test]
fn words_armed_in_host_memory_need_the_fence() {
    let boxes = boxes();
    let staged = |seed| {
        let mut p = Plan { host_staged: true, late_rearms: true, ..any(&boxes, SENTINEL)(seed) };
        // A buffer comes round every four steps.
        let first = p.steps.clone();
        p.steps.extend(first);
        p.rank_steps = vec![p.steps.len() as u32; p.n];
        p
    };
    caught("no fence after re-arm", 400, staged, |p| p.control = control::NO_FENCE);
    caught("two buffers for late re-arms", 200, staged, |p| p.late_rearms = false);
}

#[test]
fn words_cleared_in_host_memory_need_the_fence() {
    let boxes = boxes();
    let clearing = |seed: u64| Plan {
        host_staged: true,
        epoch: (1 << 30) - 2 - seed % 3,
        ..plain_plan(&boxes, any_algorithm(seed), LL, seed)
    };
    caught("no fence after clear", 200, clearing, |p| p.control = control::NO_FENCE);
}

#[test]
fn tags_that_may_recur_must_be_cleared() {
    let boxes = boxes();
    // Eight steps across a clear; the words hold the tag of a later step, as they would 2^32 steps after a large call.
    let planted = |seed: u64| {
        let mut p = plain_plan(&boxes, any_algorithm(seed), LL, seed);
        let first = p.steps.clone();
        p.steps.extend(first);
        p.rank_steps = vec![p.steps.len() as u32; p.n];
        p.epoch = (1 << 30) - 3;
        let tag = ((1u64 << 30) + 2) << 32;
        let geo = geometry(Protocol::Ll, &p.steps[0].tables[0], false);
        for rank in 0..p.n {
            for at in (0..2 * geo.half_bytes).step_by(8) {
                p.planted.push((rank, geo.data + at, tag | 0x4040_4040));
            }
        }
        p
    };
    caught("no clear", 60, planted, |p| p.control = control::NO_CLEAR);
}

/// One-shot over two ranks, where rank 0 stores its result over its input before it has sent that.
#[test]
fn an_input_must_be_sent_before_it_is_overwritten() {
    let pairs: Vec<Box_> = boxes().into_iter().filter(|b| b.n == 2).collect();
    for way in WAYS {
        let two = |seed| {
            let mut p = plain_plan(&pairs, Algorithm::OneShot, way, seed);
            p.steps.iter_mut().for_each(|s| s.in_place = true);
            p
        };
        let name = format!("in-place overwrite, {} {}", way.0, way.1);
        caught(&name, 3, two, |p| {
            for s in &mut p.steps {
                let t = &mut s.tables[0];
                t.phases = 2;
                t.phase[1] = pl_phase { folds: 0, ..t.phase[0] };
                t.phase[0].sends = 0;
            }
        });
    }
}

#[test]
fn a_slot_that_nobody_writes_is_noticed() {
    let boxes = boxes();
    for way in WAYS {
        let room = |seed| {
            let mut p = plain_plan(&boxes, any_algorithm(seed), way, seed);
            for t in p.steps.iter_mut().flat_map(|s| &mut s.tables) {
                (t.slots, t.flag_slots) = (t.slots + 1, t.flag_slots + 1);
            }
            for s in &mut p.steps {
                s.count = s.count.min(16 / s.dtype.size());
            }
            p
        };
        let name = format!("unwritten slot, {} {}", way.0, way.1);
        caught(&name, 3, room, |p| {
            for t in p.steps.iter_mut().flat_map(|s| &mut s.tables) {
                let (data, arrival) = (t.slots - 1, t.flag_slots - 1);
                for item in t.item.iter_mut().filter(|i| u32::from(i.from) < PL_MAX_RANKS) {
                    // Flags find their slot, so that only the data is missing.
                    if way.0 != Protocol::Flagged {
                        item.slot = arrival;
                    }
                    item.data = data;
                }
            }
        });
    }
}

/// Rank 0's input to all others; with `acknowledge` they answer. Without, nothing keeps rank 0 from running ahead.
fn broadcast(n: usize, pull: bool, acknowledge: bool) -> Vec<pl_table> {
    let fold = |item0, dst| pl_fold { item0, items: 1, piece: 0, dst: dst as u8, canonical: 1 };
    let item = |from: u32, slot| pl_item {
        slot,
        data: if pull { 0 } else { slot },
        from: from as u8,
        merge: 0,
        wire_f32: 0,
    };
    let send = |peer, slot| pl_send {
        peer,
        piece: 0,
        src: PL_SRC_RESULT as u8,
        slot,
        data: if pull { 0 } else { slot },
    };
    (0..n as u8)
        .map(|rank| {
            // SAFETY: plain integers, for which zero is a value.
            let mut t: pl_table = unsafe { std::mem::zeroed() };
            (t.n, t.rank, t.pull, t.pieces, t.cut_den) = (n as u8, rank, pull.into(), 1, 1);
            t.cut_num[1] = 1;
            (t.slots, t.flag_slots, t.fan_in) = (n as u8, n as u8, 1);
            t.phases = if acknowledge { 3 } else { 2 };
            let others = n as u8 - 1;
            if rank == 0 {
                t.item[0] = item(PL_FROM_INPUT, 0);
                t.fold[0] = fold(0, PL_DST_RESULT);
                t.phase[0].folds = 1;
                t.phase[1].sends = others;
                for peer in 1..=others {
                    t.send[usize::from(peer) - 1] = send(peer, 0);
                    t.item[usize::from(peer)] = item(peer.into(), peer);
                    t.fold[usize::from(peer)] = fold(peer.into(), PL_DST_PARTIAL);
                }
                t.phase[1].fold0 = 1;
                t.phase[2] =
                    pl_phase { send0: others, sends: 0, fold0: 1, folds: others, wire_f32: 0 };
            } else {
                t.item[0] = item(0, 0);
                t.fold[0] = fold(0, PL_DST_RESULT);
                t.phase[1].folds = 1;
                t.send[0] = send(0, rank);
                t.phase[2] = pl_phase { send0: 0, sends: 1, fold0: 1, folds: 0, wire_f32: 0 };
            }
            t
        })
        .collect()
}

#[test]
fn a_broadcast_must_be_acknowledged() {
    for way in WAYS {
        let boxes = boxes();
        let pull = way.1 == Direction::Pull;
        let acknowledged = |seed: u64| {
            let mut p = plain_plan(&boxes, Algorithm::OneShot, way, seed);
            let mut r = Random(mix(seed));
            let tables = broadcast(p.n, pull, true);
            p.steps = (0..6)
                .map(|_| {
                    let s = step(&mut r, &tables, way.0);
                    // A lone accumulator would be divided; that is no broadcast.
                    Step {
                        op: Op::Sum,
                        dtype: if s.dtype == DType::I32 { s.dtype } else { DType::F32 },
                        count: s.count.min(16),
                        ..s
                    }
                })
                .collect();
            p.rank_steps = vec![6; p.n];
            p.root = Some(0);
            p
        };
        let mut runner = Runner::new();
        for seed in 0..300 {
            assert_eq!(runner.run(&acknowledged(seed)).complaint(), None, "seed {seed}");
        }
        let name = format!("no acknowledgement, {} {}", way.0, way.1);
        caught(&name, 200, acknowledged, |p| {
            for s in &mut p.steps {
                s.tables = broadcast(p.n, pull, false);
            }
        });
    }
}

/// The schedules that the library uses, without the flags by which ranks tell each other that they have begun the step.
#[test]
fn broadcasts_need_their_flags() {
    let boxes = boxes();
    for way in [PUSH, PULL] {
        for in_parts in [false, true] {
            let broadcasts = |seed: u64| {
                let mut p = plain_plan(&boxes, Algorithm::OneShot, way, seed);
                let mut r = Random(mix(seed ^ 0xb7));
                let of = |b: &&Box_| p.name.ends_with(&format!("ranks {}", b.name));
                let b = boxes.iter().find(of).unwrap();
                let goal = Goal::Broadcast { root: 0 };
                p.steps = (0..6)
                    .map(|_| {
                        let mut s = step(&mut r, &p.steps[0].tables, way.0);
                        collective(b, &mut s, goal, in_parts, way.1, &mut r);
                        s.count = s.count.min(8);
                        s
                    })
                    .collect();
                p.rank_steps = vec![6; p.n];
                p
            };
            let name = format!("no flags, {} {}, in parts {in_parts}", way.0, way.1);
            caught(&name, 300, broadcasts, |p| {
                p.steps.iter_mut().for_each(|s| cases::flags::without_flags(&mut s.tables));
            });
        }
    }
}
