//! Cases for the explorer: boxes, plans drawn from a seed, and the verdict over what the ranks did.

#![allow(dead_code)]

#[path = "../common/flags.rs"]
pub mod flags;
#[path = "../common/rows.rs"]
mod rows;

use crate::common::partitions::{islands, shuffled};
use crate::common::world::mix;
use explorer::Outcome;
use half::bf16;
use peerlane::lane::{longest_piece, step_packs, step_rows, tile_packs, Fan, RowUnits, Unrolled};
use peerlane::launch::*;
use peerlane::schedule::{build, build_goal, check, check_goal, exists, Goal, Islands, Tree};
use peerlane::{Algorithm, DType, Direction, Op, Protocol};
use std::collections::BTreeMap;

pub type Way = (Protocol, Direction);
pub const WAYS: [Way; 4] = [
    (Protocol::Ll, Direction::Push),
    (Protocol::Sentinel, Direction::Push),
    (Protocol::Flagged, Direction::Push),
    (Protocol::Flagged, Direction::Pull),
];

const SLAB_LOG2: u32 = 18;
const SLAB: usize = 1 << SLAB_LOG2;
const HALF: u64 = 16 << 10;
const FLAGS: u64 = 4096;
const FLAGS_HALF: u64 = 8192;
const DATA: u64 = FLAGS + 2 * FLAGS_HALF;
/// Packs of the largest message.
const MAX_PACKS: u64 = 40;
/// Of `delta`: a slot, and where its two regions begin, behind those of the protocols.
const DELTA_SLOT: u64 = 512;
const DELTAS: u64 = DATA + 3 * 2 * HALF;
/// What a rank has sent, of all sends of both phases and both buffers, and what it has seen, each for two regions.
const DELTA_SENT: usize = 14 * 2 * DELTA_SLOT as usize;
const DELTA_SEEN: usize = 2 * HALF as usize;
/// Room for a message of so many packs, its offset and guard bytes.
const BUFFER: usize = 1024;
const GUARD: u8 = 0xa5;
pub const DEADLINE_NS: u64 = 1_000_000_000;

/// A partition of some ranks and all tables that exist for it.
pub struct Box_ {
    pub n: usize,
    pub name: String,
    pub islands: Islands,
    pub tree: Tree,
    pub tables: BTreeMap<(u32, u32), Vec<pl_table>>,
}

/// Two to five ranks in one to four islands, in order and mixed.
pub fn boxes() -> Vec<Box_> {
    let sizes: [&[usize]; 13] = [
        &[2],
        &[1, 1],
        &[3],
        &[2, 1],
        &[1, 1, 1],
        &[4],
        &[2, 2],
        &[1, 3],
        &[1, 1, 2],
        &[5],
        &[3, 2],
        &[1, 4],
        &[2, 1, 1, 1],
    ];
    let mut all = Vec::new();
    for sizes in sizes {
        let n = sizes.iter().sum();
        for ranks in [(0..n).collect(), shuffled(n, 77)] {
            let partition = islands(sizes, &ranks);
            let tree = Tree::new(&partition);
            let mut tables = BTreeMap::new();
            for &algorithm in Algorithm::ALL {
                if !exists(algorithm, &partition) {
                    continue;
                }
                let schedule = build(algorithm, &partition).unwrap();
                for direction in [Direction::Push, Direction::Pull] {
                    let made = schedule.tables(direction).unwrap();
                    check(&made, &tree).unwrap();
                    tables.insert((algorithm as u32, direction as u32), made);
                }
            }
            let name = partition.to_string();
            all.push(Box_ { n, name, islands: partition, tree, tables });
        }
    }
    all
}

impl Box_ {
    pub fn tables(&self, algorithm: Algorithm, direction: Direction) -> Option<&Vec<pl_table>> {
        self.tables.get(&(algorithm as u32, direction as u32))
    }
}

/// One collective, as every rank makes it.
#[derive(Clone)]
pub struct Step {
    pub tables: Vec<pl_table>,
    pub protocol: Protocol,
    pub dtype: DType,
    pub op: Op,
    pub count: usize,
    pub in_place: bool,
    pub shift: usize,
    pub chunk_packs: u32,
    pub seed: u64,
    /// Add + RMSNorm over rows; then the type is bf16 and the operation a sum.
    pub norm: Option<Norm>,
    /// What it is; of what is no all-reduce in one piece, `count` is that of a part.
    pub goal: Goal,
    pub in_parts: bool,
    /// By `delta`, in place of `sentinel`.
    pub delta: bool,
}

/// The fused operation's part of a step.
#[derive(Clone, Copy)]
pub struct Norm {
    pub width: usize,
    pub residual_in_place: bool,
}

const EPS: f32 = 1e-3;
const WEIGHT_BIAS: f32 = 0.25;

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

pub struct Random(pub u64);
impl Random {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = mix(self.0);
        (self.0 >> 11) % n
    }
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
    pub fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len() as u64) as usize]
    }
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
        rank_steps: vec![steps.len() as u32; b.n],
        steps,
        planted: Vec::new(),
        root: None,
        squares: 0,
        one_delta: false,
    }
}

pub fn step(r: &mut Random, tables: &[pl_table], protocol: Protocol) -> Step {
    let dtype = match r.below(3) {
        0 if protocol != Protocol::Sentinel => DType::I32,
        1 => DType::F32,
        _ => DType::BF16,
    };
    let op = if dtype != DType::I32 && r.one_in(3) { Op::Avg } else { Op::Sum };
    let geometry = geometry(protocol, &tables[0], true);
    let most = step_packs(&geometry, &tables[0], dtype, protocol).min(MAX_PACKS);
    let longest = if r.one_in(6) { most } else { most.min(10) };
    let packs = 1 + r.below(longest);
    let per_pack = 16 / dtype.size() as u64;
    // Unrolled kernels are for whole packs.
    let tail = if r.one_in(2) { per_pack } else { 1 + r.below(per_pack) };
    let count = ((packs - 1) * per_pack + tail) as usize;
    let least = longest_piece(&tables[0], packs).div_ceil(geometry.flag_chunks.into()).max(1);
    Step {
        tables: tables.to_vec(),
        protocol,
        dtype,
        op,
        count,
        in_place: r.one_in(2),
        shift: r.below(4) as usize,
        chunk_packs: (1 + r.below(8)).max(least) as u32,
        seed: r.0,
        norm: None,
        goal: Goal::AllReduce,
        in_parts: false,
        delta: false,
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

/// Makes another collective of a step.
pub fn collective(
    b: &Box_,
    step: &mut Step,
    goal: Goal,
    in_parts: bool,
    direction: Direction,
    r: &mut Random,
) {
    step.tables = build_goal(goal, in_parts, &b.islands).unwrap().tables(direction).unwrap();
    check_goal(&step.tables, &b.tree, goal).unwrap();
    let per_pack = 16 / step.dtype.size() as u64;
    let packs = 1 + r.below(6);
    step.count = ((packs - 1) * per_pack + 1 + r.below(per_pack)) as usize;
    step.chunk_packs = 1 + r.below(4) as u32;
    // The one that can raise a flag without data.
    step.protocol = Protocol::Flagged;
    (step.goal, step.in_parts) = (goal, in_parts);
    if goal != Goal::ReduceScatter {
        step.op = Op::Sum;
    }
}

impl Step {
    /// Elements of a rank's input, and of its output, of `n` ranks.
    fn elements(&self, n: usize) -> (usize, usize) {
        let all = if self.in_parts { n * self.count } else { self.count };
        match self.goal {
            Goal::AllGather => (self.count, all),
            Goal::ReduceScatter => (all, self.count),
            Goal::AllReduce | Goal::Broadcast { .. } => (all, all),
        }
    }

    /// Bytes from where a buffer begins to where a rank's input and output do, if they are in one buffer.
    fn shifts(&self, rank: usize) -> (usize, usize) {
        let own = rank * self.count * self.dtype.size();
        match self.goal {
            Goal::AllGather if self.in_place => (own, 0),
            Goal::ReduceScatter if self.in_place => (0, own),
            _ => (0, 0),
        }
    }

    /// Bytes from one part to the next, in the input and the output.
    fn strides(&self) -> [u64; 2] {
        let part = (self.count * self.dtype.size()) as u64;
        match self.goal {
            Goal::AllGather => [0, part],
            Goal::ReduceScatter => [part, 0],
            Goal::AllReduce | Goal::Broadcast { .. } => [part, part],
        }
    }

    /// Where in the output the host has copied what a rank has itself.
    fn own_copy(&self, rank: usize) -> Option<usize> {
        match self.goal {
            Goal::Broadcast { root } if usize::from(root) == rank => Some(0),
            Goal::AllGather => Some(rank * self.count * self.dtype.size()),
            _ => None,
        }
    }
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

/// `late_rearms`: as `Layout::with_late_rearms` makes it.
pub fn geometry(protocol: Protocol, table: &pl_table, late_rearms: bool) -> pl_geometry {
    let buffers = if protocol == Protocol::Sentinel && late_rearms { 4 } else { 2 };
    let half_bytes = 2 * HALF / buffers;
    pl_geometry {
        data: DATA + 2 * HALF * protocol as u64,
        half_bytes,
        slot_bytes: half_bytes / u64::from(table.slots) / 128 * 128,
        flags: FLAGS,
        flags_half_bytes: FLAGS_HALF,
        records: 0,
        calls: 1024,
        flag_chunks: (FLAGS_HALF / 64) as u32 / u32::from(table.flag_slots),
        ll: DATA + 2 * HALF * Protocol::Ll as u64,
        ll_half_bytes: HALF,
        rotation: buffers as u32 - 1,
    }
}

/// Trees over islands of different sizes have another form.
fn has_unrolled_form(table: &pl_table) -> bool {
    let mut step = *pl_unrolled_7::zeroed().step();
    (step.geo.slot_bytes, step.base) = (1, [4096; PL_MAX_RANKS as usize]);
    Unrolled::<pl_unrolled_7>::new(table, &step, Protocol::Sentinel).is_some_and(|f| f.is_short())
}

/// As `Layout::delta_geometry` makes it.
fn delta_geometry(table: &pl_table, one_region: bool) -> pl_geometry {
    let phases = u64::from(table.phases);
    // Slots of one size would have the same writers in both schedules.
    let (region, slots) = if one_region { (0, phases) } else { (phases - 1, 1) };
    assert!(u64::from(table.slots) * DELTA_SLOT <= HALF);
    pl_geometry {
        data: DELTAS + 2 * HALF * region,
        half_bytes: HALF,
        slot_bytes: DELTA_SLOT / slots,
        rotation: 1,
        ..geometry(Protocol::Sentinel, table, false)
    }
}

/// In place of a rank, for what is the same on all of them.
const RESIDUAL: usize = 100;
const GAMMA: usize = 101;

/// Element `i` of `rank`: values whose fp32 sums depend on the order, so that another tree gives other bits.
fn element(dtype: DType, rank: usize, seed: u64, i: usize) -> u32 {
    let h = mix(seed ^ (rank as u64) << 48 ^ i as u64);
    if h.is_multiple_of(31) && dtype != DType::I32 {
        return u32::MAX; // a NaN that sentinel must not send as it is
    }
    let v = ((h >> 8) as u16 as f32 - 30000.0) * [1e-3, 1.0, 37.7, 1e4][(h >> 30) as usize % 4];
    match dtype {
        DType::BF16 => bf16::from_f32(v).to_bits().into(),
        DType::I32 => h as u32,
        _ => v.to_bits(),
    }
}

/// What a fused step's outputs must be, given the sums: the normed rows and the residual.
fn normed(norm: &Norm, seed: u64, sums: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let up = |bits: u32| f32::from_bits(bits << 16);
    let down = |v: f32| if v.is_nan() { 0x7fff } else { u32::from(bf16::from_f32(v).to_bits()) };
    let residual: Vec<u32> = (sums.iter().enumerate())
        .map(|(i, &s)| down(up(s) + up(element(DType::BF16, RESIDUAL, seed, i))))
        .collect();
    let mut out = Vec::new();
    for row in residual.chunks(norm.width) {
        let squares: Vec<f32> = row.iter().map(|&r| up(r) * up(r)).collect();
        let mean = rows::over_lanes(&squares) / norm.width as f32;
        let scale = 1.0 / (mean + EPS).sqrt();
        for (i, &r) in row.iter().enumerate() {
            let gamma = up(element(DType::BF16, GAMMA, seed, i)) + WEIGHT_BIAS;
            out.push(down((up(r) * scale) * gamma));
        }
    }
    (out, residual)
}

fn reduced(plan: &Plan, step: &Step, inputs: &[u32]) -> u32 {
    fn float(tree: &Tree, of: &dyn Fn(u8) -> f32) -> f32 {
        match tree {
            Tree::Leaf(rank) => of(*rank),
            Tree::Sum(a, b) => float(a, of) + float(b, of),
        }
    }
    if step.dtype == DType::I32 {
        return match plan.root {
            Some(root) => inputs[usize::from(root)],
            None => inputs.iter().fold(0, |s, &v| s.wrapping_add(v)),
        };
    }
    let value = |rank: u8| match step.dtype {
        DType::BF16 => f32::from_bits(inputs[usize::from(rank)] << 16),
        _ => f32::from_bits(inputs[usize::from(rank)]),
    };
    let sum = plan.root.map_or_else(|| float(&plan.tree, &value), value);
    let v = if step.op == Op::Avg { sum / inputs.len() as f32 } else { sum };
    match (step.dtype, v.is_nan()) {
        (DType::BF16, true) => 0x7fff,
        (DType::BF16, false) => bf16::from_f32(v).to_bits().into(),
        (_, true) => 0x7fff_ffff,
        _ => v.to_bits(),
    }
}

/// What a failed step leaves in its output.
fn failed(dtype: DType) -> u32 {
    match dtype {
        DType::I32 => 0,
        DType::BF16 => 0x7fff,
        _ => 0x7fff_ffff,
    }
}

fn next_epoch(e: u64) -> u64 {
    if (e + 1) as u32 == 0 {
        e + 5
    } else {
        e + 1
    }
}

/// The epoch after so many steps.
pub fn epoch_after(start: u64, steps: u32) -> u64 {
    let first = if start as u32 == 0 { start + 2 } else { start };
    (0..steps).fold(first, |e, _| next_epoch(e))
}

/// How a case ended.
pub struct Verdict {
    pub outcome: Outcome,
    pub states: Vec<pl_state>,
    pub channels: Vec<pl_channel>,
    /// `records[at][of]`.
    pub records: Vec<Vec<pl_record>>,
    /// Steps that each rank finished.
    pub finished: Vec<u32>,
    /// A wrong bit in a finished step, or an output of a failed step that could be taken for a result.
    pub wrong: Option<String>,
}

impl Verdict {
    pub fn gave_up(&self) -> bool {
        self.states.iter().any(|s| s.abort != 0)
    }
    /// What is not as in a clean run.
    pub fn complaint(&self) -> Option<String> {
        if self.outcome.stuck != 0 {
            return Some("threads of a block left each other at a barrier".into());
        }
        self.wrong.clone().or_else(|| {
            let (rank, state) = self.states.iter().enumerate().find(|(_, s)| s.abort != 0)?;
            Some(format!("rank {rank} gave up: {:?}", state.record))
        })
    }
}

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

/// Groups of threads in a block that has a row by the short path: what the back end's ROW_PACKS leaves of a fan of 8.
const ROW_GROUPS: u64 = 2;

/// The step for the kernel with unrolled loops, or nothing where there is none for it. Mostly: ranks that walk their tables
/// must understand the others.
fn unrolled(
    args: &pl_args,
    step: &Step,
    (blocks, threads): (u32, u32),
    kernels: &mut Random,
) -> pl_unrolled_7 {
    let form = Unrolled::<pl_unrolled_7>::new(&args.table, &args.step, step.protocol);
    let per_pack = 16 / step.dtype.size();
    match form {
        None if step.delta => panic!("a step by delta has the form"),
        Some(mut form) if step.delta => {
            let packs = (step.count / per_pack) as u64;
            let args = *form.lay_out(&args.table, packs, Some(u64::from(blocks * threads)));
            assert_eq!(args.straight, 1, "on a GPU it is the only path");
            args
        }
        Some(mut form)
            if step.dtype != DType::I32
                && step.count.is_multiple_of(per_pack)
                && !kernels.one_in(5) =>
        {
            let packs = step.norm.map_or(step.count, |norm| norm.width) / per_pack;
            if step.norm.is_none() {
                // As the host does it: the short path where every thread has a pack of each piece at most.
                let plain = step.op == Op::Sum && args.step.check == 0;
                let all = plain.then_some(u64::from(blocks * threads));
                return *form.lay_out(&args.table, packs as u64, all);
            }
            // Ranks may hand their packs out in different ways; the last block may have none.
            let (rows, blocks, threads) = (args.step.rows, u64::from(blocks), u64::from(threads));
            let plain = args.step.check == 0;
            let spread =
                form.lay_out_rows(&args.table, packs as u64, rows, plain, |longest, short| {
                    if short && !kernels.one_in(5) {
                        let whole = args.table.phases == 2;
                        let block = if whole { longest } else { longest.min(threads) };
                        let row = longest.next_multiple_of(block);
                        let fits = block * if whole { ROW_GROUPS } else { 1 } <= threads;
                        if fits && rows * (row / block) <= blocks {
                            return RowUnits { block, row, straight: true };
                        }
                    }
                    let block = (rows * longest).div_ceil(blocks) + kernels.below(3).min(1);
                    RowUnits { block, row: longest, straight: false }
                });
            spread.copied().unwrap_or_else(pl_unrolled_7::zeroed)
        }
        _ => pl_unrolled_7::zeroed(),
    }
}

/// Memory that cases are run in, one per thread.
pub struct Runner {
    slabs: Vec<Line>,
    buffers: Vec<Line>,
    partial: Vec<Line>,
    squares: Vec<u64>,
    /// Of `delta`, by rank: what was sent in both regions, then what was seen.
    remembered: Vec<u32>,
    buffer_bytes: usize,
    args: Vec<pl_args>,
    unrolled: Vec<pl_unrolled_7>,
    /// Steps of a rank, of all cases so far, that took the kernels' short path.
    pub short_steps: u64,
    /// Of them, by `delta`.
    pub delta_steps: u64,
    /// Of these, steps of rows, in one phase and in two.
    pub short_rows: [u64; 2],
}

impl Runner {
    pub fn new() -> Self {
        Runner {
            slabs: vec![Line([0; 64]); 5 * SLAB / 64],
            buffers: Vec::new(),
            partial: vec![Line([0; 64]); 5 * MAX_PACKS as usize * 32 / 64],
            squares: Vec::new(),
            remembered: Vec::new(),
            buffer_bytes: BUFFER,
            args: Vec::new(),
            unrolled: Vec::new(),
            short_steps: 0,
            delta_steps: 0,
            short_rows: [0; 2],
        }
    }

    fn slab(&mut self, rank: usize) -> &mut [u8] {
        // SAFETY: lines are bytes, and there are five slabs of them.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.slabs.as_mut_ptr().cast::<u8>().add(rank * SLAB),
                SLAB,
            )
        }
    }

    fn buffer(&mut self, index: usize) -> &mut [u8] {
        // SAFETY: lines are bytes, and `run` has made room for all buffers.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.buffers.as_mut_ptr().cast::<u8>().add(index * self.buffer_bytes),
                self.buffer_bytes,
            )
        }
    }

    /// Runs a plan and compares every bit.
    pub fn run(&mut self, plan: &Plan) -> Verdict {
        let n = plan.n;
        for rank in 0..n {
            let slab = self.slab(rank);
            slab[..DATA as usize].fill(0);
            for &protocol in Protocol::ALL {
                let at = (DATA + 2 * HALF * protocol as u64) as usize;
                // What a flag announces may have any bytes before.
                let fill = [0, 0xff, 0x5a][protocol as usize];
                slab[at..at + 2 * HALF as usize].fill(fill);
            }
            slab[DELTAS as usize..][..4 * HALF as usize].fill(0);
        }
        self.remembered.clear();
        self.remembered.resize(n * 2 * (DELTA_SENT + DELTA_SEEN) / 4, 0);
        // Words in a half for the squares of a step's rows, each of which may have a neighbour that is none.
        let words = plan.steps.iter().map(|s| s.count / 8 + s.count / 8).max().unwrap_or(0);
        self.squares.clear();
        self.squares.resize(2 * n * words, plan.squares);
        for &(rank, offset, value) in &plan.planted {
            self.slab(rank)[offset as usize..][..8].copy_from_slice(&value.to_le_bytes());
        }
        // SAFETY: plain integers and raw pointers, for which zero is a value.
        let (zero, state): (pl_args, pl_state) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let channel = pl_channel::idle_at(plan.epoch);
        let mut states = vec![state; n];
        let mut channels = vec![channel; n];
        let count = plan.steps.len() * n;
        // Of every step and rank: input, output, residual, residual_out, gamma.
        let bytes = |s: &Step| s.elements(n).0.max(s.elements(n).1) * s.dtype.size() + 64;
        let largest = plan.steps.iter().map(bytes).max().unwrap_or(0);
        self.buffer_bytes = largest.next_multiple_of(64).max(BUFFER);
        self.buffers.resize(5 * count * self.buffer_bytes / 64, Line([0; 64]));
        self.args.clear();
        self.args.resize(count, zero);
        self.unrolled.resize(count, pl_unrolled_7::zeroed());
        let mut kernels = Random(mix(plan.seed ^ 0x0a11));
        let inputs: Vec<Vec<Vec<u32>>> = plan
            .steps
            .iter()
            .map(|s| {
                (0..n)
                    .map(|rank| {
                        (0..s.elements(n).0).map(|i| element(s.dtype, rank, s.seed, i)).collect()
                    })
                    .collect()
            })
            .collect();
        for (k, step) in plan.steps.iter().enumerate() {
            let size = step.dtype.size();
            let at = step.shift * size;
            for rank in 0..n {
                let index = 5 * (k * n + rank);
                (index..index + 5).for_each(|i| self.buffer(i).fill(GUARD));
                let input = index + usize::from(step.in_place);
                let (input_shift, output_shift) = step.shifts(rank);
                let own_copy = step.own_copy(rank).filter(|_| !step.in_place);
                for (i, v) in inputs[k][rank].iter().enumerate() {
                    let word = v.to_le_bytes();
                    let places = [Some((input, input_shift)), own_copy.map(|to| (index + 1, to))];
                    for (buffer, shift) in places.into_iter().flatten() {
                        self.buffer(buffer)[at + shift + i * size..][..size]
                            .copy_from_slice(&word[..size]);
                    }
                }
                let residual_out = step.norm.map(|norm| {
                    for (buffer, what, count) in
                        [(index + 2, RESIDUAL, step.count), (index + 4, GAMMA, norm.width)]
                    {
                        for i in 0..count {
                            let bits = element(DType::BF16, what, step.seed, i) as u16;
                            self.buffer(buffer)[at + i * 2..][..2]
                                .copy_from_slice(&bits.to_le_bytes());
                        }
                    }
                    index + if norm.residual_in_place { 2 } else { 3 }
                });
                let mut address = |i| self.buffer(i).as_mut_ptr().wrapping_add(at);
                let (residual, gamma) = (address(index + 2), address(index + 4));
                let residual_out = residual_out.map(&mut address);
                let input = self.buffer(input).as_mut_ptr().wrapping_add(at + input_shift);
                let output = self.buffer(index + 1).as_mut_ptr().wrapping_add(at + output_shift);
                let mut base = [0; 16];
                for (r, b) in base.iter_mut().enumerate().take(n) {
                    *b = self.slab(r).as_ptr() as u64;
                }
                let mut geo = geometry(step.protocol, &step.tables[rank], plan.late_rearms);
                let mut remembered = None;
                if step.delta {
                    geo = delta_geometry(&step.tables[rank], plan.one_delta);
                    let region = ((geo.data - DELTAS) / (2 * HALF)) as usize;
                    let each = 2 * (DELTA_SENT + DELTA_SEEN);
                    let own = self.remembered.as_mut_ptr().cast::<u8>().wrapping_add(rank * each);
                    let seen = own.wrapping_add(2 * DELTA_SENT + region * DELTA_SEEN) as u64;
                    let slab = base[rank] + geo.data;
                    let sent = own.wrapping_add(region * DELTA_SENT);
                    remembered = Some((sent, seen.wrapping_sub(slab)));
                    self.delta_steps += 1;
                }
                if plan.one_half {
                    (geo.half_bytes, geo.flags_half_bytes) = (0, 0);
                    geo.rotation = if step.delta { 0 } else { geo.rotation };
                }
                let partial = self.partial.as_mut_ptr().cast::<u8>();
                let squares = self.squares.as_mut_ptr().wrapping_add(2 * rank * words);
                let args = &mut self.args[k * n + rank];
                args.table = step.tables[rank];
                (args.step.n, args.step.rank) = (n as u32, rank as u32);
                args.step.geo = geo;
                args.step.base = base;
                args.step.state = &mut states[rank];
                args.step.channel = &mut channels[rank];
                args.step.input = input.cast();
                args.step.output = output.cast();
                args.step.partial = partial.wrapping_add(rank * MAX_PACKS as usize * 32).cast();
                args.step.squares = squares.cast();
                args.step.squares_half_bytes = 8 * words as u64;
                args.step.count = step.count as u64;
                args.step.deadline_ns = DEADLINE_NS;
                args.step.launch = k as u64 + 1;
                args.step.call = k as u64;
                args.step.dtype = step.dtype as u32;
                args.step.op = step.op as u32;
                args.step.proto = step.protocol as u32;
                args.step.chunk_packs = step.chunk_packs;
                args.step.check = plan.check.into();
                args.step.host_staged = plan.host_staged.into();
                args.step.parts = step.in_parts.into();
                if let Some((sent, seen_shift)) = remembered {
                    (args.step.sent, args.step.seen_shift) = (sent.cast(), seen_shift);
                }
                [args.step.input_part, args.step.output_part] = step.strides();
                if let (Some(norm), Some(residual_out)) = (step.norm, residual_out) {
                    args.step.rows = (step.count / norm.width) as u64;
                    args.step.width = norm.width as u64;
                    args.step.residual = residual.cast();
                    args.step.gamma = gamma.cast();
                    args.step.residual_out = residual_out.cast();
                    (args.step.eps, args.step.weight_bias) = (EPS, WEIGHT_BIAS);
                }
                let form = unrolled(args, step, (plan.blocks, plan.threads), &mut kernels);
                self.short_steps += u64::from(form.straight);
                if form.straight == 1 && form.step.rows != 0 {
                    self.short_rows[usize::from(form.phases) - 1] += 1;
                }
                self.unrolled[k * n + rank] = form;
            }
        }
        let mut rank_steps = [0; 16];
        rank_steps[..n].copy_from_slice(&plan.rank_steps);
        let (mirror_from, mirror_to) = plan.mirror.unwrap_or((0, 0));
        let case = explorer::Case {
            seed: plan.seed,
            n: n as u32,
            steps: plan.steps.len() as u32,
            blocks: plan.blocks,
            threads: plan.threads,
            cpu_shape: plan.cpu_shape.into(),
            control: plan.control,
            host_staged: plan.host_staged.into(),
            drop_at: plan.drop_at,
            mirror_from,
            mirror_to,
            rank_steps,
            arena: self.slabs.as_mut_ptr().cast(),
            slab_log2: SLAB_LOG2,
            args: self.args.as_ptr().cast(),
            unrolled: self.unrolled.as_ptr().cast(),
        };
        // SAFETY: everything that `args` names lives here, is large enough for the counts, and is this thread's own.
        let outcome = unsafe { explorer::run(&case) };
        let records = (0..n)
            .map(|at| {
                // SAFETY: records start each slab, and are plain integers.
                (0..n)
                    .map(|of| unsafe { self.slab(at).as_ptr().cast::<pl_record>().add(of).read() })
                    .collect()
            })
            .collect();
        let finished: Vec<u32> = (0..n)
            .map(|rank| {
                let steps = 0..=plan.steps.len() as u32;
                let epoch = channels[rank].epoch();
                steps.into_iter().find(|&k| epoch_after(plan.epoch, k) == epoch).unwrap_or(0)
            })
            .collect();
        let wrong = self.first_wrong(plan, &inputs, &states, &channels, &finished);
        Verdict { outcome, states, channels, records, finished, wrong }
    }

    fn first_wrong(
        &mut self,
        plan: &Plan,
        inputs: &[Vec<Vec<u32>>],
        states: &[pl_state],
        channels: &[pl_channel],
        finished: &[u32],
    ) -> Option<String> {
        let n = plan.n;
        for (k, step) in plan.steps.iter().enumerate() {
            let size = step.dtype.size();
            let at = step.shift * size;
            let mut column = vec![0; n];
            let moved = !matches!(step.goal, Goal::AllReduce | Goal::ReduceScatter);
            let summed = if moved { 0 } else { step.elements(n).0 };
            let want: Vec<u32> = (0..summed)
                .map(|i| {
                    column.iter_mut().zip(&inputs[k]).for_each(|(c, v)| *c = v[i]);
                    reduced(plan, step, &column)
                })
                .collect();
            let (want, residual) = match &step.norm {
                None => (want, Vec::new()),
                Some(norm) => normed(norm, step.seed, &want),
            };
            for rank in 0..n {
                if k as u32 >= plan.rank_steps[rank] {
                    continue;
                }
                let done = states[rank].abort == 0 || (k as u32) < finished[rank];
                if !done && step.goal != Goal::AllReduce {
                    continue;
                }
                let part = rank * step.count..(rank + 1) * step.count;
                let want = match step.goal {
                    Goal::AllReduce => want.clone(),
                    Goal::Broadcast { root } => inputs[k][usize::from(root)].clone(),
                    Goal::AllGather => inputs[k].concat(),
                    Goal::ReduceScatter if step.in_place => {
                        let mut all = inputs[k][rank].clone();
                        all[part.clone()].copy_from_slice(&want[part]);
                        all
                    }
                    Goal::ReduceScatter => want[part].to_vec(),
                };
                let place = format!(
                    "step {k} ({:?}, {} of {}{}, {} {}{}), rank {rank}",
                    step.goal,
                    step.count,
                    step.dtype,
                    step.norm.map_or(String::new(), |norm| format!(" in rows of {}", norm.width)),
                    step.protocol,
                    if step.tables[0].pull != 0 { "pull" } else { "push" },
                    if step.in_place { ", in place" } else { "" }
                );
                let index = 5 * (k * n + rank);
                let in_place = step.norm.is_some_and(|norm| norm.residual_in_place);
                let residual_out = index + if in_place { 2 } else { 3 };
                for (buffer, want) in [(index + 1, &want), (residual_out, &residual)] {
                    let output = self.buffer(buffer);
                    for (i, &w) in want.iter().enumerate() {
                        let mut word = [0; 4];
                        word[..size].copy_from_slice(&output[at + i * size..][..size]);
                        let got = u32::from_le_bytes(word);
                        // A NaN of 16 bits was drawn as 32 ones.
                        let w = if done {
                            w & (u32::MAX >> (32 - 8 * size))
                        } else {
                            failed(step.dtype)
                        };
                        if got != w {
                            let which =
                                if buffer == residual_out { " of the residual" } else { "" };
                            return Some(format!(
                                "{place}: element {i}{which} is {got:#x}, not {w:#x}"
                            ));
                        }
                    }
                    let end = at + want.len() * size;
                    let mut outside = output[..at].iter().chain(&output[end..]);
                    if !want.is_empty() && outside.any(|&b| b != GUARD) {
                        return Some(format!("{place}: wrote outside of its output"));
                    }
                }
            }
        }
        for (rank, c) in channels.iter().enumerate() {
            let steps = plan.rank_steps[rank];
            if states[rank].abort == 0 && steps > 0 {
                let want = (epoch_after(plan.epoch, steps), 0, 0);
                let got = (c.epoch(), c.launch(), c.entered);
                if got != want {
                    return Some(format!("rank {rank}: channel is {got:x?}, not {want:x?}"));
                }
            }
        }
        None
    }
}
