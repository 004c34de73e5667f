//! Ranks on GPUs. One thread drives all ranks of a process, as in nccl-tests with several GPUs per thread.
//!
//! | file | what it is |
//! | --- | --- |
//! | `rank` | a rank's stream and buffers |
//! | `library` | whose all-reduce is called: ours, or the rival's |
//! | `nccl` | the rival: libnccl, opened at run time |
//! | `norm` | all-reduce with residual add and RMSNorm, in one kernel or two |
//! | `foreign` | the kernel of somebody else's between which calls are measured |
//! | `batch` | many calls, eager or as graphs, and their time |
//! | `process` | what must be settled before the driver starts, and which GPUs there are |

mod batch;
mod foreign;
mod library;
pub mod nccl;
mod norm;
pub mod process;
mod rank;

use super::orders::{Answer, Call, Order, Settings, Subject, Task, Timing};
use super::payload::Payload;
use super::rank::served_by;
use anyhow::{bail, Context, Result};
use batch::{Batch, Body};
use foreign::Foreign;
use library::{Library, Ours};
use nccl::{Nccl, NcclRanks};
use norm::{Norm, Rows};
use peerlane::bootstrap::UniqueId;
use peerlane::comm::{create_all, Creation};
use rank::GpuRank;
use std::ops::Range;
use std::path::PathBuf;

/// Launches of a graph before the timing: the first brings it to the GPU.
const UNTIMED_LAUNCHES: u32 = 2;

/// The ranks of this process.
pub struct GpuRanks {
    /// Fields are dropped in this order: communicators before the streams and buffers that they use.
    rival: Option<NcclRanks>,
    ours: Ours,
    ranks: Vec<GpuRank>,
    foreign: Option<Foreign>,
    foreign_kernel: Option<PathBuf>,
    size: usize,
    seed: u64,
    /// Number of the data set in use; grows by one with every one, alike in all processes.
    data: u64,
}

/// A data set in use.
struct Data {
    payload: Payload,
    /// Of the fused operation.
    rows: Option<Rows>,
}

impl GpuRanks {
    /// Has the ranks `numbers` join the communicator `id`.
    pub fn join(id: &UniqueId, numbers: Range<usize>, settings: &Settings) -> Result<Self> {
        let gpu = settings.gpu.clone().context("no GPUs in the settings")?;
        let ranks = numbers
            .clone()
            .map(|number| GpuRank::new(number, gpu.ordinal(number)))
            .collect::<Result<Vec<_>>>()?;
        let creations = numbers
            .map(|rank| {
                let config = settings.config(rank)?;
                Ok(Creation { id: *id, n: settings.ranks, rank, config })
            })
            .collect::<peerlane::Result<Vec<_>>>()?;
        let comms = create_all(&creations)?.into_iter().collect::<peerlane::Result<_>>()?;
        Ok(GpuRanks {
            rival: None,
            ours: Ours(comms),
            ranks,
            foreign: None,
            foreign_kernel: gpu.foreign_kernel,
            size: settings.ranks,
            seed: settings.seed,
            data: 0,
        })
    }

    /// Carries out an order; `busy` is told now and then.
    pub fn obey(&mut self, order: &Order, busy: &mut dyn FnMut()) -> Result<Answer> {
        // As in a framework's own threads: the context is current, and entering it again is one look-up.
        let context = self.ranks.first().map(|rank| rank.context.clone());
        let _current = context.as_ref().map(|context| context.enter()).transpose()?;
        match order {
            Order::Check { call, iterations, graph } => {
                self.check(None, call, (*iterations, *graph), busy)
            }
            Order::Time { call, timing } => self.time(None, call, timing, busy),
            Order::JoinNccl { library, id } => {
                self.rival =
                    Some(NcclRanks::join(Nccl::open(library)?, id, self.size, &self.ranks)?);
                Ok(Answer::Joined)
            }
            Order::Other(subject, Task::Check { call, iterations, graph }) => {
                self.check(Some(*subject), call, (*iterations, *graph), busy)
            }
            Order::Other(subject, Task::Time { call, timing }) => {
                self.time(Some(*subject), call, timing, busy)
            }
            Order::Burst(_) => bail!("bursts are for ranks on the CPU"),
            Order::Join { .. } => bail!("already members of a communicator"),
            Order::Leave => bail!("only the owner of ranks can make them leave"),
        }
    }

    /// Says goodbye to the other ranks. Those of this process leave together: one that waits for the others to close its
    /// memory would wait in vain for one whose turn comes after.
    pub fn leave(mut self) -> Result<Answer> {
        self.rival.take().map_or(Ok(()), NcclRanks::destroy)?;
        let comms = std::mem::take(&mut self.ours.0);
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                comms.into_iter().map(|comm| scope.spawn(move || comm.destroy())).collect();
            let panicked = || peerlane::Error::Internal("a rank panicked while leaving".into());
            threads.into_iter().try_for_each(|t| t.join().unwrap_or_else(|_| Err(panicked())))
        })?;
        Ok(Answer::Left)
    }

    /// Whose calls are made: our all-reduce, unless there is another subject.
    fn library(&self, subject: Option<Subject>) -> Result<Box<dyn Library + '_>> {
        Ok(match (subject, &self.rival) {
            (None, _) => Box::new(&self.ours),
            (Some(Subject::Norm { width, fused }), _) => {
                Box::new(Norm { comms: &self.ours.0, width, fused })
            }
            (Some(Subject::Nccl), Some(rival)) => Box::new(rival),
            (Some(Subject::Nccl), None) => bail!("the ranks have not joined NCCL"),
        })
    }

    /// Room on the GPUs for `call`; nothing moves once a graph knows the addresses.
    fn make_room(&mut self, subject: Option<Subject>, call: &Call, between: bool) -> Result<()> {
        for rank in &mut self.ranks {
            rank.make_room(call, between)?;
            if let Some(Subject::Norm { width, .. }) = subject {
                rank.make_room_for_rows(call, width)?;
            }
        }
        Ok(())
    }

    /// Fresh data on the GPUs, in buffers that fit.
    fn load(&mut self, subject: Option<Subject>, call: &Call, between: bool) -> Result<Data> {
        self.data += 1;
        let payload = Payload::new(self.seed, self.data, self.size, call.dtype, call.op);
        let rows = match subject {
            Some(Subject::Norm { width, .. }) => Some(Rows::new(self.seed, self.data, call, width)),
            _ => None,
        };
        self.make_room(subject, call, between)?;
        for rank in &mut self.ranks {
            rank.load(&payload, between)?;
            if let Some(rows) = &rows {
                rank.load_rows(call, rows)?;
            }
        }
        Ok(Data { payload, rows })
    }

    fn compare(&mut self, subject: Option<Subject>, call: &Call, data: &Data) -> Result<u64> {
        if subject == Some(Subject::Nccl) && nccl::rounds_otherwise(call, self.size) {
            return Ok(0);
        }
        let compare = |rank: &mut GpuRank| match &data.rows {
            Some(rows) => rank.compare_rows(call, &data.payload, rows),
            None => rank.compare(call, &data.payload),
        };
        self.ranks.iter_mut().map(compare).sum()
    }

    /// Calls with fresh data each; with `graph` a graph of one call is launched for each.
    fn check(
        &mut self,
        subject: Option<Subject>,
        call: &Call,
        (iterations, graph): (u32, bool),
        busy: &mut dyn FnMut(),
    ) -> Result<Answer> {
        let once = Timing {
            warmup: 0,
            iters: 1,
            batches: 1,
            aggregate: 1,
            verify: true,
            graph: graph.into(),
            between: false,
        };
        self.make_room(subject, call, false)?;
        let library = self.library(subject)?;
        let body = Body { foreign: None, library: Some(&*library) };
        if graph {
            // A first call may set up connections, which is better not captured.
            body.queue(&self.ranks, call, 1)?;
            body.finish(&self.ranks)?;
        }
        let batch = Batch::prepare(&body, &self.ranks, call, &once)?;
        drop(library);
        let mut wrong = 0;
        for _ in 0..iterations {
            let data = self.load(subject, call, false)?;
            let library = self.library(subject)?;
            let body = Body { foreign: None, library: Some(&*library) };
            batch.run(&body, &self.ranks, call, &once, busy)?;
            drop(library);
            wrong += self.compare(subject, call, &data)?;
            busy();
        }
        Ok(Answer::Checked { wrong })
    }

    fn time(
        &mut self,
        subject: Option<Subject>,
        call: &Call,
        timing: &Timing,
        busy: &mut dyn FnMut(),
    ) -> Result<Answer> {
        if timing.between && self.foreign.is_none() {
            self.foreign = Some(Foreign::load(&self.ranks, self.foreign_kernel.as_deref())?);
        }
        let data = self.load(subject, call, timing.between)?;
        let foreign = self.foreign.as_ref().filter(|_| timing.between);
        let library = self.library(subject)?;
        let body = Body { foreign, library: Some(&*library) };
        let ranks = &self.ranks;

        for _ in 0..timing.warmup {
            body.queue(ranks, call, 1)?;
        }
        body.finish(ranks)?;
        let before = library.stats();
        let batch = Batch::prepare(&body, ranks, call, timing)?;
        // Counted when they are captured; launches of the graph are not.
        let mut served = (timing.graph > 0).then(|| served_by(&before, &library.stats()));
        // The same without the all-reduces, to be subtracted.
        let alone = Body { foreign, library: None };
        let without = foreign.map(|_| Batch::prepare(&alone, ranks, call, timing)).transpose()?;
        if timing.graph > 0 {
            let untimed = Timing { graph: UNTIMED_LAUNCHES, ..*timing };
            for (batch, body) in without.iter().map(|b| (b, &alone)).chain([(&batch, &body)]) {
                self.ours.barrier(ranks)?;
                batch.run(body, ranks, call, &untimed, busy)?;
            }
        }

        let (mut batch_us, mut foreign_us) = (Vec::new(), Vec::new());
        for _ in 0..timing.batches {
            busy();
            let mut subtracted = 0.0;
            // Before the batch itself, whose results are looked at in the end.
            if let Some(without) = &without {
                self.ours.barrier(ranks)?;
                subtracted = without.run(&alone, ranks, call, timing, busy)?;
                foreign_us.push(subtracted);
            }
            self.ours.barrier(ranks)?;
            let before = library.stats();
            batch_us.push(batch.run(&body, ranks, call, timing, busy)? - subtracted);
            served = served.or_else(|| Some(served_by(&before, &library.stats())));
        }
        // In place a call's result is the next one's input, unless a foreign kernel writes that anew.
        let known = !call.in_place || (timing.between && data.rows.is_none());
        drop((batch, without, library));
        let wrong = match timing.verify && known && timing.iters > 0 {
            true => self.compare(subject, call, &data)?,
            false => 0,
        };
        let (algo, proto) = served.unwrap_or_default();
        Ok(Answer::Timed { batch_us, foreign_us, wrong, algo, proto })
    }
}
