//! Attention: heads' queries against cache rows, and what they make of the rows that they see.

use super::blas::{Matrix, Product};
use super::launch::{Attend, Merge, Turn};
use super::rows::{DeviceBatch, Limits};
use super::{Buffer, Cuda, Weight};
use anyhow::{ensure, Result};

impl Cuda {
    pub(super) fn queries_of(
        &self,
        q: &Buffer,
        key_up: &Weight,
        batch: &DeviceBatch,
        out: &Buffer,
    ) -> Result<()> {
        let dims = &self.dims;
        let (heads, plain, latent) = (dims.heads, dims.plain, dims.kv_latent);
        let (from, to) = (plain + dims.rotary, dims.cache_width());
        self.check(q, batch.rows * heads * from)?;
        self.check(out, batch.rows * heads * to)?;
        self.multiply(&Product {
            rows: batch.rows,
            inner: plain,
            columns: latent,
            left: Matrix { ptr: q.memory.ptr(), row: heads * from, step: from },
            right: Matrix { ptr: key_up.memory.ptr(), row: latent, step: plain * latent },
            transposed: false,
            out: Matrix { ptr: out.memory.ptr(), row: heads * to, step: to },
            wide: false,
            count: heads,
        })?;
        let arguments = Turn {
            blocks: batch.at.rows,
            heads: heads as u32,
            plain: plain as u32,
            rotary: dims.rotary as u32,
            latent: latent as u32,
            unused: 0,
            batch: batch.at,
            q: q.memory.ptr(),
            turns: self.scratch.turns.ptr(),
            out: out.memory.ptr(),
        };
        self.launch(&self.gpu.kernels.turn, &arguments)
    }

    pub(super) fn attend_to(
        &self,
        queries: &Buffer,
        cache: &Buffer,
        batch: &DeviceBatch,
        out: &Buffer,
    ) -> Result<()> {
        let dims = &self.dims;
        let tiles = Limits::tiles(batch.block, dims.heads);
        let blocks = batch.sequences * tiles * batch.chunks;
        let most = self.limits.sequences
            * Limits::tiles(self.limits.block, dims.heads)
            * Limits::chunks(self.limits.length);
        ensure!(blocks <= most, "attention in {blocks} blocks, but room for {most}");
        let arguments = Attend {
            blocks: blocks as u32,
            heads: dims.heads as u32,
            latent: dims.kv_latent as u32,
            width: dims.cache_width() as u32,
            tiles: tiles as u32,
            chunks: batch.chunks as u32,
            batch: batch.at,
            queries: queries.memory.ptr(),
            cache: cache.memory.ptr(),
            parts: self.scratch.parts.ptr(),
            stats: self.scratch.stats.ptr(),
            out: out.memory.ptr(),
            scale: dims.softmax_scale,
            unused: 0,
        };
        self.launch(&self.gpu.kernels.attend, &arguments)?;
        let merge = Merge {
            blocks: (batch.rows * dims.heads) as u32,
            heads: arguments.heads,
            latent: arguments.latent,
            width: arguments.width,
            tiles: arguments.tiles,
            chunks: arguments.chunks,
            batch: arguments.batch,
            queries: arguments.queries,
            cache: arguments.cache,
            parts: arguments.parts,
            stats: arguments.stats,
            out: arguments.out,
            scale: arguments.scale,
            unused: 0,
        };
        self.launch(&self.gpu.kernels.merge, &merge)
    }
}
