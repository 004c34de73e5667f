//! The libraries whose all-reduce is timed on GPUs: ours, and behind the same interface NCCL, so that both are driven alike.

use super::rank::GpuRank;
use crate::bench::orders::Call;
use anyhow::Result;
use peerlane::comm::{group_end, group_start, Communicator, Stats};
use peerlane::{DType, Op};

/// The communicators of this process's ranks, in the order of the ranks.
pub trait Library {
    /// Queues `times` all-reduces for every rank, each on the rank's own stream, or records them where the streams are being
    /// captured; returns before they have run.
    ///
    /// One thread does so for all ranks, call by call: no call of a rank can then wait for a call of another rank that this
    /// thread has yet to make, even when the driver's queue of launches is full and a launch waits for room.
    fn queue(&self, ranks: &[GpuRank], call: &Call, times: u32) -> Result<()>;

    /// What went wrong in calls that have run.
    fn failure(&self) -> Option<anyhow::Error>;

    /// What the library counts, where it does.
    fn stats(&self) -> Stats {
        Stats::default()
    }
}

/// peerlane.
pub struct Ours(pub Vec<Communicator>);

impl Ours {
    /// Queues a small all-reduce of every rank and waits for it: then all ranks of all processes are there. Of a type that every
    /// protocol carries, since the run may have pinned one.
    pub fn barrier(&self, ranks: &[GpuRank]) -> Result<()> {
        for (comm, rank) in self.0.iter().zip(ranks) {
            enqueue(comm, rank, (rank.word(), rank.word()), (1, DType::F32, Op::Max))?;
        }
        ranks.iter().try_for_each(|rank| rank.stream.synchronize())?;
        self.failure().map_or(Ok(()), Err)
    }
}

impl Library for Ours {
    fn queue(&self, ranks: &[GpuRank], call: &Call, times: u32) -> Result<()> {
        if times > 1 {
            group_start();
        }
        let mut outcome = Ok(());
        for (comm, rank) in (0..times).flat_map(|_| self.0.iter().zip(ranks)) {
            let made = enqueue(comm, rank, rank.operands(call), (call.count, call.dtype, call.op));
            outcome = outcome.and(made);
        }
        if times > 1 {
            outcome = outcome.and(group_end());
        }
        Ok(outcome?)
    }

    fn failure(&self) -> Option<anyhow::Error> {
        failure(&self.0)
    }

    fn stats(&self) -> Stats {
        self.0.first().map(Communicator::stats).unwrap_or_default()
    }
}

/// The first communicator's error.
pub fn failure(comms: &[Communicator]) -> Option<anyhow::Error> {
    let failed = |comm: &Communicator| Some((comm.rank(), comm.error()?));
    let (rank, error) = comms.iter().find_map(failed)?;
    Some(anyhow::anyhow!("rank {rank}: {error}"))
}

impl<L: Library + ?Sized> Library for &L {
    fn queue(&self, ranks: &[GpuRank], call: &Call, times: u32) -> Result<()> {
        (**self).queue(ranks, call, times)
    }

    fn failure(&self) -> Option<anyhow::Error> {
        (**self).failure()
    }

    fn stats(&self) -> Stats {
        (**self).stats()
    }
}

fn enqueue(
    comm: &Communicator,
    rank: &GpuRank,
    (input, output): (u64, u64),
    (count, dtype, op): (usize, DType, Op),
) -> peerlane::Result<()> {
    let stream = rank.stream.as_ref().as_raw();
    // SAFETY: the addresses are this rank's device memory with room for `count` elements, the same or apart. They and the
    // stream live until the stream has been synchronised, and longer than any graph: `GpuRanks` drops graphs at the end of
    // an order and changes buffers only before the next.
    unsafe {
        comm.all_reduce_cuda(input as *const _, output as *mut _, count, dtype, op, stream, None)
    }
}
