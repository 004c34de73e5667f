//! Launches of the kernels with unrolled loops: the hot schedules' usual path.

use super::chain::Queue;
use super::kernels::{HasKernels, Kernels};
use super::shape::{Shape, FEWER_THREADS};
use crate::comm::call::Call;
use crate::error::Result;
use crate::lane::Unrolled;
use crate::launch::*;
use crate::types::{DType, Op, Protocol, PACK_BYTES};

/// A table laid out for the smallest of these kernels that has room for it.
pub(super) enum UnrolledArgs {
    One(Box<Unrolled<pl_unrolled_1>>),
    Three(Box<Unrolled<pl_unrolled_3>>),
    Seven(Box<Unrolled<pl_unrolled_7>>),
    Fifteen(Box<Unrolled<pl_unrolled_15>>),
}

impl UnrolledArgs {
    /// None where the table has another form.
    pub fn new(table: &pl_table, step: &pl_step, protocol: Protocol) -> Option<Self> {
        let boxed = Unrolled::new(table, step, protocol).map(|form| Self::One(Box::new(form)));
        boxed
            .or_else(|| Some(Self::Three(Box::new(Unrolled::new(table, step, protocol)?))))
            .or_else(|| Some(Self::Seven(Box::new(Unrolled::new(table, step, protocol)?))))
            .or_else(|| Some(Self::Fifteen(Box::new(Unrolled::new(table, step, protocol)?))))
    }

    /// Launches a step; false if there is no such kernel for it.
    ///
    /// # Safety
    /// As for the launch of any step: see `GpuRank::launch`.
    pub unsafe fn launch(
        &mut self,
        kernels: &Kernels,
        queue: &mut Queue<'_>,
        shape: Shape,
        step: &pl_step,
        table: &pl_table,
    ) -> Result<bool> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::One(form) => launch(form, kernels, queue, shape, step, table),
                Self::Three(form) => launch(form, kernels, queue, shape, step, table),
                Self::Seven(form) => launch(form, kernels, queue, shape, step, table),
                Self::Fifteen(form) => launch(form, kernels, queue, shape, step, table),
            }
        }
    }
}

/// Whether a call is free of what these kernels have no code for: other operations, and edges inside a pack.
pub(super) fn may_be_unrolled(call: &Call) -> bool {
    let aligned = |at: usize| at.is_multiple_of(PACK_BYTES);
    matches!(call.op, Op::Sum | Op::Avg)
        && call.dtype.has_sentinel()
        && aligned(call.count * call.dtype.size())
        && aligned(call.input as usize)
        && aligned(call.output as usize)
}

/// # Safety
/// As for [`UnrolledArgs::launch`].
unsafe fn launch<F: HasKernels>(
    form: &mut Unrolled<F>,
    kernels: &Kernels,
    queue: &mut Queue<'_>,
    mut shape: Shape,
    step: &pl_step,
    table: &pl_table,
) -> Result<bool> {
    let (dtype, protocol) = (DType::from_raw(step.dtype)?, Protocol::from_raw(step.proto)?);
    let Some(kernel) = F::of(kernels).get(dtype, protocol, table.phases.into(), step.rows != 0)
    else {
        return Ok(false);
    };
    if table.phases > 1 || protocol == Protocol::Ll {
        shape.threads = shape.threads.min(FEWER_THREADS);
    }
    let elements = if step.rows != 0 { step.width } else { step.count };
    let packs = elements * dtype.size() as u64 / PACK_BYTES as u64;
    let plain = step.rows == 0 && step.op == Op::Sum as u32 && step.check == 0;
    let threads = u64::from(shape.blocks) * u64::from(shape.threads);
    let args = form.lay_out(table, packs, plain.then_some(threads));
    *args.step() = *step;
    // SAFETY: the caller's promise; the struct is the kernel's own by its type.
    unsafe { queue.launch(kernel, shape, args)? };
    Ok(true)
}
