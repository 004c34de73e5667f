//! Products of few rows: by kernels that read each weight once and take one launch, where cuBLAS may take several.

use super::launch::{
    FewRows, QueryUp, Route, Router, TurnOver, FEW_ROWS, NARROW_STRIP, ROUTER_EXPERTS,
    ROUTER_PARTS, STRIP,
};
use super::ops::striding;
use super::rows::DeviceBatch;
use super::{Buffer, Chosen, Cuda, Weight};
use anyhow::{ensure, Result};
use peerlane::device::cuda::memory;

/// Warps of a block.
const WARPS: usize = 8;
/// What a warp multiplies at a time, and least so many of it that are worth a warp.
const STEP: usize = 32;
const LEAST_STEPS: usize = 4;
/// From so many columns on there are blocks enough if a block takes twice the columns.
const MANY_COLUMNS: usize = 4096;

/// Whether the kernels of few rows take a product with this inner dimension.
pub fn few(rows: usize, inner: usize) -> bool {
    rows <= FEW_ROWS && inner.is_multiple_of(8)
}

/// Warps that share the inner dimension of the same columns.
pub fn splits(inner: usize, columns: usize) -> usize {
    let most = if columns >= MANY_COLUMNS { WARPS / 2 } else { WARPS };
    let wanted = (inner / STEP / LEAST_STEPS).max(1);
    // The power of two below.
    (1 << wanted.ilog2()).min(most)
}

/// Blocks of a product.
pub fn blocks_of(columns: usize, splits: usize) -> usize {
    columns.div_ceil(WARPS / splits * STRIP)
}

/// The same where strips are narrow.
fn narrow_blocks_of(columns: usize, splits: usize) -> usize {
    columns.div_ceil(WARPS / splits * NARROW_STRIP)
}

impl Cuda {
    /// `out = x w^T`
    pub(super) fn product_of_few(
        &self,
        x: &Buffer,
        w: &Weight,
        out: &Buffer,
        rows: usize,
    ) -> Result<()> {
        let splits = splits(w.columns, w.rows);
        let arguments = FewRows {
            blocks: blocks_of(w.rows, splits) as u32,
            rows: rows as u32,
            inner: w.columns as u32,
            columns: w.rows as u32,
            splits: splits as u32,
            wide: out.wide.into(),
            x: x.memory.ptr(),
            weights: w.memory.ptr(),
            out: out.memory.ptr(),
        };
        self.launch(&self.gpu.kernels.few_rows, &arguments)
    }

    /// Heads' queries, and the batch's rows of the cache, of rows before the norms of their latents.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn queries_of_few(
        &self,
        fused: &Buffer,
        (query_gamma, key_gamma): (&Weight, &Weight),
        eps: f32,
        batch: &DeviceBatch,
        cache: &Buffer,
        w: &Weight,
        q: &Buffer,
    ) -> Result<()> {
        let dims = &self.dims;
        ensure!(w.columns == dims.query_latent, "queries of {} elements", w.columns);
        self.check(q, batch.rows * w.rows)?;
        let splits = splits(w.columns, w.rows);
        let arguments = QueryUp {
            blocks: (narrow_blocks_of(w.rows, splits) + batch.rows) as u32,
            query_latent: dims.query_latent as u32,
            kv_latent: dims.kv_latent as u32,
            rotary: dims.rotary as u32,
            columns: w.rows as u32,
            splits: splits as u32,
            batch: batch.at,
            fused: fused.memory.ptr(),
            query_gamma: query_gamma.memory.ptr(),
            key_gamma: key_gamma.memory.ptr(),
            turns: self.scratch.turns.ptr(),
            weights: w.memory.ptr(),
            out: q.memory.ptr(),
            cache: cache.memory.ptr(),
            eps,
            unused: 0,
        };
        self.launch(&self.gpu.kernels.query_up, &arguments)
    }

    /// What routes `rows` rows.
    pub(super) fn route_arguments(
        &self,
        logits: u64,
        bias: &Weight,
        routing: &Chosen,
        rows: usize,
    ) -> Route {
        Route {
            blocks: rows.div_ceil(WARPS) as u32,
            rows: rows as u32,
            experts: self.dims.experts as u32,
            groups: self.router.groups as u32,
            kept_groups: self.router.kept_groups as u32,
            kept: self.dims.experts_per_token as u32,
            unused: 0,
            scale: self.router.scale,
            logits,
            bias: bias.memory.ptr(),
            chosen: routing.experts.ptr(),
            weights: routing.weights.ptr(),
        }
    }

    /// The router's product and its choice.
    pub(super) fn route_few(
        &self,
        x: &Buffer,
        (gate, bias): (&Weight, &Weight),
        routing: &Chosen,
        rows: usize,
    ) -> Result<()> {
        let arguments = Router {
            blocks: (self.dims.experts.div_ceil(ROUTER_EXPERTS) * ROUTER_PARTS) as u32,
            hidden: gate.columns as u32,
            route: self.route_arguments(self.scratch.logits.ptr(), bias, routing, rows),
            x: x.memory.ptr(),
            gate: gate.memory.ptr(),
            arrived: self.scratch.arrived.ptr(),
        };
        self.launch(&self.gpu.kernels.router, &arguments)
    }

    /// Turns each of the matrices of `rows` rows that `w` consists of, in its place.
    pub(super) fn turn_over(&self, w: Weight, rows: usize) -> Result<Weight> {
        let (scratch, bytes) = (&self.scratch.turning, w.memory.bytes());
        ensure!(
            bytes <= scratch.bytes(),
            "turning {bytes} bytes, but room for {}",
            scratch.bytes()
        );
        let arguments = TurnOver {
            blocks: striding(w.rows * w.columns, 256),
            heads: (w.rows / rows) as u32,
            rows: rows as u32,
            columns: w.columns as u32,
            input: w.memory.ptr(),
            out: scratch.ptr(),
        };
        self.launch(&self.gpu.kernels.turn_over, &arguments)?;
        let (to, from) = (w.memory.ptr(), scratch.ptr());
        // SAFETY: both hold as many bytes, for as long as the rank lives.
        unsafe { memory::copy(&self.enter()?, to, from, bytes, self.stream()) }?;
        Ok(Weight { rows: w.rows / rows * w.columns, columns: rows, memory: w.memory })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warps_share_an_inner_dimension_while_each_has_enough_of_it() {
        assert_eq!(splits(7168, 2112), 8);
        assert_eq!(splits(7168, 16384), 4);
        assert_eq!((splits(512, 128), splits(256, 128), splits(96, 192)), (4, 2, 1));
        assert_eq!((blocks_of(128, 4), blocks_of(2112, 8), blocks_of(1, 1)), (2, 66, 1));
    }
}
