//! A GPU: bf16 weights and activations, dense products of many rows by cuBLAS, the rest by the kernels in `cuda/`.
//! Operations are queued on the rank's stream, eager or recorded into a graph.
//!
//! | file | what it is |
//! | --- | --- |
//! | `place` | which rank is on which GPU; what must be settled before the driver starts |
//! | `gpu` | a GPU of the run, its kernels, how one is launched |
//! | `launch` | the kernels' parameters |
//! | `arena` | device memory in large pieces |
//! | `rows` | the batch on the device |
//! | `blas`, `nccl` | libraries opened at run time |
//! | `ops` | the operations of a pass; the longer ones are in `attention`, `experts` and `few` |
//! | `calls` | what several operations are made of |
//! | `host` | weights, and what the host reads and writes |
//! | `record` | graphs, and where their time goes |

mod arena;
mod attention;
mod blas;
mod calls;
mod experts;
mod few;
mod gpu;
mod host;
mod launch;
pub mod nccl;
mod ops;
pub mod place;
mod record;
mod rows;
#[cfg(test)]
mod tests;

use crate::config::Config;
use crate::device::cpu::Rope;
use crate::meeting::Meeting;
use crate::shard::{split, Dims};
use anyhow::{ensure, Result};
use arena::{Arena, Slice};
pub use blas::Blas;
use blas::Products;
pub use gpu::Gpu;
use launch::{
    Arguments, CHUNK, FEW_ROWS, MOST_CACHE_WIDTH, MOST_EXPERTS, MOST_KEPT, QUERIES, ROUTER_PARTS,
};
use nccl::NcclRank;
use peerlane::device::cuda::{memory, Entered, Function, Stream, StreamRef};

use record::Recording;
pub use rows::Limits;
use rows::{BatchMemory, DeviceBatch};
use std::sync::Arc;

/// A matrix or a vector on the device.
pub struct Weight {
    memory: Slice,
    rows: usize,
    columns: usize,
}

/// Activations or cache rows on the device.
pub struct Buffer {
    memory: Slice,
    /// fp32, where all else is bf16.
    wide: bool,
}

/// Which experts each row goes to, on the device.
pub struct Chosen {
    /// u32 [rows, kept]
    experts: Slice,
    /// f32 [rows, kept]
    weights: Slice,
}

/// The router's sizes.
struct Router {
    groups: usize,
    kept_groups: usize,
    scale: f32,
}

/// Room for what no other operation sees.
struct Scratch {
    /// Cosine and sine of every position.
    turns: Slice,
    /// What each chunk of keys makes of each query, and the sums that they are weighted with.
    parts: Slice,
    stats: Slice,
    /// The inner layer of the MLP that every row goes through.
    product: Slice,
    /// The same product of every row and expert.
    inner: Slice,
    /// Parts of the router's logits, and how many of its blocks are done.
    logits: Slice,
    arrived: Slice,
    /// Matrices on their way to being turned.
    turning: Slice,
    /// Pairs by expert.
    slots: Slice,
    order: Slice,
    /// The choice of each row, as a key.
    keys: Slice,
    accepted: Slice,
    /// One element for barriers.
    word: Slice,
    stamps: Slice,
}

/// Stamps of a pass: six a layer, and some outside.
const MOST_STAMPS: usize = 4096;

/// One rank on a GPU.
pub struct Cuda {
    /// Fields are dropped in this order: what uses the stream before it.
    recording: Option<Recording>,
    products: Products,
    nccl: Option<NcclRank>,
    scratch: Scratch,
    batches: BatchMemory,
    arena: Arena,
    /// In a box: a recording borrows it.
    stream: Box<Stream>,
    dims: Dims,
    router: Router,
    limits: Limits,
    gpu: Arc<Gpu>,
    meeting: Arc<Meeting>,
    /// Whether kernels of this rank may be waiting for other ranks: since [`work_together`](Self::work_together).
    together: bool,
}

impl Cuda {
    /// Rank `rank` of `ranks` on `gpu`.
    pub fn new(
        config: &Config,
        rank: usize,
        ranks: usize,
        gpu: Arc<Gpu>,
        blas: &'static Blas,
        limits: Limits,
        meeting: Arc<Meeting>,
    ) -> Result<Self> {
        check(config)?;
        let dims = Dims::new(config, rank, ranks);
        let stream = Stream::new(&gpu.context, 0)?;
        let entered = gpu.context.enter()?;
        let mut arena = Arena::new(&gpu.context);
        let workspace = arena.take(blas::WORKSPACE)?;
        let products = Products::new(blas, &entered, stream.as_ref(), workspace)?;
        let batches = BatchMemory::new(&mut arena, limits)?;
        let sizes = sizes(config, rank, ranks, &limits);
        let mut take = |bytes: usize| -> Result<Slice> {
            let slice = arena.take(bytes)?;
            // SAFETY: the slice is all of it this rank's.
            unsafe { memory::fill(&entered, slice.ptr(), 0, slice.bytes(), stream.as_ref()) }?;
            Ok(slice)
        };
        let scratch = Scratch {
            turns: take(sizes.turns)?,
            parts: take(sizes.parts)?,
            stats: take(sizes.stats)?,
            product: take(sizes.product)?,
            inner: take(sizes.inner)?,
            logits: take(4 * ROUTER_PARTS * FEW_ROWS * config.n_routed_experts)?,
            arrived: take(4)?,
            turning: take(sizes.turning)?,
            slots: take(4 * (2 * config.n_routed_experts + 2))?,
            order: take(4 * limits.rows * config.num_experts_per_tok)?,
            keys: take(8 * limits.rows)?,
            accepted: take(4 * limits.sequences)?,
            word: take(16)?,
            stamps: take(8 * MOST_STAMPS)?,
        };
        let mut rope = Rope::new(config);
        rope.reserve(limits.length);
        let turns: Vec<u8> = rope
            .table()
            .iter()
            .flat_map(|(c, s)| [c.to_le_bytes(), s.to_le_bytes()])
            .flatten()
            .collect();
        // SAFETY: the slice was taken for exactly this table.
        unsafe { memory::write(&entered, scratch.turns.ptr(), &turns, stream.as_ref()) }?;
        drop(entered);
        let router = Router {
            groups: config.n_group,
            kept_groups: config.topk_group,
            scale: config.routed_scaling_factor,
        };
        Ok(Cuda {
            recording: None,
            products,
            nccl: None,
            scratch,
            batches,
            arena,
            stream: Box::new(stream),
            dims,
            router,
            limits,
            gpu,
            meeting,
            together: false,
        })
    }

    /// Bytes that a rank takes beside weights, caches and activations.
    pub fn own_bytes(config: &Config, rank: usize, ranks: usize, limits: &Limits) -> u64 {
        let sizes = sizes(config, rank, ranks, limits);
        let scratch =
            sizes.turns + sizes.parts + sizes.stats + sizes.product + sizes.inner + sizes.turning;
        // A piece of the arena that is not full, the tails of caches, and what the driver keeps of a rank's graphs.
        let tail = config.num_hidden_layers * CHUNK * config.cache_width() * 2;
        (scratch + tail + blas::WORKSPACE + 2 * arena::PIECE + (96 << 20)) as u64
    }

    /// From now on `--all-reduce nccl` has who carries it out.
    pub fn join_nccl(
        &mut self,
        nccl: &'static nccl::Nccl,
        id: nccl::UniqueId,
        ranks: usize,
        rank: usize,
    ) -> Result<()> {
        let gpu = Arc::clone(&self.gpu);
        self.nccl = Some(NcclRank::join(nccl, &gpu.context.enter()?, id, ranks, rank)?);
        Ok(())
    }

    /// Frees what must not be freed after an error, when all ranks have come to their end.
    pub fn close(&mut self) -> Result<()> {
        let gpu = Arc::clone(&self.gpu);
        let _entered = gpu.context.enter()?;
        self.nccl.take().map_or(Ok(()), NcclRank::destroy)
    }

    /// Its GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The library of its products.
    pub fn describe_blas(&self) -> Result<String> {
        self.products.describe()
    }

    fn stream(&self) -> StreamRef {
        (*self.stream).as_ref()
    }

    fn enter(&self) -> Result<Entered<'_>> {
        Ok(self.gpu.context.enter()?)
    }

    /// Queues a kernel on this rank's stream, or records it.
    fn launch<A: Arguments>(&self, kernel: &Function<A>, arguments: &A) -> Result<()> {
        // SAFETY: every address that an operation passes is a slice of this rank's arena, of its buffers and weights, or of
        // the batch, each as large as the shapes in `arguments` say; they live as long as the rank, whose graphs go first.
        unsafe { gpu::launch(&self.enter()?, self.stream(), kernel, arguments) }
    }

    /// Set-up is over: from here on no rank allocates, and what may wait for the GPU is done [`quietly`](Self::quietly).
    pub fn work_together(&mut self) -> Result<()> {
        self.stream.synchronize()?;
        self.meeting.wait()?;
        self.together = true;
        Ok(())
    }

    /// Does `work` while no kernel of any rank of this process is under way; all ranks call it at the same places.
    ///
    /// Ranks that share a GPU may not do otherwise with anything but launches, and waits for their own stream. A copy from or to
    /// pageable memory, making or freeing memory, loading a kernel, instantiating, uploading or freeing a graph may each wait
    /// for all that the GPU has been given, or stand in a queue that all streams share. There may be an all-reduce of another
    /// rank, which waits for this rank's, which this thread cannot launch as long as it waits here.
    ///
    /// Why this is enough: a rank comes to the first meeting when its stream is empty, so after it every all-reduce that was
    /// launched has ended; none is launched before the second meeting, to which a rank comes when its work is done.
    fn quietly<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        if !self.together {
            return work();
        }
        self.stream.synchronize()?;
        self.meeting.wait()?;
        let done = work()?;
        self.meeting.wait()?;
        Ok(done)
    }

    /// Memory of this rank's; only while ranks are set up.
    fn take(&mut self, bytes: usize) -> Result<Slice> {
        ensure!(!self.together, "allocating {bytes} bytes while other ranks may wait for this one");
        self.arena.take(bytes)
    }

    fn read_bytes(&self, slice: &Slice, bytes: usize) -> Result<Vec<u8>> {
        ensure!(bytes <= slice.bytes(), "reading {bytes} bytes of {}", slice.bytes());
        let mut data = vec![0; bytes];
        self.quietly(|| {
            // SAFETY: the slice holds as many bytes.
            Ok(unsafe { memory::read(&self.enter()?, slice.ptr(), &mut data, self.stream()) }?)
        })?;
        Ok(data)
    }

    fn write_bytes(&self, slice: &Slice, data: &[u8]) -> Result<()> {
        ensure!(data.len() <= slice.bytes(), "writing {} bytes to {}", data.len(), slice.bytes());
        self.quietly(|| {
            // SAFETY: the slice holds as many bytes.
            Ok(unsafe { memory::write(&self.enter()?, slice.ptr(), data, self.stream()) }?)
        })
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // After an error there may be work queued that reads what goes now. It ends: waits for other ranks have a deadline.
        let _ = self.stream.synchronize();
    }
}

/// Bytes of the scratch whose size depends on the model.
struct Sizes {
    turns: usize,
    parts: usize,
    stats: usize,
    product: usize,
    inner: usize,
    turning: usize,
}

fn sizes(config: &Config, rank: usize, ranks: usize, limits: &Limits) -> Sizes {
    let heads = config.num_attention_heads / ranks;
    let tiles = limits.sequences * Limits::tiles(limits.block, heads);
    let queries = tiles * Limits::chunks(limits.length) * QUERIES;
    let width = |width: usize| split(width, rank, ranks).len();
    let shared = width(config.moe_intermediate_size * config.n_shared_experts);
    let widest = width(config.intermediate_size).max(shared);
    let pairs = limits.rows * config.num_experts_per_tok;
    Sizes {
        turns: limits.length * config.qk_rope_head_dim * 4,
        parts: queries * config.kv_lora_rank * 4,
        stats: queries * 2 * 4,
        product: limits.rows * widest * 2,
        inner: pairs * width(config.moe_intermediate_size) * 2,
        turning: heads * config.qk_nope_head_dim * config.kv_lora_rank * 2,
    }
}

/// Refuses shapes that the kernels do not take.
fn check(config: &Config) -> Result<()> {
    for (key, value, multiple) in [
        ("hidden_size", config.hidden_size, 8),
        ("q_lora_rank", config.q_lora_rank, 8),
        ("kv_lora_rank", config.kv_lora_rank, 32),
        ("qk_rope_head_dim", config.qk_rope_head_dim, 16),
    ] {
        ensure!(
            value.is_multiple_of(multiple),
            "{key} is {value}, but on a GPU it is a multiple of {multiple}"
        );
    }
    for (key, value, most) in [
        ("kv_lora_rank + qk_rope_head_dim", config.cache_width(), MOST_CACHE_WIDTH),
        ("n_routed_experts", config.n_routed_experts, MOST_EXPERTS),
        ("num_experts_per_tok", config.num_experts_per_tok, MOST_KEPT),
        ("n_group", config.n_group, 64),
    ] {
        ensure!(value <= most, "{key} is {value}, but on a GPU at most {most}");
    }
    Ok(())
}
