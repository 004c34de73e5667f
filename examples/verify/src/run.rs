//! A run: load, start a thread for each rank (or a process: `processes`), measure, and put together what the ranks say.

use crate::args::Job;
#[cfg(feature = "cuda")]
use crate::args::Wanted;
use crate::device::cpu::Cpu;
#[cfg(feature = "cuda")]
use crate::device::cuda::{
    nccl::{Nccl, UniqueId as NcclId},
    place::Gpus,
    Cuda,
};
use crate::device::Device;
#[cfg(feature = "cuda")]
use crate::device::Recorder;
use crate::measure::{self, Measured, Plan};
#[cfg(feature = "cuda")]
use crate::meeting::{Left, Meeting};
use crate::memory::{self, Need};
use crate::pass::Rank;
use crate::processes;
use crate::reduce::{AllReduce, Reduce};
use crate::report::machine;
use crate::shard::{Loader, Replicated, Shard};
use crate::weights::Source;
use anyhow::{anyhow, ensure, Result};
#[cfg(feature = "cuda")]
use half::bf16;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use peerlane::comm::{Communicator, Stats};
use peerlane::{Algorithm, Protocol};
use std::sync::Arc;
use std::thread;

/// What a run came to.
pub struct Outcome {
    /// By rank, then by draft.
    pub ranks: Vec<Vec<Measured>>,
    /// What it ran on, in a line.
    pub machine: String,
    /// Bytes that the model may have taken.
    pub memory: u64,
    /// Pools of experts, fewer than layers with experts where they are shared.
    pub pools: usize,
    pub parameters: u64,
    pub bytes: u64,
    /// Algorithms and protocols that served the all-reduces.
    pub served: String,
    pub islands: String,
}

/// Carries out `job`.
pub fn run(job: &Job) -> Result<Outcome> {
    if job.processes {
        return processes::run(job);
    }
    match &job.gpu {
        None => on_cpu(job),
        #[cfg(feature = "cuda")]
        Some(wanted) => on_gpus(job, wanted),
        #[cfg(not(feature = "cuda"))]
        Some(_) => anyhow::bail!("this runner was built for the CPU alone"),
    }
}

/// What a run's ranks need to know before they load: what the model may take, and what it takes.
pub struct Size {
    need: Need,
    memory: u64,
    element: usize,
    layers: usize,
    /// Pools of experts that fit.
    pub pools: usize,
    parameters: u64,
    /// Beside the model.
    own: u64,
}

impl Size {
    /// `whole` is the model once, `need` what one machine or GPU holds of it.
    fn new(
        job: &Job,
        source: &Source,
        (whole, need): (Need, Need),
        element: usize,
        memory: u64,
    ) -> Result<Self> {
        let layers = job.config.moe_layers();
        let pools = need.pools(layers, source.may_share_experts(), element, memory)?;
        let parameters = whole.bytes(layers, 1) - whole.buffers as u64;
        Ok(Size { need, memory, element, layers, pools, parameters, own: 0 })
    }

    fn bytes(&self) -> u64 {
        self.need.bytes(self.pools.min(self.layers), self.element) + self.own
    }

    /// On this machine's processors.
    pub fn on_cpu(job: &Job, source: &Source) -> Result<Self> {
        let plan = &job.plan;
        let need = Need::new(&job.config, job.ranks, plan.rows(), plan.cache_rows());
        let memory = job.memory.map_or_else(memory::available, Ok)?;
        Size::new(job, source, (need, need), size_of::<f32>(), memory)
    }

    /// On the fullest of `gpus`, whose ranks share what is replicated, or are processes, which do not.
    #[cfg(feature = "cuda")]
    pub fn on_gpus(job: &Job, source: &Source, gpus: &Gpus) -> Result<Self> {
        let (config, ranks, limits) = (&job.config, job.ranks, job.plan.limits());
        let whole = Need::new(config, ranks, job.plan.rows(), job.plan.cache_rows());
        let here = gpus.ranks_per_gpu.min(ranks);
        let need = whole.on_device(here, ranks, if job.processes { here } else { 1 });
        let room = gpus.room(config, &limits)?;
        let memory = job.memory.map_or(room, |memory| memory.min(room));
        let mut size = Size::new(job, source, (whole, need), size_of::<bf16>(), memory)?;
        size.own = (0..here).map(|rank| Cuda::own_bytes(config, rank, ranks, &limits)).sum();
        Ok(size)
    }
}

/// What one rank has to say at the end: what it measured, and what served its all-reduces.
pub type Said = (Vec<Measured>, String);

fn on_cpu(job: &Job) -> Result<Outcome> {
    let (config, ranks) = (&job.config, job.ranks);
    let source = Source::open(&job.origin)?;
    let size = Size::on_cpu(job, &source)?;
    let devices = (0..ranks).map(|rank| (rank, Cpu::new(config, rank, ranks, job.sums))).collect();
    let loaded = load(job, &source, devices, size.pools, &|_| 0)?;

    // Only now that nothing can fail on one rank alone do ranks begin to wait for each other.
    let comms = Communicator::create_local(ranks, &job.comm)?;
    let bar = verifying(&job.plan);
    let results = on_threads(comms.into_iter().zip(loaded).collect(), |(comm, loaded)| {
        measure_on_cpu(job, loaded, comm, &bar)
    })?;
    bar.finish_and_clear();
    Outcome::new(job, results, machine(), &size)
}

/// What a rank on a processor does once it has its weights.
pub fn measure_on_cpu(
    job: &Job,
    loaded: Loaded<Cpu>,
    comm: Communicator,
    bar: &ProgressBar,
) -> Result<Said> {
    let first = comm.rank() == 0;
    let mut rank = loaded.rank(job, comm)?;
    let measured = measure::measure(&mut rank, &job.plan, &|| bar.inc(first.into()))?;
    Ok((measured, served(&rank.reduce.comm.stats())))
}

#[cfg(feature = "cuda")]
fn on_gpus(job: &Job, wanted: &Wanted) -> Result<Outcome> {
    let ranks = job.ranks;
    let source = Source::open(&job.origin)?;
    let gpus = Gpus::new(wanted, ranks)?;
    let nccl = open_nccl(job, wanted, &gpus)?;
    let size = Size::on_gpus(job, &source, &gpus)?;
    let meeting = Arc::new(Meeting::new(ranks));
    let device = |rank| Ok((rank, new_device(job, &gpus, rank, &meeting)?));
    let devices = (0..ranks).map(device).collect::<Result<Vec<_>>>()?;
    let machine = gpus.machine(&devices[0].1, nccl)?;
    let loaded = load(job, &source, devices, size.pools, &|rank| gpus.of(rank))?;
    let id = nccl.map(|nccl| Ok::<_, anyhow::Error>((nccl, nccl.unique_id()?))).transpose()?;

    let comms = gpus.communicators(&job.comm)?;
    let bar = verifying(&job.plan);
    let results = on_threads(comms.into_iter().zip(loaded).collect(), |(comm, loaded)| {
        measure_on_gpu(job, loaded, comm, id, &bar).inspect_err(|_| meeting.leave())
    })?;
    bar.finish_and_clear();
    Outcome::new(job, results, machine, &size)
}

/// NCCL, where it sums.
#[cfg(feature = "cuda")]
pub fn open_nccl(job: &Job, wanted: &Wanted, gpus: &Gpus) -> Result<Option<&'static Nccl>> {
    if job.plan.by != AllReduce::Nccl {
        return Ok(None);
    }
    let nccl = Nccl::open(wanted.nccl.as_deref())?;
    nccl.require_sharing(gpus.ranks_per_gpu)?;
    Ok(Some(nccl))
}

#[cfg(feature = "cuda")]
pub fn new_device(job: &Job, gpus: &Gpus, rank: usize, meeting: &Arc<Meeting>) -> Result<Cuda> {
    let gpu = Arc::clone(&gpus.gpus[gpus.of(rank)]);
    let limits = job.plan.limits();
    Cuda::new(&job.config, rank, job.ranks, gpu, gpus.blas, limits, Arc::clone(meeting))
}

/// What a rank on a GPU does once it has its weights.
#[cfg(feature = "cuda")]
pub fn measure_on_gpu(
    job: &Job,
    loaded: Loaded<Cuda>,
    comm: Communicator,
    nccl: Option<(&'static Nccl, NcclId)>,
    bar: &ProgressBar,
) -> Result<Said> {
    let number = comm.rank();
    let gpu = Arc::clone(loaded.device.gpu());
    // Current throughout, so that each operation finds it so.
    let _current = gpu.context.enter()?;
    let mut rank = loaded.rank(job, comm)?;
    if let Some((nccl, id)) = nccl {
        rank.device.join_nccl(nccl, id, job.ranks, number)?;
    }
    rank.device.work_together()?;
    let tick = || bar.inc((number == 0).into());
    let measured = measure::graphs::measure(&mut rank, &job.plan, &tick)?;
    let served = served(&rank.reduce.comm.stats());
    // Freeing waits for the GPU.
    rank.device.meet()?;
    rank.device.close()?;
    Ok((measured, served))
}

/// A rank's device with its weights.
pub struct Loaded<D: Device> {
    pub device: D,
    replicated: Arc<Replicated<D::Weight>>,
    shard: Shard<D::Weight>,
}

impl<D: Device> Loaded<D> {
    /// With a communicator and memory for its passes.
    pub fn rank(self, job: &Job, comm: Communicator) -> Result<Rank<D>> {
        let reduce = Reduce { comm, by: AllReduce::Peerlane, fused: job.fused, barrier: false };
        let (rows, cache) = (job.plan.rows(), job.plan.cache_rows());
        let Loaded { device, replicated, shard } = self;
        Rank::new(&job.config, device, replicated, shard, reduce, rows, cache)
    }
}

/// Loads every rank's part of the model, and what ranks with the same `place` share once.
pub fn load<D: Device + Send>(
    job: &Job,
    source: &Source,
    devices: Vec<(usize, D)>,
    pools: usize,
    place: &dyn Fn(usize) -> usize,
) -> Result<Vec<Loaded<D>>>
where
    D::Weight: Send + Sync,
{
    let (config, ranks) = (&job.config, job.ranks);
    let weights = Need { buffers: 0, ..Need::new(config, ranks, 0, 0) };
    let bar = bar(weights.bytes(pools, 1), "loading {wide_bar} {percent} %, {eta} left");
    let progress = |elements: usize| bar.inc(elements as u64);
    let loader = Loader { config, source, progress: &progress };
    let mut replicas: Vec<Arc<Replicated<D::Weight>>> = Vec::new();
    let mut all = Vec::new();
    for (rank, mut device) in devices {
        if place(rank) == replicas.len() {
            replicas.push(Arc::new(loader.replicated(&mut device)?));
            device.finish()?;
        }
        all.push((rank, device, Arc::clone(&replicas[place(rank)])));
    }
    let loaded = on_threads(all, |(rank, mut device, replicated)| {
        let shard = loader.shard(&mut device, rank, ranks, pools)?;
        device.finish()?;
        Ok(Loaded { device, replicated, shard })
    })?;
    bar.finish_and_clear();
    Ok(loaded)
}

impl Outcome {
    /// Puts together what the ranks say, after a look at whether they hold the same bits.
    pub fn new(job: &Job, results: Vec<Said>, machine: String, size: &Size) -> Result<Self> {
        let (ranks, served): (Vec<_>, Vec<_>) = results.into_iter().unzip();
        if job.plan.by == AllReduce::Peerlane {
            for (at, draft) in job.plan.drafts.iter().enumerate() {
                let prints: Vec<u64> =
                    ranks.iter().map(|rank: &Vec<Measured>| rank[at].fingerprint).collect();
                let other = prints.iter().position(|print| *print != prints[0]);
                ensure!(
                    other.is_none(),
                    "rank {} does not hold the bits that rank 0 holds after verifying {} rows",
                    other.unwrap_or(0),
                    draft.rows()
                );
            }
        }
        Ok(Outcome {
            ranks,
            machine,
            pools: size.pools,
            memory: size.memory,
            parameters: size.parameters,
            bytes: size.bytes(),
            served: served.into_iter().next().unwrap_or_default(),
            islands: match &job.comm.islands {
                Some(islands) => islands.to_string(),
                None => "one".into(),
            },
        })
    }
}

/// Runs `work` on a thread for each item; results in their order, or the error that came first in rank order and is not only
/// another rank's consequence.
pub fn on_threads<T: Send, R: Send>(
    items: Vec<T>,
    work: impl Fn(T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let work = &work;
    let results: Vec<Result<R>> = thread::scope(|scope| {
        let threads: Vec<_> = items
            .into_iter()
            .enumerate()
            .map(|(rank, item)| {
                let name = format!("rank-{rank}");
                thread::Builder::new().name(name).spawn_scoped(scope, move || work(item))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| match thread {
                Ok(thread) => thread.join().unwrap_or_else(|_| Err(anyhow!("a rank panicked"))),
                Err(error) => Err(anyhow!("cannot start a thread for a rank: {error}")),
            })
            .collect()
    });
    let (mut fine, mut errors) = (Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok(result) => fine.push(result),
            Err(error) => errors.push(error),
        }
    }
    errors.sort_by_key(consequence);
    match errors.into_iter().next() {
        None => Ok(fine),
        Some(error) => Err(error),
    }
}

/// Whether an error is only what another rank's error came to here.
pub fn consequence(error: &anyhow::Error) -> bool {
    use peerlane::Error::{Aborted, RankDied, RankLeft};
    #[cfg(feature = "cuda")]
    if error.is::<Left>() {
        return true;
    }
    let cause = error.downcast_ref::<peerlane::Error>();
    matches!(cause, Some(Aborted { .. } | RankDied { .. } | RankLeft { .. }))
}

/// Which algorithms and protocols served calls.
fn served(stats: &Stats) -> String {
    let algorithms = Algorithm::ALL.iter().filter(|&&a| stats.by_algorithm[a as usize] > 0);
    let protocols = Protocol::ALL.iter().filter(|&&p| stats.by_protocol[p as usize] > 0);
    let algorithms: Vec<_> = algorithms.map(|a| a.name()).collect();
    let protocols: Vec<_> = protocols.map(|p| p.name()).collect();
    format!("{} by {}", algorithms.join(", "), protocols.join(", "))
}

/// The bar of a run's passes.
pub fn verifying(plan: &Plan) -> ProgressBar {
    bar(plan.steps() as u64, "verifying {wide_bar} {pos}/{len} passes, {eta} left")
}

/// A progress bar on a terminal, and nothing elsewhere.
fn bar(length: u64, style: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template(style).unwrap_or(ProgressStyle::default_bar()));
    bar
}
