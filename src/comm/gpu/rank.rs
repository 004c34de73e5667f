//! A rank on a GPU: one kernel per step on the caller's stream, eager and captured alike. A call allocates nothing and asks
//! the driver for nothing but whether the stream is being captured, and where it stands then.

use super::chain::{Chain, Queue, Room};
use super::delta::Delta;
use super::shape::{ShapeRule, FEWER_THREADS};
use super::share::{CAPTURED, EAGER};
use super::slab::{Peer, Slab};
use super::state::DeviceState;
use super::unrolled::{may_be_unrolled, UnrolledArgs};
use crate::bootstrap::{Steps, CHANNELS};
use crate::comm::call::Call;
use crate::comm::fault::{error_of, Fault};
use crate::comm::plans::{Plan, Plans};
use crate::comm::signature::signature;
use crate::device::cpu::partial_bytes;
use crate::device::cuda::{
    keep_with_graph, memory, CaptureStatus, CapturedGraph, DeviceMemory, Entered, Event, StreamRef,
};
use crate::error::{Error, Result};
use crate::lane::{Layout, SQUARES_HALF_BYTES};
use crate::launch::*;
use crate::placement::Placement;
use crate::probe::ProbeReport;
use crate::types::{DType, Lane, PACK_BYTES};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Graphs whose capture has been seen lately; a captured call keeps the state alive once per graph.
const GRAPHS_REMEMBERED: usize = 8;

/// What a rank is made of.
pub(super) struct Parts {
    pub lane: Lane,
    /// By channel.
    pub rules: [ShapeRule; CHANNELS],
    /// For programmatic launches; none where there are none.
    pub room: Option<Room>,
    pub state: Arc<DeviceState>,
    pub slab: Arc<Slab>,
    /// By rank; none where no schedule has an edge, and once this rank has left.
    pub peers: Mutex<Vec<Option<Peer>>>,
    pub layout: Layout,
    pub check: bool,
    pub placement: Placement,
}

pub(in crate::comm) struct GpuRank {
    pub(super) rank: usize,
    pub(super) parts: Parts,
    pub(super) fault: Arc<Fault>,
    notes: Vec<String>,
    report: Option<ProbeReport>,
    pub(super) deadline_ns: AtomicU64,
    /// Accumulators of a whole tile between phases, for every channel its own.
    _partial: Option<DeviceMemory>,
    /// What the blocks of a fused step tell each other, likewise.
    _squares: DeviceMemory,
    /// Held by the call whose turn it is.
    launcher: Mutex<Launcher>,
}

/// The last eager call of a channel.
pub(super) struct LastCall {
    /// Behind it.
    pub event: Event,
    /// Whether there has been one.
    pub made: bool,
    /// Its stream's number, if the driver gives numbers.
    stream: Option<u64>,
}

pub(super) struct Launcher {
    /// By plan and channel.
    prepared: Vec<Vec<Prepared>>,
    /// Arguments of other collectives, by their plan's number and channel, from the first call on.
    others: HashMap<(u32, usize), Box<Prepared>>,
    /// Calls made on each channel.
    calls: Steps,
    /// By channel.
    pub(super) last: Vec<LastCall>,
    graphs: [u64; GRAPHS_REMEMBERED],
    pub(super) captured: usize,
    chain: Box<Chain>,
}

/// Arguments complete but for the call's own.
struct Prepared {
    args: pl_args,
    /// For the kernels with unrolled loops, where the table has the form.
    unrolled: Option<UnrolledArgs>,
    /// The way over host memory that sums take instead.
    delta: Option<Box<Delta>>,
}

// SAFETY: the pointers in the prepared arguments are device addresses, which no thread follows; what they refer to lives as
// long as the rank. Those in the chain are handles of the driver's, which any thread may hand to it.
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
        let squares = DeviceMemory::new(context, 2 * SQUARES_HALF_BYTES as usize * CHANNELS)?;
        // No tag is 0.
        squares.zero(parts.state.stream())?;
        let args = |plan: &Plan, channel: usize| {
            // SAFETY: integers and raw pointers, for which zero is a value.
            let mut args: pl_args = unsafe { std::mem::zeroed() };
            args.table = *plan.table;
            args.step.geo = parts.layout.geometry(channel, plan.choice.protocol, &plan.table);
            args.step.base = base;
            args.step.state = parts.state.state();
            args.step.channel = parts.state.channel(channel);
            args.step.report = parts.state.report(channel);
            args.step.partial =
                partial.as_ref().map_or(0, |p| p.ptr() + (scratch * channel) as u64) as *mut _;
            let before = 2 * SQUARES_HALF_BYTES * channel as u64;
            args.step.squares = (squares.ptr() + before) as *mut _;
            args.step.squares_half_bytes = SQUARES_HALF_BYTES;
            args.step.launch = 1;
            args.step.proto = plan.choice.protocol as u32;
            args.step.algo = plan.code;
            args.step.check = parts.check.into();
            args.step.yield_ = 1;
            args.step.host_staged = (parts.lane == Lane::Host).into();
            (args.step.n, args.step.rank) = (plan.table.n.into(), rank as u32);
            let unrolled = UnrolledArgs::new(&plan.table, &args.step, plan.choice.protocol);
            let (state, rule) = (&parts.state, &parts.rules[channel]);
            let delta = Delta::new(state, &parts.layout, channel, plan, rule, &args)?;
            Ok(Prepared { args, unrolled, delta: delta.map(Box::new) })
        };
        let prepared = plans
            .all()
            .iter()
            .map(|plan| (0..CHANNELS).map(|channel| args(plan, channel)).collect())
            .collect::<Result<_>>()?;
        let last = (0..CHANNELS)
            .map(|_| Ok(LastCall { event: Event::new(context)?, made: false, stream: None }))
            .collect::<Result<_>>()?;
        let launcher = Launcher {
            prepared,
            others: HashMap::new(),
            calls: [0; CHANNELS],
            last,
            graphs: [0; GRAPHS_REMEMBERED],
            captured: 0,
            chain: Box::new(Chain::new(parts.room)),
        };
        let gpu = GpuRank {
            rank,
            parts,
            fault,
            notes: Vec::new(),
            report: None,
            deadline_ns: AtomicU64::new(0),
            _partial: partial,
            _squares: squares,
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
        let mut text = format!(
            "{} ({}), lane {}, {}",
            facts.name, facts.uuid, self.parts.lane, self.parts.placement
        );
        for note in &self.notes {
            text.push_str(&format!("\n  {note}"));
        }
        text
    }

    /// What [`describe`](Self::describe) was told.
    pub fn lane_notes(&self) -> &[String] {
        &self.notes
    }

    /// What the probe found, once [`set_report`](Self::set_report) has said.
    pub fn report(&self) -> Option<&ProbeReport> {
        self.report.as_ref()
    }

    pub(super) fn set_report(&mut self, report: Option<ProbeReport>) {
        self.report = report;
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.parts.layout
    }

    /// Of a large eager step.
    pub(super) fn most_blocks(&self) -> u32 {
        self.parts.rules[EAGER].most_blocks()
    }

    /// Arguments of a step, whichever, complete but for the call's own.
    pub(super) fn any_step(&self) -> Result<pl_step> {
        let launcher = self.lock();
        let prepared = launcher.prepared.first().and_then(|plan| plan.first());
        let mut step =
            prepared.ok_or_else(|| Error::Internal("a rank without plans".into()))?.args.step;
        step.deadline_ns = self.deadline_ns.load(Ordering::Relaxed);
        Ok(step)
    }

    /// Why it is over, if it is.
    pub(super) fn set_up_error(&self) -> Option<Error> {
        self.fault.get().cloned().or_else(|| self.kernel_error())
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

    /// The same for a thread of its own.
    pub fn look(&self) -> Box<dyn Fn() -> Option<Error> + Send> {
        let (state, rank) = (Arc::clone(&self.parts.state), self.rank as u32);
        Box::new(move || Some(error_of(&state.record()?, rank, None)))
    }

    pub(super) fn peers(&self) -> MutexGuard<'_, Vec<Option<Peer>>> {
        self.parts.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // Nothing in there can be left half changed that matters after a panic.
    pub(super) fn lock(&self) -> MutexGuard<'_, Launcher> {
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
        self.in_order(stream, channel, |launcher, entered, channel| {
            launcher.calls[channel] += 1;
            let number = launcher.calls[channel];
            let prepared = &mut launcher.prepared[index][channel];
            let mut queue = Queue { entered, stream, channel, chain: &mut launcher.chain };
            self.launch(&mut queue, call, plan, prepared, number)
        })
    }

    /// The same for another collective: what this rank copies by itself, then the `runs`.
    pub fn enqueue_runs(
        &self,
        call: &Call,
        runs: &[(Call, Arc<Plan>)],
        stream: StreamRef,
        channel: Option<usize>,
    ) -> Result<u64> {
        self.in_order(stream, channel, |launcher, entered, channel| {
            if let Some((from, to, bytes)) = call.own_copy() {
                // SAFETY: this rank's input and its place in the output, which do not overlap: `validate` has looked.
                unsafe { memory::copy(entered, to as u64, from as u64, bytes, stream)? };
                launcher.chain.interrupt();
            }
            launcher.calls[channel] += 1;
            let number = launcher.calls[channel];
            let mut queue = Queue { entered, stream, channel, chain: &mut launcher.chain };
            let mut steps = 0;
            for (run, plan) in runs {
                let layout = &self.parts.layout;
                let any = launcher.prepared.first().and_then(|plan| plan.get(channel));
                let any =
                    any.ok_or_else(|| Error::Internal("a rank without plans".into()))?.args.step;
                let prepared = launcher.others.entry((plan.code, channel)).or_insert_with(|| {
                    let choice = plan.choice;
                    let geo = layout.geometry(channel, choice.protocol, &plan.table);
                    let proto = choice.protocol as u32;
                    let step = pl_step { geo, proto, algo: plan.code, ..any };
                    Box::new(Prepared {
                        args: pl_args { step, table: *plan.table },
                        unrolled: None,
                        delta: None,
                    })
                });
                steps += self.launch(&mut queue, run, plan, prepared, number)?;
            }
            Ok(steps)
        })
    }

    /// Work on a stream, behind what its channel did last.
    fn in_order(
        &self,
        stream: StreamRef,
        channel: Option<usize>,
        work: impl FnOnce(&mut Launcher, &Entered<'_>, usize) -> Result<u64>,
    ) -> Result<u64> {
        let entered = self.parts.state.context().enter()?;
        let mut launcher = self.lock();
        match launcher.chain.look(&entered, stream)? {
            CaptureStatus::None => {
                let channel = channel.unwrap_or(EAGER);
                // Work of one stream is in order already. The number says whether it is one: a handle does not, since a
                // stream that was destroyed with work in it may have come back as another one under the same handle.
                let id = stream.id(&entered)?;
                let last = &launcher.last[channel];
                if last.made && (id.is_none() || id != last.stream) {
                    stream.wait(&entered, &last.event)?;
                }
                let steps = work(&mut launcher, &entered, channel)?;
                // Now, not when a call comes on another stream: by then this one may be gone.
                let last = &mut launcher.last[channel];
                last.event.record(&entered, stream)?;
                (last.made, last.stream) = (true, id);
                Ok(steps)
            }
            CaptureStatus::Active(graph) => {
                self.keep_alive(&mut launcher, &entered, graph)?;
                let channel = channel.unwrap_or(CAPTURED);
                work(&mut launcher, &entered, channel)
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

    fn launch(
        &self,
        queue: &mut Queue<'_>,
        call: &Call,
        plan: &Plan,
        prepared: &mut Prepared,
        number: u64,
    ) -> Result<u64> {
        let protocol = plan.choice.protocol;
        let kernels = &self.parts.state.kernels;
        let Prepared { args, unrolled, delta } = prepared;
        let delta =
            delta.as_deref_mut().and_then(|delta| Some((delta.step_elements(call)?, delta)));
        let (step, args, mut unrolled, rule, aligned) = match delta {
            Some((step, Delta { args, unrolled, rule, aligned, .. })) => {
                (step, args, Some(unrolled), &*rule, Some(aligned))
            }
            None => {
                let unrolled = unrolled.as_mut().filter(|_| may_be_unrolled(call));
                let rule = &self.parts.rules[queue.channel];
                (plan.step_elements(call)?, args, unrolled, rule, None)
            }
        };
        let parts = call.other.and_then(|other| other.parts);
        args.step.deadline_ns = self.deadline_ns.load(Ordering::Relaxed);
        args.step.call = number;
        args.step.signature = signature(call, plan.choice);
        args.step.dtype = call.dtype as u32;
        args.step.op = call.op as u32;
        args.step.parts = parts.is_some().into();
        [args.step.input_part, args.step.output_part] = parts.unwrap_or_default();
        let (mut steps, mut done) = (0, 0u64);
        while done < call.count as u64 {
            let count = step.min(call.count as u64 - done);
            let offset = done as usize * call.dtype.size();
            args.step.input = call.input.wrapping_byte_add(offset);
            args.step.output = call.output.wrapping_byte_add(offset);
            args.step.count = count;
            let shapes = match &call.norm {
                Some(norm) if norm.fused => {
                    norm.prepare(&mut args.step, call.dtype, done, count);
                    rule.rows(args.step.rows).into()
                }
                _ => {
                    (args.step.rows, args.step.width) = (0, 0);
                    let packs = (count * call.dtype.size() as u64).div_ceil(PACK_BYTES as u64);
                    // The shape asks for the tile; pieces are parts, so it has as many times the packs of one.
                    let packs = packs * parts.map_or(1, |_| u64::from(plan.table.pieces));
                    let geo = &args.step.geo;
                    rule.shape(&plan.table, geo, protocol, packs, FEWER_THREADS)
                }
            };
            // SAFETY: the table has passed the checker; the geometry lies inside slabs that are mapped at `base` until
            // the sticky word is set; state and report live as long as the rank and every graph that captured it; the
            // caller vouches for input and output; the channel's word refuses a second launch.
            unsafe {
                let bytes = count as usize * call.dtype.size();
                let after = match &aligned {
                    Some(aligned) => aligned.before(&mut args.step, queue, bytes)?,
                    None => None,
                };
                let launched = match &mut unrolled {
                    Some(unrolled) => unrolled.launch(kernels, queue, rule, args)?,
                    None => false,
                };
                let shapes = shapes.with_at_most(FEWER_THREADS);
                match call.rows() {
                    _ if launched => {}
                    None => {
                        let kernel = kernels.get(call.dtype, call.op, protocol, &plan.table)?;
                        queue.launch(kernel, shapes, args)?
                    }
                    Some(_) => {
                        let kernel = kernels.fused(call.dtype, protocol, &plan.table)?;
                        queue.launch(kernel, shapes, args)?
                    }
                }
                if let Some(after) = after {
                    after.queue(queue)?;
                }
            }
            steps += 1;
            done += count;
        }
        if let Some(norm) = call.norm_after() {
            args.step.output = call.output;
            norm.prepare(&mut args.step, call.dtype, 0, call.count as u64);
            let shapes = ShapeRule::alone(args.step.rows).into();
            let kernel = kernels.norm(call.dtype)?;
            // SAFETY: the caller vouches for all buffers of the call. Of a sum that failed NaN is left, which makes NaN of
            // both outputs.
            unsafe { queue.launch(kernel, shapes, &mut args.step)? };
        }
        Ok(steps)
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
