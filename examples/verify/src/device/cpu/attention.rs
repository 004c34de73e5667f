//! Attention in the latent space: every head's query against the one row that a token has in the cache.

use super::gemm::{multiply, View};
use crate::batch::{Batch, Block};
use crate::shard::Dims;
use anyhow::Result;

/// Attention of all blocks; `scores` is scratch.
pub fn attend(
    dims: &Dims,
    queries: &[f32],
    cache: &[f32],
    batch: &Batch,
    scores: &mut Vec<f32>,
    out: &mut [f32],
) -> Result<()> {
    let (width, latent, heads) = (dims.cache_width(), dims.kv_latent, dims.heads);
    for block in &batch.blocks {
        let length = block.context + block.rows;
        let rows = block.rows * heads;
        let cache = &cache[block.cache * width..][..length * width];
        let queries = &queries[block.row * heads * width..][..rows * width];
        scores.clear();
        scores.resize(rows * length, 0.0);
        let (q, k) = (View::rows(queries, width), View::transposed(cache, width));
        multiply((rows, width, length), q, k, scores, length)?;
        for (at, scores) in scores.chunks_exact_mut(length).enumerate() {
            softmax(scores, block, batch.visible[block.row + at / heads], dims.softmax_scale);
        }
        let out = &mut out[block.row * heads * latent..][..rows * latent];
        let (p, v) = (View::rows(scores, length), View::rows(cache, width));
        multiply((rows, length, latent), p, v, out, latent)?;
    }
    Ok(())
}

/// Scores to probabilities; of its own block a row sees what `visible` says.
fn softmax(scores: &mut [f32], block: &Block, visible: u64, scale: f32) {
    for (at, score) in scores[block.context..].iter_mut().enumerate() {
        if visible >> at & 1 == 0 {
            *score = f32::NEG_INFINITY;
        }
    }
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for score in scores.iter_mut() {
        *score = ((*score - largest) * scale).exp();
        sum += *score;
    }
    for score in scores.iter_mut() {
        *score /= sum;
    }
}
