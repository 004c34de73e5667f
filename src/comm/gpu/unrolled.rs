//! Launches of the kernels with unrolled loops: the hot schedules' usual path.

use super::chain::Queue;
use super::kernels::{HasKernels, Kernels};
use super::shape::{
    Shape, ShapeRule, FEWER_THREADS, LARGEST_ROW_THREADS, ROW_THREADS, SMALL_THREADS,
};
use crate::comm::call::Call;
use crate::error::Result;
use crate::lane::{short_row, Unrolled};
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
        rule: &ShapeRule,
        args: &pl_args,
    ) -> Result<bool> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::One(form) => launch(form, kernels, queue, shape, rule, args),
                Self::Three(form) => launch(form, kernels, queue, shape, rule, args),
                Self::Seven(form) => launch(form, kernels, queue, shape, rule, args),
                Self::Fifteen(form) => launch(form, kernels, queue, shape, rule, args),
            }
        }
    }
}

/// The most sends of kernels of `SMALL_THREADS` in `cuda/kernels.cu`, and of those with a norm.
const MOST_SMALL: usize = 7;
const LARGEST_WITH_NORM: usize = 7;

/// Whether a call is free of what these kernels have no code for: other operations, and edges inside a pack.
pub(super) fn may_be_unrolled(call: &Call) -> bool {
    let aligned = |at: usize| at.is_multiple_of(PACK_BYTES);
    matches!(call.op, Op::Sum | Op::Avg)
        && call.dtype.has_sentinel()
        && aligned(call.count * call.dtype.size())
        && aligned(call.input as usize)
        && aligned(call.output as usize)
        && call.norm.as_ref().filter(|norm| norm.fused).is_none_or(|norm| {
            [norm.residual, norm.gamma, norm.residual_out.cast_const()]
                .iter()
                .all(|&at| aligned(at as usize))
        })
}

/// # Safety
/// As for [`UnrolledArgs::launch`].
unsafe fn launch<F: HasKernels>(
    form: &mut Unrolled<F>,
    kernels: &Kernels,
    queue: &mut Queue<'_>,
    mut shape: Shape,
    rule: &ShapeRule,
    args: &pl_args,
) -> Result<bool> {
    let pl_args { step, table } = args;
    let (dtype, protocol) = (DType::from_raw(step.dtype)?, Protocol::from_raw(step.proto)?);
    let kernels = F::of(kernels);
    let phases = usize::from(table.phases);
    let Some(mut kernel) = kernels.get(dtype, protocol, phases, step.rows != 0) else {
        return Ok(false);
    };
    // As cuda/kernels.cu has it.
    let small = protocol == Protocol::Sentinel && F::K <= MOST_SMALL;
    let most_threads = match (step.rows, protocol, phases) {
        (0, ..) if small => SMALL_THREADS,
        (0, ..) | (_, Protocol::Ll, _) => FEWER_THREADS,
        (_, _, 2) if F::K >= LARGEST_WITH_NORM => LARGEST_ROW_THREADS,
        _ => ROW_THREADS,
    };
    let pack = |elements: u64| elements * dtype.size() as u64 / PACK_BYTES as u64;
    let plain = step.op == Op::Sum as u32 && step.check == 0;
    let args = match step.rows {
        0 => {
            shape = rule.shape(table, &step.geo, protocol, pack(step.count), most_threads);
            let threads = u64::from(shape.blocks) * u64::from(shape.threads);
            form.lay_out(table, pack(step.count), plain.then_some(threads))
        }
        rows => {
            let short_kernel =
                if protocol == Protocol::Sentinel { kernels.rows(dtype, phases) } else { None };
            let packs = pack(step.width);
            let plain = plain && short_kernel.is_some();
            let spread = form.lay_out_rows(table, packs, rows, plain, |longest, short| {
                let by_short_path = || {
                    let whole = match phases {
                        1 => None,
                        _ => Some(short_row(F::K, packs, longest)?),
                    };
                    rule.spread_straight(rows, longest, whole)
                };
                let spread = match short {
                    true => by_short_path(),
                    false => None,
                };
                let spread =
                    spread.unwrap_or_else(|| rule.spread(rows, longest, most_threads, phases > 1));
                (shape.blocks, shape.threads) = (spread.blocks, spread.threads);
                spread.units
            });
            let Some(args) = spread else { return Ok(false) };
            if *args.head().straight != 0 {
                kernel = short_kernel.unwrap_or(kernel);
            }
            args
        }
    };
    *args.step() = *step;
    // SAFETY: the caller's promise; the struct is the kernel's own by its type.
    unsafe { queue.launch(kernel, shape, args)? };
    Ok(true)
}
