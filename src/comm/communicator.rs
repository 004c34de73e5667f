//! The public handle: create, call, abort, destroy.

use super::call::Call;
use super::config::{Agreed, Config};
use super::engine::{self, CpuEngine, Engine, Queue, Submission, IDLE};
use super::fault::Fault;
use super::group;
use super::order::Admission;
use super::plans::Plans;
use super::stats::{Counters, Stats};
use crate::bootstrap::{Mesh, Owner, UniqueId, Watch, CHANNELS, UNIQUE_ID_BYTES};
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::log::log;
use crate::plan::DeviceKind;
use crate::schedule;
use crate::types::{DType, Op, MAX_RANKS};
use std::ffi::c_void;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::mpsc;
use std::sync::{Arc, OnceLock, PoisonError};

/// One rank's end of a group of ranks that reduce together. `Send` and `Sync`: calls from several threads are ordered as
/// they come in.
pub struct Communicator {
    inner: Arc<Inner>,
}

pub(super) struct Inner {
    rank: usize,
    size: usize,
    plans: Plans,
    counters: Counters,
    engine: Engine,
    fault: Arc<Fault>,
    watch: Watch,
    id: [u8; UNIQUE_ID_BYTES],
    owner: Owner,
}

impl Communicator {
    /// Joins the communicator `id` as `rank` of `n`; returns once all ranks have, or fails on all with the same error.
    pub fn create(id: &UniqueId, n: usize, rank: usize, config: &Config) -> Result<Self> {
        check_rank(n, rank)?;
        let mut mesh = Mesh::connect(id, n, rank, config.setup_deadline)?;

        let all = mesh.all_gather("agree on the configuration", config.settle(n))?;
        Agreed::compare(&all)?;
        let (plans, engine, fault) = engine::set_up(&mut mesh, all[rank].clone(), config)?;

        let raised = Arc::clone(&fault);
        let on_failure = move |error: Error| {
            // First end the waits, then speak: standard error may be a pipe that nobody empties.
            raised.raise(error.clone());
            log!(Warn, "rank {rank} of {n}: {error}");
        };
        let on_goodbye: Box<dyn Fn(usize, [u64; CHANNELS]) -> Option<Error> + Send> = match &engine
        {
            Engine::Cpu(cpu) => {
                let running = Arc::clone(&cpu.in_flight);
                Box::new(move |peer, steps| {
                    // The counterpart of `Inner::may_step`: whichever of the two comes second sees the first.
                    (running.load(SeqCst) >= steps[0])
                        .then_some(Error::RankLeft { rank: peer as u32 })
                })
            }
            // The host does not know which step a GPU is at; its kernels do.
            #[cfg(feature = "cuda")]
            Engine::Cuda(gpu) => {
                let state = Arc::clone(gpu.state());
                Box::new(move |peer, steps| {
                    state.left(peer, steps);
                    None
                })
            }
        };
        let watch = mesh.watch(Box::new(on_failure), on_goodbye)?;
        let inner = Inner {
            rank,
            size: n,
            plans,
            counters: Counters::default(),
            engine,
            fault,
            watch,
            id: *id.as_bytes(),
            owner: Owner::current(),
        };
        log!(
            Info,
            "rank {rank} of {n}: {}, islands {}, tree {} ({:016x})",
            inner.device(),
            inner.plans.islands(),
            inner.plans.tree(),
            inner.plans.tree().hash64()
        );
        Ok(Communicator { inner: Arc::new(inner) })
    }

    /// All `n` ranks as members of this process, in order; each is meant for a thread of its own, or for a group. On GPUs
    /// all of them share the one that `config` names.
    pub fn create_local(n: usize, config: &Config) -> Result<Vec<Self>> {
        check_rank(n, 0)?;
        #[cfg(feature = "cuda")]
        let config =
            &Config { device: super::gpu::settle_ordinal(config.device)?, ..config.clone() };
        let id = UniqueId::in_dir(config.run_dir.as_deref())?;
        // No rank begins before all have a thread: it would wait for the missing ones until the set-up deadline.
        let gate = OnceLock::new();
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..n)
                .map(|rank| {
                    let gate = &gate;
                    let work = move || match gate.wait() {
                        true => Self::create(&id, n, rank, config),
                        false => Err(Error::Internal("another rank has no thread".into())),
                    };
                    std::thread::Builder::new()
                        .name(format!("peerlane-create-{rank}"))
                        .spawn_scoped(scope, work)
                        .map_err(|e| Error::os("starting a thread per rank", &e))
                })
                .collect();
            let _ = gate.set(ranks.iter().all(Result::is_ok));
            let unstarted = ranks.iter().find_map(|r| r.as_ref().err().cloned());
            let panicked = |_| Err(Error::Internal("a rank panicked in set-up".into()));
            let created: Vec<_> = ranks
                .into_iter()
                .flatten()
                .map(|thread| thread.join().unwrap_or_else(panicked))
                .collect();
            unstarted.map_or_else(|| created.into_iter().collect(), Err)
        })
    }

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
        let call = Call { input, output, count, dtype, op };
        let queue = match (stream, &self.inner.engine) {
            (None, _) => Queue::Default,
            (Some(stream), Engine::Cpu(_)) => Queue::Cpu(stream),
            #[cfg(feature = "cuda")]
            (Some(_), Engine::Cuda(_)) => {
                return Err(Error::InvalidArgument(
                    "a stream of the CPU device for a communicator on a GPU; pass a CUstream"
                        .into(),
                ))
            }
        };
        self.call(&call, queue)
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
        self.call(&Call { input, output, count, dtype, op }, Queue::Cuda { stream, channel })
    }

    fn call(&self, call: &Call, queue: Queue) -> Result<()> {
        call.validate()?;
        // What cannot be served is refused here, alike on all ranks, before anybody waits for it.
        self.inner.plans.choose(call.bytes(), call.dtype)?;
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

fn check_rank(n: usize, rank: usize) -> Result<()> {
    if n == 0 || n > MAX_RANKS {
        return Err(Error::InvalidArgument(format!(
            "a communicator has 1 to {MAX_RANKS} ranks, not {n}"
        )));
    }
    if rank >= n {
        return Err(Error::InvalidArgument(format!(
            "rank {rank} of {n}: ranks are 0 to {}",
            n - 1
        )));
    }
    Ok(())
}

impl Inner {
    /// Whether both are ranks of one communicator.
    pub fn same_communicator(&self, other: &Self) -> bool {
        self.id == other.id
    }

    /// The device, for people.
    fn device(&self) -> String {
        match &self.engine {
            Engine::Cpu(_) => "the CPU".into(),
            #[cfg(feature = "cuda")]
            Engine::Cuda(gpu) => gpu.explain(),
        }
    }

    /// The sticky error: what the host knows, or what a kernel has found.
    fn error(&self) -> Option<Error> {
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

    /// Starts a call, or queues it. With `may_run_here` an idle stream's call runs on this thread before the return.
    ///
    /// # Safety
    /// A stream named in `queue` lives.
    pub unsafe fn submit(
        inner: &Arc<Self>,
        call: Call,
        queue: Queue,
        may_run_here: bool,
    ) -> Result<Submission> {
        inner.counters.calls.fetch_add(1, Relaxed);
        match (&inner.engine, queue) {
            (Engine::Cpu(cpu), Queue::Cpu(stream)) => {
                // SAFETY: the caller's promise.
                Self::submit_cpu(inner, cpu, call, unsafe { stream.as_ref() }, may_run_here)
            }
            (Engine::Cpu(cpu), _) => Self::submit_cpu(inner, cpu, call, None, may_run_here),
            #[cfg(feature = "cuda")]
            (Engine::Cuda(gpu), Queue::Cuda { stream, channel }) => {
                Ok(Submission::Done(inner.launch(gpu, &call, stream, channel)))
            }
            #[cfg(feature = "cuda")]
            (Engine::Cuda(gpu), _) => {
                let stream = crate::device::cuda::StreamRef::LEGACY;
                Ok(Submission::Done(inner.launch(gpu, &call, stream, None)))
            }
        }
    }

    #[cfg(feature = "cuda")]
    fn launch(
        &self,
        gpu: &super::gpu::GpuRank,
        call: &Call,
        stream: crate::device::cuda::StreamRef,
        channel: Option<usize>,
    ) -> Result<()> {
        if let Some(error) = self.error() {
            return Err(error);
        }
        if call.count == 0 {
            return Ok(());
        }
        let choice = self.plans.choose(call.bytes(), call.dtype)?;
        let index = self.plans.index(choice)?;
        let launched = gpu.enqueue(call, &self.plans, index, stream, channel);
        match launched {
            Ok(steps) => {
                self.counters.steps.fetch_add(steps, Relaxed);
                self.counters.served(choice.algorithm, choice.protocol, call.bytes() as u64);
                Ok(())
            }
            Err(error) => {
                self.counters.failed.fetch_add(1, Relaxed);
                // The others may have launched it, and would wait for this rank.
                self.fail(error.clone());
                Err(error)
            }
        }
    }

    fn submit_cpu(
        inner: &Arc<Self>,
        cpu: &CpuEngine,
        call: Call,
        stream: Option<&Stream>,
        may_run_here: bool,
    ) -> Result<Submission> {
        let mut told = None;
        let admission =
            cpu.order.admit(stream.unwrap_or(&cpu.own_stream), may_run_here, |number| {
                let inner = Arc::clone(inner);
                let (tell, result) = mpsc::sync_channel(1);
                told = Some(result);
                Box::new(move || {
                    let result = match &inner.engine {
                        Engine::Cpu(cpu) => {
                            let turn = cpu.order.wait_for(number);
                            let result = inner.execute(cpu, &call);
                            drop(turn);
                            result
                        }
                        #[cfg(feature = "cuda")]
                        Engine::Cuda(_) => Err(Error::Internal("a call changed its device".into())),
                    };
                    // Nobody listens where the caller named a stream.
                    let _ = tell.send(result);
                })
            })?;
        Ok(match admission {
            Admission::Now(_turn, _claim) => Submission::Done(inner.execute(cpu, &call)),
            Admission::Queued => match told.filter(|_| stream.is_none()) {
                Some(result) => Submission::Waiting(result),
                None => Submission::Queued,
            },
        })
    }

    /// Runs a call whose turn it is.
    fn execute(&self, cpu: &CpuEngine, call: &Call) -> Result<()> {
        self.run(cpu, call).map_err(|error| {
            self.counters.failed.fetch_add(1, Relaxed);
            // A call that was refused before its first step has cost the others nothing yet, but they will wait for it.
            self.fail(error.clone());
            self.fault.get().cloned().unwrap_or(error)
        })
    }

    fn run(&self, cpu: &CpuEngine, call: &Call) -> Result<()> {
        let mut host = cpu.host.lock().unwrap_or_else(PoisonError::into_inner);
        host.count_call();
        if let Some(error) = self.fault.get() {
            call.fill_failed(0);
            return Err(error.clone());
        }
        if call.count == 0 {
            return Ok(());
        }
        let choice = self.plans.choose(call.bytes(), call.dtype)?;
        let plan = self.plans.get(choice)?;
        let result = host.run(call, plan, |step| self.may_step(cpu, step));
        cpu.in_flight.store(IDLE, SeqCst);
        let steps = result?;
        drop(host);
        self.counters.steps.fetch_add(steps, Relaxed);
        self.counters.served(choice.algorithm, choice.protocol, call.bytes() as u64);
        Ok(())
    }

    /// Announces a step, unless a rank that it needs has left without it. A rank that left after it finished the step is
    /// no obstacle: what it had to send is on its way.
    fn may_step(&self, cpu: &CpuEngine, step: u64) -> Result<()> {
        cpu.in_flight.store(step, SeqCst);
        let missing = |&r: &usize| self.watch.left_before(r).is_some_and(|left| left[0] <= step);
        match (0..self.size).find(missing) {
            Some(rank) => Err(Error::RankLeft { rank: rank as u32 }),
            None => Ok(()),
        }
    }

    /// Makes `error` sticky here and tells the other ranks, if it is the first.
    fn fail(&self, error: Error) {
        // The watch may have learned of another error a moment ago, and told it to everybody: that one counts.
        let first = self.watch.tell(&error);
        if self.fault.raise(first.clone()) {
            log!(Warn, "rank {} of {}: {first}", self.rank, self.size);
        }
    }
}
