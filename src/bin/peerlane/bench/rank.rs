//! A rank on the CPU: carries out the parent's orders.

use super::buffer::{compare, Buffer};
use super::orders::{Answer, Call, Order, Settings, Timing};
use super::payload::Payload;
use anyhow::{bail, Result};
use peerlane::bootstrap::UniqueId;
use peerlane::comm::{group_end, group_start, Communicator, Stats};
use peerlane::{Algorithm, DType, Op, Protocol};
use std::time::Instant;

/// A rank of the CPU with its communicator and buffers.
pub struct Rank {
    pub(super) comm: Communicator,
    seed: u64,
    /// Number of the data set in use; grows by one with every checked call, alike on all ranks.
    data: u64,
    input: Buffer,
    output: Buffer,
}

impl Rank {
    /// A rank of a communicator that exists.
    pub fn new(comm: Communicator, seed: u64) -> Self {
        Rank { comm, seed, data: 0, input: Buffer::default(), output: Buffer::default() }
    }

    /// Joins the communicator `id` as `rank`.
    pub fn join(id: &UniqueId, rank: usize, settings: &Settings) -> Result<Self> {
        let comm = Communicator::create(id, settings.ranks, rank, &settings.config(rank)?)?;
        Ok(Self::new(comm, settings.seed))
    }

    /// Carries out an order; `busy` is told between batches.
    pub fn obey(&mut self, order: &Order, busy: &mut dyn FnMut()) -> Result<Answer> {
        match order {
            Order::Check { call, iterations, .. } => {
                let mut wrong = 0;
                for _ in 0..*iterations {
                    wrong += self.check(call)?;
                    busy();
                }
                Ok(Answer::Checked { wrong })
            }
            Order::Burst(burst) => Ok(Answer::Checked { wrong: self.burst(burst, busy)? }),
            Order::Time { call, timing } => self.time(call, timing, busy),
            Order::Join { .. } => bail!("already a member of a communicator"),
            Order::JoinNccl { .. } | Order::Other(..) => {
                bail!("a rank on the CPU calls our all-reduce alone")
            }
            Order::Leave => bail!("only the owner of a rank can make it leave"),
        }
    }

    /// Says goodbye to the other ranks.
    pub fn leave(self) -> Result<Answer> {
        self.comm.destroy()?;
        Ok(Answer::Left)
    }

    /// The numbers of the next checked call.
    pub(super) fn next_data(&mut self, call: &Call) -> Payload {
        self.data += 1;
        Payload::new(self.seed, self.data, self.comm.size(), call.dtype, call.op)
    }

    /// Fresh data in the buffers that `call` uses.
    fn load(&mut self, call: &Call) -> Result<Payload> {
        let payload = self.next_data(call);
        let bytes = call.bytes();
        if !self.input.fits(bytes) {
            self.input.resize(bytes)?;
            self.output.resize(bytes)?;
        }
        self.input.poison();
        self.output.poison();
        payload.fill(self.comm.rank(), self.input.message());
        Ok(payload)
    }

    fn run(&mut self, call: &Call) -> Result<()> {
        let input = self.input.message().as_mut_ptr();
        let output = if call.in_place { input } else { self.output.message().as_mut_ptr() };
        // SAFETY: both buffers hold `count` elements, are distinct unless the call is in place, and stay until the call
        // or the group that it belongs to is over, for no stream is given and `self` is borrowed meanwhile.
        unsafe {
            self.comm.all_reduce(
                input.cast(),
                output.cast(),
                call.count,
                call.dtype,
                call.op,
                None,
            )?
        };
        Ok(())
    }

    /// One call with fresh data; how many elements of its result are wrong.
    fn check(&mut self, call: &Call) -> Result<u64> {
        let payload = self.load(call)?;
        self.run(call)?;
        compare(self.comm.rank(), call, &payload, &mut self.input, &mut self.output)
    }

    /// All ranks start a batch together; a small all-reduce is the tightest barrier there is. Of a type that every protocol
    /// carries, since the run may have pinned one.
    fn barrier(&self) -> Result<()> {
        let mut word = [1f32];
        let data = word.as_mut_ptr().cast();
        // SAFETY: one element, in place, alive until the call returns.
        unsafe { self.comm.all_reduce(data, data, 1, DType::F32, Op::Max, None)? };
        Ok(())
    }

    fn iterate(&mut self, call: &Call, aggregate: u32) -> Result<()> {
        if aggregate == 1 {
            return self.run(call);
        }
        group_start();
        let mut outcome = Ok(());
        for _ in 0..aggregate {
            outcome = outcome.and_then(|()| self.run(call));
        }
        group_end()?;
        outcome
    }

    fn time(&mut self, call: &Call, timing: &Timing, busy: &mut dyn FnMut()) -> Result<Answer> {
        let payload = self.load(call)?;
        for _ in 0..timing.warmup {
            self.run(call)?;
        }
        let calls = f64::from(timing.iters) * f64::from(timing.aggregate);
        let mut batch_us = Vec::with_capacity(timing.batches as usize);
        let mut served = None;
        for _ in 0..timing.batches {
            busy();
            self.barrier()?;
            let before = served.is_none().then(|| self.comm.stats());
            let start = Instant::now();
            let mut report = 0;
            for done in 1..=timing.iters {
                self.iterate(call, timing.aggregate)?;
                // A batch may be long. Looking at the clock twice a second is not felt in the mean.
                if done > report {
                    let mean = start.elapsed().as_secs_f64() / f64::from(done);
                    report = done.saturating_add((0.5 / mean.max(1e-6)) as u32);
                    busy();
                }
            }
            batch_us.push(start.elapsed().as_secs_f64() * 1e6 / calls);
            served = served.or_else(|| before.map(|before| served_by(&before, &self.comm.stats())));
        }
        let wrong = match timing.verify && !call.in_place && timing.iters > 0 {
            true => compare(self.comm.rank(), call, &payload, &mut self.input, &mut self.output)?,
            false => 0,
        };
        let (algo, proto) = served.unwrap_or_default();
        Ok(Answer::Timed { batch_us, foreign_us: Vec::new(), wrong, algo, proto })
    }
}

/// Names of the algorithms and protocols whose counts grew from `before` to `after`; `none` where no call needed one.
pub fn served_by(before: &Stats, after: &Stats) -> (String, String) {
    fn grown<const N: usize>(names: &[&str], before: [u64; N], after: [u64; N]) -> String {
        let names: Vec<_> = (0..N).filter(|&i| after[i] > before[i]).map(|i| names[i]).collect();
        if names.is_empty() {
            "none".into()
        } else {
            names.join("+")
        }
    }
    let algorithms: Vec<_> = Algorithm::ALL.iter().map(|a| a.name()).collect();
    let protocols: Vec<_> = Protocol::ALL.iter().map(|p| p.name()).collect();
    (
        grown(&algorithms, before.by_algorithm, after.by_algorithm),
        grown(&protocols, before.by_protocol, after.by_protocol),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn served_by_names_what_grew() {
        let before = Stats { by_algorithm: [5, 1, 0, 0, 0, 0], ..Stats::default() };
        let mut after = before.clone();
        assert_eq!(served_by(&before, &after), ("none".into(), "none".into()));
        after.by_algorithm[1] += 20;
        after.by_protocol[Protocol::Flagged as usize] += 20;
        assert_eq!(served_by(&before, &after), ("two_shot".into(), "flagged".into()));
        after.by_algorithm[0] += 1;
        assert_eq!(served_by(&before, &after).0, "one_shot+two_shot");
    }
}
