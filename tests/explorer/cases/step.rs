//! One collective of a plan: what it is drawn from, and where its input and output lie.

use super::boxes::Box_;
use super::layout::{geometry, MAX_PACKS};
use super::random::Random;
use peerlane::lane::{longest_piece, step_packs};
use peerlane::launch::*;
use peerlane::schedule::{build_goal, check_goal, Goal};
use peerlane::{DType, Direction, Op, Protocol};

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

pub(super) const EPS: f32 = 1e-3;
pub(super) const WEIGHT_BIAS: f32 = 0.25;

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
    pub(super) fn elements(&self, n: usize) -> (usize, usize) {
        let all = if self.in_parts { n * self.count } else { self.count };
        match self.goal {
            Goal::AllGather => (self.count, all),
            Goal::ReduceScatter => (all, self.count),
            Goal::AllReduce | Goal::Broadcast { .. } => (all, all),
        }
    }

    /// Bytes from where a buffer begins to where a rank's input and output do, if they are in one buffer.
    pub(super) fn shifts(&self, rank: usize) -> (usize, usize) {
        let own = rank * self.count * self.dtype.size();
        match self.goal {
            Goal::AllGather if self.in_place => (own, 0),
            Goal::ReduceScatter if self.in_place => (0, own),
            _ => (0, 0),
        }
    }

    /// Bytes from one part to the next, in the input and the output.
    pub(super) fn strides(&self) -> [u64; 2] {
        let part = (self.count * self.dtype.size()) as u64;
        match self.goal {
            Goal::AllGather => [0, part],
            Goal::ReduceScatter => [part, 0],
            Goal::AllReduce | Goal::Broadcast { .. } => [part, part],
        }
    }

    /// Where in the output the host has copied what a rank has itself.
    pub(super) fn own_copy(&self, rank: usize) -> Option<usize> {
        match self.goal {
            Goal::Broadcast { root } if usize::from(root) == rank => Some(0),
            Goal::AllGather => Some(rank * self.count * self.dtype.size()),
            _ => None,
        }
    }
}
