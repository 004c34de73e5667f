//! The CPU: fp32 arithmetic, every operation carried out at once on the rank's own thread.

mod attention;
mod experts;
mod gemm;
mod norm;
mod rope;
pub(in crate::device) mod router;
mod sums;

use super::{Device, Experts, Routed};
use crate::batch::Batch;
use crate::config::Config;
use crate::mistake::{made, Mistake};
use crate::reduce::Over;
use crate::shard::Dims;
use crate::stamp::{Kind, Part, Times};
use crate::weights::{Part as Tensor, Random};
use anyhow::{ensure, Result};
use gemm::{multiply, View};
use peerlane::comm::Communicator;
use peerlane::{DType, Op};
#[cfg(feature = "cuda")]
pub use rope::Rope;
use std::time::Instant;
pub use sums::Sums;

/// A weight matrix; a vector has one row.
pub struct Weight {
    values: Vec<f32>,
    columns: usize,
}

impl Weight {
    fn rows(&self) -> usize {
        self.values.len() / self.columns.max(1)
    }
}

/// One rank on the CPU.
pub struct Cpu {
    dims: Dims,
    router: router::Router,
    rope: rope::Rope,
    scores: Vec<f32>,
    experts: experts::Scratch,
    /// For every row the chosen token as a key whose maximum is the choice.
    chosen: Vec<u64>,
    /// Tokens committed for every sequence.
    accepted: Vec<u32>,
    sums: Sums,
    staging: sums::Staging,
    times: Times,
    last: Instant,
}

impl Cpu {
    /// Rank `rank` of `ranks`, whose sums are kept as `sums`.
    pub fn new(config: &Config, rank: usize, ranks: usize, sums: Sums) -> Self {
        Cpu {
            dims: Dims::new(config, rank, ranks),
            router: router::Router::new(config),
            rope: rope::Rope::new(config),
            scores: Vec::new(),
            experts: experts::Scratch::default(),
            chosen: Vec::new(),
            accepted: Vec::new(),
            sums,
            staging: sums::Staging::default(),
            times: Times::default(),
            last: Instant::now(),
        }
    }
}

/// Orders as logits do, and among equals the lower token is the larger key.
fn key(logit: f32, token: usize) -> u64 {
    let bits = logit.to_bits();
    let ordered = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(ordered) << 32 | u64::from(!(token as u32))
}

impl Device for Cpu {
    type Buffer = Vec<f32>;
    type Weight = Weight;
    type Batch = Batch;
    type Routing = Routed;

    fn weight(&mut self, values: Vec<f32>, columns: usize, _wide: bool) -> Result<Weight> {
        Ok(Weight { values, columns })
    }

    fn random_weight(&mut self, random: &Random, parts: &[Tensor], wide: bool) -> Result<Weight> {
        let mut values = Vec::new();
        parts.iter().for_each(|part| random.append(&mut values, part));
        self.weight(values, parts[0].columns.len(), wide)
    }

    fn buffer(&mut self, elements: usize, _wide: bool) -> Result<Vec<f32>> {
        Ok(vec![0.0; elements])
    }

    fn cache(&mut self, rows: usize) -> Result<Vec<f32>> {
        self.buffer(rows * self.dims.cache_width(), false)
    }

    fn batch(&mut self, batch: &Batch) -> Result<Batch> {
        let furthest = batch.positions.iter().max().map_or(0, |&position| position as usize + 1);
        self.rope.reserve(furthest);
        Ok(batch.clone())
    }

    fn routing(&mut self, rows: usize) -> Result<Routed> {
        let elements = rows * self.dims.experts_per_token;
        Ok(Routed { experts: vec![0; elements], weights: vec![0.0; elements] })
    }

    fn read(&mut self, buffer: &Vec<f32>, elements: usize) -> Result<Vec<f32>> {
        Ok(buffer[..elements].to_vec())
    }

    fn read_routing(&mut self, routing: &Routed, rows: usize) -> Result<Routed> {
        let elements = rows * self.dims.experts_per_token;
        Ok(Routed {
            experts: routing.experts[..elements].to_vec(),
            weights: routing.weights[..elements].to_vec(),
        })
    }

    fn write_routing(&mut self, routing: &mut Routed, routed: &Routed) -> Result<()> {
        routing.experts[..routed.experts.len()].copy_from_slice(&routed.experts);
        routing.weights[..routed.weights.len()].copy_from_slice(&routed.weights);
        Ok(())
    }

    fn read_chosen(&mut self, rows: usize) -> Result<Vec<u32>> {
        Ok(self.chosen[..rows].iter().map(|&key| !(key as u32)).collect())
    }

    fn read_accepted(&mut self, _batch: &Batch) -> Result<Vec<u32>> {
        Ok(self.accepted.clone())
    }

    fn finish(&mut self) -> Result<()> {
        Ok(()) // nothing is ever queued
    }

    fn take_times(&mut self) -> Result<Times> {
        self.last = Instant::now();
        Ok(std::mem::take(&mut self.times))
    }

    fn stamp(&mut self, kind: Kind, part: Part) -> Result<()> {
        let now = Instant::now();
        self.times.add(kind, part, (now - self.last).as_secs_f64());
        self.last = now;
        Ok(())
    }

    fn embed(&mut self, batch: &Batch, table: &Weight, out: &mut Vec<f32>) -> Result<()> {
        let width = self.dims.hidden;
        for (row, &token) in out.chunks_exact_mut(width).zip(&batch.tokens) {
            row.copy_from_slice(&table.values[token as usize * width..][..width]);
        }
        Ok(())
    }

    fn rms_norm(
        &mut self,
        x: &Vec<f32>,
        gamma: &Weight,
        eps: f32,
        out: &mut Vec<f32>,
        rows: usize,
    ) -> Result<()> {
        let width = gamma.columns;
        let rows = x.chunks_exact(width).zip(out.chunks_exact_mut(width)).take(rows);
        rows.for_each(|(x, out)| norm::rms_norm(x, &gamma.values, eps, out));
        Ok(())
    }

    fn add_rms_norm(
        &mut self,
        x: &Vec<f32>,
        residual: &mut Vec<f32>,
        gamma: &Weight,
        eps: f32,
        normed: &mut Vec<f32>,
        rows: usize,
    ) -> Result<()> {
        let (width, sums) = (gamma.columns, self.sums);
        let rows = residual.chunks_exact_mut(width).zip(x.chunks_exact(width)).take(rows);
        for ((residual, x), normed) in rows.zip(normed.chunks_exact_mut(width)) {
            residual.iter_mut().zip(x).for_each(|(sum, x)| *sum = sums.round(*sum + x));
            norm::rms_norm(residual, &gamma.values, eps, normed);
            normed.iter_mut().for_each(|value| *value = sums.round(*value));
        }
        if made(Mistake::ResidualAfterNorm) {
            residual.clone_from(normed);
        }
        Ok(())
    }

    fn linear(&mut self, x: &Vec<f32>, w: &Weight, out: &mut Vec<f32>, rows: usize) -> Result<()> {
        let (inputs, outputs) = (w.columns, w.rows());
        let (a, b) = (View::rows(x, inputs), View::transposed(&w.values, inputs));
        multiply((rows, inputs, outputs), a, b, out, outputs)
    }

    fn latents(
        &mut self,
        fused: &Vec<f32>,
        query_gamma: &Weight,
        key_gamma: &Weight,
        eps: f32,
        batch: &Batch,
        query_latent: &mut Vec<f32>,
        cache: &mut Vec<f32>,
    ) -> Result<()> {
        let dims = &self.dims;
        let (width, query) = (dims.cache_width(), dims.query_latent);
        let mut rows =
            fused.chunks_exact(dims.latents_width()).zip(query_latent.chunks_exact_mut(query));
        for block in &batch.blocks {
            let first = block.cache + block.context;
            let cached = cache[first * width..].chunks_exact_mut(width).take(block.rows);
            for (at, (cached, (row, query_latent))) in cached.zip(&mut rows).enumerate() {
                let (q, rest) = row.split_at(query);
                let (latent, key) = rest.split_at(dims.kv_latent);
                let (cached_latent, cached_key) = cached.split_at_mut(dims.kv_latent);
                norm::rms_norm(q, &query_gamma.values, eps, query_latent);
                norm::rms_norm(latent, &key_gamma.values, eps, cached_latent);
                self.rope.rotate(batch.positions[block.row + at], key, cached_key);
            }
        }
        Ok(())
    }

    fn queries(
        &mut self,
        q: &Vec<f32>,
        key_up: &Weight,
        batch: &Batch,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        let dims = &self.dims;
        let (heads, plain, latent) = (dims.heads, dims.plain, dims.kv_latent);
        let (from, to) = (plain + dims.rotary, dims.cache_width());
        for head in 0..heads {
            let up = &key_up.values[head * plain * latent..][..plain * latent];
            let (a, b) = (View::rows(&q[head * from..], heads * from), View::rows(up, latent));
            let shape = (batch.rows(), plain, latent);
            multiply(shape, a, b, &mut out[head * to..], heads * to)?;
        }
        let rows = q.chunks_exact(heads * from).zip(out.chunks_exact_mut(heads * to));
        for ((q, out), &position) in rows.zip(&batch.positions) {
            for (q, out) in q.chunks_exact(from).zip(out.chunks_exact_mut(to)) {
                self.rope.rotate(position, &q[plain..], &mut out[latent..]);
            }
        }
        Ok(())
    }

    fn attend(
        &mut self,
        queries: &Vec<f32>,
        cache: &Vec<f32>,
        batch: &Batch,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        attention::attend(&self.dims, queries, cache, batch, &mut self.scores, out)
    }

    fn values(
        &mut self,
        latent: &Vec<f32>,
        value_up: &Weight,
        out: &mut Vec<f32>,
        rows: usize,
    ) -> Result<()> {
        let (heads, value, width) = (self.dims.heads, self.dims.value, self.dims.kv_latent);
        for head in 0..heads {
            let up = &value_up.values[head * value * width..][..value * width];
            let a = View::rows(&latent[head * width..], heads * width);
            let b = View::transposed(up, width);
            multiply((rows, width, value), a, b, &mut out[head * value..], heads * value)?;
        }
        Ok(())
    }

    fn route(
        &mut self,
        logits: &Vec<f32>,
        bias: &Weight,
        routing: &mut Routed,
        rows: usize,
    ) -> Result<()> {
        let kept = self.dims.experts_per_token;
        for row in 0..rows {
            let logits = &logits[row * self.dims.experts..][..self.dims.experts];
            let at = row * kept..(row + 1) * kept;
            let experts = &mut routing.experts[at.clone()];
            self.router.route(logits, &bias.values, experts, &mut routing.weights[at]);
        }
        Ok(())
    }

    fn experts(
        &mut self,
        x: &Vec<f32>,
        always: &Experts<Weight>,
        routed: Option<(&Experts<Weight>, &Routed)>,
        out: &mut Vec<f32>,
        rows: usize,
    ) -> Result<()> {
        let shape = (rows, self.dims.hidden);
        experts::always(always, x, shape, &mut self.experts, out)?;
        if let Some((pool, routing)) = routed {
            if made(Mistake::SharedExpertTwice) {
                out.iter_mut().for_each(|value| *value *= 2.0);
            }
            let routed = self.read_routing(routing, rows)?;
            experts::add_routed(pool, &routed, x, shape, &mut self.experts, out)?;
        }
        Ok(())
    }

    fn choose(
        &mut self,
        logits: &Vec<f32>,
        rows: usize,
        first: usize,
        over: Option<Over>,
    ) -> Result<()> {
        let width = self.dims.vocabulary.len();
        self.chosen.clear();
        for logits in logits.chunks_exact(width).take(rows) {
            let keys = logits.iter().enumerate().map(|(at, &logit)| key(logit, first + at));
            self.chosen.push(keys.max().unwrap_or(0));
        }
        if let Some(Over { comm, .. }) = over {
            let keys = self.chosen.as_mut_ptr().cast();
            // SAFETY: in place, `chosen` holds `rows` keys until the call returns.
            unsafe { comm.all_reduce(keys, keys, rows, DType::U64, Op::Max, None)? };
        }
        Ok(())
    }

    fn accept(&mut self, batch: &Batch) -> Result<()> {
        let chosen: Vec<u32> = self.chosen.iter().map(|&key| !(key as u32)).collect();
        self.accepted = batch.accepted(&chosen);
        Ok(())
    }

    fn all_reduce(&mut self, over: Over, buffer: &mut Vec<f32>, elements: usize) -> Result<()> {
        ensure!(elements <= buffer.len(), "an all-reduce of {elements} of {}", buffer.len());
        self.staging.all_reduce(over.comm, self.sums, &mut buffer[..elements])
    }

    fn fuses(&self) -> bool {
        self.sums == Sums::Bf16
    }

    fn all_reduce_add_rms_norm(
        &mut self,
        comm: &Communicator,
        x: &Vec<f32>,
        residual: &mut Vec<f32>,
        gamma: &Weight,
        eps: f32,
        normed: &mut Vec<f32>,
        rows: usize,
    ) -> Result<()> {
        let elements = rows * gamma.columns;
        ensure!(elements <= x.len(), "an all-reduce of {elements} of {}", x.len());
        let (residual, normed) = (&mut residual[..elements], &mut normed[..elements]);
        let staging = &mut self.staging;
        staging.all_reduce_add_rms_norm(comm, &x[..elements], residual, &gamma.values, eps, normed)
    }

    fn barrier(&mut self, comm: &Communicator) -> Result<()> {
        // Its result needs every rank's input.
        self.staging.all_reduce(comm, self.sums, &mut [0.0])
    }

    fn dims(&self) -> &Dims {
        &self.dims
    }
}

#[cfg(test)]
mod tests {
    use super::key;

    #[test]
    fn keys_order_as_logits_and_prefer_the_lower_token() {
        let logits = [-3.0e9, -1.0, -0.5, 0.0, 1e-30, 0.5, 7.0];
        for (at, pair) in logits.windows(2).enumerate() {
            assert!(key(pair[0], 0) < key(pair[1], 9), "{at}");
        }
        assert!(key(1.0, 3) > key(1.0, 4));
        assert_eq!(!(key(-1.0, 129279) as u32), 129279);
    }
}
