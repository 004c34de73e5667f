//! MLPs: the one that every row goes through, and beside it the routed ones; each active expert's weights are read once.

use super::launch::{Dispatch, Down, GateUp, FEW_ROWS, INNER, OUTPUTS};
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
        let (scratch, kernels, dims) = (&self.scratch, &self.gpu.kernels, &self.dims);
        ensure!(rows <= self.limits.rows, "{rows} rows, but room for {}", self.limits.rows);
        let pairs = routed.map_or(0, |_| rows * dims.experts_per_token);
        let few = rows <= FEW_ROWS;
        let mut gate_up = GateUp {
            rows: rows as u32,
            hidden: dims.hidden as u32,
            pairs: pairs as u32,
            kept: dims.experts_per_token as u32,
            always_width: always.width as u32,
            x: x.memory.ptr(),
            always: always.gate_up.memory.ptr(),
            product: scratch.product.ptr(),
            ..GateUp::default()
        };
        let mut down = Down {
            blocks: (rows * dims.hidden.div_ceil(OUTPUTS)) as u32,
            rows: rows as u32,
            hidden: dims.hidden as u32,
            always_width: always.width as u32,
            product: scratch.product.ptr(),
            always: always.down.memory.ptr(),
            out: out.memory.ptr(),
            ..Down::default()
        };
        let mut blocks = always.width.div_ceil(INNER);
        if let Some((pool, routing)) = routed {
            blocks += pairs.min(if few { pairs } else { pool.count }) * pool.width.div_ceil(INNER);
            gate_up.experts = pool.count as u32;
            gate_up.width = pool.width as u32;
            gate_up.weights = pool.gate_up.memory.ptr();
            gate_up.chosen = routing.experts.ptr();
            gate_up.inner = scratch.inner.ptr();
            down.kept = gate_up.kept;
            down.width = gate_up.width;
            down.inner = gate_up.inner;
            down.weights = pool.down.memory.ptr();
            down.chosen = gate_up.chosen;
            down.scales = routing.weights.ptr();
        }
        // At few rows a block finds the rows of its expert by itself, which is less than a launch.
        if routed.is_some() && !few {
            gate_up.slots = scratch.slots.ptr();
            gate_up.order = scratch.order.ptr();
            let dispatch = Dispatch {
                blocks: 1,
                experts: gate_up.experts,
                pairs: gate_up.pairs,
                unused: 0,
                chosen: gate_up.chosen,
                slots: gate_up.slots,
                order: gate_up.order,
            };
            self.launch(&kernels.dispatch, &dispatch)?;
        }
        gate_up.blocks = blocks as u32;
        self.launch(&kernels.gate_up, &gate_up)?;
        self.launch(&kernels.down, &down)
    }
}
