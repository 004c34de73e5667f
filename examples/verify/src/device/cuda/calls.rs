//! What several operations are made of.

use super::arena::Slice;
use super::blas::{Matrix, Product};
use super::host::size;
use super::launch::AddNorm;
use super::{Buffer, Cuda, Weight};
use crate::reduce::{AllReduce, Over};
use anyhow::{ensure, Context as _, Result};
use peerlane::{DType, Op};

/// A matrix that stands alone.
fn alone(ptr: u64, row: usize) -> Matrix {
    Matrix { ptr, row, step: 0 }
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

    /// Residual add and norm by a kernel of its own.
    pub(super) fn norm(
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
    pub(super) fn reduce(
        &self,
        over: Over,
        ptr: u64,
        count: usize,
        dtype: DType,
        op: Op,
    ) -> Result<()> {
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
