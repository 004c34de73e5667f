//! What carries out a communicator's calls: a rank of the CPU device, or one on a GPU.

use super::attempt::{agree, Failed};
use super::call::Call;
use super::config::{Agreed, Config};
use super::departures::Departures;
use super::fault::Fault;
use super::host::{armed_slab, HostRank};
use super::order::Order;
use super::plans::{Plan, Plans};
use super::probe;
use super::selftest;
use crate::bootstrap::Mesh;
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::lane::{Layout, Mapping};
use crate::plan::DeviceKind;
use crate::probe::ProbeReport;
use crate::types::{DType, Op, ProbeMode};
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};

/// Channels of a CPU communicator: there is no capture, so all calls are eager and use channel 0.
const CPU_CHANNELS: usize = 1;

pub(super) enum Engine {
    Cpu(CpuEngine),
    #[cfg(feature = "cuda")]
    Cuda(super::gpu::GpuRank),
}

impl Engine {
    /// Whether buffers are host memory and calls run on the host's threads.
    pub fn is_cpu(&self) -> bool {
        matches!(self, Engine::Cpu(_))
    }

    /// Looks for an error that a kernel has found and nobody has asked for yet. Ranks that no schedule joins to this one have
    /// no other way to learn of it, and would wait until their own deadlines. A rank of the CPU finds it when the call ends.
    pub fn look(&self) -> Option<Box<dyn Fn() -> Option<Error> + Send>> {
        match self {
            Engine::Cpu(_) => None,
            #[cfg(feature = "cuda")]
            Engine::Cuda(gpu) => Some(gpu.look()),
        }
    }

    /// Why the ranks run over the lane they run over.
    pub fn lane_notes(&self) -> &[String] {
        match self {
            Engine::Cpu(_) => &[],
            #[cfg(feature = "cuda")]
            Engine::Cuda(gpu) => gpu.lane_notes(),
        }
    }

    /// What the probe found, if creation measured or remembers it.
    pub fn report(&self) -> Option<&ProbeReport> {
        match self {
            Engine::Cpu(cpu) => cpu.report.as_ref(),
            #[cfg(feature = "cuda")]
            Engine::Cuda(gpu) => gpu.report(),
        }
    }
}

/// A rank of the CPU device and the order of its calls.
pub(super) struct CpuEngine {
    pub order: Order,
    /// Runs calls that name no stream.
    pub own_stream: Stream,
    /// Held by the call whose turn it is.
    pub host: Mutex<HostRank>,
    /// The step that is running, and who has left.
    pub departures: Arc<Departures>,
    /// What the probe found.
    pub report: Option<ProbeReport>,
}

/// Where a call is queued. A stream of the CPU device lives as long as the call it is named in, or the group.
#[derive(Clone, Copy)]
pub(super) enum Queue {
    /// The CPU rank's own stream, which is waited for; on a GPU the legacy default stream, which is not.
    Default,
    Cpu(*const Stream),
    #[cfg(feature = "cuda")]
    Cuda {
        stream: crate::device::cuda::StreamRef,
        channel: Option<usize>,
    },
}

impl Queue {
    /// Whether both name one stream, so that the one's work waits for the other's.
    pub fn same_stream(&self, other: &Self) -> bool {
        match (self, other) {
            (Queue::Cpu(a), Queue::Cpu(b)) => std::ptr::eq(*a, *b),
            #[cfg(feature = "cuda")]
            (Queue::Cuda { stream: a, .. }, Queue::Cuda { stream: b, .. }) => a == b,
            _ => false,
        }
    }
}

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

/// The stages of set-up that depend on the device.
pub(super) fn set_up(
    mesh: &mut Mesh,
    agreed: Agreed,
    config: &Config,
) -> Result<(Plans, Engine, Arc<Fault>)> {
    match agreed.device_kind() {
        DeviceKind::Cpu => set_up_cpu(mesh, agreed, config),
        #[cfg(feature = "cuda")]
        DeviceKind::Gpu => {
            let super::gpu::Ready { plans, gpu, fault } =
                super::gpu::set_up(mesh, &agreed, config)?;
            Ok((plans, Engine::Cuda(gpu), fault))
        }
        // `Config::settle` has refused it.
        #[cfg(not(feature = "cuda"))]
        DeviceKind::Gpu => Err(Error::Internal("a GPU without the feature cuda".into())),
    }
}

fn set_up_cpu(
    mesh: &mut Mesh,
    agreed: Agreed,
    config: &Config,
) -> Result<(Plans, Engine, Arc<Fault>)> {
    let (n, rank, check) = (mesh.size(), mesh.rank(), agreed.check);
    let layout = Layout::new(agreed.slab_bytes, CPU_CHANNELS).map(Layout::with_rotation);
    let built = layout.and_then(|layout| {
        let plans = Plans::new(agreed, rank, &layout, |_| true)?;
        Ok((plans, layout, armed_slab(&layout)?))
    });
    let (built, exported) = match built {
        Ok((plans, layout, slab)) => {
            let fd = slab.export();
            (Some((plans, layout, slab)), fd.map(|fd| vec![fd]))
        }
        Err(error) => (None, Err(error)),
    };
    let fds = mesh.exchange_fds("share the slabs", exported)?;
    let (plans, layout, slab) =
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
    let reduce = |input: &[f32], output: &mut [f32], plan: usize| {
        let call = Call {
            input: input.as_ptr().cast(),
            output: output.as_mut_ptr().cast(),
            count: input.len(),
            dtype: DType::F32,
            op: Op::Sum,
            norm: None,
        };
        host.run(&call, &plans.all()[plan], |_| Ok(())).map(drop)
    };
    let ended = |error| {
        fault.raise(error);
    };
    let tested = mesh.guard("begin the test of the lane", ended, |_| {
        selftest::run(&plans, rank, &nonces, 0, reduce).map_err(Failed::from)
    })?;
    agree(mesh, "test the lane", tested)?.map_err(|failed| failed.error)?;
    let report = match plans.agreed().probe {
        ProbeMode::Always | ProbeMode::Pairs => measure(mesh, &plans, &layout, &mut host, &fault)?,
        // There is no lane to choose, and thousands of communicators need not know.
        ProbeMode::Auto | ProbeMode::Off => None,
    };
    host.set_deadline(config.deadline);
    let engine = CpuEngine {
        order: Order::default(),
        own_stream: Stream::new()?,
        host: Mutex::new(host),
        departures: Arc::new(Departures::new(n)),
        report,
    };
    Ok((plans, Engine::Cpu(engine), fault))
}

fn measure(
    mesh: &mut Mesh,
    plans: &Plans,
    layout: &Layout,
    host: &mut HostRank,
    fault: &Fault,
) -> Result<Option<ProbeReport>> {
    struct Cpu<'a>(&'a mut HostRank, &'a Plan, &'a Layout);
    impl probe::Prober for Cpu<'_> {
        // A rank of the CPU is one thread that runs the whole grid.
        fn blocks(&self) -> u32 {
            1
        }
        fn shoot(&mut self, shot: &probe::Shot) -> Result<Vec<u64>> {
            self.0.probe(shot, self.1, self.2)
        }
    }
    let any = plans.all().first().ok_or_else(|| Error::Internal("a rank without plans".into()))?;
    // Every rank has mapped the slabs of all.
    let reach = ((1u32 << mesh.size()) - 1) & !(1 << mesh.rank());
    let every_pair = plans.agreed().probe == ProbeMode::Pairs;
    let setting =
        probe::Setting { lane: "cpu", islands: plans.islands(), layout, reach, every_pair };
    let measured = probe::measure(mesh, &setting, &mut Cpu(host, any, layout), fault)?;
    measured.map_err(|failed| failed.error)
}
