//! A rank's launches: one kernel per step on the caller's stream, eager and captured alike. A call allocates nothing and asks
//! the driver for nothing but whether the stream is being captured, and where it stands then; and once per kernel and shape how many
//! of its blocks a multiprocessor holds.

use super::chain::{Chain, Queue, Room};
use super::delta::Delta;
use super::rank::GpuRank;
use super::shape::{ShapeRule, FEWER_THREADS};
use super::share::{CAPTURED, EAGER};
use super::unrolled::{may_be_unrolled, UnrolledArgs};
use crate::bootstrap::{Steps, CHANNELS};
use crate::comm::call::Call;
use crate::comm::plans::{Plan, Plans};
use crate::comm::signature::signature;
use crate::device::cuda::{
    keep_with_graph, memory, CaptureStatus, CapturedGraph, Context, Entered, Event, StreamRef,
};
use crate::error::{Error, Result};
use crate::launch::*;
use crate::types::PACK_BYTES;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::Arc;

/// Graphs whose capture has been seen lately; a captured call keeps the state alive once per graph.
const GRAPHS_REMEMBERED: usize = 8;

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
pub(super) struct Prepared {
    pub args: pl_args,
    /// For the kernels with unrolled loops, where the table has the form.
    pub unrolled: Option<UnrolledArgs>,
    /// The way over host memory that sums take instead.
    pub delta: Option<Box<Delta>>,
}

// SAFETY: the pointers in the prepared arguments are device addresses, which no thread follows; what they refer to lives as
// long as the rank. Those in the chain are handles of the driver's, which any thread may hand to it.
unsafe impl Send for Launcher {}

impl Launcher {
    /// `prepared`: by plan and channel.
    pub fn new(
        context: &Context,
        prepared: Vec<Vec<Prepared>>,
        room: Option<Room>,
    ) -> Result<Self> {
        let last = (0..CHANNELS)
            .map(|_| Ok(LastCall { event: Event::new(context)?, made: false, stream: None }))
            .collect::<Result<_>>()?;
        Ok(Launcher {
            prepared,
            others: HashMap::new(),
            calls: [0; CHANNELS],
            last,
            graphs: [0; GRAPHS_REMEMBERED],
            captured: 0,
            chain: Box::new(Chain::new(room)),
        })
    }
}

impl GpuRank {
    /// Arguments of a step, whichever, complete but for the call's own.
    pub(super) fn any_step(&self) -> Result<pl_step> {
        let launcher = self.lock();
        let prepared = launcher.prepared.first().and_then(|plan| plan.first());
        let mut step =
            prepared.ok_or_else(|| Error::Internal("a rank without plans".into()))?.args.step;
        step.deadline_ns = self.deadline_ns.load(Ordering::Relaxed);
        Ok(step)
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
