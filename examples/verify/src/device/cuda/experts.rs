//! MLPs: the one that every row goes through by two products, the routed ones by kernels that read each active expert once.

use super::launch::{Dispatch, Down, Gate, GateUp, INNER, OUTPUTS};
use super::ops::striding;
use super::{Buffer, Chosen, Cuda, Weight};
use crate::device::Experts;
use anyhow::{ensure, Result};

impl Cuda {
    pub(super) fn run_experts(
        &self,
        x: &Buffer,
        always: &Experts<Weight>,
        routed: Option<(&Experts<Weight>, &Chosen)>,
        out: &Buffer,
        rows: usize,
    ) -> Result<()> {
        let (scratch, kernels) = (&self.scratch, &self.gpu.kernels);
        let (x, out) = (x.memory.ptr(), out.memory.ptr());
        ensure!(rows <= self.limits.rows, "{rows} rows, but room for {}", self.limits.rows);
        self.product(x, &always.gate_up, scratch.factors.ptr(), rows, false)?;
        let width = always.width;
        let gate = Gate {
            blocks: striding(rows * width, 256),
            rows: rows as u32,
            width: width as u32,
            unused: 0,
            input: scratch.factors.ptr(),
            out: scratch.product.ptr(),
        };
        self.launch(&kernels.gate, &gate)?;
        self.product(scratch.product.ptr(), &always.down, out, rows, false)?;

        let Some((pool, routing)) = routed else { return Ok(()) };
        let (experts, kept, hidden) = (pool.count, self.dims.experts_per_token, self.dims.hidden);
        let pairs = rows * kept;
        let dispatch = Dispatch {
            blocks: 1,
            experts: experts as u32,
            pairs: pairs as u32,
            unused: 0,
            chosen: routing.experts.ptr(),
            slots: scratch.slots.ptr(),
            order: scratch.order.ptr(),
        };
        self.launch(&kernels.dispatch, &dispatch)?;
        let tiles = pool.width.div_ceil(INNER);
        let gate_up = GateUp {
            blocks: (pairs.min(experts) * tiles) as u32,
            tiles: tiles as u32,
            hidden: hidden as u32,
            width: pool.width as u32,
            kept: kept as u32,
            experts: experts as u32,
            x,
            weights: pool.gate_up.memory.ptr(),
            slots: scratch.slots.ptr(),
            order: scratch.order.ptr(),
            out: scratch.inner.ptr(),
        };
        self.launch(&kernels.gate_up, &gate_up)?;
        let tiles = hidden.div_ceil(OUTPUTS);
        let down = Down {
            blocks: (rows * tiles) as u32,
            tiles: tiles as u32,
            hidden: hidden as u32,
            width: pool.width as u32,
            kept: kept as u32,
            unused: 0,
            inner: scratch.inner.ptr(),
            weights: pool.down.memory.ptr(),
            chosen: routing.experts.ptr(),
            scales: routing.weights.ptr(),
            out,
        };
        self.launch(&kernels.down, &down)
    }
}
