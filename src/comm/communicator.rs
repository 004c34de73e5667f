//! The public handle: create, call, abort, destroy.

use super::call::Call;
use super::config::{Agreed, Config};
use super::fault::Fault;
use super::group;
use super::host::{armed_slab, HostRank};
use super::order::{Admission, Order};
use super::plans::Plans;
use super::selftest;
use super::stats::{Counters, Stats};
use crate::bootstrap::{Mesh, Owner, UniqueId, Watch, UNIQUE_ID_BYTES};
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::lane::{Layout, Mapping};
use crate::log::log;
use crate::schedule;
use crate::types::{DType, Op, MAX_RANKS};
use std::ffi::c_void;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Channels of a CPU communicator: there is no capture, so all calls are eager and use channel 0.
const CPU_CHANNELS: usize = 1;

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
    order: Order,
    /// Runs calls that name no stream.
    own_stream: Stream,
    /// Held by the call whose turn it is.
    host: Mutex<HostRank>,
    /// The step that is running, or [`IDLE`].
    in_flight: Arc<AtomicU64>,
    fault: Arc<Fault>,
    watch: Watch,
    id: [u8; UNIQUE_ID_BYTES],
    owner: Owner,
}

/// No step has this number: epochs start at 1.
const IDLE: u64 = 0;

/// A call on its way.
pub(super) enum Submission {
    Done(Result<()>),
    /// On a stream that the caller named: its result is the communicator's sticky error.
    Queued,
    /// On the communicator's own stream.
    Waiting(mpsc::Receiver<Result<()>>),
}

impl Submission {
    pub fn wait(self) -> Result<()> {
        match self {
            Submission::Done(result) => result,
            Submission::Queued => Ok(()),
            Submission::Waiting(result) => result
                .recv()
                .unwrap_or_else(|_| Err(Error::Internal("a queued call was lost".into()))),
        }
    }
}

impl Communicator {
    /// Joins the communicator `id` as `rank` of `n`; returns once all ranks have, or fails on all with the same error.
    pub fn create(id: &UniqueId, n: usize, rank: usize, config: &Config) -> Result<Self> {
        check_rank(n, rank)?;
        let mut mesh = Mesh::connect(id, n, rank, config.setup_deadline)?;

        let all = mesh.all_gather("agree on the configuration", config.settle(n))?;
        Agreed::compare(&all)?;
        let agreed = all[rank].clone();
        let check = agreed.check;

        let layout = Layout::new(agreed.slab_bytes, CPU_CHANNELS).map(Layout::with_rotation);
        let built = layout.and_then(|layout| {
            let plans = Plans::new(agreed, rank, &layout, 0)?;
            Ok((plans, armed_slab(&layout)?))
        });
        let (built, exported) = match built {
            Ok((plans, slab)) => {
                let fd = slab.export();
                (Some((plans, slab)), fd.map(|fd| vec![fd]))
            }
            Err(error) => (None, Err(error)),
        };
        let fds = mesh.exchange_fds("share the slabs", exported)?;
        let (plans, slab) =
            built.ok_or_else(|| Error::Internal("the vote passed without a slab".into()))?;

        let peers = (0..n)
            .map(|peer| match fds.get(peer).and_then(|fds| fds.first()) {
                _ if peer == rank => Ok(None),
                Some(fd) => Mapping::import(fd.as_fd(), slab.mapping().bytes()).map(Some),
                None => Err(Error::Internal(format!("rank {peer} sent no slab"))),
            })
            .collect::<Result<Vec<_>>>();
        let mapped = peers.as_ref().map(|_| ()).map_err(Clone::clone);
        mesh.vote("map the slabs", mapped)?;

        let fault = Arc::new(Fault::new());
        let mut host = HostRank::new(rank, slab, peers?, Arc::clone(&fault), check);
        let nonces = mesh.all_gather("draw test data", selftest::nonce())?;
        host.set_deadline(config.setup_deadline);
        let tested = mesh
            .guard(
                |error| {
                    fault.raise(error);
                },
                || selftest::run(&mut host, &plans, rank, &nonces),
            )
            .and_then(|tested| tested);
        mesh.vote("test the lane", tested)?;
        host.set_deadline(config.deadline);

        let in_flight = Arc::new(AtomicU64::new(IDLE));
        let raised = Arc::clone(&fault);
        let on_failure = move |error: Error| {
            // First end the waits, then speak: standard error may be a pipe that nobody empties.
            raised.raise(error.clone());
            log!(Warn, "rank {rank} of {n}: {error}");
        };
        let running = Arc::clone(&in_flight);
        let on_goodbye = move |peer: usize, step| {
            // The counterpart of `Inner::may_step`: whichever of the two comes second sees the first.
            (running.load(SeqCst) >= step).then_some(Error::RankLeft { rank: peer as u32 })
        };
        let watch = mesh.watch(Box::new(on_failure), Box::new(on_goodbye))?;
        let inner = Inner {
            rank,
            size: n,
            plans,
            counters: Counters::default(),
            order: Order::default(),
            own_stream: Stream::new()?,
            host: Mutex::new(host),
            in_flight,
            fault,
            watch,
            id: *id.as_bytes(),
            owner: Owner::current(),
        };
        log!(
            Info,
            "rank {rank} of {n}: CPU device, islands {}, tree {} ({:016x})",
            inner.plans.islands(),
            inner.plans.tree(),
            inner.plans.tree().hash64()
        );
        Ok(Communicator { inner: Arc::new(inner) })
    }

    /// All `n` ranks as members of this process, in order; each is meant for a thread of its own, or for a group.
    pub fn create_local(n: usize, config: &Config) -> Result<Vec<Self>> {
        check_rank(n, 0)?;
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

    /// Reduces `count` elements over all ranks into `output`. With `stream` `None` the call returns when `output` is
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
        call.validate()?;
        // What cannot be served is refused here, alike on all ranks, before anybody waits for it.
        self.inner.plans.choose(call.bytes(), dtype)?;
        self.inner.owner.require()?;
        if let Some(error) = self.inner.fault.get() {
            call.fill_failed(0);
            return Err(error.clone());
        }
        if group::note(&self.inner, &call, stream) {
            return Ok(());
        }
        Inner::submit(&self.inner, call, stream, true)?.wait()
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
        self.inner.fault.get().cloned()
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
            "{bytes} bytes of {dtype} over {} ranks: {} by {}, {}\nislands {}\ntree {} ({:016x})\n{}",
            self.inner.size,
            choice.algorithm,
            choice.protocol,
            choice.direction,
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
        self.inner.order.drain();
        // Calls still noted in an open group come too late: nobody will join them.
        self.inner.fault.raise(Error::Closed);
        if std::thread::panicking() {
            return; // the watch ends without a goodbye, and the others see a death
        }
        let step = self.inner.host.lock().unwrap_or_else(PoisonError::into_inner).epoch();
        self.inner.watch.goodbye(step);
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

    /// Starts a call, or queues it. With `may_run_here` an idle stream's call runs on this thread before the return.
    pub fn submit(
        inner: &Arc<Self>,
        call: Call,
        stream: Option<&Stream>,
        may_run_here: bool,
    ) -> Result<Submission> {
        inner.counters.calls.fetch_add(1, Relaxed);
        let mut told = None;
        let admission =
            inner.order.admit(stream.unwrap_or(&inner.own_stream), may_run_here, |number| {
                let inner = Arc::clone(inner);
                let (tell, result) = mpsc::sync_channel(1);
                told = Some(result);
                Box::new(move || {
                    let turn = inner.order.wait_for(number);
                    let result = inner.execute(&call);
                    drop(turn);
                    // Nobody listens where the caller named a stream.
                    let _ = tell.send(result);
                })
            })?;
        Ok(match admission {
            Admission::Now(_turn, _claim) => Submission::Done(inner.execute(&call)),
            Admission::Queued => match told.filter(|_| stream.is_none()) {
                Some(result) => Submission::Waiting(result),
                None => Submission::Queued,
            },
        })
    }

    /// Runs a call whose turn it is.
    fn execute(&self, call: &Call) -> Result<()> {
        self.run(call).map_err(|error| {
            self.counters.failed.fetch_add(1, Relaxed);
            // A call that was refused before its first step has cost the others nothing yet, but they will wait for it.
            self.fail(error.clone());
            self.fault.get().cloned().unwrap_or(error)
        })
    }

    fn run(&self, call: &Call) -> Result<()> {
        let mut host = self.host.lock().unwrap_or_else(PoisonError::into_inner);
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
        let result = host.run(call, plan, |step| self.may_step(step));
        self.in_flight.store(IDLE, SeqCst);
        let steps = result?;
        drop(host);
        self.counters.steps.fetch_add(steps, Relaxed);
        self.counters.served(choice.algorithm, choice.protocol, call.bytes() as u64);
        Ok(())
    }

    /// Announces a step, unless a rank that it needs has left without it. A rank that left after it finished the step is
    /// no obstacle: what it had to send is on its way.
    fn may_step(&self, step: u64) -> Result<()> {
        self.in_flight.store(step, SeqCst);
        let missing = |&r: &usize| self.watch.left_before(r).is_some_and(|left| left <= step);
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
