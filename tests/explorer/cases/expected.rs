//! The data of a step, and the bits that must come of it.

use super::plan::Plan;
use super::rows;
use super::step::{Norm, Step, EPS, WEIGHT_BIAS};
use crate::common::world::mix;
use half::bf16;
use peerlane::schedule::Tree;
use peerlane::{DType, Op};

/// In place of a rank, for what is the same on all of them.
pub(super) const RESIDUAL: usize = 100;
pub(super) const GAMMA: usize = 101;

/// Element `i` of `rank`: values whose fp32 sums depend on the order, so that another tree gives other bits.
pub(super) fn element(dtype: DType, rank: usize, seed: u64, i: usize) -> u32 {
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
pub(super) fn normed(norm: &Norm, seed: u64, sums: &[u32]) -> (Vec<u32>, Vec<u32>) {
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

pub(super) fn reduced(plan: &Plan, step: &Step, inputs: &[u32]) -> u32 {
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
pub(super) fn failed(dtype: DType) -> u32 {
    match dtype {
        DType::I32 => 0,
        DType::BF16 => 0x7fff,
        _ => 0x7fff_ffff,
    }
}
