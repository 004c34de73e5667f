//! A pass: rows of tokens through all layers, to the token that each row chooses.

use crate::config::Config;
use crate::device::Device;
use crate::layer;
use crate::moe::Routing;
use crate::observe::Observer;
use crate::reduce::Reduce;
use crate::shard::{Replicated, Shard};
use crate::stamp::{Kind, Part};
use anyhow::Result;
use std::sync::Arc;

/// Buffers of a pass, for as many rows as it may have.
pub struct Activations<D: Device> {
    /// [rows, hidden]
    pub residual: D::Buffer,
    /// [rows, hidden]
    pub normed: D::Buffer,
    /// [rows, query latent + cache width]
    pub latents: D::Buffer,
    /// [rows, query latent]
    pub query_latent: D::Buffer,
    /// [rows, heads, plain + rotary]
    pub q: D::Buffer,
    /// [rows, heads, cache width]
    pub queries: D::Buffer,
    /// [rows, heads, key-value latent]
    pub attended: D::Buffer,
    /// [rows, heads, value]
    pub heads: D::Buffer,
    /// [rows, hidden]: this rank's part of a sum, then the sum.
    pub partial: D::Buffer,
    /// [rows, experts]
    pub scores: D::Buffer,
    /// [rows, this rank's vocabulary]
    pub logits: D::Buffer,
}

impl<D: Device> Activations<D> {
    fn new(device: &mut D, rows: usize) -> Result<Self> {
        let dims = device.dims().clone();
        let wide = [dims.latents_width(), dims.experts, dims.vocabulary.len()];
        let [latents, scores, logits] = wide.map(|width| device.buffer(rows * width, true));
        let mut buffer = |width: usize| device.buffer(rows * width, false);
        Ok(Activations {
            residual: buffer(dims.hidden)?,
            normed: buffer(dims.hidden)?,
            latents: latents?,
            query_latent: buffer(dims.query_latent)?,
            q: buffer(dims.heads * (dims.plain + dims.rotary))?,
            queries: buffer(dims.heads * dims.cache_width())?,
            attended: buffer(dims.heads * dims.kv_latent)?,
            heads: buffer(dims.heads * dims.value)?,
            partial: buffer(dims.hidden)?,
            scores: scores?,
            logits: logits?,
        })
    }
}

/// One rank: its device, its part of the model, its cache.
pub struct Rank<D: Device> {
    pub device: D,
    pub replicated: Arc<Replicated<D::Weight>>,
    pub shard: Shard<D::Weight>,
    pub reduce: Reduce,
    pub act: Activations<D>,
    /// For each layer [rows of all sequences, cache width].
    pub cache: Vec<D::Buffer>,
    /// For each layer with experts what was decided in the last pass.
    pub routing: Vec<Option<D::Routing>>,
    pub eps: f32,
    pub decision: Routing,
}

impl<D: Device> Rank<D> {
    /// A rank with room for `rows` rows a pass and `cache_rows` tokens in all.
    pub fn new(
        config: &Config,
        mut device: D,
        replicated: Arc<Replicated<D::Weight>>,
        shard: Shard<D::Weight>,
        reduce: Reduce,
        rows: usize,
        cache_rows: usize,
    ) -> Result<Self> {
        let layers = 0..config.num_hidden_layers;
        let cache = layers.clone().map(|_| device.cache(cache_rows));
        let cache = cache.collect::<Result<_>>()?;
        let routing = layers.map(|layer| match config.is_moe(layer) {
            true => device.routing(rows).map(Some),
            false => Ok(None),
        });
        let routing = routing.collect::<Result<_>>()?;
        let act = Activations::new(&mut device, rows)?;
        let (eps, decision) = (config.rms_norm_eps, Routing::Own);
        Ok(Rank { device, replicated, shard, reduce, act, cache, routing, eps, decision })
    }

    /// What has gone wrong in calls of the communicator that have run.
    #[cfg(feature = "cuda")]
    pub fn error(&self) -> Result<()> {
        self.reduce.comm.error().map_or(Ok(()), |error| Err(error.into()))
    }

    /// Carries out a pass over the `rows` rows of `batch`; with `head` it ends with the choice of tokens.
    pub fn pass(
        &mut self,
        batch: &D::Batch,
        rows: usize,
        head: bool,
        observer: &mut dyn Observer<D>,
    ) -> Result<()> {
        let (device, act) = (&mut self.device, &mut self.act);
        device.embed(batch, &self.replicated.embedding, &mut act.residual)?;
        let gamma = &self.replicated.layers[0].input_norm;
        device.rms_norm(&act.residual, gamma, self.eps, &mut act.normed, rows)?;
        device.stamp(Kind::Outside, Part::Embed)?;
        for layer in 0..self.shard.layers.len() {
            layer::run(self, layer, batch, rows, observer)?;
        }
        if head {
            let (device, act) = (&mut self.device, &mut self.act);
            device.linear(&act.normed, &self.shard.head, &mut act.logits, rows)?;
            let first = device.dims().vocabulary.start;
            device.choose(&act.logits, rows, first, self.reduce.over_ranks())?;
            device.accept(batch)?;
            device.stamp(Kind::Outside, Part::Head)?;
        }
        Ok(())
    }
}
