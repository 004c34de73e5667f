//! A rank on a GPU: what it is made of, and what it knows of itself. How it launches stands in `launcher.rs`.

use super::chain::Room;
use super::delta::Delta;
use super::launcher::{Launcher, Prepared};
use super::shape::ShapeRule;
use super::share::EAGER;
use super::slab::{Peer, Slab};
use super::state::DeviceState;
use super::unrolled::UnrolledArgs;
use crate::bootstrap::CHANNELS;
use crate::comm::fault::{error_of, Fault};
use crate::comm::plans::{Plan, Plans};
use crate::device::cpu::partial_bytes;
use crate::device::cuda::DeviceMemory;
use crate::error::{Error, Result};
use crate::lane::{Layout, SQUARES_HALF_BYTES};
use crate::launch::*;
use crate::placement::Placement;
use crate::probe::ProbeReport;
use crate::types::{DType, Lane};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What a rank is made of.
pub(super) struct Parts {
    pub lane: Lane,
    /// By channel.
    pub rules: Box<[ShapeRule; CHANNELS]>,
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
        let launcher = Launcher::new(context, prepared, parts.room)?;
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
