//! Ranks as processes: the one that the user started runs itself once for each rank and puts together what they say.
//!
//! It talks to them over their standard input and output, a line of JSON each way at a time: what lets a rank in is no
//! argument and no variable, which others could read. A rank says what memory it finds; all are told the least of it, so
//! that they share experts alike; at the end it says what it measured, or why it could not.

use crate::args::Job;
#[cfg(feature = "cuda")]
use crate::args::Wanted;
use crate::device::cpu::Cpu;
#[cfg(feature = "cuda")]
use crate::device::cuda::{nccl::UniqueId as NcclId, place::Gpus};
#[cfg(feature = "cuda")]
use crate::meeting::Meeting;
use crate::report::machine;
use crate::run::{self, Outcome, Said, Size};
use crate::weights::Source;
use anyhow::{anyhow, bail, Context, Result};
use peerlane::bootstrap::UniqueId;
use peerlane::comm::Communicator;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Lines, StdinLock, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// From a rank.
#[derive(Serialize, Deserialize)]
enum FromRank {
    /// Before it loads: pools of experts that fit, and of rank 0 NCCL's id where NCCL sums.
    Ready {
        pools: usize,
        nccl: Option<Vec<u8>>,
    },
    Done {
        said: Said,
        machine: String,
    },
    Failed {
        error: String,
        consequence: bool,
    },
}

/// To a rank, first and second.
#[derive(Serialize, Deserialize)]
enum ToRank {
    Join { id: String },
    Load { pools: usize, nccl: Option<Vec<u8>> },
}

fn say(out: &mut dyn Write, message: &impl Serialize) -> Result<()> {
    writeln!(out, "{}", serde_json::to_string(message)?)?;
    Ok(out.flush()?)
}

/// A rank's process, as the first one sees it. Ended when dropped, if it has not ended by then.
struct Process {
    rank: usize,
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(rank: usize) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(std::env::args_os().skip(1)).arg("--as-rank").arg(rank.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start a process for a rank")?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let input = input.context("a process without a standard input")?;
        let output = output.context("a process without a standard output")?;
        Ok(Process { rank, child, input, output: BufReader::new(output).lines() })
    }

    /// Its next message; what else it writes goes to whoever reads this process.
    fn hear(&mut self) -> Result<FromRank> {
        for line in self.output.by_ref() {
            let line = line?;
            match serde_json::from_str(&line) {
                Ok(message) => return Ok(message),
                Err(_) => {
                    writeln!(std::io::stdout(), "{line}")?;
                    std::io::stdout().flush()?;
                }
            }
        }
        let status = self.child.wait()?;
        bail!("the process of rank {} ended without a word ({status})", self.rank)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All ranks of `job`, each a process.
pub fn run(job: &Job) -> Result<Outcome> {
    let id = UniqueId::in_dir(job.comm.run_dir.as_deref())?.to_string();
    let mut ranks = (0..job.ranks).map(Process::start).collect::<Result<Vec<_>>>()?;
    for rank in &mut ranks {
        // One that is gone already has said why.
        let _ = say(&mut rank.input, &ToRank::Join { id: id.clone() });
    }
    let (mut least, mut nccl) = (usize::MAX, None);
    for heard in hear_all(&mut ranks)? {
        if let FromRank::Ready { pools, nccl: id } = heard {
            (least, nccl) = (least.min(pools), nccl.or(id));
        }
    }
    for rank in &mut ranks {
        let _ = say(&mut rank.input, &ToRank::Load { pools: least, nccl: nccl.clone() });
    }
    let (mut results, mut on) = (Vec::new(), String::new());
    for heard in hear_all(&mut ranks)? {
        if let FromRank::Done { said, machine } = heard {
            results.push(said);
            on = machine;
        }
    }
    for rank in &mut ranks {
        rank.child.wait()?;
    }
    let mut size = size(job)?;
    size.pools = least;
    Outcome::new(job, results, on, &size)
}

/// A message of each, or the error that is not only another's consequence.
fn hear_all(ranks: &mut [Process]) -> Result<Vec<FromRank>> {
    let (mut messages, mut errors) = (Vec::new(), Vec::new());
    for rank in ranks {
        match rank.hear() {
            Ok(FromRank::Failed { error, consequence }) => {
                errors.push((consequence, anyhow!(error)))
            }
            Ok(message) => messages.push(message),
            Err(error) => errors.push((false, error)),
        }
    }
    errors.sort_by_key(|(consequence, _)| *consequence);
    match errors.into_iter().next() {
        None => Ok(messages),
        Some((_, error)) => Err(error),
    }
}

/// What the model takes, as its ranks have found it.
fn size(job: &Job) -> Result<Size> {
    let source = Source::open(&job.origin)?;
    match &job.gpu {
        None => Size::on_cpu(job, &source),
        #[cfg(feature = "cuda")]
        Some(wanted) => Size::on_gpus(job, &source, &Gpus::new(wanted, job.ranks)?),
        #[cfg(not(feature = "cuda"))]
        Some(_) => bail!("this runner was built for the CPU alone"),
    }
}

/// This process is rank `rank` of `job`.
pub fn rank(job: &Job, rank: usize) -> Result<()> {
    let mut first = First { input: std::io::stdin().lock().lines() };
    let message = match work(job, rank, &mut first) {
        Ok((said, machine)) => FromRank::Done { said, machine },
        Err(error) => FromRank::Failed {
            error: format!("{error:#}"),
            consequence: run::consequence(&error) || error.is::<Gone>(),
        },
    };
    say(&mut std::io::stdout(), &message)
}

/// The process that the user started, as a rank's sees it.
struct First {
    input: Lines<StdinLock<'static>>,
}

/// It has gone, or goes on without this rank.
#[derive(Debug)]
struct Gone;

impl std::fmt::Display for Gone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the run is over")
    }
}

impl std::error::Error for Gone {}

impl First {
    fn hear(&mut self) -> Result<ToRank> {
        let line = self.input.next().ok_or(Gone)??;
        Ok(serde_json::from_str(&line)?)
    }

    /// The id that lets this rank in.
    fn id(&mut self) -> Result<UniqueId> {
        match self.hear()? {
            ToRank::Join { id } => Ok(id.parse()?),
            ToRank::Load { .. } => bail!("told to load before having been let in"),
        }
    }

    /// What all agree on: pools of experts, and NCCL's id.
    fn agree(&mut self, pools: usize, nccl: Option<Vec<u8>>) -> Result<(usize, Option<Vec<u8>>)> {
        say(&mut std::io::stdout(), &FromRank::Ready { pools, nccl })?;
        match self.hear()? {
            ToRank::Load { pools, nccl } => Ok((pools, nccl)),
            ToRank::Join { .. } => bail!("let in twice"),
        }
    }
}

fn work(job: &Job, rank: usize, first: &mut First) -> Result<(Said, String)> {
    let id = first.id()?;
    let source = Source::open(&job.origin)?;
    match &job.gpu {
        None => on_cpu(job, rank, id, &source, first),
        #[cfg(feature = "cuda")]
        Some(wanted) => on_gpu(job, wanted, rank, id, &source, first),
        #[cfg(not(feature = "cuda"))]
        Some(_) => bail!("this runner was built for the CPU alone"),
    }
}

fn on_cpu(
    job: &Job,
    rank: usize,
    id: UniqueId,
    source: &Source,
    first: &mut First,
) -> Result<(Said, String)> {
    let (pools, _) = first.agree(Size::on_cpu(job, source)?.pools, None)?;
    let device = Cpu::new(&job.config, rank, job.ranks, job.sums);
    let loaded = run::load(job, source, vec![(rank, device)], pools, &|_| 0)?;
    let loaded = loaded.into_iter().next().context("no rank was loaded")?;
    let comm = Communicator::create(&id, job.ranks, rank, &job.comm)?;
    let said = run::measure_on_cpu(job, loaded, comm, &run::verifying(&job.plan))?;
    Ok((said, machine()))
}

#[cfg(feature = "cuda")]
fn on_gpu(
    job: &Job,
    wanted: &Wanted,
    rank: usize,
    id: UniqueId,
    source: &Source,
    first: &mut First,
) -> Result<(Said, String)> {
    let gpus = Gpus::of_rank(wanted, job.ranks, rank)?;
    let nccl = run::open_nccl(job, wanted, &gpus)?;
    let size = Size::on_gpus(job, source, &gpus)?;
    let own = nccl.filter(|_| rank == 0).map(|nccl| nccl.unique_id()).transpose()?;
    let (pools, theirs) = first.agree(size.pools, own.map(|id| id.bytes()))?;
    // Processes that share a GPU take turns there; only ranks of one process could wait for each other in its queues.
    let meeting = Arc::new(Meeting::new(1));
    let device = run::new_device(job, &gpus, rank, &meeting)?;
    let machine = gpus.machine(&device, nccl)?;
    let loaded = run::load(job, source, vec![(rank, device)], pools, &|_| 0)?;
    let loaded = loaded.into_iter().next().context("no rank was loaded")?;
    let comm = Communicator::create(&id, job.ranks, rank, &gpus.config(&job.comm, rank))?;
    let nccl = match (nccl, theirs) {
        (Some(nccl), Some(id)) => Some((nccl, NcclId::from_bytes(&id)?)),
        _ => None,
    };
    let said = run::measure_on_gpu(job, loaded, comm, nccl, &run::verifying(&job.plan))?;
    Ok((said, machine))
}
