//! Those who carry out the parent's orders: a process of its own that reads them from a pipe, and what it makes of them.

#[cfg(feature = "cuda")]
use super::gpu::GpuRanks;
use super::orders::{from_line, to_line, Answer, Order, Settings};
use super::rank::Rank;
use anyhow::{bail, Context, Result};
use peerlane::bootstrap::UniqueId;
use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

/// Who obeys on one thread: a rank of the CPU, or the ranks of this process that are on GPUs.
pub enum Member {
    /// One rank.
    Cpu(Rank),
    /// All ranks of this process.
    #[cfg(feature = "cuda")]
    Gpu(Box<GpuRanks>),
}

impl Member {
    fn join(id: &str, rank: usize, settings: &Settings) -> Result<Self> {
        let id: UniqueId = id.parse()?;
        #[cfg(feature = "cuda")]
        if settings.gpu.is_some() {
            return Ok(Member::Gpu(Box::new(GpuRanks::join(&id, rank..rank + 1, settings)?)));
        }
        Ok(Member::Cpu(Rank::join(&id, rank, settings)?))
    }

    /// Carries out an order; `busy` is told now and then.
    pub fn obey(&mut self, order: &Order, busy: &mut dyn FnMut()) -> Result<Answer> {
        match self {
            Member::Cpu(rank) => rank.obey(order, busy),
            #[cfg(feature = "cuda")]
            Member::Gpu(ranks) => ranks.obey(order, busy),
        }
    }

    /// Says goodbye to the other ranks.
    pub fn leave(self) -> Result<Answer> {
        match self {
            Member::Cpu(rank) => rank.leave(),
            #[cfg(feature = "cuda")]
            Member::Gpu(ranks) => ranks.leave(),
        }
    }
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
    let mut rank: Option<Member> = None;
    for line in orders.lines() {
        let order: Order = from_line(&line.context("the parent's pipe broke")?)?;
        let leaving = matches!(order, Order::Leave);
        let outcome = match (order, rank.take()) {
            (Order::Join { id, rank: number, settings }, None) => {
                Member::join(&id, number, &settings).map(|joined| {
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
    use super::super::orders::Call;
    use super::*;
    use peerlane::{DType, Op};

    #[test]
    fn nonsense_on_the_pipe_is_an_error() {
        let mut answers = Vec::new();
        assert!(serve(&b"hello\n"[..], &mut answers).is_err());
        let order = to_line(&Order::Check {
            call: Call { count: 1, dtype: DType::F32, op: Op::Sum, in_place: false },
            iterations: 1,
            graph: false,
        })
        .unwrap();
        assert!(serve(order.as_bytes(), &mut answers).is_err());
        assert!(answers.is_empty());
    }
}
