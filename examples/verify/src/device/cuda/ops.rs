//! The operations of a pass, each one or a few launches.

use super::blas::{Matrix, Product};
use super::few::few;
use super::host::{long_words, size, words};
use super::launch::{Accept, Choose, Embed, Latents, Stamp, CHUNK};
use super::{Buffer, Chosen, Cuda, DeviceBatch, Weight, MOST_STAMPS};
use crate::batch::Batch;
use crate::device::{Device, Experts, Routed};
use crate::reduce::{AllReduce, Over};
use crate::shard::Dims;
use crate::stamp::{Kind, Part, Times};
use crate::weights::{Part as Tensor, Random};
use anyhow::{bail, ensure, Result};
use peerlane::comm::{AddRmsNorm, Communicator};
use peerlane::device::cuda::memory;
use peerlane::{DType, Op};

/// Blocks of a kernel that strides over `count` elements, `each` by a block.
pub(super) fn striding(count: usize, each: usize) -> u32 {
    count.div_ceil(each).clamp(1, 4096) as u32
}

impl Device for Cuda {
    type Buffer = Buffer;
    type Weight = Weight;
    type Batch = DeviceBatch;
    type Routing = Chosen;

    fn weight(&mut self, values: Vec<f32>, columns: usize, wide: bool) -> Result<Weight> {
        self.weight_of(&values, columns, wide)
    }

    fn random_weight(&mut self, random: &Random, parts: &[Tensor], wide: bool) -> Result<Weight> {
        self.drawn(random, parts, wide)
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
        self.floats(buffer, elements)
    }

    fn read_routing(&mut self, routing: &Chosen, rows: usize) -> Result<Routed> {
        self.routed(routing, rows)
    }

    fn write_routing(&mut self, routing: &mut Chosen, routed: &Routed) -> Result<()> {
        self.put_routed(routing, routed)
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
