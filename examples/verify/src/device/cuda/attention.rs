//! Attention: heads' queries against cache rows, and what they make of the rows that they see.

use super::blas::{Matrix, Product};
use super::few::{blocks_of, few, splits};
use super::launch::{Attend, Merge, Queries, Rotate, Values, FEW_CHUNKS};
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
        if few(batch.rows, plain) {
            // Two warps for each strip: twice the blocks, which are few.
            let splits = if plain >= 64 { 2 } else { 1 };
            return self.launch(
                &self.gpu.kernels.queries,
                &Queries {
                    blocks: (heads * blocks_of(latent, splits)) as u32,
                    heads: heads as u32,
                    plain: plain as u32,
                    rotary: dims.rotary as u32,
                    latent: latent as u32,
                    splits: splits as u32,
                    batch: batch.at,
                    q: q.memory.ptr(),
                    key_up: key_up.memory.ptr(),
                    turns: self.scratch.turns.ptr(),
                    out: out.memory.ptr(),
                },
            );
        }
        self.multiply(&Product {
            rows: batch.rows,
            inner: plain,
            columns: latent,
            left: Matrix { ptr: q.memory.ptr(), row: heads * from, step: from },
            right: Matrix { ptr: key_up.memory.ptr(), row: plain, step: plain * latent },
            transposed: true,
            out: Matrix { ptr: out.memory.ptr(), row: heads * to, step: to },
            wide: false,
            count: heads,
        })?;
        let arguments = Rotate {
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
        self.launch(&self.gpu.kernels.rotate, &arguments)
    }

    /// Every chunk of keys by itself.
    fn attend_to_chunks(
        &self,
        queries: &Buffer,
        cache: &Buffer,
        batch: &DeviceBatch,
    ) -> Result<Attend> {
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
            out: 0,
            scale: dims.softmax_scale,
            unused: 0,
        };
        self.launch(&self.gpu.kernels.attend, &arguments)?;
        Ok(arguments)
    }

    pub(super) fn attend_to(
        &self,
        queries: &Buffer,
        cache: &Buffer,
        batch: &DeviceBatch,
        out: &Buffer,
    ) -> Result<()> {
        let done = self.attend_to_chunks(queries, cache, batch)?;
        let merge = Merge {
            blocks: (batch.rows * self.dims.heads) as u32,
            heads: done.heads,
            latent: done.latent,
            width: done.width,
            tiles: done.tiles,
            chunks: done.chunks,
            batch: done.batch,
            queries: done.queries,
            cache: done.cache,
            parts: done.parts,
            stats: done.stats,
            out: out.memory.ptr(),
            scale: done.scale,
            unused: 0,
        };
        self.launch(&self.gpu.kernels.merge, &merge)
    }

    /// Of few rows with few chunks: the product with `value_up` puts the chunks together. Whether these are such.
    pub(super) fn attend_by_few(
        &self,
        queries: &Buffer,
        cache: &Buffer,
        batch: &DeviceBatch,
        value_up: &Weight,
        out: &Buffer,
    ) -> Result<bool> {
        let dims = &self.dims;
        if !few(batch.rows, dims.kv_latent) || batch.chunks > FEW_CHUNKS {
            return Ok(false);
        }
        self.check(out, batch.rows * dims.heads * dims.value)?;
        let done = self.attend_to_chunks(queries, cache, batch)?;
        let splits = splits(dims.kv_latent, dims.value);
        let values = Values {
            blocks: (dims.heads * blocks_of(dims.value, splits)) as u32,
            heads: done.heads,
            latent: done.latent,
            value: dims.value as u32,
            tiles: done.tiles,
            chunks: done.chunks,
            batch: done.batch,
            parts: done.parts,
            stats: done.stats,
            value_up: value_up.memory.ptr(),
            out: out.memory.ptr(),
            splits: splits as u32,
            unused: 0,
        };
        self.launch(&self.gpu.kernels.values, &values)?;
        Ok(true)
    }
}
