//! One decoder layer: attention, all-reduce, residual and norm; MLP or experts, all-reduce, residual and norm.

use crate::attention;
use crate::device::Device;
use crate::moe;
use crate::observe::{Half, Observer, Site};
use crate::pass::Rank;
use crate::stamp::Kind;
use anyhow::Result;

/// Carries out layer `layer`: from `normed` and `residual` to the next layer's.
pub fn run<D: Device>(
    rank: &mut Rank<D>,
    layer: usize,
    batch: &D::Batch,
    rows: usize,
    observer: &mut dyn Observer<D>,
) -> Result<()> {
    let Rank { device, replicated, shard, reduce, act, cache, routing, eps, decision } = rank;
    let (common, own, eps) = (&replicated.layers[layer], &shard.layers[layer], *eps);
    let kind = if common.router.is_some() { Kind::Moe } else { Kind::Dense };
    // What follows a layer's second all-reduce is the first norm of the next one.
    let next_norm = match replicated.layers.get(layer + 1) {
        Some(next) => &next.input_norm,
        None => &replicated.final_norm,
    };

    attention::partial(device, common, own, eps, batch, rows, act, &mut cache[layer])?;
    let site = Site { layer, half: Half::Attention };
    reduce.add_norm(device, kind, site, &common.post_norm, eps, rows, act, observer)?;

    moe::partial(device, common, own, rows, act, *decision, routing[layer].as_mut())?;
    let site = Site { layer, half: Half::Mlp };
    reduce.add_norm(device, kind, site, next_norm, eps, rows, act, observer)?;
    device.pace()
}
