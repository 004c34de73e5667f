//! A rank of the CPU device: its slab, the peers' slabs, its state, and the steps of a call.

use super::call::Call;
use super::fault::{Fault, OwnCall};
use super::plans::Plan;
use super::probe::{launch_of, result_words, Shot};
use super::signature::signature;
use crate::device::cpu;
use crate::error::{Error, Result};
use crate::lane::{longest_piece, HostSlab, Layout, Mapping};
use crate::launch::{pl_args, pl_channel, pl_geometry, pl_step, PL_MAX_RANKS};
use crate::schedule::Goal;
use crate::types::{DType, Op, Protocol, PACK_BYTES};
use std::cell::UnsafeCell;
use std::sync::Arc;
use std::time::Duration;

/// Packs per chunk where the flags' room does not ask for more. One flag per 32 KiB: fine enough that a reader starts on
/// the first chunk while the next is written, coarse enough that flags cost nothing.
const CHUNK_PACKS: u64 = 2048;

pub(crate) struct HostRank {
    rank: usize,
    size: usize,
    deadline_ns: u64,
    check: bool,
    yields: bool,
    base: [u64; PL_MAX_RANKS as usize],
    channel: Box<UnsafeCell<pl_channel>>,
    fault: Arc<Fault>,
    /// Accumulators of a whole tile between phases, for schedules that keep partial sums.
    partial: Vec<u128>,
    args: Option<Box<pl_args>>,
    calls: u64,
    launches: u64,
    _slab: HostSlab,
    _peers: Vec<Option<Mapping>>,
}

// SAFETY: used by one call at a time (the communicator's order sees to it); the addresses in `base` and `args` belong to
// mappings that live as long as `self`.
unsafe impl Send for HostRank {}

/// Over how many buffers (less one) a step of `bytes` bytes rotates: enough that a buffer's lines have left the reader's
/// innermost cache before they are written again, no more than the next cache holds. Measured over 2 cores with 48 KiB
/// and 2 MiB: 14 KiB take 2.6 us over eight buffers, 3.4 over four or two; 28 KiB 3.7 over four, 6.2 over two; 112 KiB
/// 13 us over two, 16 over eight.
///
/// A buffer's parity is the epoch's whatever the rotation, so steps that rotate differently still never write in step
/// k + 1 where step k is read. All ranks rotate alike: a flag carries its call's signature, which holds the count.
fn rotation(geometry: &pl_geometry, bytes: u64) -> u32 {
    geometry.rotation.min(match bytes {
        0..=0x5000 => 7,
        0x5001..=0xa000 => 3,
        _ => 1,
    })
}

/// Makes a slab that peers may write to as soon as they have it: laid out, and armed for the sentinel protocol.
pub(crate) fn armed_slab(layout: &Layout) -> Result<HostSlab> {
    let mut slab = HostSlab::create(layout.bytes() as usize)?;
    for channel in 0..layout.channels() {
        let (start, bytes) = layout.region(channel, Protocol::Sentinel);
        slab.arm(start, bytes)?;
    }
    Ok(slab)
}

impl HostRank {
    pub fn new(
        rank: usize,
        slab: HostSlab,
        peers: Vec<Option<Mapping>>,
        fault: Arc<Fault>,
        check: bool,
    ) -> Self {
        let size = peers.len();
        let mut base = [0; PL_MAX_RANKS as usize];
        for (r, peer) in peers.iter().enumerate() {
            base[r] = peer.as_ref().unwrap_or(slab.mapping()).base().as_ptr() as u64;
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let channel = pl_channel::idle_at(1);
        HostRank {
            rank,
            size,
            deadline_ns: 0,
            check,
            yields: size > cores,
            base,
            channel: Box::new(UnsafeCell::new(channel)),
            fault,
            partial: Vec::new(),
            args: None,
            calls: 0,
            launches: 0,
            _slab: slab,
            _peers: peers,
        }
    }

    /// How long a wait of later steps lasts.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.deadline_ns = u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX);
    }

    /// The epoch of the next step, the same on all ranks that have finished as many.
    pub fn epoch(&self) -> u64 {
        // SAFETY: no step is running (`&self` while steps need `&mut self`).
        unsafe { (*self.channel.get()).epoch() }
    }

    /// Counts a call, empty ones too: ranks that are off by one call must differ in it.
    pub fn count_call(&mut self) {
        self.calls += 1;
    }

    /// Runs a call, step by step, each after `may_step` has agreed to its epoch. Returns the number of steps.
    pub fn run(
        &mut self,
        call: &Call,
        plan: &Plan,
        may_step: impl Fn(u64) -> Result<()>,
    ) -> Result<u64> {
        let own = OwnCall {
            rank: self.rank as u32,
            count: call.count as u64,
            dtype: call.dtype,
            op: call.op,
            goal: call.other.map_or(Goal::AllReduce, |other| other.goal),
            algorithm: plan.choice.algorithm,
            protocol: plan.choice.protocol,
        };
        let step = plan.step_elements(call)?;
        self.prepare(call, plan, step)?;
        let parts = call.other.and_then(|other| other.parts);
        let mut steps = 0;
        let mut done = 0u64;
        // The kernel fills what it could not finish of its own step; the rest of the output is filled here.
        let failed = |from: u64, error: Error| {
            call.fill_failed(from as usize);
            Err(error)
        };
        while done < call.count as u64 {
            let count = step.min(call.count as u64 - done);
            if let Err(error) = may_step(self.epoch()) {
                return failed(done, error);
            }
            let offset = done as usize * call.dtype.size();
            self.launches += 1;
            let Some(args) = self.args.as_mut() else {
                return Err(Error::Internal("a step without arguments".into()));
            };
            args.step.input = call.input.wrapping_byte_add(offset);
            args.step.output = call.output.wrapping_byte_add(offset);
            args.step.count = count;
            args.step.launch = self.launches;
            args.step.parts = parts.is_some().into();
            [args.step.input_part, args.step.output_part] = parts.unwrap_or_default();
            match &call.norm {
                Some(norm) if norm.fused => norm.prepare(&mut args.step, call.dtype, done, count),
                _ => (args.step.rows, args.step.width) = (0, 0),
            }
            let packs = (count * call.dtype.size() as u64).div_ceil(PACK_BYTES as u64);
            let longest = parts.map_or_else(|| longest_piece(&plan.table, packs), |_| packs);
            let least = longest.div_ceil(plan.geometry.flag_chunks.into());
            args.step.chunk_packs = CHUNK_PACKS.max(least) as u32;
            args.step.geo.rotation = rotation(&plan.geometry, packs * PACK_BYTES as u64);
            // SAFETY: the table has passed the checker; the geometry lies inside slabs that are mapped here at `base`;
            // the caller vouches for input and output; one step at a time runs on this channel.
            unsafe { cpu::all_reduce(args)? };
            steps += 1;
            done += count;
            if self.fault.aborted() {
                return failed(done, self.fault.after_kernel(own));
            }
        }
        if let (Some(norm), Some(args)) = (call.norm_after(), self.args.as_mut()) {
            args.step.output = call.output;
            norm.prepare(&mut args.step, call.dtype, 0, call.count as u64);
            // SAFETY: the caller vouches for all buffers of the call.
            unsafe { cpu::add_rms_norm(&args.step)? };
        }
        Ok(steps)
    }

    /// Runs one launch of the probe; `plan` is any of this rank's.
    pub fn probe(&mut self, shot: &Shot, plan: &Plan, layout: &Layout) -> Result<Vec<u64>> {
        // SAFETY: integers and raw pointers, for which zero is a value.
        let mut step: pl_step = unsafe { std::mem::zeroed() };
        (step.n, step.rank) = (self.size as u32, self.rank as u32);
        step.geo = plan.geometry;
        step.base = self.base;
        step.state = self.fault.state();
        step.channel = self.channel.get();
        step.deadline_ns = self.deadline_ns;
        step.yield_ = self.yields.into();
        step.launch = 1;
        let mut words = vec![0u64; result_words(shot)];
        let mut barrier = [0u64; 2];
        let (result, barrier) = (words.as_mut_ptr() as u64, barrier.as_mut_ptr() as u64);
        let probe = launch_of(shot, layout, step, result, barrier);
        // SAFETY: the slabs are mapped at `base`, and the probe keeps to the bulk protocol's data, which nobody uses in
        // set-up; results and barrier are this call's own.
        unsafe { cpu::probe(&probe)? };
        match self.fault.aborted() {
            true => Err(self.fault.after_kernel(OwnCall {
                rank: self.rank as u32,
                count: 0,
                dtype: DType::F32,
                op: Op::Sum,
                goal: Goal::AllReduce,
                algorithm: plan.choice.algorithm,
                protocol: plan.choice.protocol,
            })),
            false => Ok(words),
        }
    }

    /// Points the arguments at `plan`. They are kept between calls: copying a table costs more than a small call.
    fn prepare(&mut self, call: &Call, plan: &Plan, step: u64) -> Result<()> {
        let bytes = match plan.partials {
            true => cpu::partial_bytes(call.dtype, step.min(call.count as u64)),
            false => 0,
        };
        let words = (bytes as usize).div_ceil(PACK_BYTES);
        if self.partial.len() < words {
            self.partial
                .try_reserve_exact(words - self.partial.len())
                .map_err(|e| Error::os("allocating scratch for partial sums", &e.into()))?;
            self.partial.resize(words, 0);
        }
        let args = self.args.get_or_insert_with(|| {
            // SAFETY: integers and raw pointers, for which zero is a value.
            Box::new(unsafe { std::mem::zeroed() })
        });
        let choice = plan.choice;
        let same = args.table.n as usize == self.size
            && args.step.algo == plan.code
            && args.step.proto == choice.protocol as u32
            && args.table.pull == choice.direction as u8;
        if !same {
            args.table = *plan.table;
            args.step.geo = plan.geometry;
            args.step.algo = plan.code;
            args.step.proto = choice.protocol as u32;
        }
        (args.step.n, args.step.rank) = (self.size as u32, self.rank as u32);
        args.step.base = self.base;
        args.step.state = self.fault.state();
        args.step.channel = self.channel.get();
        args.step.partial = self.partial.as_mut_ptr().cast();
        args.step.deadline_ns = self.deadline_ns;
        args.step.call = self.calls;
        args.step.signature = signature(call, choice);
        args.step.dtype = call.dtype as u32;
        args.step.op = call.op as u32;
        args.step.check = self.check.into();
        args.step.yield_ = self.yields.into();
        debug_assert_eq!(usize::from(args.table.rank), self.rank);
        Ok(())
    }
}
