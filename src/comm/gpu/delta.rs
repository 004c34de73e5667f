//! Sums over host memory by words that differ from the last ones (`cuda/protocol_delta.cuh`), which halves what GPUs write there.
//!
//! It stands in for `sentinel`, plan by plan, where all of a call has the kernels' short path. Whether a call goes by it, and how it
//! is cut into steps, all ranks must decide alike: by its type, operation and count, by the table, and by blocks and threads, which
//! ranks have agreed on. Where a rank's buffers lie is its own matter, and the short path is for aligned ones: others are copied.

use super::chain::Queue;
use super::shape::ShapeRule;
use super::state::DeviceState;
use super::unrolled::{is_aligned, UnrolledArgs};
use crate::comm::call::Call;
use crate::comm::plans::Plan;
use crate::device::cuda::DeviceMemory;
use crate::error::Result;
use crate::lane::{step_packs, tile_packs, Layout, MOST_PACKS};
use crate::launch::*;
use crate::types::{Algorithm, DType, Op, Protocol, PACK_BYTES};

/// Calls of several steps go by `sentinel` where a step by `delta` has fewer packs than this: steps cost their latency.
const LEAST_PACKS: u64 = 8192;

/// One plan's way on one channel. The memory that it works with is the state's.
pub(super) struct Delta {
    /// Complete but for the call's own.
    pub args: pl_args,
    pub unrolled: UnrolledArgs,
    pub rule: ShapeRule,
    pub aligned: Aligned,
    /// Most packs of a step.
    most_packs: u64,
}

impl Delta {
    /// The way beside `plan`'s by `sentinel`, whose arguments are `args`; none where there is none. The slab's region is 0, as the
    /// memory is that this gives `state` to keep.
    pub fn new(
        state: &DeviceState,
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
        let rule = rule.without_spare_block();
        let Some(unrolled) = UnrolledArgs::new(&plan.table, &args.step, Protocol::Sentinel) else {
            return Ok(None);
        };
        let Some((sends, threads)) = unrolled.by_delta(&plan.table) else { return Ok(None) };
        // No slot need have more packs than a launch has threads.
        let Some(geo) = layout.delta_geometry(channel, &plan.table, rule.most_packs(threads))
        else {
            return Ok(None);
        };
        // Of any type: all have packs of so many bytes.
        let most_packs = step_packs(&geo, &plan.table, DType::F32, Protocol::Sentinel)
            .min(tile_packs(&plan.table, rule.most_packs(threads)))
            .min(MOST_PACKS);
        if most_packs == 0 {
            return Ok(None);
        }
        let memory = |bytes: usize| -> Result<u64> {
            let memory = DeviceMemory::new(state.context(), bytes)?;
            memory.zero(state.stream())?;
            let at = memory.ptr();
            state.adopt([memory]);
            Ok(at)
        };
        let mut step = pl_step { geo, ..args.step };
        // As the kernels count: by phase, send and buffer.
        step.sent = memory(sends * 2 * geo.slot_bytes as usize)? as *mut _;
        let slab = step.base[usize::from(plan.table.rank)] + geo.data;
        step.seen_shift = memory(2 * geo.half_bytes as usize)?.wrapping_sub(slab);
        let tile = most_packs as usize * PACK_BYTES;
        let aligned = Aligned { input: memory(tile)?, output: memory(tile)? };
        // Slots lie elsewhere now.
        let unrolled = UnrolledArgs::new(&plan.table, &step, Protocol::Sentinel);
        let args = pl_args { step, ..*args };
        Ok(unrolled.map(|unrolled| Delta { args, unrolled, rule, aligned, most_packs }))
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

/// Aligned memory in the place of buffers that are not: addresses. Calls on one channel follow each other, eager ones by the library's
/// own events and captured ones because the caller orders replays; those that he does not order would meet here as well.
pub(super) struct Aligned {
    input: u64,
    output: u64,
}

impl Aligned {
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
    ) -> Result<Option<CopyBack>> {
        if is_aligned(step.input as usize) && is_aligned(step.output as usize) {
            return Ok(None);
        }
        let after = CopyBack { to: step.output as u64, from: self.output, bytes };
        // SAFETY: the caller's promise for its input; no step has more bytes than there are here.
        unsafe { queue.copy(self.input, step.input as u64, bytes)? };
        (step.input, step.output) = (self.input as *const _, self.output as *mut _);
        Ok(Some(after))
    }
}

/// The copy of a result to where the caller wants it.
pub(super) struct CopyBack {
    to: u64,
    from: u64,
    bytes: usize,
}

impl CopyBack {
    /// # Safety
    /// As for the launch that it follows.
    pub unsafe fn queue(self, queue: &mut Queue<'_>) -> Result<()> {
        // SAFETY: the caller's promise for its output.
        unsafe { queue.copy(self.to, self.from, self.bytes) }
    }
}
