//! Multi-head latent attention in its absorbed form: the cache holds one row per token for all heads, and every head's
//! query is carried into that row's space. Ends with this rank's partial sums of the output projection.

use crate::device::Device;
use crate::pass::Activations;
use crate::shard::{ReplicatedLayer, ShardLayer};
use anyhow::Result;

/// From `normed` to `partial`; writes the batch's rows of `cache`.
#[allow(clippy::too_many_arguments)]
pub fn partial<D: Device>(
    device: &mut D,
    common: &ReplicatedLayer<D::Weight>,
    own: &ShardLayer<D::Weight>,
    eps: f32,
    batch: &D::Batch,
    rows: usize,
    act: &mut Activations<D>,
    cache: &mut D::Buffer,
) -> Result<()> {
    device.linear(&act.normed, &common.latents, &mut act.latents, rows)?;
    let (query_norm, key_norm) = (&common.query_norm, &common.key_norm);
    let query_latent = &mut act.query_latent;
    device.latents_and_queries(
        &act.latents,
        (query_norm, key_norm),
        eps,
        batch,
        query_latent,
        cache,
        &own.query_up,
        &mut act.q,
        rows,
    )?;
    device.queries(&act.q, &own.key_up, batch, &mut act.queries)?;
    device.attend_to_values(
        &act.queries,
        cache,
        batch,
        &mut act.attended,
        &own.value_up,
        &mut act.heads,
        rows,
    )?;
    device.linear(&act.heads, &own.output, &mut act.partial, rows)
}
