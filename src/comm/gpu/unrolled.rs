//! Launches of the kernels with unrolled loops: the hot schedules' usual path.

use super::chain::Queue;
use super::cluster::can_be_clusters;
use super::kernels::{HasKernels, Kernels, MOST_DELTA};
use super::shape::{
    ShapeRule, Shapes, Spread, FEWER_THREADS, LARGEST_ROW_THREADS, ROW_THREADS, SMALL_THREADS,
};
use crate::comm::call::Call;
use crate::error::{Error, Result};
use crate::lane::{short_row, Fan, Unrolled};
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

    /// If steps of its table may go by `delta`: what the kernels' sends in all phases are numbered up to, and the most threads of a
    /// block.
    pub fn by_delta(&self, table: &pl_table) -> Option<(usize, u32)> {
        let (short, k) = match self {
            Self::One(form) => (form.is_short(), pl_unrolled_1::K),
            Self::Three(form) => (form.is_short(), pl_unrolled_3::K),
            Self::Seven(form) => (form.is_short(), pl_unrolled_7::K),
            Self::Fifteen(form) => (form.is_short(), pl_unrolled_15::K),
        };
        (short && k <= MOST_DELTA)
            .then_some((k * usize::from(table.phases), delta_threads(k, table.phases)))
    }

    /// Launches a step; false if there is no such kernel for it.
    ///
    /// # Safety
    /// As for the launch of any step: see `GpuRank::launch`.
    pub unsafe fn launch(
        &mut self,
        kernels: &Kernels,
        queue: &mut Queue<'_>,
        rule: &ShapeRule,
        args: &pl_args,
    ) -> Result<bool> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::One(form) => launch(form, kernels, queue, rule, args),
                Self::Three(form) => launch(form, kernels, queue, rule, args),
                Self::Seven(form) => launch(form, kernels, queue, rule, args),
                Self::Fifteen(form) => launch(form, kernels, queue, rule, args),
            }
        }
    }
}

/// The most sends of kernels of `SMALL_THREADS` in `cuda/kernels.cu`, and of those with a norm.
const MOST_SMALL: usize = 7;
const LARGEST_WITH_NORM: usize = 7;

/// Most threads of a block by `delta`, as cuda/kernels.cu has it.
fn delta_threads(k: usize, phases: u8) -> u32 {
    match (k, phases) {
        (7.., 2) => FEWER_THREADS,
        _ => SMALL_THREADS,
    }
}

/// Whether packs may begin there.
pub(super) fn is_aligned(at: usize) -> bool {
    at.is_multiple_of(PACK_BYTES)
}

/// Whether a call is free of what these kernels have no code for: other operations, and edges inside a pack.
pub(super) fn may_be_unrolled(call: &Call) -> bool {
    matches!(call.op, Op::Sum | Op::Avg)
        && call.dtype.has_sentinel()
        && is_aligned(call.count * call.dtype.size())
        && is_aligned(call.input as usize)
        && is_aligned(call.output as usize)
        && call.norm.as_ref().filter(|norm| norm.fused).is_none_or(|norm| {
            [norm.residual, norm.gamma, norm.residual_out.cast_const()]
                .iter()
                .all(|&at| is_aligned(at as usize))
        })
}

/// # Safety
/// As for [`UnrolledArgs::launch`].
unsafe fn launch<F: HasKernels>(
    form: &mut Unrolled<F>,
    kernels: &Kernels,
    queue: &mut Queue<'_>,
    rule: &ShapeRule,
    args: &pl_args,
) -> Result<bool> {
    let pl_args { step, table } = args;
    let (dtype, protocol) = (DType::from_raw(step.dtype)?, Protocol::from_raw(step.proto)?);
    let (phases, delta) = (usize::from(table.phases), !step.sent.is_null());
    let kernels = F::of(kernels);
    let kernel = match delta {
        true => kernels.delta(dtype, phases),
        false => kernels.get(dtype, protocol, phases, step.rows != 0),
    };
    let Some(mut kernel) = kernel else {
        return match delta {
            true => Err(Error::Internal(format!("no kernel for {dtype} by delta"))),
            false => Ok(false),
        };
    };
    // As cuda/kernels.cu has it.
    let small = protocol == Protocol::Sentinel && F::K <= MOST_SMALL;
    let most_threads = match (step.rows, protocol, phases) {
        _ if delta => delta_threads(F::K, table.phases),
        (0, ..) if small => SMALL_THREADS,
        (0, ..) | (_, Protocol::Ll, _) => FEWER_THREADS,
        (_, _, 2) if F::K >= LARGEST_WITH_NORM => LARGEST_ROW_THREADS,
        _ => ROW_THREADS,
    };
    let pack = |elements: u64| elements * dtype.size() as u64 / PACK_BYTES as u64;
    let plain = step.op == Op::Sum as u32 && step.check == 0;
    let (shapes, args) = match step.rows {
        0 => {
            let shapes = rule.shape(table, &step.geo, protocol, pack(step.count), most_threads);
            // As many for either shape as there are packs, or for neither.
            let threads = u64::from(shapes.usual.blocks) * u64::from(shapes.usual.threads);
            let args = form.lay_out(step, table, pack(step.count), plain.then_some(threads));
            let aligned = is_aligned(step.input as usize) && is_aligned(step.output as usize);
            if delta && !(aligned && *args.head().straight != 0) {
                return Err(Error::Internal("a step by delta without its only path".into()));
            }
            (shapes, args)
        }
        rows => {
            let short_kernel =
                if protocol == Protocol::Sentinel { kernels.rows(dtype, phases) } else { None };
            let cluster_kernel = kernels.cluster(dtype).filter(|kernel| can_be_clusters(kernel));
            let packs = pack(step.width);
            let plain = plain && short_kernel.is_some();
            let mut shapes = rule.rows(rows).into();
            let laid_out = form.lay_out_rows(step, table, packs, plain, |longest, short| {
                let mut by_short_path = |rule: &ShapeRule| {
                    let whole = match phases {
                        1 => None,
                        _ => Some(short_row(F::K, packs, longest)?),
                    };
                    let mut per_sm =
                        |threads| cluster_kernel.map_or(0, |kernel| queue.per_sm(kernel, threads));
                    rule.spread_straight(rows, longest, whole, &mut per_sm)
                };
                let mut by = |rule: &ShapeRule| {
                    let spread = if short { by_short_path(rule) } else { None };
                    spread.unwrap_or_else(|| rule.spread(rows, longest, most_threads, phases > 1))
                };
                // The kernel is told how rows are spread, so it cannot be recorded anew with another shape: the first of a
                // chain keeps all its blocks. If they leave no room for the second, these two are not chained, and those
                // behind are.
                let (all, link) = (by(rule), by(&rule.for_a_link()));
                let of = |spread: &Spread| match (short_kernel, cluster_kernel) {
                    (_, Some(cluster_kernel)) if spread.units.cluster != 0 => cluster_kernel,
                    (Some(short_kernel), _) if spread.units.straight => short_kernel,
                    _ => kernel,
                };
                let spread = if queue.has_a_link(of(&link), link.shape()) { link } else { all };
                kernel = of(&spread);
                shapes = Shapes { again: link.shape(), ..spread.shape().into() };
                spread.units
            });
            let Some(args) = laid_out else { return Ok(false) };
            (shapes, args)
        }
    };
    // SAFETY: the caller's promise; the struct is the kernel's own by its type.
    unsafe { queue.launch(kernel, shapes, args)? };
    Ok(true)
}
