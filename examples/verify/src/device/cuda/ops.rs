//! The operations of a pass, each one or a few launches.

use super::arena::Slice;
use super::blas::{Matrix, Product};
use super::few::few;
use super::launch::{Accept, AddNorm, Choose, Embed, Fill, Latents, Stamp, CHUNK};
use super::{Buffer, Chosen, Cuda, DeviceBatch, Weight, MOST_STAMPS};
use crate::batch::Batch;
use crate::device::{Device, Experts, Routed};
use crate::reduce::{AllReduce, Over};
use crate::shard::Dims;
use crate::stamp::{Kind, Part, Times};
use crate::weights::{Drawn, Part as Tensor, Random};
use anyhow::{bail, ensure, Context as _, Result};
use half::bf16;
use peerlane::comm::{AddRmsNorm, Communicator};
use peerlane::device::cuda::memory;
use peerlane::{DType, Op};

fn size(wide: bool) -> usize {
    if wide {
        size_of::<f32>()
    } else {
        size_of::<bf16>()
    }
}

fn bytes_of(values: &[f32], wide: bool) -> Vec<u8> {
    match wide {
        true => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        false => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes))
}

fn long_words(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes))
}

/// A matrix that stands alone.
fn alone(ptr: u64, row: usize) -> Matrix {
    Matrix { ptr, row, step: 0 }
}

/// Blocks of a kernel that strides over `count` elements, `each` by a block.
pub(super) fn striding(count: usize, each: usize) -> u32 {
    count.div_ceil(each).clamp(1, 4096) as u32
}

impl Cuda {
    pub(super) fn multiply(&self, product: &Product) -> Result<()> {
        // SAFETY: as for launches: slices of this rank's, or of weights that it holds, as large as the shapes say.
        unsafe { self.products.multiply(&self.enter()?, product) }
    }

    /// `out = x w^T`, where rows of `w` are the outputs.
    pub(super) fn product(
        &self,
        x: u64,
        w: &Weight,
        out: u64,
        rows: usize,
        wide: bool,
    ) -> Result<()> {
        self.multiply(&Product {
            rows,
            inner: w.columns,
            columns: w.rows,
            left: alone(x, w.columns),
            right: alone(w.memory.ptr(), w.columns),
            transposed: true,
            out: alone(out, w.rows),
            wide,
            count: 1,
        })
    }

    fn norm(
        &self,
        x: u64,
        residual: &Slice,
        gamma: &Weight,
        eps: f32,
        out: &Slice,
        rows: usize,
    ) -> Result<()> {
        let arguments = AddNorm {
            blocks: rows as u32,
            width: gamma.columns as u32,
            x,
            residual: residual.ptr(),
            gamma: gamma.memory.ptr(),
            out: out.ptr(),
            eps,
            unused: 0,
        };
        self.launch(&self.gpu.kernels.add_norm, &arguments)
    }

    /// An all-reduce in place, queued or recorded.
    fn reduce(&self, over: Over, ptr: u64, count: usize, dtype: DType, op: Op) -> Result<()> {
        let entered = self.enter()?;
        if over.by == AllReduce::Nccl {
            let nccl = self.nccl.as_ref().context("this rank has not joined NCCL")?;
            // SAFETY: a slice of this rank's, as large as `count` says, that lives as long as the rank and its graphs.
            return unsafe { nccl.all_reduce(&entered, self.stream(), ptr, count, dtype, op) };
        }
        let (data, stream) = (ptr as *mut std::ffi::c_void, self.stream().as_raw());
        // SAFETY: as above; in place.
        Ok(unsafe { over.comm.all_reduce_cuda(data, data, count, dtype, op, stream, None) }?)
    }

    pub(super) fn check(&self, buffer: &Buffer, elements: usize) -> Result<()> {
        let held = buffer.memory.bytes() / size(buffer.wide);
        ensure!(elements <= held, "{elements} elements of a buffer of {held}");
        Ok(())
    }
}

impl Device for Cuda {
    type Buffer = Buffer;
    type Weight = Weight;
    type Batch = DeviceBatch;
    type Routing = Chosen;

    fn weight(&mut self, values: Vec<f32>, columns: usize, wide: bool) -> Result<Weight> {
        let rows = values.len() / columns.max(1);
        let memory = self.take(values.len() * size(wide))?;
        self.write_bytes(&memory, &bytes_of(&values, wide))?;
        Ok(Weight { memory, rows, columns })
    }

    fn random_weight(&mut self, random: &Random, parts: &[Tensor], wide: bool) -> Result<Weight> {
        let columns = parts[0].columns.len();
        let rows: usize = parts.iter().map(|part| part.rows.len()).sum();
        let memory = self.take(rows * columns * size(wide))?;
        let mut out = memory.ptr();
        for part in parts {
            let Drawn { key, centre, reach } = random.drawn(part);
            let count = part.rows.len() * columns;
            let arguments = Fill {
                blocks: striding(count, 256 * 8),
                wide: wide.into(),
                out,
                key,
                first: (part.rows.start * part.shape[1] + part.columns.start) as u64,
                columns: columns as u64,
                between: part.shape[1] as u64,
                count: count as u64,
                centre,
                reach,
            };
            self.launch(&self.gpu.kernels.fill, &arguments)?;
            out += (count * size(wide)) as u64;
        }
        Ok(Weight { memory, rows, columns })
    }

    fn buffer(&mut self, elements: usize, wide: bool) -> Result<Buffer> {
        let memory = self.take(elements * size(wide))?;
        // SAFETY: the slice is this buffer's.
        unsafe { memory::fill(&self.enter()?, memory.ptr(), 0, memory.bytes(), self.stream()) }?;
        Ok(Buffer { memory, wide })
    }

    fn cache(&mut self, rows: usize) -> Result<Buffer> {
        // The last block of keys reads behind the last row.
        self.buffer((rows + CHUNK) * self.dims.cache_width(), false)
    }

    fn batch(&mut self, batch: &Batch) -> Result<DeviceBatch> {
        self.quietly(|| self.batches.load(&self.enter()?, self.stream(), batch))
    }

    fn routing(&mut self, rows: usize) -> Result<Chosen> {
        let bytes = 4 * rows * self.dims.experts_per_token;
        Ok(Chosen { experts: self.take(bytes)?, weights: self.take(bytes)? })
    }

    fn read(&mut self, buffer: &Buffer, elements: usize) -> Result<Vec<f32>> {
        let bytes = self.read_bytes(&buffer.memory, elements * size(buffer.wide))?;
        Ok(match buffer.wide {
            true => words(&bytes).map(f32::from_bits).collect(),
            false => {
                let halves = bytes.as_chunks().0.iter();
                halves.map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect()
            }
        })
    }

    fn read_routing(&mut self, routing: &Chosen, rows: usize) -> Result<Routed> {
        let bytes = 4 * rows * self.dims.experts_per_token;
        let experts = self.read_bytes(&routing.experts, bytes)?;
        let weights = self.read_bytes(&routing.weights, bytes)?;
        Ok(Routed {
            experts: words(&experts).collect(),
            weights: words(&weights).map(f32::from_bits).collect(),
        })
    }

    fn write_routing(&mut self, routing: &mut Chosen, routed: &Routed) -> Result<()> {
        let experts: Vec<u8> = routed.experts.iter().flat_map(|e| e.to_le_bytes()).collect();
        self.write_bytes(&routing.experts, &experts)?;
        self.write_bytes(&routing.weights, &bytes_of(&routed.weights, true))
    }

    fn read_chosen(&mut self, rows: usize) -> Result<Vec<u32>> {
        let bytes = self.read_bytes(&self.scratch.keys, 8 * rows)?;
        Ok(long_words(&bytes).map(|key| !(key as u32)).collect())
    }

    fn read_accepted(&mut self, batch: &DeviceBatch) -> Result<Vec<u32>> {
        let bytes = self.read_bytes(&self.scratch.accepted, 4 * batch.sequences)?;
        Ok(words(&bytes).collect())
    }

    fn finish(&mut self) -> Result<()> {
        Ok(self.stream.synchronize()?)
    }

    fn pace(&mut self) -> Result<()> {
        // As for replays: a full queue of launches could keep another rank from launching what this one waits for.
        match self.recording {
            Some(_) => Ok(()),
            None => self.finish(),
        }
    }

    fn take_times(&mut self) -> Result<Times> {
        bail!("the times of a pass on a GPU are those of its replays")
    }

    fn stamp(&mut self, kind: Kind, part: Part) -> Result<()> {
        let Some(stamps) = self.recording.as_mut().and_then(|recording| recording.stamps.as_mut())
        else {
            return Ok(());
        };
        stamps.push((kind, part));
        let at = stamps.len();
        ensure!(at < MOST_STAMPS, "more than {MOST_STAMPS} stamps in a pass");
        let out = self.scratch.stamps.ptr() + 8 * at as u64;
        self.launch(&self.gpu.kernels.stamp, &Stamp { blocks: 1, unused: 0, out })
    }

    fn embed(&mut self, batch: &DeviceBatch, table: &Weight, out: &mut Buffer) -> Result<()> {
        let arguments = Embed {
            blocks: batch.at.rows,
            width: table.columns as u32,
            batch: batch.at,
            table: table.memory.ptr(),
            out: out.memory.ptr(),
        };
        self.launch(&self.gpu.kernels.embed, &arguments)
    }

    fn rms_norm(
        &mut self,
        x: &Buffer,
        gamma: &Weight,
        eps: f32,
        out: &mut Buffer,
        rows: usize,
    ) -> Result<()> {
        self.norm(0, &x.memory, gamma, eps, &out.memory, rows)
    }

    fn add_rms_norm(
        &mut self,
        x: &Buffer,
        residual: &mut Buffer,
        gamma: &Weight,
        eps: f32,
        normed: &mut Buffer,
        rows: usize,
    ) -> Result<()> {
        self.norm(x.memory.ptr(), &residual.memory, gamma, eps, &normed.memory, rows)
    }

    fn linear(&mut self, x: &Buffer, w: &Weight, out: &mut Buffer, rows: usize) -> Result<()> {
        self.check(x, rows * w.columns)?;
        self.check(out, rows * w.rows)?;
        match few(rows, w.columns) {
            true => self.product_of_few(x, w, out, rows),
            false => self.product(x.memory.ptr(), w, out.memory.ptr(), rows, out.wide),
        }
    }

    fn latents_and_queries(
        &mut self,
        fused: &Buffer,
        (query_gamma, key_gamma): (&Weight, &Weight),
        eps: f32,
        batch: &DeviceBatch,
        query_latent: &mut Buffer,
        cache: &mut Buffer,
        query_up: &Weight,
        q: &mut Buffer,
        rows: usize,
    ) -> Result<()> {
        if few(rows, query_up.columns) {
            return self.queries_of_few(
                fused,
                (query_gamma, key_gamma),
                eps,
                batch,
                cache,
                query_up,
                q,
            );
        }
        self.latents(fused, query_gamma, key_gamma, eps, batch, query_latent, cache)?;
        self.linear(query_latent, query_up, q, rows)
    }

    fn attend_to_values(
        &mut self,
        queries: &Buffer,
        cache: &Buffer,
        batch: &DeviceBatch,
        attended: &mut Buffer,
        value_up: &Weight,
        out: &mut Buffer,
        rows: usize,
    ) -> Result<()> {
        if self.attend_by_few(queries, cache, batch, value_up, out)? {
            return Ok(());
        }
        self.attend(queries, cache, batch, attended)?;
        self.values(attended, value_up, out, rows)
    }

    fn gate_and_route(
        &mut self,
        x: &Buffer,
        (gate, bias): (&Weight, &Weight),
        logits: &mut Buffer,
        routing: &mut Chosen,
        rows: usize,
    ) -> Result<()> {
        if few(rows, gate.columns) {
            return self.route_few(x, (gate, bias), routing, rows);
        }
        self.linear(x, gate, logits, rows)?;
        self.route(logits, bias, routing, rows)
    }

    fn turned(&mut self, w: Weight, rows: usize) -> Result<Weight> {
        self.turn_over(w, rows)
    }

    fn latents(
        &mut self,
        fused: &Buffer,
        query_gamma: &Weight,
        key_gamma: &Weight,
        eps: f32,
        batch: &DeviceBatch,
        query_latent: &mut Buffer,
        cache: &mut Buffer,
    ) -> Result<()> {
        let dims = &self.dims;
        let arguments = Latents {
            blocks: batch.at.rows,
            query_latent: dims.query_latent as u32,
            kv_latent: dims.kv_latent as u32,
            rotary: dims.rotary as u32,
            batch: batch.at,
            fused: fused.memory.ptr(),
            query_gamma: query_gamma.memory.ptr(),
            key_gamma: key_gamma.memory.ptr(),
            turns: self.scratch.turns.ptr(),
            query_latents: query_latent.memory.ptr(),
            cache: cache.memory.ptr(),
            eps,
            unused: 0,
        };
        self.launch(&self.gpu.kernels.latents, &arguments)
    }

    fn queries(
        &mut self,
        q: &Buffer,
        key_up: &Weight,
        batch: &DeviceBatch,
        out: &mut Buffer,
    ) -> Result<()> {
        self.queries_of(q, key_up, batch, out)
    }

    fn attend(
        &mut self,
        queries: &Buffer,
        cache: &Buffer,
        batch: &DeviceBatch,
        out: &mut Buffer,
    ) -> Result<()> {
        self.attend_to(queries, cache, batch, out)
    }

    fn values(
        &mut self,
        latent: &Buffer,
        value_up: &Weight,
        out: &mut Buffer,
        rows: usize,
    ) -> Result<()> {
        let (heads, value, width) = (self.dims.heads, self.dims.value, self.dims.kv_latent);
        self.multiply(&Product {
            rows,
            inner: width,
            columns: value,
            left: Matrix { ptr: latent.memory.ptr(), row: heads * width, step: width },
            right: Matrix { ptr: value_up.memory.ptr(), row: width, step: value * width },
            transposed: true,
            out: Matrix { ptr: out.memory.ptr(), row: heads * value, step: value },
            wide: false,
            count: heads,
        })
    }

    fn route(
        &mut self,
        logits: &Buffer,
        bias: &Weight,
        routing: &mut Chosen,
        rows: usize,
    ) -> Result<()> {
        let arguments = self.route_arguments(logits.memory.ptr(), bias, routing, rows);
        self.launch(&self.gpu.kernels.route, &arguments)
    }

    fn experts(
        &mut self,
        x: &Buffer,
        always: &Experts<Weight>,
        routed: Option<(&Experts<Weight>, &Chosen)>,
        out: &mut Buffer,
        rows: usize,
    ) -> Result<()> {
        self.run_experts(x, always, routed, out, rows)
    }

    fn choose(
        &mut self,
        logits: &Buffer,
        rows: usize,
        first: usize,
        over: Option<Over>,
    ) -> Result<()> {
        let arguments = Choose {
            blocks: rows as u32,
            width: self.dims.vocabulary.len() as u32,
            first: first as u32,
            unused: 0,
            logits: logits.memory.ptr(),
            keys: self.scratch.keys.ptr(),
        };
        self.launch(&self.gpu.kernels.choose, &arguments)?;
        match over {
            Some(over) => self.reduce(over, self.scratch.keys.ptr(), rows, DType::U64, Op::Max),
            None => Ok(()),
        }
    }

    fn accept(&mut self, batch: &DeviceBatch) -> Result<()> {
        let arguments = Accept {
            blocks: 1,
            unused: 0,
            batch: batch.at,
            keys: self.scratch.keys.ptr(),
            accepted: self.scratch.accepted.ptr(),
        };
        self.launch(&self.gpu.kernels.accept, &arguments)
    }

    fn all_reduce(&mut self, over: Over, buffer: &mut Buffer, elements: usize) -> Result<()> {
        self.check(buffer, elements)?;
        self.reduce(over, buffer.memory.ptr(), elements, DType::BF16, Op::Sum)
    }

    fn fuses(&self) -> bool {
        true
    }

    fn all_reduce_add_rms_norm(
        &mut self,
        comm: &Communicator,
        x: &Buffer,
        residual: &mut Buffer,
        gamma: &Weight,
        eps: f32,
        normed: &mut Buffer,
        rows: usize,
    ) -> Result<()> {
        let arguments = AddRmsNorm {
            input: x.memory.ptr() as *const _,
            residual: residual.memory.ptr() as *const _,
            gamma: gamma.memory.ptr() as *const _,
            normed: normed.memory.ptr() as *mut _,
            residual_out: residual.memory.ptr() as *mut _,
            rows,
            width: gamma.columns,
            dtype: DType::BF16,
            eps,
            weight_bias: 0.0,
            fused: true,
        };
        self.check(x, rows * gamma.columns)?;
        let _entered = self.enter()?;
        // SAFETY: this rank's buffers, which live as long as the rank and its graphs; the new residual lies over the old one,
        // as the call allows.
        Ok(unsafe { comm.all_reduce_add_rms_norm_cuda(&arguments, self.stream().as_raw(), None) }?)
    }

    fn barrier(&mut self, comm: &Communicator) -> Result<()> {
        // Its result needs every rank's input.
        let over = Over { comm, by: AllReduce::Peerlane };
        self.reduce(over, self.scratch.word.ptr(), 1, DType::F32, Op::Max)
    }

    fn dims(&self) -> &Dims {
        &self.dims
    }
}
