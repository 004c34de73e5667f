//! What a pass runs on: the seam between the model and the machine.
//!
//! Layers are written in terms of these operations alone. An implementation may carry an operation out at once, as the CPU
//! does, or queue it, as a GPU's stream does, eager or captured: no operation of a pass returns anything to the host, its
//! sizes are fixed by the batch's shape, and what routing decides stays on the device. Only what stands under "host" below
//! waits for queued work, and is not called inside a pass.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

use crate::batch::Batch;
use crate::reduce::Over;
use crate::shard::Dims;
use crate::stamp::{Kind, Part, Times};
use crate::weights::{Part as Tensor, Random};
use anyhow::Result;
use peerlane::comm::Communicator;

/// Gated MLPs of one width: the experts of a layer, or its one dense or shared MLP.
pub struct Experts<W> {
    pub count: usize,
    /// Columns of the hidden layer that this rank holds.
    pub width: usize,
    /// For each expert `width` rows of the gate, then `width` rows of the other factor; [count * 2 * width, hidden].
    pub gate_up: W,
    /// For each expert [hidden, width].
    pub down: W,
}

/// What a router decided, on the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routed {
    /// [rows, experts per token], ascending within a row.
    pub experts: Vec<u32>,
    /// The weight of each, the routed scale included.
    pub weights: Vec<f32>,
}

/// A rank's arithmetic. Matrices are row-major, weights are `[outputs, inputs]`, `rows` are rows of the batch.
pub trait Device: Sized {
    /// Activations and cache rows.
    type Buffer;
    /// A weight; ranks that share a device share replicated ones.
    type Weight: Send + Sync;
    /// A batch as operations read it.
    type Batch;
    /// Which experts each row goes to.
    type Routing;

    // --- host ---

    /// Takes over weights with rows of `columns` elements; at the precision of weights, or in fp32 where they are `wide`.
    fn weight(&mut self, values: Vec<f32>, columns: usize, wide: bool) -> Result<Self::Weight>;
    /// The same from a seed, which a device may draw itself; all parts have rows of one length.
    fn random_weight(
        &mut self,
        random: &Random,
        parts: &[Tensor],
        wide: bool,
    ) -> Result<Self::Weight>;
    /// Matrices one below the other, of `rows` rows each, as [`queries`](Self::queries) wants them.
    fn turned(&mut self, w: Self::Weight, _rows: usize) -> Result<Self::Weight> {
        Ok(w)
    }
    /// A buffer of zeros, at the precision of activations, or in fp32 where it is `wide`.
    fn buffer(&mut self, elements: usize, wide: bool) -> Result<Self::Buffer>;
    /// A buffer of zeros for `rows` rows of the cache.
    fn cache(&mut self, rows: usize) -> Result<Self::Buffer>;
    /// Takes over a batch, in the place of the one before it.
    fn batch(&mut self, batch: &Batch) -> Result<Self::Batch>;
    /// Room for the routing of `rows` rows.
    fn routing(&mut self, rows: usize) -> Result<Self::Routing>;
    /// The first elements of a buffer.
    fn read(&mut self, buffer: &Self::Buffer, elements: usize) -> Result<Vec<f32>>;
    /// What the router decided for the first rows.
    fn read_routing(&mut self, routing: &Self::Routing, rows: usize) -> Result<Routed>;
    /// Puts another's decision in the place of the router's: what comparisons at low precision need.
    #[cfg_attr(not(any(test, feature = "cuda")), allow(dead_code))]
    fn write_routing(&mut self, routing: &mut Self::Routing, routed: &Routed) -> Result<()>;
    /// What [`choose`](Self::choose) chose for the first rows.
    fn read_chosen(&mut self, rows: usize) -> Result<Vec<u32>>;
    /// How many tokens [`accept`](Self::accept) committed for each sequence.
    fn read_accepted(&mut self, batch: &Self::Batch) -> Result<Vec<u32>>;
    /// Waits for everything queued; an error of what has run.
    fn finish(&mut self) -> Result<()>;
    /// Between layers: a device that queues may let its queue run empty here, lest it fill up.
    fn pace(&mut self) -> Result<()> {
        Ok(())
    }
    /// Time by part since the last call.
    fn take_times(&mut self) -> Result<Times>;

    // --- operations of a pass ---

    /// Books the time since the last stamp on `part` of a layer of this kind.
    fn stamp(&mut self, kind: Kind, part: Part) -> Result<()>;
    /// The rows' tokens' rows of `table`.
    fn embed(
        &mut self,
        batch: &Self::Batch,
        table: &Self::Weight,
        out: &mut Self::Buffer,
    ) -> Result<()>;
    /// `out = x / sqrt(mean(x^2) + eps) * gamma`, row by row.
    fn rms_norm(
        &mut self,
        x: &Self::Buffer,
        gamma: &Self::Weight,
        eps: f32,
        out: &mut Self::Buffer,
        rows: usize,
    ) -> Result<()>;
    /// `residual += x`, then `normed = rms_norm(residual)`.
    fn add_rms_norm(
        &mut self,
        x: &Self::Buffer,
        residual: &mut Self::Buffer,
        gamma: &Self::Weight,
        eps: f32,
        normed: &mut Self::Buffer,
        rows: usize,
    ) -> Result<()>;
    /// `out = x w^T`.
    fn linear(
        &mut self,
        x: &Self::Buffer,
        w: &Self::Weight,
        out: &mut Self::Buffer,
        rows: usize,
    ) -> Result<()>;
    /// From rows of query latent, key-value latent and unrotated shared key: the normed query latent, and the cache rows of
    /// the batch (normed latent, rotated key).
    #[allow(clippy::too_many_arguments)]
    fn latents(
        &mut self,
        fused: &Self::Buffer,
        query_gamma: &Self::Weight,
        key_gamma: &Self::Weight,
        eps: f32,
        batch: &Self::Batch,
        query_latent: &mut Self::Buffer,
        cache: &mut Self::Buffer,
    ) -> Result<()>;
    /// [`latents`](Self::latents) and heads' queries `q` of the normed query latent.
    #[allow(clippy::too_many_arguments)]
    fn latents_and_queries(
        &mut self,
        fused: &Self::Buffer,
        (query_gamma, key_gamma): (&Self::Weight, &Self::Weight),
        eps: f32,
        batch: &Self::Batch,
        query_latent: &mut Self::Buffer,
        cache: &mut Self::Buffer,
        query_up: &Self::Weight,
        q: &mut Self::Buffer,
        rows: usize,
    ) -> Result<()> {
        self.latents(fused, query_gamma, key_gamma, eps, batch, query_latent, cache)?;
        self.linear(query_latent, query_up, q, rows)
    }
    /// From rows of heads' queries (plain, rotary): queries against cache rows, `[heads, cache width]`, the plain part
    /// multiplied with the head's key matrix of `key_up` (`[heads * plain, latent]`), the rotary part rotated.
    fn queries(
        &mut self,
        q: &Self::Buffer,
        key_up: &Self::Weight,
        batch: &Self::Batch,
        out: &mut Self::Buffer,
    ) -> Result<()>;
    /// Attention of every head over what its row may see; the result is in the latent space, `[heads, latent]`.
    fn attend(
        &mut self,
        queries: &Self::Buffer,
        cache: &Self::Buffer,
        batch: &Self::Batch,
        out: &mut Self::Buffer,
    ) -> Result<()>;
    /// Heads' values from the latent space: `value_up` is `[heads * value, latent]`.
    fn values(
        &mut self,
        latent: &Self::Buffer,
        value_up: &Self::Weight,
        out: &mut Self::Buffer,
        rows: usize,
    ) -> Result<()>;
    /// [`attend`](Self::attend) and [`values`](Self::values); what `attended` holds afterwards is nobody's business.
    #[allow(clippy::too_many_arguments)]
    fn attend_to_values(
        &mut self,
        queries: &Self::Buffer,
        cache: &Self::Buffer,
        batch: &Self::Batch,
        attended: &mut Self::Buffer,
        value_up: &Self::Weight,
        out: &mut Self::Buffer,
        rows: usize,
    ) -> Result<()> {
        self.attend(queries, cache, batch, attended)?;
        self.values(attended, value_up, out, rows)
    }
    /// From router logits, the experts of every row and their weights.
    fn route(
        &mut self,
        logits: &Self::Buffer,
        bias: &Self::Weight,
        routing: &mut Self::Routing,
        rows: usize,
    ) -> Result<()>;
    /// The router's product and [`route`](Self::route).
    #[allow(clippy::too_many_arguments)]
    fn gate_and_route(
        &mut self,
        x: &Self::Buffer,
        (gate, bias): (&Self::Weight, &Self::Weight),
        logits: &mut Self::Buffer,
        routing: &mut Self::Routing,
        rows: usize,
    ) -> Result<()> {
        self.linear(x, gate, logits, rows)?;
        self.route(logits, bias, routing, rows)
    }
    /// `out = always(x) + sum of weight * expert(x)` over the experts a row goes to, in ascending order.
    fn experts(
        &mut self,
        x: &Self::Buffer,
        always: &Experts<Self::Weight>,
        routed: Option<(&Experts<Self::Weight>, &Self::Routing)>,
        out: &mut Self::Buffer,
        rows: usize,
    ) -> Result<()>;
    /// Of every row the token with the largest logit, the lower one of equals. `logits` are those from token `first` on;
    /// where ranks work together the choice is made over all of them.
    fn choose(
        &mut self,
        logits: &Self::Buffer,
        rows: usize,
        first: usize,
        over: Option<Over>,
    ) -> Result<()>;
    /// How many tokens a greedy verifier commits for each sequence, from what was chosen.
    fn accept(&mut self, batch: &Self::Batch) -> Result<()>;
    /// Sums the first elements over all ranks, in place.
    fn all_reduce(&mut self, over: Over, buffer: &mut Self::Buffer, elements: usize) -> Result<()>;
    /// Whether all-reduce, residual add and norm can be one operation here.
    fn fuses(&self) -> bool;
    /// [`all_reduce`](Self::all_reduce) of `x` and [`add_rms_norm`](Self::add_rms_norm) in one, with the same bits.
    #[allow(clippy::too_many_arguments)]
    fn all_reduce_add_rms_norm(
        &mut self,
        comm: &Communicator,
        x: &Self::Buffer,
        residual: &mut Self::Buffer,
        gamma: &Self::Weight,
        eps: f32,
        normed: &mut Self::Buffer,
        rows: usize,
    ) -> Result<()>;
    /// Returns, or lets the queue go on, when all ranks have come here.
    fn barrier(&mut self, comm: &Communicator) -> Result<()>;

    /// Sizes of this rank's part of the model.
    fn dims(&self) -> &Dims;
}

/// A device that can keep a pass and carry it out again without the host.
#[cfg(feature = "cuda")]
pub trait Recorder: Device {
    /// What was kept.
    type Captured;
    /// A pass that can be carried out again.
    type Recorded;

    /// From now on operations are kept and not carried out; with `stamps` the times of their parts are taken too.
    fn record(&mut self, stamps: bool) -> Result<()>;
    /// What was kept.
    fn recorded(&mut self) -> Result<Self::Captured>;
    /// Makes passes of what was kept; all ranks do, when none has any more to keep.
    fn ready(&mut self, captured: Vec<Self::Captured>) -> Result<Vec<Self::Recorded>>;
    /// Queues it `times` times, without a break; seconds of each, without the first.
    fn time(&mut self, recorded: &Self::Recorded, times: usize) -> Result<Vec<f64>>;
    /// Queues it once; all ranks do.
    fn replay(&mut self, recorded: &Self::Recorded) -> Result<()>;
    /// Waits on the host until all ranks are here.
    fn meet(&mut self) -> Result<()>;
    /// Where the time of its last replay went.
    fn times(&mut self, recorded: &Self::Recorded) -> Result<Times>;
}
