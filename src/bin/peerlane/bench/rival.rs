//! What is measured beside ours in the same run.

use super::orders::{Answer, Call, Order, Subject, Task, Timing};
use super::parent::Ranks;
use super::rival_mpi::{Mpi, Plan};
use super::rows::{median, RivalResult};
use super::Counts;
use anyhow::{bail, Result};
use std::path::Path;
use std::time::Duration;

/// A rival that is ready.
pub enum Rival {
    /// Open MPI: processes of its own.
    Mpi(Mpi),
    /// NCCL, or our own unfused calls: the ranks make them themselves, on the same streams and buffers as ours.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Called { name: String, version: String, subject: Subject },
}

impl Rival {
    /// Starts Open MPI's driver.
    pub fn mpi(driver: Option<&Path>, ranks: usize) -> Result<Self> {
        Ok(Rival::Mpi(Mpi::start(driver, ranks)?))
    }

    /// Has the ranks make communicators of NCCL's beside ours.
    #[cfg(feature = "cuda")]
    pub fn nccl(library: &Path, ranks_per_gpu: usize, ranks: &mut Ranks) -> Result<Self> {
        let nccl = super::gpu::nccl::Nccl::open(library)?;
        nccl.require_sharing(ranks_per_gpu)?;
        let order = Order::JoinNccl { library: library.to_owned(), id: nccl.unique_id()? };
        for answer in ranks.ask(&order)? {
            if answer != Answer::Joined {
                bail!("a rank answered an invitation to NCCL with {answer:?}");
            }
        }
        Ok(Rival::Called { name: "NCCL".into(), version: nccl.version(), subject: Subject::Nccl })
    }

    /// Our own all-reduce and the kernel of add + RMSNorm after it.
    pub fn unfused(width: usize) -> Self {
        Rival::Called {
            name: "unfused".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            subject: Subject::Norm { width, fused: false },
        }
    }

    /// Name and version.
    pub fn title(&self) -> String {
        match self {
            Rival::Mpi(mpi) => mpi.title(),
            Rival::Called { name, version, .. } => format!("{name} {version}"),
        }
    }

    /// Measures and checks `call` with the counts that ours had; `None` if the rival has no such type or operation.
    pub fn measure(
        &mut self,
        call: &Call,
        timing: &Timing,
        counts: &Counts,
        ranks: &mut Ranks,
    ) -> Result<Option<RivalResult>> {
        match self {
            Rival::Mpi(mpi) => {
                let plan = Plan {
                    // The rival has no groups: as many calls, one by one.
                    iters: timing.iters.saturating_mul(timing.aggregate),
                    batches: timing.batches,
                    warmup: timing.warmup,
                    checks: counts.checks,
                    seed: counts.seed,
                    data: counts.data,
                    ours: Duration::from_secs_f64(
                        counts.time_us * 1e-6 * timing.calls() * f64::from(timing.batches),
                    ),
                };
                mpi.measure(call, &plan)
            }
            Rival::Called { name, version, subject } => {
                let mut wrong = 0;
                if counts.checks > 0 {
                    let (iterations, graph) = (counts.checks, timing.graph > 0);
                    let task = Task::Check { call: *call, iterations, graph };
                    for answer in ranks.ask(&Order::Other(*subject, task))? {
                        match answer {
                            Answer::Checked { wrong: n } => wrong += n,
                            other => bail!("a rank answered a check of {name} with {other:?}"),
                        }
                    }
                }
                let task = Task::Time { call: *call, timing: *timing };
                let timed = super::timed(ranks.ask(&Order::Other(*subject, task))?, timing)?;
                let otherwise = *subject == Subject::Nccl && counts.rival_rounds_otherwise(call);
                let checked = counts.checks > 0 && !otherwise;
                Ok(Some(RivalResult {
                    name: name.clone(),
                    version: version.clone(),
                    time_us: median(&timed.batch_us),
                    wrong: checked.then_some(wrong + timed.wrong),
                }))
            }
        }
    }

    /// Ends it in good order.
    pub fn finish(self) -> Result<()> {
        match self {
            Rival::Mpi(mpi) => mpi.finish(),
            // The ranks end it when they leave.
            Rival::Called { .. } => Ok(()),
        }
    }
}
