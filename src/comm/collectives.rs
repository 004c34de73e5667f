//! Broadcast, all-gather and reduce-scatter: the public calls, and how each is cut into runs of one plan.

use super::call::{Call, Other};
use super::communicator::Communicator;
use super::engine::Queue;
use super::plans::{Plan, Plans};
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::plan::DeviceKind;
use crate::schedule::Goal;
use crate::types::{Algorithm, DType, Op, PACK_BYTES};
use std::ffi::c_void;
use std::sync::Arc;

/// A broadcast of more bytes among GPUs goes in parts: two hops then cost less than n-1 messages out of one rank. As for all-reduces in
/// one island (`plan/choose.rs`), whose one-shot puts as many bytes on every link.
const IN_PARTS: usize = 32 << 10;

/// The runs of a collective, in order; each has a plan of its own. None where a rank is alone.
pub(super) fn runs(call: &Call, other: Other, plans: &Plans) -> Result<Vec<(Call, Arc<Plan>)>> {
    let Other { goal, ranks, .. } = other;
    if ranks == 1 || call.count == 0 {
        return Ok(Vec::new());
    }
    let part = call.bytes() as u64;
    let whole = |parts| Call { other: Some(Other { parts: Some(parts), ..other }), ..*call };
    match goal {
        Goal::AllGather => return Ok(vec![(whole([0, part]), plans.other(goal, true)?)]),
        Goal::ReduceScatter => return Ok(vec![(whole([part, 0]), plans.other(goal, true)?)]),
        Goal::Broadcast { .. } | Goal::AllReduce => {}
    }
    let in_parts = match (plans.agreed().algorithm, plans.agreed().device_kind()) {
        (Some(Algorithm::OneShot), _) => false,
        (Some(Algorithm::TwoShot), _) => true,
        // One store serves all readers.
        (_, DeviceKind::Cpu) => false,
        (_, DeviceKind::Gpu) => ranks > 2 && call.bytes() > IN_PARTS,
    };
    // Parts are whole packs, so that they are equal; what is left over, less than a pack per rank, goes in one piece.
    let packs = if in_parts { call.bytes() / PACK_BYTES / ranks } else { 0 };
    let (size, mut runs) = (call.dtype.size(), Vec::with_capacity(2));
    let bytes = packs * PACK_BYTES;
    if packs > 0 {
        let run = Call { count: bytes / size, ..whole([bytes as u64; 2]) };
        runs.push((run, plans.other(goal, true)?));
    }
    let done = bytes * ranks;
    if done < call.bytes() {
        let rest = Call {
            input: call.input.wrapping_byte_add(done),
            output: call.output.wrapping_byte_add(done),
            count: call.count - done / size,
            ..*call
        };
        runs.push((rest, plans.other(goal, false)?));
    }
    Ok(runs)
}

impl Communicator {
    /// Copies `count` elements of rank `root`'s `input` into every rank's `output`, bit by bit. Only the root's input is looked at;
    /// there it may be the output. Streams, groups, return and errors are as for [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As for [`all_reduce`](Self::all_reduce); the input of ranks other than the root may be anything.
    pub unsafe fn broadcast(
        &self,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
        root: usize,
        stream: Option<&Stream>,
    ) -> Result<()> {
        let goal = self.broadcast_from(root)?;
        self.collective(goal, input, output, count, dtype, Op::Sum, self.queue(stream)?)
    }

    /// Copies every rank's `count` elements into every rank's `output`, `size()` times `count` elements in the order of the ranks, bit
    /// by bit. The input may be this rank's part of the output. Streams, groups, return and errors are as for
    /// [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As for [`all_reduce`](Self::all_reduce), with an output of that size.
    pub unsafe fn all_gather(
        &self,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
        stream: Option<&Stream>,
    ) -> Result<()> {
        let queue = self.queue(stream)?;
        self.collective(Goal::AllGather, input, output, count, dtype, Op::Sum, queue)
    }

    /// Reduces every rank's input, `size()` times `count` elements, and gives rank r the r-th `count` of them, with the bits that an
    /// all-reduce has there. The output may be this rank's part of the input. Streams, groups, return and errors are as for
    /// [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As for [`all_reduce`](Self::all_reduce), with an input of that size.
    pub unsafe fn reduce_scatter(
        &self,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
        op: Op,
        stream: Option<&Stream>,
    ) -> Result<()> {
        let queue = self.queue(stream)?;
        self.collective(Goal::ReduceScatter, input, output, count, dtype, op, queue)
    }

    /// [`broadcast`](Self::broadcast) on a CUDA stream; see [`all_reduce_cuda`](Self::all_reduce_cuda).
    ///
    /// # Safety
    /// As for [`broadcast`](Self::broadcast), in device memory.
    #[cfg(feature = "cuda")]
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn broadcast_cuda(
        &self,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
        root: usize,
        stream: *mut c_void,
        channel: Option<usize>,
    ) -> Result<()> {
        let (goal, queue) = (self.broadcast_from(root)?, self.cuda_queue(stream, channel)?);
        self.collective(goal, input, output, count, dtype, Op::Sum, queue)
    }

    /// [`all_gather`](Self::all_gather) on a CUDA stream; see [`all_reduce_cuda`](Self::all_reduce_cuda).
    ///
    /// # Safety
    /// As for [`all_gather`](Self::all_gather), in device memory.
    #[cfg(feature = "cuda")]
    pub unsafe fn all_gather_cuda(
        &self,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
        stream: *mut c_void,
        channel: Option<usize>,
    ) -> Result<()> {
        let queue = self.cuda_queue(stream, channel)?;
        self.collective(Goal::AllGather, input, output, count, dtype, Op::Sum, queue)
    }

    /// [`reduce_scatter`](Self::reduce_scatter) on a CUDA stream; see [`all_reduce_cuda`](Self::all_reduce_cuda).
    ///
    /// # Safety
    /// As for [`reduce_scatter`](Self::reduce_scatter), in device memory.
    #[cfg(feature = "cuda")]
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn reduce_scatter_cuda(
        &self,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
        op: Op,
        stream: *mut c_void,
        channel: Option<usize>,
    ) -> Result<()> {
        let queue = self.cuda_queue(stream, channel)?;
        self.collective(Goal::ReduceScatter, input, output, count, dtype, op, queue)
    }

    fn broadcast_from(&self, root: usize) -> Result<Goal> {
        match u8::try_from(root) {
            Ok(root) if usize::from(root) < self.size() => Ok(Goal::Broadcast { root }),
            _ => Err(Error::InvalidArgument(format!("root {root} of {} rank(s)", self.size()))),
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn collective(
        &self,
        goal: Goal,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
        op: Op,
        queue: Queue,
    ) -> Result<()> {
        let other = Other { goal, ranks: self.size(), rank: self.rank(), parts: None };
        // Of one rank's data the sum is an all-reduce's: averages and NaN are what they are there.
        let alone = goal == Goal::ReduceScatter && self.size() == 1;
        let other = (!alone).then_some(other);
        self.call(&Call { input, output, count, dtype, op, norm: None, other }, queue)
    }
}
