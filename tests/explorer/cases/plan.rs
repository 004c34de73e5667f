//! Plans: what the explorer is asked to run, drawn from a seed.

use super::boxes::Box_;
use super::layout::{geometry, MAX_PACKS};
use super::random::Random;
use super::step::{collective, step, Norm, Step};
use super::unrolled::has_unrolled_form;
use super::{Way, WAYS};
use crate::common::world::mix;
use peerlane::lane::{step_packs, step_rows, tile_packs};
use peerlane::schedule::{Goal, Tree};
use peerlane::{Algorithm, DType, Direction, Op, Protocol};

/// What the explorer is asked to run.
#[derive(Clone)]
pub struct Plan {
    pub seed: u64,
    pub name: String,
    pub n: usize,
    pub tree: Tree,
    pub steps: Vec<Step>,
    pub epoch: u64,
    pub blocks: u32,
    pub threads: u32,
    pub cpu_shape: bool,
    pub host_staged: bool,
    /// Four buffers for `sentinel` instead of two.
    pub late_rearms: bool,
    pub check: bool,
    pub control: u32,
    pub one_half: bool,
    pub drop_at: u32,
    pub mirror: Option<(u32, u32)>,
    /// At which decision of the explorer a rank's host aborts.
    pub abort: Option<(u32, u32)>,
    pub rank_steps: Vec<u32>,
    /// Words of the slabs before the first step: (rank, offset, value).
    pub planted: Vec<(usize, u64, u64)>,
    /// Whose input is the result, where the steps are broadcasts.
    pub root: Option<u8>,
    /// What all words hold through which blocks tell each other their squares, before the first step.
    pub squares: u64,
    /// Both schedules that go by `delta` have the same region.
    pub one_delta: bool,
}

/// A plan whose steps are mostly of this schedule and way, the others of any that the box has.
pub fn plan(boxes: &[Box_], algorithm: Algorithm, way: Way, seed: u64) -> Plan {
    draw(boxes, algorithm, way, seed, 3)
}

/// A plan of this schedule and way alone.
pub fn plain_plan(boxes: &[Box_], algorithm: Algorithm, way: Way, seed: u64) -> Plan {
    draw(boxes, algorithm, way, seed, 1)
}

/// Every step is, with a chance of `1 - 1/mix_in`, of this schedule and way.
fn draw(boxes: &[Box_], algorithm: Algorithm, way: Way, seed: u64, mix_in: u64) -> Plan {
    let mut r = Random(mix(
        seed ^ ((algorithm as u64) << 56 | (way.0 as u64) << 52 | (way.1 as u64) << 50)
    ));
    let fitting: Vec<&Box_> =
        boxes.iter().filter(|b| b.tables(algorithm, way.1).is_some()).collect();
    let b = *r.of(&fitting);
    let (blocks, threads, cpu_shape) = *r.of(&[
        (1, 1, true),
        (1, 1, true),
        (1, 1, false),
        (1, 2, false),
        (1, 4, false),
        (2, 1, false),
        (2, 2, false),
    ]);
    let epochs =
        [1, 1, 0, 2, (1 << 30) - 4, (1 << 32) - 5, (1 << 32) - 2, (1 << 31) - 3, (5 << 30) - 3];
    let mut steps = Vec::new();
    for k in 0..4 + r.below(3) {
        let main = k < 2 || mix_in == 1 || !r.one_in(mix_in);
        let (tables, protocol) = if main {
            (b.tables(algorithm, way.1).unwrap(), way.0)
        } else {
            let other = *r.of(&WAYS);
            let with: Vec<_> = b.tables.iter().filter(|(k, _)| k.1 == other.1 as u32).collect();
            (r.of(&with).1, other.0)
        };
        steps.push(step(&mut r, tables, protocol));
    }
    let host_staged = r.one_in(3);
    Plan {
        seed,
        name: format!("{algorithm} {} {}, ranks {}", way.0, way.1, b.name),
        n: b.n,
        tree: b.tree.clone(),
        epoch: *r.of(&epochs),
        blocks,
        threads,
        cpu_shape,
        host_staged,
        late_rearms: host_staged,
        check: r.one_in(8),
        control: 0,
        one_half: false,
        drop_at: 0,
        mirror: None,
        abort: None,
        rank_steps: vec![steps.len() as u32; b.n],
        steps,
        planted: Vec::new(),
        root: None,
        squares: 0,
        one_delta: false,
    }
}

/// Steps by `delta`, of `one_shot` and `two_shot`, between steps of any kind. Words come again: what was sent last is often sent
/// once more.
pub fn delta_plan(boxes: &[Box_], seed: u64) -> Plan {
    let mut plan = plan(boxes, Algorithm::OneShot, WAYS[1], seed);
    let mut r = Random(mix(seed ^ 0x0de1));
    let b = boxes.iter().find(|b| plan.name.ends_with(&format!("ranks {}", b.name))).unwrap();
    plan.name = format!("delta, ranks {}", b.name);
    (plan.cpu_shape, plan.check) = (false, false);
    let threads = u64::from(plan.blocks * plan.threads);
    let seeds = [r.below(1 << 32), r.below(1 << 32)];
    let first = plan.steps.clone();
    plan.steps.extend(first);
    plan.rank_steps = vec![plan.steps.len() as u32; plan.n];
    for kept in &mut plan.steps {
        if r.one_in(4) {
            continue;
        }
        let algorithm = *r.of(&[Algorithm::OneShot, Algorithm::OneShot, Algorithm::TwoShot]);
        let tables = b.tables(algorithm, Direction::Push).unwrap();
        if !tables.iter().all(has_unrolled_form) {
            continue;
        }
        let mut step = step(&mut r, tables, Protocol::Sentinel);
        (step.op, step.delta, step.seed) = (Op::Sum, true, *r.of(&seeds));
        let packs = 1 + r.below(tile_packs(&tables[0], threads).max(1));
        step.count = packs as usize * 16 / step.dtype.size();
        *kept = step;
    }
    plan
}

/// A plan whose steps are of any collective, one after the other on one channel, between all-reduces of any schedule.
pub fn mixed_plan(boxes: &[Box_], way: Way, seed: u64) -> Plan {
    let mut plan = plan(boxes, Algorithm::OneShot, way, seed);
    let mut r = Random(mix(seed ^ 0x0b0e));
    let b = boxes.iter().find(|b| plan.name.ends_with(&format!("ranks {}", b.name))).unwrap();
    plan.name = format!("any collective, {} {}, ranks {}", way.0, way.1, b.name);
    for step in &mut plan.steps {
        let root = r.below(b.n as u64) as u8;
        let (goal, in_parts) = match r.below(5) {
            0 => continue,
            1 => (Goal::Broadcast { root }, false),
            2 => (Goal::Broadcast { root }, true),
            3 => (Goal::AllGather, true),
            _ => (Goal::ReduceScatter, true),
        };
        collective(b, step, goal, in_parts, way.1, &mut r);
    }
    plan
}

/// A plan of this schedule and way in which every other step or so is fused.
pub fn fused_plan(boxes: &[Box_], algorithm: Algorithm, way: Way, seed: u64) -> Plan {
    let mut plan = plain_plan(boxes, algorithm, way, seed);
    let mut r = Random(mix(seed ^ 0xf05ed));
    for (k, step) in plan.steps.iter_mut().enumerate() {
        if k != 1 && r.one_in(3) {
            continue;
        }
        let geometry = geometry(step.protocol, &step.tables[0], true);
        let row_packs = 1 + r.below(6);
        let most = step_rows(&geometry, &step.tables[0], DType::BF16, step.protocol, row_packs);
        // Half of them so few that a block may have a row.
        let few = if r.one_in(2) { plan.blocks.into() } else { 7 };
        let rows = 1 + r.below(most.min(MAX_PACKS / row_packs).min(few));
        let width = row_packs as usize * 8;
        (step.dtype, step.op, step.count) = (DType::BF16, Op::Sum, rows as usize * width);
        step.norm = Some(Norm { width, residual_in_place: r.one_in(2) });
    }
    plan
}

/// The same by `one_shot` and `sentinel` with one row a step, short enough for two blocks with a thread for each pack: they may be a
/// cluster.
pub fn cluster_plan(boxes: &[Box_], seed: u64) -> Plan {
    let mut plan = fused_plan(boxes, Algorithm::OneShot, WAYS[1], seed);
    let mut r = Random(mix(seed ^ 0xc105));
    (plan.blocks, plan.threads) = (2, 1 + r.below(2) as u32);
    (plan.cpu_shape, plan.check) = (false, false);
    for step in &mut plan.steps {
        let Some(norm) = &mut step.norm else { continue };
        norm.width = norm.width.min(8 * 2 * plan.threads as usize);
        step.count = norm.width;
    }
    plan
}

/// The same with one row a step, of more packs than there are lanes, in two blocks.
pub fn wide_plan(boxes: &[Box_], algorithm: Algorithm, way: Way, seed: u64) -> Plan {
    let mut plan = fused_plan(boxes, algorithm, way, seed);
    let mut r = Random(mix(seed ^ 0x81de));
    (plan.blocks, plan.threads, plan.cpu_shape) = (2, 1 + seed as u32 % 2, false);
    (plan.host_staged, plan.late_rearms) = (false, false);
    plan.steps.truncate(3);
    plan.rank_steps = vec![3; plan.n];
    for step in plan.steps.iter_mut().filter(|step| step.norm.is_some()) {
        let geometry = geometry(step.protocol, &step.tables[0], false);
        let most = step_packs(&geometry, &step.tables[0], DType::BF16, step.protocol);
        let width = 8 * (257 + r.below(most.saturating_sub(256).max(1))).min(most) as usize;
        step.count = width;
        step.norm = Some(Norm { width, residual_in_place: r.one_in(2) });
    }
    plan
}
