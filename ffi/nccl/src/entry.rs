//! What stands beside a communicator of NCCL: what its ranks agreed on, the set-up that the first call brings about, launches.

use crate::exchange::{Decided, Kept};
use crate::group::Call;
use crate::log;
use crate::settings;
use crate::stats::{count, Counters};
use crate::types::cudaStream_t;
use peerlane_core::comm::{Communicator, Config};
use peerlane_core::device::cuda::{CaptureStatus, Context, Event, Stream, StreamRef};
use peerlane_core::{Device, Error, Result};
use std::sync::{Mutex, OnceLock, PoisonError};

/// How far an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// NCCL serves, for good.
    Refused,
    /// The first eager call that peerlane can serve sets it up.
    Waiting,
    /// Peerlane serves.
    Ready,
}

/// A rank of a communicator.
pub struct Entry {
    rank: usize,
    n: usize,
    ordinal: u32,
    context: Context,
    /// Where the ranks meet, or why NCCL serves.
    agreed: Decided,
    outcome: OnceLock<Option<Ready>>,
    counters: Counters,
    /// Last: its memory is freed once all work is done.
    _kept: Kept,
}

struct Ready {
    comm: Communicator,
    /// For calls that share a group with calls of NCCL.
    side: Stream,
    fork: Event,
    join: Event,
    /// The graph that the last captured call went into, and the point after it there.
    captured: Mutex<(u64, Event)>,
}

fn stream_of(stream: cudaStream_t) -> StreamRef {
    StreamRef::from_raw(stream.cast())
}

impl Entry {
    /// The entry of a rank whose communicator's ranks have decided.
    pub fn new(
        rank: usize,
        n: usize,
        ordinal: u32,
        context: Context,
        agreed: Decided,
        kept: Kept,
    ) -> Self {
        let outcome = OnceLock::new();
        let counters = Counters::new();
        match &agreed {
            Ok(_) => count(&counters, |c| &c.communicators, 1),
            Err(why) => {
                count(&counters, |c| &c.refused, 1);
                log!(Info, "rank {rank} of {n}: NCCL serves this communicator: {why}");
                let _ = outcome.set(None);
            }
        }
        Entry { rank, n, ordinal, context, agreed, _kept: kept, outcome, counters }
    }

    /// Its counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Up to how many bytes it serves.
    pub fn most_bytes(&self) -> u64 {
        self.agreed.as_ref().map_or(0, |agreed| agreed.most_bytes)
    }

    /// How far it is.
    pub fn phase(&self) -> Phase {
        match self.outcome.get() {
            None => Phase::Waiting,
            Some(None) => Phase::Refused,
            Some(Some(_)) => Phase::Ready,
        }
    }

    /// Sets it up, once, together with all other ranks; where that fails NCCL serves, on all of them.
    pub fn set_up(&self) -> Phase {
        self.outcome.get_or_init(|| match self.create() {
            Ok(ready) => {
                count(&self.counters, |c| &c.set_up, 1);
                log!(
                    Info,
                    "rank {} of {}: serves all-reduces of up to {} bytes in the place of NCCL",
                    self.rank,
                    self.n,
                    self.most_bytes()
                );
                Some(ready)
            }
            Err(error) => {
                count(&self.counters, |c| &c.refused, 1);
                log!(
                    Warn,
                    "rank {} of {}: NCCL serves this communicator: {error}",
                    self.rank,
                    self.n
                );
                None
            }
        });
        self.phase()
    }

    fn create(&self) -> Result<Ready> {
        let agreed = self.agreed.as_ref().map_err(|why| Error::Unsupported(why.clone()))?;
        let env =
            settings::get().env.as_ref().map_err(|why| Error::InvalidArgument(why.clone()))?;
        let mut config = Config::from_vars(self.n, env)?;
        config.device = Device::Cuda { ordinal: Some(self.ordinal) };
        if env.setup_deadline.is_none() {
            // A rank comes when it makes its first all-reduce, as late as it may be in any later one.
            config.setup_deadline = config.setup_deadline.max(config.deadline);
        }
        // Before the ranks meet: what fails afterwards would have to be told to the others.
        let side = Stream::new(&self.context, 0)?;
        let event = || Event::new(&self.context);
        let (fork, join, captured) = (event()?, event()?, Mutex::new((0, event()?)));
        let comm = Communicator::create(&agreed.id, self.n, self.rank, &config)?;
        Ok(Ready { comm, side, fork, join, captured })
    }

    fn ready(&self) -> Result<&Ready> {
        let ready = self.outcome.get().and_then(Option::as_ref);
        ready.ok_or_else(|| Error::Internal("a call of a communicator that is not set up".into()))
    }

    /// Whether the stream is being captured.
    pub fn capturing(&self, stream: cudaStream_t) -> Result<bool> {
        let status = stream_of(stream).capture(&self.context.enter()?)?;
        Ok(status != CaptureStatus::None)
    }

    /// Launches a call on its own stream, or on the side stream.
    ///
    /// # Safety
    /// Buffers and stream are what NCCL asks for.
    pub unsafe fn launch(&self, call: &Call, aside: bool) -> Result<()> {
        // SAFETY: the caller's promise.
        let launched = self.ready().and_then(|ready| unsafe { self.enqueue(ready, call, aside) });
        match &launched {
            Ok(()) => {
                count(&self.counters, |c| &c.served_calls, 1);
                count(&self.counters, |c| &c.served_bytes, (call.count * call.dtype.size()) as u64);
            }
            Err(_) => count(&self.counters, |c| &c.failed, 1),
        }
        launched
    }

    unsafe fn enqueue(&self, ready: &Ready, call: &Call, aside: bool) -> Result<()> {
        let entered = self.context.enter()?;
        let stream = if aside { ready.side.as_ref() } else { stream_of(call.stream) };
        let run = || {
            // SAFETY: the caller's promise.
            unsafe {
                ready.comm.all_reduce_cuda(
                    call.input,
                    call.output,
                    call.count,
                    call.dtype,
                    call.op,
                    stream.as_raw(),
                    None,
                )
            }
        };
        match stream.capture(&entered)? {
            CaptureStatus::Active(graph) => {
                // NCCL orders calls of one communicator whatever streams of a capture they are on.
                let mut last = ready.captured.lock().unwrap_or_else(PoisonError::into_inner);
                if last.0 == graph.id {
                    stream.wait(&entered, &last.1)?;
                }
                run()?;
                last.1.record(&entered, stream)?;
                last.0 = graph.id;
                Ok(())
            }
            _ => run(),
        }
    }

    /// Lets the side stream wait for what `stream` holds now.
    pub fn fork(&self, stream: cudaStream_t) -> Result<()> {
        let (ready, entered) = (self.ready()?, self.context.enter()?);
        ready.fork.record(&entered, stream_of(stream))?;
        ready.side.as_ref().wait(&entered, &ready.fork)
    }

    /// Lets `stream` wait for what the side stream holds now.
    pub fn join(&self, stream: cudaStream_t) -> Result<()> {
        let (ready, entered) = (self.ready()?, self.context.enter()?);
        ready.join.record(&entered, ready.side.as_ref())?;
        stream_of(stream).wait(&entered, &ready.join)
    }

    /// The sticky error.
    pub fn error(&self) -> Option<Error> {
        self.outcome.get().and_then(Option::as_ref).and_then(|ready| ready.comm.error())
    }

    /// Ends every wait, on all ranks.
    pub fn abort(&self) {
        if let Some(Some(ready)) = self.outcome.get() {
            ready.comm.abort();
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let stats = self.counters.read();
        log!(
            Info,
            "rank {} of {}: peerlane served {} all-reduces ({} bytes), NCCL {} (size {}, type or operation {}, not set up {})",
            self.rank,
            self.n,
            stats.served_calls,
            stats.served_bytes,
            stats.forwarded_size + stats.forwarded_kind + stats.forwarded_unready,
            stats.forwarded_size,
            stats.forwarded_kind,
            stats.forwarded_unready
        );
    }
}
