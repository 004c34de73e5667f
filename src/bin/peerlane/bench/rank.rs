//! One rank of a run: carries out the parent's orders.

use super::orders::{from_line, to_line, Answer, Call, Order, Settings, Timing};
use super::payload::Payload;
use anyhow::{bail, ensure, Context, Result};
use bytemuck::{Pod, Zeroable};
use peerlane::bootstrap::UniqueId;
use peerlane::comm::{group_end, group_start, Communicator, Stats};
use peerlane::{Algorithm, DType, Op, Protocol};
use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

/// Elements beyond the message that a call must leave alone, as cache lines.
const GUARD_LINES: usize = 2;
/// No integer result is this byte repeated, nor is any float result.
const POISON: u8 = 0xa5;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Memory of one message, aligned as an allocator of tensors would, with a guard behind it.
#[derive(Default)]
pub(super) struct Buffer {
    lines: Vec<Line>,
    bytes: usize,
}

impl Buffer {
    pub(super) fn resize(&mut self, bytes: usize) -> Result<()> {
        let lines = bytes.div_ceil(64) + GUARD_LINES;
        self.lines.clear();
        self.lines
            .try_reserve_exact(lines)
            .with_context(|| format!("no memory for a message of {bytes} bytes"))?;
        self.lines.resize(lines, Line([POISON; 64]));
        self.bytes = bytes;
        Ok(())
    }

    pub(super) fn message(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.bytes]
    }

    /// Forgets the last result and re-arms the guard.
    fn poison(&mut self) {
        self.lines.fill(Line([POISON; 64]));
    }

    fn guard_intact(&self) -> bool {
        bytemuck::cast_slice::<Line, u8>(&self.lines)[self.bytes..].iter().all(|&b| b == POISON)
    }
}

/// A rank with its communicator and buffers.
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

    fn join(id: &str, rank: usize, settings: &Settings) -> Result<Self> {
        let id: UniqueId = id.parse()?;
        let comm = Communicator::create(&id, settings.ranks, rank, &settings.config()?)?;
        Ok(Self::new(comm, settings.seed))
    }

    /// Carries out an order; `busy` is told between batches.
    pub fn obey(&mut self, order: &Order, busy: &mut dyn FnMut()) -> Result<Answer> {
        match order {
            Order::Check { call, iterations } => {
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
        if self.input.lines.is_empty() || self.input.bytes != bytes {
            self.input.resize(bytes)?;
            self.output.resize(bytes)?;
        }
        self.input.poison();
        self.output.poison();
        payload.fill(self.comm.rank(), self.input.message());
        Ok(payload)
    }

    fn run(&mut self, call: &Call) -> Result<()> {
        let input = self.input.lines.as_mut_ptr();
        let output = if call.in_place { input } else { self.output.lines.as_mut_ptr() };
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

    /// All ranks start a batch together; a small all-reduce is the tightest barrier there is.
    fn barrier(&self) -> Result<()> {
        let mut word = [1i32];
        let data = word.as_mut_ptr().cast();
        // SAFETY: one element, in place, alive until the call returns.
        unsafe { self.comm.all_reduce(data, data, 1, DType::I32, Op::Max, None)? };
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
        Ok(Answer::Timed { batch_us, wrong, algo, proto })
    }
}

/// How many elements of a call's result are wrong; an error if it touched what it must not.
pub(super) fn compare(
    rank: usize,
    call: &Call,
    payload: &Payload,
    input: &mut Buffer,
    output: &mut Buffer,
) -> Result<u64> {
    for (name, buffer) in [("input", &*input), ("output", &*output)] {
        ensure!(
            buffer.guard_intact(),
            "an all-reduce of {} bytes wrote beyond the end of its {name}",
            call.bytes()
        );
    }
    if call.in_place {
        return Ok(payload.wrong_output(input.message()));
    }
    let changed = payload.wrong_input(rank, input.message());
    ensure!(
        changed == 0,
        "an out-of-place all-reduce of {} bytes changed {changed} elements of its input",
        call.bytes()
    );
    Ok(payload.wrong_output(output.message()))
}

/// Names of the algorithms and protocols whose counts grew from `before` to `after`; `none` where no call needed one.
fn served_by(before: &Stats, after: &Stats) -> (String, String) {
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

/// Tells `tell` that the rank is at work, at most once a second.
pub fn heartbeat(mut tell: impl FnMut()) -> impl FnMut() {
    let mut last = Instant::now();
    move || {
        if last.elapsed() >= Duration::from_secs(1) {
            last = Instant::now();
            tell();
        }
    }
}

/// A rank that is a process: orders come on `orders`, answers go to `answers`, a line each. Ends after the order to leave
/// with true, or with false after a failure that the parent has been told.
pub fn serve(orders: impl BufRead, mut answers: impl Write) -> Result<bool> {
    let mut rank: Option<Rank> = None;
    for line in orders.lines() {
        let order: Order = from_line(&line.context("the parent's pipe broke")?)?;
        let leaving = matches!(order, Order::Leave);
        let outcome = match (order, rank.take()) {
            (Order::Join { id, rank: number, settings }, None) => {
                Rank::join(&id, number, &settings).map(|joined| {
                    rank = Some(joined);
                    Answer::Joined
                })
            }
            (Order::Leave, None) => Ok(Answer::Left),
            (Order::Leave, Some(member)) => member.leave(),
            (_, None) => bail!("an order came before the rank joined a communicator"),
            (order, Some(mut member)) => {
                // A parent that is gone shows at the next answer; a lost heartbeat is no error.
                let mut busy = heartbeat(|| {
                    let _ = tell(&mut answers, &Answer::Busy);
                });
                let outcome = member.obey(&order, &mut busy);
                rank = Some(member);
                outcome
            }
        };
        match outcome {
            Ok(answer) => tell(&mut answers, &answer)?,
            Err(error) => {
                tell(&mut answers, &Answer::Failed { why: format!("{error:#}") })?;
                return Ok(false);
            }
        }
        if leaving {
            return Ok(true);
        }
    }
    bail!("the parent ended before the run did")
}

fn tell(answers: &mut impl Write, answer: &Answer) -> Result<()> {
    answers.write_all(to_line(answer)?.as_bytes())?;
    answers.flush()?;
    Ok(())
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

    #[test]
    fn a_write_behind_the_message_is_seen() {
        let mut buffer = Buffer::default();
        buffer.resize(100).unwrap();
        buffer.message().fill(1);
        assert!(buffer.guard_intact());
        bytemuck::cast_slice_mut::<Line, u8>(&mut buffer.lines)[100] = 1;
        assert!(!buffer.guard_intact());
        buffer.poison();
        assert!(buffer.guard_intact());
    }

    #[test]
    fn nonsense_on_the_pipe_is_an_error() {
        let mut answers = Vec::new();
        assert!(serve(&b"hello\n"[..], &mut answers).is_err());
        let order = to_line(&Order::Check {
            call: Call { count: 1, dtype: DType::F32, op: Op::Sum, in_place: false },
            iterations: 1,
        })
        .unwrap();
        assert!(serve(order.as_bytes(), &mut answers).is_err());
        assert!(answers.is_empty());
    }
}
