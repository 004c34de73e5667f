//! Gated MLPs: each expert once over all rows that go to it.

use super::gemm::{multiply, View};
use super::Weight;
use crate::device::{Experts, Routed};
use anyhow::{ensure, Result};

/// Scratch of the experts, kept from call to call.
#[derive(Default)]
pub struct Scratch {
    rows: Vec<f32>,
    gate_up: Vec<f32>,
    hidden: Vec<f32>,
    out: Vec<f32>,
}

/// `out = expert(x)` for expert `expert` over `rows` rows of `width` elements.
fn apply(
    experts: &Experts<Weight>,
    expert: usize,
    x: &[f32],
    (rows, width): (usize, usize),
    gate_up: &mut Vec<f32>,
    hidden: &mut Vec<f32>,
    out: &mut [f32],
) -> Result<()> {
    let inner = experts.width;
    gate_up.resize(rows * 2 * inner, 0.0);
    let weight = &experts.gate_up.values[expert * 2 * inner * width..][..2 * inner * width];
    let (a, b) = (View::rows(x, width), View::transposed(weight, width));
    multiply((rows, width, 2 * inner), a, b, gate_up, 2 * inner)?;
    hidden.clear();
    for row in gate_up.chunks_exact(2 * inner) {
        let (gate, up) = row.split_at(inner);
        hidden.extend(gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u));
    }
    let weight = &experts.down.values[expert * width * inner..][..width * inner];
    let (a, b) = (View::rows(hidden, inner), View::transposed(weight, inner));
    multiply((rows, inner, width), a, b, out, width)
}

/// `out = always(x)`.
pub fn always(
    experts: &Experts<Weight>,
    x: &[f32],
    shape: (usize, usize),
    scratch: &mut Scratch,
    out: &mut [f32],
) -> Result<()> {
    apply(experts, 0, x, shape, &mut scratch.gate_up, &mut scratch.hidden, out)
}

/// Adds the weighted results of the experts that each row goes to. Experts come in ascending order, so that the sum of a
/// row depends on nothing but the row.
pub fn add_routed(
    experts: &Experts<Weight>,
    routed: &Routed,
    x: &[f32],
    (rows, width): (usize, usize),
    scratch: &mut Scratch,
    out: &mut [f32],
) -> Result<()> {
    let kept = routed.experts.len() / rows.max(1);
    let mut order: Vec<usize> = (0..rows * kept).collect();
    order.sort_by_key(|&at| routed.experts[at]);
    for group in order.chunk_by(|&a, &b| routed.experts[a] == routed.experts[b]) {
        let expert = routed.experts[group[0]] as usize;
        ensure!(expert < experts.count, "expert {expert} of {}", experts.count);
        scratch.rows.clear();
        for &at in group {
            scratch.rows.extend_from_slice(&x[at / kept * width..][..width]);
        }
        scratch.out.resize(group.len() * width, 0.0);
        apply(
            experts,
            expert,
            &scratch.rows,
            (group.len(), width),
            &mut scratch.gate_up,
            &mut scratch.hidden,
            &mut scratch.out,
        )?;
        for (&at, result) in group.iter().zip(scratch.out.chunks_exact(width)) {
            let weight = routed.weights[at];
            let row = &mut out[at / kept * width..][..width];
            for (sum, value) in row.iter_mut().zip(result) {
                *sum += weight * value;
            }
        }
    }
    Ok(())
}
