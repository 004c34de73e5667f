//! A rank on a GPU: one kernel per step on the caller's stream, eager and captured alike. A call allocates nothing and asks
//! the driver for nothing but whether the stream is being captured.

use super::shape::{Shape, ShapeRule};
use super::slab::{Peer, Slab};
use super::state::DeviceState;
use crate::bootstrap::{Steps, Watch, CHANNELS};
use crate::comm::call::Call;
use crate::comm::fault::{error_of, Fault};
use crate::comm::plans::{Plan, Plans};
use crate::comm::selftest;
use crate::comm::signature::signature;
use crate::device::cpu::partial_bytes;
use crate::device::cuda::{
    keep_with_graph, memory, CaptureStatus, CapturedGraph, DeviceMemory, Entered, Event,
    LaunchShape, RelaxedThread, StreamRef,
};
use crate::error::{Error, Result};
use crate::lane::Layout;
use crate::launch::*;
use crate::types::{DType, Lane, Op, PACK_BYTES};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The channel of captured calls that name none. Eager calls use channel 0, so that they may run beside a replay.
const CAPTURED: usize = 1;
/// Graphs whose capture has been seen lately; a captured call keeps the state alive once per graph.
const GRAPHS_REMEMBERED: usize = 8;
/// How long a rank that leaves waits for the others to close its slab, where the lane needs that.
const FAREWELL: Duration = Duration::from_secs(2);

/// What a rank is made of.
pub(super) struct Parts {
    pub lane: Lane,
    pub rule: ShapeRule,
    pub state: Arc<DeviceState>,
    pub slab: Arc<Slab>,
    /// By rank; none where no schedule has an edge, and once this rank has left.
    pub peers: Mutex<Vec<Option<Peer>>>,
    pub layout: Layout,
    pub check: bool,
}

pub(in crate::comm) struct GpuRank {
    rank: usize,
    parts: Parts,
    fault: Arc<Fault>,
    notes: Vec<String>,
    deadline_ns: AtomicU64,
    /// Accumulators of a whole tile between phases, for every channel its own.
    _partial: Option<DeviceMemory>,
    /// Held by the call whose turn it is.
    launcher: Mutex<Launcher>,
}

struct Launcher {
    /// Arguments by plan and channel, complete but for the call's own.
    prepared: Vec<Vec<pl_args>>,
    /// Calls made on each channel.
    calls: Steps,
    /// After the last eager call of each channel, and whether there has been one.
    last: Vec<(Event, bool)>,
    graphs: [u64; GRAPHS_REMEMBERED],
    captured: usize,
}

// SAFETY: the pointers in the prepared arguments are device addresses, which no thread follows; what they refer to lives as
// long as the rank.
unsafe impl Send for Launcher {}

impl GpuRank {
    pub(super) fn new(
        rank: usize,
        parts: Parts,
        fault: Arc<Fault>,
        plans: &Plans,
        deadline: Duration,
    ) -> Result<Self> {
        let context = parts.state.context();
        let mut base = [0; PL_MAX_RANKS as usize];
        for (at, peer) in
            base.iter_mut().zip(parts.peers.lock().unwrap_or_else(PoisonError::into_inner).iter())
        {
            *at = peer.as_ref().map_or(0, Peer::ptr);
        }
        base[rank] = parts.slab.ptr();
        let scratch =
            plans.all().iter().map(scratch_bytes).max().unwrap_or(0).next_multiple_of(256);
        let partial = match scratch {
            0 => None,
            bytes => Some(DeviceMemory::new(context, bytes * CHANNELS)?),
        };
        let args = |plan: &Plan, channel: usize| {
            // SAFETY: integers and raw pointers, for which zero is a value.
            let mut args: pl_args = unsafe { std::mem::zeroed() };
            args.table = *plan.table;
            args.geo = parts.layout.geometry(channel, plan.choice.protocol, &plan.table);
            args.base = base;
            args.state = parts.state.state();
            args.channel = parts.state.channel(channel);
            args.report = parts.state.report(channel);
            args.partial =
                partial.as_ref().map_or(0, |p| p.ptr() + (scratch * channel) as u64) as *mut _;
            args.launch = 1;
            args.proto = plan.choice.protocol as u32;
            args.algo = plan.choice.algorithm as u32;
            args.check = parts.check.into();
            args.yield_ = 1;
            args.host_staged = (parts.lane == Lane::Host).into();
            args
        };
        let prepared = plans
            .all()
            .iter()
            .map(|plan| (0..CHANNELS).map(|channel| args(plan, channel)).collect())
            .collect();
        let last =
            (0..CHANNELS).map(|_| Ok((Event::new(context)?, false))).collect::<Result<_>>()?;
        let launcher = Launcher {
            prepared,
            calls: [0; CHANNELS],
            last,
            graphs: [0; GRAPHS_REMEMBERED],
            captured: 0,
        };
        let gpu = GpuRank {
            rank,
            parts,
            fault,
            notes: Vec::new(),
            deadline_ns: AtomicU64::new(0),
            _partial: partial,
            launcher: Mutex::new(launcher),
        };
        gpu.set_deadline(deadline);
        Ok(gpu)
    }

    /// How long a wait of later steps lasts.
    pub fn set_deadline(&self, deadline: Duration) {
        let ns = u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX);
        self.deadline_ns.store(ns, Ordering::Relaxed);
    }

    /// Why it runs over the lane it runs over.
    pub fn describe(&mut self, notes: Vec<String>) {
        self.notes = notes;
    }

    /// The GPU, the lane and the reasons, for people.
    pub fn explain(&self) -> String {
        let facts = self.parts.state.context().device().facts();
        let mut text = format!("{} ({}), lane {}", facts.name, facts.uuid, self.parts.lane);
        for note in &self.notes {
            text.push_str(&format!("\n  {note}"));
        }
        text
    }

    /// For the watch: what ends kernels' waits.
    pub fn state(&self) -> &Arc<DeviceState> {
        &self.parts.state
    }

    /// The error that a kernel has found since the last look. It costs a load from host memory.
    pub fn kernel_error(&self) -> Option<Error> {
        let record = self.parts.state.record()?;
        Some(error_of(&record, self.rank as u32, None))
    }

    fn peers(&self) -> MutexGuard<'_, Vec<Option<Peer>>> {
        self.parts.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // Nothing in there can be left half changed that matters after a panic.
    fn lock(&self) -> MutexGuard<'_, Launcher> {
        self.launcher.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Launches a call, or records it where `stream` is being captured, and returns the number of steps.
    pub fn enqueue(
        &self,
        call: &Call,
        plans: &Plans,
        index: usize,
        stream: StreamRef,
        channel: Option<usize>,
    ) -> Result<u64> {
        let plan = &plans.all()[index];
        let entered = self.parts.state.context().enter()?;
        let mut launcher = self.lock();
        match stream.capture(&entered)? {
            CaptureStatus::None => {
                let channel = channel.unwrap_or(0);
                let (event, made) = &launcher.last[channel];
                if *made {
                    // Always, not only where the stream is another one: a stream that was destroyed since may have come
                    // back under the same handle. On one stream the wait costs the device nothing.
                    stream.wait(&entered, event)?;
                }
                let steps = self.launch(&mut launcher, &entered, call, plan, index, stream, channel)?;
                let (event, made) = &mut launcher.last[channel];
                event.record(&entered, stream)?;
                *made = true;
                Ok(steps)
            }
            CaptureStatus::Active(graph) => {
                self.keep_alive(&mut launcher, &entered, graph)?;
                let channel = channel.unwrap_or(CAPTURED);
                self.launch(&mut launcher, &entered, call, plan, index, stream, channel)
            }
            CaptureStatus::Invalidated => Err(Error::InvalidArgument(
                "the stream's capture has been invalidated by an earlier call; end it and capture anew".into(),
            )),
        }
    }

    fn keep_alive(
        &self,
        launcher: &mut Launcher,
        entered: &Entered<'_>,
        graph: CapturedGraph,
    ) -> Result<()> {
        if launcher.graphs.contains(&graph.id) {
            return Ok(());
        }
        keep_with_graph(entered, graph, Arc::clone(&self.parts.state))?;
        let at = launcher.captured % GRAPHS_REMEMBERED;
        launcher.graphs[at] = graph.id;
        launcher.captured += 1;
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn launch(
        &self,
        launcher: &mut Launcher,
        entered: &Entered<'_>,
        call: &Call,
        plan: &Plan,
        index: usize,
        stream: StreamRef,
        channel: usize,
    ) -> Result<u64> {
        let protocol = plan.choice.protocol;
        let kernels = &self.parts.state.kernels;
        let kernel = match call.rows() {
            None => kernels.get(call.dtype, call.op, protocol, &plan.table)?,
            Some(_) => kernels.fused(call.dtype, protocol, &plan.table)?,
        };
        launcher.calls[channel] += 1;
        let number = launcher.calls[channel];
        let args = &mut launcher.prepared[index][channel];
        let step = plan.step_elements(call)?;
        args.deadline_ns = self.deadline_ns.load(Ordering::Relaxed);
        args.call = number;
        args.signature = signature(call, plan.choice);
        args.dtype = call.dtype as u32;
        args.op = call.op as u32;
        let (mut steps, mut done) = (0, 0u64);
        while done < call.count as u64 {
            let count = step.min(call.count as u64 - done);
            let offset = done as usize * call.dtype.size();
            args.input = call.input.wrapping_byte_add(offset);
            args.output = call.output.wrapping_byte_add(offset);
            args.count = count;
            let shape = match &call.norm {
                Some(norm) if norm.fused => {
                    norm.prepare(args, call.dtype, done, count);
                    self.parts.rule.rows(args.rows)
                }
                _ => {
                    (args.rows, args.width) = (0, 0);
                    let packs = (count * call.dtype.size() as u64).div_ceil(PACK_BYTES as u64);
                    self.parts.rule.shape(&plan.table, &args.geo, protocol, packs)
                }
            };
            args.chunk_packs = shape.chunk_packs;
            // SAFETY: the table has passed the checker; the geometry lies inside slabs that are mapped at `base` until
            // the sticky word is set; state and report live as long as the rank and every graph that captured it; the
            // caller vouches for input and output; the channel's owner word refuses a second launch.
            unsafe { kernel.launch(entered, stream, &launch_shape(shape), args)? };
            steps += 1;
            done += count;
        }
        if let Some(norm) = call.norm_after() {
            args.output = call.output;
            norm.prepare(args, call.dtype, 0, call.count as u64);
            let shape = ShapeRule::alone(args.rows);
            let kernel = kernels.norm(call.dtype)?;
            // SAFETY: the caller vouches for all buffers of the call. Of a sum that failed NaN is left, which makes NaN of
            // both outputs.
            unsafe { kernel.launch(entered, stream, &launch_shape(shape), args)? };
        }
        Ok(steps)
    }

    /// Input and output of the self-test.
    pub fn test_buffers(&self) -> Result<[DeviceMemory; 2]> {
        let bytes = selftest::COUNT * size_of::<f32>();
        let context = self.parts.state.context();
        Ok([DeviceMemory::new(context, bytes)?, DeviceMemory::new(context, bytes)?])
    }

    /// The first use of the lane; see `selftest`. Nothing is allocated or freed on the way: freeing may wait for the whole
    /// GPU, hence for ranks that wait for this one.
    pub fn self_test(
        &self,
        plans: &Plans,
        nonces: &[u64],
        [input, output]: &[DeviceMemory; 2],
    ) -> Result<()> {
        let stream = self.parts.state.stream();
        let tested = selftest::run(plans, self.rank, nonces, |values, result, index| {
            input.write(stream, 0, bytemuck::cast_slice(values))?;
            output.write(stream, 0, bytemuck::cast_slice(result))?;
            let call = Call {
                input: input.ptr() as *const _,
                output: output.ptr() as *mut _,
                count: values.len(),
                dtype: DType::F32,
                op: Op::Sum,
                norm: None,
            };
            self.enqueue(&call, plans, index, stream.as_ref(), None)?;
            stream.synchronize()?;
            if let Some(error) = self.fault.get().cloned().or_else(|| self.kernel_error()) {
                return Err(error);
            }
            output.read(stream, 0, bytemuck::cast_slice_mut(result))
        });
        if let Err(error) = &tested {
            // Others may be waiting for steps that this rank will not make, and its own kernel for theirs.
            self.tell_peers();
            self.fault.raise(error.clone());
            let _ = stream.synchronize();
        }
        tested
    }

    /// Tells the kernels of all ranks within reach that this one has given up, as its own kernel would.
    fn tell_peers(&self) {
        let record = pl_record {
            reason: PL_REASON_ABORTED,
            rank: self.rank as u32,
            peer: self.rank as u32,
            phase: 0,
            step: 0,
            bytes: 0,
            dtype: 0,
            op: 0,
            count: 0,
            valid: 1,
        };
        // SAFETY: plain integers without padding: `cuda/wait.cuh` asserts it.
        let bytes: [u8; size_of::<pl_record>()] = unsafe { std::mem::transmute(record) };
        let valid = std::mem::offset_of!(pl_record, valid);
        let stream = self.parts.state.stream().as_ref();
        let Ok(entered) = self.parts.state.context().enter() else { return };
        for peer in self.peers().iter().flatten() {
            let at = peer.ptr() + (self.rank * bytes.len()) as u64;
            // SAFETY: this rank's record in the peer's slab, which is mapped; validity last.
            let _ = unsafe {
                memory::write(&entered, at, &bytes[..valid], stream).and_then(|()| {
                    memory::write(&entered, at + valid as u64, &bytes[valid..], stream)
                })
            };
        }
    }

    /// Waits for this rank's work, makes replays to come return at once, lets go of the peers' slabs, and says goodbye.
    pub fn close(&self, watch: &Watch) {
        self.drain();
        let state = Arc::clone(&self.parts.state);
        let steps = state.channels().map_or([0; CHANNELS], |(steps, _)| steps);
        // A call that a group still holds finds this.
        self.fault.raise(Error::Closed);
        let _ = state.close();
        if self.lock().captured > 0 {
            // A replay that began just before the word was set.
            self.until_idle(Duration::from_secs(1));
        }
        let peers = std::mem::take(&mut *self.peers());
        let elsewhere = |peer: &Option<Peer>| matches!(peer, Some(Peer::Ipc(_)));
        let importers: Vec<usize> = (0..peers.len()).filter(|&r| elsewhere(&peers[r])).collect();
        // An exporter of IPC memory may free it once we have said goodbye, so the mapping goes before. All else goes after:
        // freeing may wait for the whole GPU, hence for ranks that wait until they know that this one has left.
        let (before, after): (Vec<_>, Vec<_>) = peers.into_iter().partition(elsewhere);
        drop(before);
        if self.parts.slab.waits_for_importers() {
            watch.goodbye_and_wait(steps, &importers, FAREWELL);
            importers
                .iter()
                .filter(|&&r| watch.gone(r))
                .for_each(|&r| self.parts.slab.importer_gone(r));
        } else {
            watch.goodbye(steps);
        }
        drop(after);
    }

    fn drain(&self) {
        let Ok(entered) = self.parts.state.context().enter() else { return };
        if let Ok(_relaxed) = RelaxedThread::new(&entered) {
            for (event, made) in &self.lock().last {
                if *made {
                    let _ = event.synchronize(&entered);
                }
            }
        }
        if self.lock().captured > 0 && !self.parts.state.aborted() {
            self.until_idle(Duration::from_nanos(self.deadline_ns.load(Ordering::Relaxed)));
        }
    }

    /// Waits until no step runs on any channel, an abort, or `patience`.
    fn until_idle(&self, patience: Duration) {
        let start = Instant::now();
        while let Ok((_, true)) = self.parts.state.channels() {
            if start.elapsed() >= patience || self.kernel_error().is_some() {
                return;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

fn launch_shape(shape: Shape) -> LaunchShape {
    LaunchShape {
        blocks: shape.blocks,
        threads: shape.threads,
        shared_bytes: 0,
        programmatic: false,
    }
}

/// Bytes of scratch that a step of `plan` may need, of any type; none where the schedule keeps no partial sums.
fn scratch_bytes(plan: &Plan) -> usize {
    let folds = &plan.table.phase[..usize::from(plan.table.phases)];
    let folds =
        folds.iter().map(|p| usize::from(p.fold0) + usize::from(p.folds)).max().unwrap_or(0);
    if plan.table.fold[..folds].iter().all(|fold| u32::from(fold.dst) != PL_DST_PARTIAL) {
        return 0;
    }
    let of = |dtype: &DType| partial_bytes(*dtype, plan.most_elements(*dtype)) as usize;
    DType::ALL.iter().map(of).max().unwrap_or(0)
}
