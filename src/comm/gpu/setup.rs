//! Set-up of a rank on a GPU, stage by stage. A lane that fails on any rank is given up by all, and all try the next one,
//! unless the caller has pinned it; the reasons are kept and printed.

use super::chain::Room;
use super::cluster::{ClusterRoom, Neighbours};
use super::facts::{self, Facts, PEERS_PER_GPU};
use super::kernels::{HasKernels, Kernels};
use super::rank::{GpuRank, Parts};
use super::shape::{ShapeRule, ROW_THREADS, SPARE_WARP};
use super::share::share;
use super::slab::{Offer, Peer, Slab};
use super::state::DeviceState;
use super::verdicts::Known;
use crate::bootstrap::{Mesh, CHANNELS};
use crate::comm::attempt::{agree, Failed, Outcome};
use crate::comm::config::{Agreed, Config};
use crate::comm::fault::Fault;
use crate::comm::plans::Plans;
use crate::comm::probe;
use crate::comm::selftest;
use crate::device::cuda::{Context, RelaxedThread};
use crate::error::{Error, Result};
use crate::lane::Layout;
use crate::launch::pl_unrolled_7;
use crate::log::log;
use crate::placement::Placement;
use crate::probe::LaneVerdict;
use crate::types::{DType, Lane, ProbeMode};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Other GPUs that a schedule may touch once a GPU has said that it has no room for as many as it could have.
const FEW_PEERS: usize = 4;

/// How long a wait of the test lasts. All ranks have just said that they are ready, so what a working lane carries comes
/// within milliseconds; a lane that loses what is written must not hold up its successor.
const LANE_PATIENCE: Duration = Duration::from_secs(2);

/// What set-up brings about.
pub(in crate::comm) struct Ready {
    pub plans: Plans,
    pub gpu: GpuRank,
    pub fault: Arc<Fault>,
}

/// What does not change from attempt to attempt.
struct Setting<'a> {
    agreed: &'a Agreed,
    config: &'a Config,
    facts: Vec<Facts>,
    context: Context,
    kernels: Arc<Kernels>,
    rank: usize,
    placement: Placement,
}

/// All stages from the GPU to the last test.
pub(in crate::comm) fn set_up(mesh: &mut Mesh, agreed: &Agreed, config: &Config) -> Result<Ready> {
    let rank = mesh.rank();
    let looked = facts::look(config.device);
    let facts = mesh.all_gather(
        "look at the GPUs",
        looked.as_ref().map(|(_, f)| f.clone()).map_err(Error::clone),
    )?;
    let (context, _) = looked?;

    // Set-up has nothing to do with what somebody on this thread may be capturing.
    let entered = context.enter();
    let relaxed = entered.as_ref().map_err(Error::clone).and_then(RelaxedThread::new);
    let kernels = relaxed
        .as_ref()
        .map_err(Error::clone)
        .and_then(|_| Kernels::load(&context, config.kernels.as_deref()));
    mesh.vote("load the kernels", kernels.as_ref().map(drop).map_err(Error::clone))?;
    // The driver's word where the box is not described.
    let driver = context.device().facts().host_numa.filter(|_| config.numa);
    let placement = mesh.placement().clone().or_node(driver);
    let (context, kernels) = (context.clone(), kernels?);
    let setting = Setting { agreed, config, facts, context, kernels, rank, placement };

    let hole = setting
        .plans(Lane::Auto, PEERS_PER_GPU)
        .map(|(plans, _)| facts::hole(&setting.facts, rank, &plans.edges()));
    // With too many GPUs for any schedule there is still the host-staged lane, which has no such limit.
    let hole = hole.or_else(|error| match error {
        Error::Unsupported(why) => Ok(Some(why)),
        other => Err(other),
    });
    let holes = mesh.all_gather("compare peer access", hole)?;
    let hole = holes.into_iter().flatten().next();
    let lanes = facts::lanes(&setting.facts, hole.as_deref(), agreed.lane)?;

    let islands = agreed.islands()?;
    let mut known = Known::consult(mesh, config, &setting.context, &setting.facts, &islands)?;

    let mut notes: Vec<String> = hole.into_iter().collect();
    let mut queue: VecDeque<(Lane, usize)> = lanes
        .into_iter()
        .map(|lane| (lane, if lane == Lane::Host { usize::MAX } else { PEERS_PER_GPU }))
        .collect();
    let mut first = None;
    while let Some((lane, limit)) = queue.pop_front() {
        // A lane that the caller insists on is tried whatever is known.
        if let Some(why) = known.broken(lane).filter(|_| agreed.lane == Lane::Auto) {
            log!(Warn, "rank {rank} of {}: lane {lane} is left out: {why}", setting.facts.len());
            notes.push(format!(
                "lane {lane}: {why} (known from earlier; PEERLANE_PROBE=always tries it again)"
            ));
            continue;
        }
        match setting.attempt(mesh, &known, lane, limit)? {
            Ok(mut ready) => {
                if let (Some(report), None) = (ready.gpu.report(), known.report(lane)) {
                    known.keep(lane, LaneVerdict::Measured(report.clone()));
                }
                ready.gpu.describe(notes);
                return Ok(ready);
            }
            Err(Failed { error, too_many_peers, lane_is_broken }) => {
                if lane_is_broken {
                    known.keep(lane, LaneVerdict::broken(error.to_string()));
                }
                log!(Warn, "rank {rank} of {}: lane {lane}: {error}", setting.facts.len());
                notes.push(format!("lane {lane}: {error}"));
                first.get_or_insert(error);
                if too_many_peers && limit > FEW_PEERS {
                    queue.push_front((lane, FEW_PEERS));
                }
            }
        }
    }
    // Every rank has the same failures in the same order.
    Err(match first {
        Some(Error::Setup { rank, stage, .. }) if notes.len() > 1 => {
            Error::Setup { rank, stage, reason: format!("no lane works: {}", notes.join("; ")) }
        }
        Some(error) => error,
        None => Error::Internal("no lane was tried".into()),
    })
}

/// What a rank has made of its own before it meets the others' slabs.
struct Built {
    plans: Plans,
    layout: Layout,
    state: Arc<DeviceState>,
    slab: Arc<Slab>,
    fd: Option<OwnedFd>,
}

impl Setting<'_> {
    fn plans(&self, lane: Lane, limit: usize) -> Result<(Plans, Layout)> {
        let layout = Layout::new(self.agreed.slab_bytes, CHANNELS)?;
        let admit = |tables: &[_]| facts::degree(&self.facts, tables) <= limit;
        let plans = |layout| Plans::new(self.agreed.clone(), self.rank, layout, admit);
        if lane == Lane::Host {
            let mut layout = layout.with_late_rearms();
            // The kernels for it have room for so many ranks, and none compares calls.
            if self.facts.len() <= super::kernels::MOST_DELTA + 1 && !self.agreed.check {
                layout = layout.with_deltas();
            }
            return Ok((plans(&layout)?.host_staged(), layout));
        }
        Ok((plans(&layout)?, layout))
    }

    fn in_process(&self, rank: usize) -> bool {
        self.facts[rank].process == self.facts[self.rank].process
    }

    fn build(&self, lane: Lane, limit: usize) -> Outcome<(Built, Offer)> {
        let (plans, layout) = self.plans(lane, limit)?;
        let state = Arc::new(DeviceState::new(
            &self.context,
            Arc::clone(&self.kernels),
            self.placement.node(),
        )?);
        let slab = Arc::new(Slab::new(
            lane,
            &self.context,
            state.stream(),
            &layout,
            self.placement.node(),
        )?);
        let importers: Vec<u32> =
            plans.edges().into_iter().filter(|&r| !self.in_process(r)).map(|r| r as u32).collect();
        let (offer, fd) = slab.offer(&importers)?;
        Ok((Built { plans, layout, state, slab, fd }, offer))
    }

    /// Everything over one lane. A failure that all ranks know of leaves nothing behind.
    fn attempt(
        &self,
        mesh: &mut Mesh,
        known: &Known,
        lane: Lane,
        limit: usize,
    ) -> Result<Outcome<Ready>> {
        let (built, offer) = match self.build(lane, limit) {
            Ok((built, offer)) => (Ok(built), Ok(offer)),
            Err(failed) => (Err(failed.clone()), Err(failed)),
        };
        let offers = match agree(mesh, "allocate the slabs", offer)? {
            Ok(offers) => offers,
            Err(failed) => {
                if let Ok(built) = built {
                    // Nobody has opened anything.
                    (0..self.facts.len()).for_each(|r| built.slab.importer_gone(r));
                }
                return Ok(Err(failed));
            }
        };
        let mut built = match built {
            Ok(built) => built,
            Err(failed) => return Ok(Err(failed)),
        };
        let slab = Arc::clone(&built.slab);
        let outcome =
            self.connect(mesh, lane, &mut built, &offers).and_then(|outcome| match outcome {
                Ok(peers) => self.test(mesh, known, lane, built, peers),
                Err(failed) => Ok(Err(failed)),
            })?;
        if outcome.is_err() && slab.waits_for_importers() {
            // By now every rank has closed what it had opened.
            mesh.vote("close the slabs", Ok(()))?;
            (0..self.facts.len()).for_each(|r| slab.importer_gone(r));
        }
        Ok(outcome)
    }

    /// Opens the slabs of the ranks that some schedule has an edge to.
    fn connect(
        &self,
        mesh: &mut Mesh,
        lane: Lane,
        built: &mut Built,
        offers: &[Offer],
    ) -> Result<Outcome<Vec<Option<Peer>>>> {
        let n = self.facts.len();
        let descriptors = lane != Lane::Ipc && (0..n).any(|r| !self.in_process(r));
        let fds = match descriptors {
            true => {
                mesh.exchange_fds("share the slabs", Ok(built.fd.take().into_iter().collect()))?
            }
            false => Vec::new(),
        };
        let edges = built.plans.edges();
        let open = |peer: usize| -> Outcome<Option<Peer>> {
            if peer == self.rank || !edges.contains(&peer) {
                return Ok(None);
            }
            let fd = fds.get(peer).and_then(|fds| fds.first());
            Peer::open(lane, &self.context, &offers[peer], fd).map(Some)
        };
        let peers: Outcome<Vec<Option<Peer>>> = (0..n).map(open).collect();
        let mapped = peers.as_ref().map(drop).map_err(Failed::clone);
        Ok(agree(mesh, "map the slabs", mapped)?.and(peers))
    }

    /// Puts the rank together and lets all ranks test the lane with it.
    fn test(
        &self,
        mesh: &mut Mesh,
        known: &Known,
        lane: Lane,
        built: Built,
        peers: Vec<Option<Peer>>,
    ) -> Result<Outcome<Ready>> {
        let Built { plans, layout, state, slab, .. } = built;
        // Of the GPU with the fewest multiprocessors a rank: all ranks must cut a message into the same chunks.
        let sharers =
            |uuid| self.facts.iter().filter(|facts| facts.uuid == uuid).count().max(1) as u32;
        let most_sharers = self.facts.iter().map(|facts| sharers(facts.uuid)).max().unwrap_or(1);
        let sm_count = self.facts.iter().map(|facts| facts.sm_count).min().unwrap_or(1);
        let (blocks, threads) = (self.agreed.blocks, self.agreed.threads);
        let shares: [u32; CHANNELS] =
            std::array::from_fn(|channel| share(sm_count, most_sharers, channel));
        // A kernel of an older family of code, or a GPU that cannot, is found out per kernel and here.
        let capability = self.context.device().facts().compute_capability;
        // The largest of the kernels for clusters.
        let kernel = pl_unrolled_7::of(&self.kernels).cluster(DType::BF16);
        let largest = ROW_THREADS + SPARE_WARP;
        let neighbours = kernel
            .filter(|_| self.config.clusters)
            .and_then(|kernel| Neighbours::look(kernel, largest, capability));
        let own_sms = self.facts[self.rank].sm_count;
        let rules = shares.map(|share| match ShapeRule::new(share, blocks, threads) {
            rule if lane == Lane::Host => rule.with_spare_block(),
            rule => rule.with_clusters(neighbours.map(|neighbours| match blocks {
                None => ClusterRoom::new(neighbours, own_sms, share),
                Some(blocks) => ClusterRoom::pinned(neighbours, most_sharers, blocks),
            })),
        });
        let wanted = self.config.programmatic;
        let shares = blocks.is_none().then_some(shares);
        let room = Room::new(capability, sm_count, most_sharers, shares).filter(|_| wanted);
        let fault = Arc::new(Fault::on_device(Arc::clone(&state)));
        let peers = Mutex::new(peers);
        let placement = self.placement.clone();
        let check = self.agreed.check;
        let rules = Box::new(rules);
        let parts = Parts { lane, rules, room, state, slab, peers, layout, check, placement };
        let patience = self.config.setup_deadline.min(LANE_PATIENCE);
        let gpu = GpuRank::new(self.rank, parts, Arc::clone(&fault), &plans, patience);
        let ready = gpu.and_then(|gpu| {
            let (buffers, results) = (gpu.test_buffers()?, gpu.probe_memory()?);
            Ok((gpu, buffers, results))
        });
        let outcome = ready.as_ref().map(drop).map_err(|error| Failed::from(error.clone()));
        if let Err(failed) = agree(mesh, "prepare the launches", outcome)? {
            return Ok(Err(failed));
        }
        let (mut gpu, buffers, results) = ready?;
        let nonces = mesh.all_gather("draw test data", selftest::nonce())?;
        let ended = |error| {
            fault.raise(error);
        };
        let tested = mesh.guard("begin the test of the lane", ended, |_| {
            gpu.self_test(&plans, &nonces, &buffers).map_err(Failed::from)
        })?;
        if let Err(failed) = agree(mesh, "test the lane", tested)? {
            return Ok(Err(failed));
        }
        let report = match known.report(lane) {
            None if known.measures() => {
                let setting = probe::Setting {
                    lane: lane.name(),
                    islands: plans.islands(),
                    layout: &layout,
                    reach: plans.edges().into_iter().map(|peer| 1 << peer).sum(),
                    every_pair: self.agreed.probe == ProbeMode::Pairs,
                };
                match probe::measure(mesh, &setting, &mut gpu.prober(&results), &fault)? {
                    Ok(report) => report,
                    Err(failed) => return Ok(Err(failed)),
                }
            }
            report => report.cloned(),
        };
        gpu.set_report(report);
        gpu.set_deadline(self.config.deadline);
        Ok(Ok(Ready { plans, gpu, fault }))
    }
}
