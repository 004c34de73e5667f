//! Sums over host memory by words that differ from the last ones (`cuda/protocol_delta.cuh`), which halves what GPUs write there.
//!
//! It stands in for `sentinel`, plan by plan, where all of a call has the kernels' short path. Whether a call goes by it, and how it
//! is cut into steps, all ranks must decide alike: by its type, operation and count, by the table, and by blocks and threads, which
//! ranks have agreed on. Where a rank's buffers lie is its own matter, and the short path is for aligned ones: others are copied.

use super::chain::Queue;
use super::shape::ShapeRule;
use super::unrolled::UnrolledArgs;
use crate::comm::call::Call;
use crate::comm::plans::Plan;
use crate::device::cuda::{Context, DeviceMemory, Stream};
use crate::error::Result;
use crate::lane::{step_packs, tile_packs, Layout};
use crate::launch::*;
use crate::types::{Algorithm, DType, Op, Protocol, PACK_BYTES};

/// Calls of several steps go by `sentinel` where a step by `delta` has fewer packs than this: steps cost their latency.
const LEAST_PACKS: u64 = 8192;

/// One plan's way on one channel.
pub(super) struct Delta {
    /// Complete but for the call's own.
    pub args: pl_args,
    pub unrolled: UnrolledArgs,
    pub rule: ShapeRule,
    /// Most packs of a step.
    most_packs: u64,
    /// What was sent and what was seen: the addresses of the first are in `args`, of the second the distance to the slab.
    _sent: DeviceMemory,
    _seen: DeviceMemory,
    pub aligned: Aligned,
}

impl Delta {
    /// The way beside `plan`'s by `sentinel`, whose arguments are `args`; none where there is none. The slab's region is 0, as the
    /// memory is once `stream` has done its work.
    pub fn new(
        context: &Context,
        stream: &Stream,
        layout: &Layout,
        channel: usize,
        plan: &Plan,
        rule: &ShapeRule,
        args: &pl_args,
    ) -> Result<Option<Self>> {
        let known = matches!(plan.choice.algorithm, Algorithm::OneShot | Algorithm::TwoShot);
        if plan.choice.protocol != Protocol::Sentinel || !known || args.step.check != 0 {
            return Ok(None);
        }
        let Some(geo) = layout.delta_geometry(channel, &plan.table) else { return Ok(None) };
        let mut args = pl_args { step: pl_step { geo, ..args.step }, ..*args };
        // Any type: all have packs of so many bytes.
        let most = step_packs(&geo, &plan.table, DType::F32, Protocol::Sentinel);
        let form = UnrolledArgs::new(&plan.table, &args.step, Protocol::Sentinel);
        let Some((sends, threads)) = form.and_then(|form| form.by_delta(&plan.table)) else {
            return Ok(None);
        };
        let rule = rule.without_spare_block();
        let most_packs = most.min(tile_packs(&plan.table, rule.most_packs(threads)));
        if most_packs == 0 {
            return Ok(None);
        }
        // As `sent` in the kernels counts: by phase, send and buffer.
        let sent = DeviceMemory::new(context, sends * 2 * geo.slot_bytes as usize)?;
        let seen = DeviceMemory::new(context, 2 * geo.half_bytes as usize)?;
        sent.zero(stream)?;
        seen.zero(stream)?;
        let aligned = Aligned::new(context, most_packs as usize * PACK_BYTES)?;
        let slab = args.step.base[usize::from(plan.table.rank)] + geo.data;
        args.step.sent = sent.ptr() as *mut _;
        args.step.seen_shift = seen.ptr().wrapping_sub(slab);
        let unrolled = UnrolledArgs::new(&plan.table, &args.step, Protocol::Sentinel);
        let Some(unrolled) = unrolled else { return Ok(None) };
        Ok(Some(Delta { args, unrolled, rule, most_packs, _sent: sent, _seen: seen, aligned }))
    }

    /// Elements of each step of `call` but the last, if the call goes by it. The same on all ranks.
    pub fn step_elements(&self, call: &Call) -> Option<u64> {
        let bytes = call.bytes();
        let packs = (bytes / PACK_BYTES) as u64;
        let serves = call.op == Op::Sum
            && call.dtype.has_sentinel()
            && call.other.is_none()
            && call.rows().is_none()
            && bytes.is_multiple_of(PACK_BYTES)
            && (packs <= self.most_packs || self.most_packs >= LEAST_PACKS);
        serves.then_some(self.most_packs * (PACK_BYTES / call.dtype.size()) as u64)
    }
}

/// Aligned memory in the place of buffers that are not.
pub(super) struct Aligned([DeviceMemory; 2]);

impl Aligned {
    fn new(context: &Context, bytes: usize) -> Result<Self> {
        Ok(Aligned([DeviceMemory::new(context, bytes)?, DeviceMemory::new(context, bytes)?]))
    }

    /// Before the launch of a step of `bytes` bytes: where its buffers are not aligned it gets others. Returns what is to be copied
    /// behind it.
    ///
    /// # Safety
    /// As for the launch.
    pub unsafe fn before(
        &self,
        step: &mut pl_step,
        queue: &mut Queue<'_>,
        bytes: usize,
    ) -> Result<Option<Copy>> {
        if [step.input.cast_mut(), step.output]
            .iter()
            .all(|at| (*at as usize).is_multiple_of(PACK_BYTES))
        {
            return Ok(None);
        }
        let [input, output] = &self.0;
        let after = Copy { to: step.output as u64, from: output.ptr(), bytes };
        // SAFETY: the caller's promise for its input; no step has more bytes than there are here.
        unsafe { queue.copy(input.ptr(), step.input as u64, bytes)? };
        (step.input, step.output) = (input.ptr() as *const _, output.ptr() as *mut _);
        Ok(Some(after))
    }
}

/// A copy on the device.
pub(super) struct Copy {
    to: u64,
    from: u64,
    bytes: usize,
}

impl Copy {
    /// # Safety
    /// As for the launch that it follows.
    pub unsafe fn queue(self, queue: &mut Queue<'_>) -> Result<()> {
        // SAFETY: the caller's promise for its output.
        unsafe { queue.copy(self.to, self.from, self.bytes) }
    }
}
