//! The public handle: call, ask, abort, destroy.

use super::call::Call;
use super::engine::{Engine, Queue};
use super::fault::Fault;
use super::group;
use super::plans::Plans;
use super::stats::{Counters, Stats};
use crate::bootstrap::{Owner, Watch, CHANNELS, UNIQUE_ID_BYTES};
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::log::log;
use crate::plan::DeviceKind;
use crate::probe::ProbeReport;
use crate::schedule;
use crate::types::{DType, Op};
use std::ffi::c_void;
use std::sync::{Arc, PoisonError};

/// One rank's end of a group of ranks that reduce together. `Send` and `Sync`: calls from several threads are ordered as
/// they come in.
pub struct Communicator {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) plans: Plans,
    pub(super) counters: Counters,
    pub(super) engine: Engine,
    pub(super) fault: Arc<Fault>,
    pub(super) watch: Watch,
    pub(super) id: [u8; UNIQUE_ID_BYTES],
    pub(super) owner: Owner,
}

impl Communicator {
    /// This rank.
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.inner.size
    }

    /// Reduces `count` elements over all ranks into `output`.
    ///
    /// On a GPU the buffers are device memory (or host memory that the device maps), and the call with `stream` `None` is
    /// queued on the legacy default stream; for others there is [`all_reduce_cuda`](Self::all_reduce_cuda).
    ///
    /// On the CPU with `stream` `None` the call returns when `output` is
    /// complete; with a stream it returns when the work is queued behind what the stream already holds, and an error of
    /// the work is what [`Communicator::error`] and every later call return. Between
    /// [`group_start`](super::group_start) and [`group_end`](super::group_end) it only notes the call.
    ///
    /// On an error of the communicator (a dead rank, a deadline, a difference between calls) `output` holds NaN, or zero for
    /// integers, wherever the result is not known.
    ///
    /// With an idle stream the call runs on the calling thread, so it may wait for the other ranks to call too.
    ///
    /// # Safety
    /// `input` is readable and `output` writable for `count` elements until the work is done; they are the same or do
    /// not overlap. Inside a group, `stream` lives until the outermost [`group_end`](super::group_end).
    pub unsafe fn all_reduce(
        &self,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
        op: Op,
        stream: Option<&Stream>,
    ) -> Result<()> {
        let queue = self.queue(stream)?;
        self.call(&Call { input, output, count, dtype, op, norm: None }, queue)
    }

    /// The same on a CUDA stream, for a communicator on a GPU: one kernel per step is launched, or recorded where the stream
    /// is being captured, and the call returns. `stream` is a `CUstream` or `cudaStream_t` of the communicator's GPU; null is
    /// the legacy default stream.
    /// Ranks of one process that share a GPU need a stream each: the default stream is one for all of them, and work in
    /// it waits for what is before it, which here would be waiting for it.
    ///
    /// A step belongs to a channel, and one channel carries one step at a time. With `channel` `None` eager calls take channel
    /// 0 and are ordered among each other whatever streams they name; captured calls take channel 1 in the order of their
    /// graph. Graphs whose replays may overlap need channels of their own: name 0 to 3, alike on all ranks.
    ///
    /// An error found while the work runs is what [`error`](Self::error) and every later call return; a replay after that
    /// only fills its output.
    ///
    /// # Safety
    /// As for [`all_reduce`](Self::all_reduce), in device memory; the work is done when the stream, or every replay of
    /// the graph, has passed it. `stream` lives.
    #[cfg(feature = "cuda")]
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn all_reduce_cuda(
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
        self.call(&Call { input, output, count, dtype, op, norm: None }, queue)
    }

    pub(super) fn queue(&self, stream: Option<&Stream>) -> Result<Queue> {
        match (stream, &self.inner.engine) {
            (None, _) => Ok(Queue::Default),
            (Some(stream), Engine::Cpu(_)) => Ok(Queue::Cpu(stream)),
            #[cfg(feature = "cuda")]
            (Some(_), Engine::Cuda(_)) => Err(Error::InvalidArgument(
                "a stream of the CPU device for a communicator on a GPU; pass a CUstream".into(),
            )),
        }
    }

    #[cfg(feature = "cuda")]
    pub(super) fn cuda_queue(&self, stream: *mut c_void, channel: Option<usize>) -> Result<Queue> {
        if self.inner.engine.is_cpu() {
            return Err(Error::InvalidArgument(
                "a CUDA stream for a communicator of the CPU".into(),
            ));
        }
        if channel.is_some_and(|channel| channel >= CHANNELS) {
            return Err(Error::InvalidArgument(format!(
                "channel {}; a communicator has channels 0 to {}",
                channel.unwrap_or(0),
                CHANNELS - 1
            )));
        }
        let stream = crate::device::cuda::StreamRef::from_raw(stream);
        Ok(Queue::Cuda { stream, channel })
    }

    pub(super) fn call(&self, call: &Call, queue: Queue) -> Result<()> {
        call.validate()?;
        // What cannot be served is refused here, alike on all ranks, before anybody waits for it.
        let choice = self.inner.plans.choose(call.bytes(), call.dtype)?;
        if call.rows().is_some() {
            self.inner.plans.get(choice)?.step_elements(call)?;
        }
        self.inner.owner.require()?;
        if let Some(error) = self.inner.error() {
            if self.inner.engine.is_cpu() {
                call.fill_failed(0);
            }
            return Err(error);
        }
        if group::note(&self.inner, call, queue) {
            return Ok(());
        }
        // SAFETY: a stream named in `queue` is the caller's argument, or the caller vouches for it.
        unsafe { Inner::submit(&self.inner, *call, queue, true) }?.wait()
    }

    /// Ends every wait of this communicator on all ranks; every later call fails.
    pub fn abort(&self) {
        if !self.inner.owner.is_current() {
            return;
        }
        self.inner.fail(Error::Aborted { rank: self.inner.rank as u32 });
    }

    /// The sticky error, if there is one.
    pub fn error(&self) -> Option<Error> {
        self.inner.error()
    }

    /// What its ranks run on.
    pub fn device_kind(&self) -> DeviceKind {
        match self.inner.engine {
            Engine::Cpu(_) => DeviceKind::Cpu,
            #[cfg(feature = "cuda")]
            Engine::Cuda(_) => DeviceKind::Gpu,
        }
    }

    /// What the lane between its ranks does, where creation has measured it or remembers it from an earlier one; see
    /// [`ProbeMode`](crate::ProbeMode). The same on all ranks.
    pub fn probe(&self) -> Option<&ProbeReport> {
        self.inner.engine.report()
    }

    /// Why its ranks run over the lane they run over: edges without peer access, and what other lanes were found to be. Empty
    /// where the first lane works, and on the CPU.
    pub fn lane_notes(&self) -> &[String] {
        self.inner.engine.lane_notes()
    }

    /// What it did so far.
    pub fn stats(&self) -> Stats {
        self.inner.counters.read(self.inner.plans.tree().hash64())
    }

    /// How a call of `bytes` bytes would be served: islands, tree, schedule phase by phase, protocol.
    pub fn explain(&self, bytes: usize, dtype: DType) -> Result<String> {
        let plans = &self.inner.plans;
        let choice = plans.choose(bytes, dtype)?;
        let schedule = schedule::build(choice.algorithm, plans.islands())?;
        let tables = schedule.tables(choice.direction)?;
        Ok(format!(
            "{bytes} bytes of {dtype} over {} ranks: {} by {}, {}\non {}\nislands {}\ntree {} ({:016x})\n{}",
            self.inner.size,
            choice.algorithm,
            choice.protocol,
            choice.direction,
            self.inner.device(),
            plans.islands(),
            plans.tree(),
            plans.tree().hash64(),
            schedule::explain(&tables)
        ))
    }

    /// Says goodbye to the other ranks and frees what this rank holds. Waits for work in flight. Dropping does the same.
    pub fn destroy(self) -> Result<()> {
        drop(self);
        Ok(())
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !self.inner.owner.is_current() {
            // A forked child: the threads that this would wait for are the parent's, and so are locks they may have held
            // at the fork. Nothing is touched, and what is mapped goes when the child does.
            std::mem::forget(Arc::clone(&self.inner));
            return;
        }
        match &self.inner.engine {
            Engine::Cpu(cpu) => {
                cpu.order.drain();
                // Calls still noted in an open group come too late: nobody will join them.
                self.inner.fault.raise(Error::Closed);
                if std::thread::panicking() {
                    return; // the watch ends without a goodbye, and the others see a death
                }
                let step = cpu.host.lock().unwrap_or_else(PoisonError::into_inner).epoch();
                self.inner.watch.goodbye([step; CHANNELS]);
            }
            #[cfg(feature = "cuda")]
            Engine::Cuda(gpu) => gpu.close(&self.inner.watch),
        }
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Communicator(rank {} of {})", self.inner.rank, self.inner.size)
    }
}

impl Inner {
    /// Whether both are ranks of one communicator.
    pub fn same_communicator(&self, other: &Self) -> bool {
        self.id == other.id
    }

    /// The device, for people.
    pub(super) fn device(&self) -> String {
        match &self.engine {
            Engine::Cpu(_) => "the CPU".into(),
            #[cfg(feature = "cuda")]
            Engine::Cuda(gpu) => gpu.explain(),
        }
    }

    /// The sticky error: what the host knows, or what a kernel has found.
    pub(super) fn error(&self) -> Option<Error> {
        match &self.engine {
            #[cfg(feature = "cuda")]
            Engine::Cuda(gpu) if self.fault.get().is_none() => {
                if let Some(error) = gpu.kernel_error() {
                    self.fail(error);
                }
            }
            _ => {}
        }
        self.fault.get().cloned()
    }

    /// Makes `error` sticky here and tells the other ranks, if it is the first.
    pub(super) fn fail(&self, error: Error) {
        // The watch may have learned of another error a moment ago, and told it to everybody: that one counts.
        let first = self.watch.tell(&error);
        if self.fault.raise(first.clone()) {
            log!(Warn, "rank {} of {}: {first}", self.rank, self.size);
        }
    }
}
