//! The verdict over what the ranks did: every bit of every output, and where each rank has come to.

use super::expected::{failed, normed, reduced};
use super::plan::Plan;
use super::runner::{Runner, GUARD};
use explorer::Outcome;
use peerlane::launch::*;
use peerlane::schedule::Goal;

fn next_epoch(e: u64) -> u64 {
    if (e + 1) as u32 == 0 {
        e + 5
    } else {
        e + 1
    }
}

/// The epoch after so many steps.
pub fn epoch_after(start: u64, steps: u32) -> u64 {
    let first = if start as u32 == 0 { start + 2 } else { start };
    (0..steps).fold(first, |e, _| next_epoch(e))
}

/// How a case ended.
pub struct Verdict {
    pub outcome: Outcome,
    pub states: Vec<pl_state>,
    pub channels: Vec<pl_channel>,
    /// `records[at][of]`.
    pub records: Vec<Vec<pl_record>>,
    /// Steps that each rank finished.
    pub finished: Vec<u32>,
    /// A wrong bit in a finished step, or an output of a failed step that could be taken for a result.
    pub wrong: Option<String>,
}

impl Verdict {
    pub fn gave_up(&self) -> bool {
        self.states.iter().any(|s| s.abort != 0)
    }
    /// What is not as in a clean run.
    pub fn complaint(&self) -> Option<String> {
        if self.outcome.stuck != 0 {
            return Some("threads of a block or a cluster left each other at a barrier".into());
        }
        if self.outcome.strayed != 0 {
            return Some("a block's shared memory was stored to while it did not run".into());
        }
        self.wrong.clone().or_else(|| {
            let (rank, state) = self.states.iter().enumerate().find(|(_, s)| s.abort != 0)?;
            Some(format!("rank {rank} gave up: {:?}", state.record))
        })
    }
}

impl Runner {
    pub(super) fn first_wrong(
        &mut self,
        plan: &Plan,
        inputs: &[Vec<Vec<u32>>],
        states: &[pl_state],
        channels: &[pl_channel],
        finished: &[u32],
    ) -> Option<String> {
        let n = plan.n;
        for (k, step) in plan.steps.iter().enumerate() {
            let size = step.dtype.size();
            let at = step.shift * size;
            let mut column = vec![0; n];
            let moved = !matches!(step.goal, Goal::AllReduce | Goal::ReduceScatter);
            let summed = if moved { 0 } else { step.elements(n).0 };
            let want: Vec<u32> = (0..summed)
                .map(|i| {
                    column.iter_mut().zip(&inputs[k]).for_each(|(c, v)| *c = v[i]);
                    reduced(plan, step, &column)
                })
                .collect();
            let (want, residual) = match &step.norm {
                None => (want, Vec::new()),
                Some(norm) => normed(norm, step.seed, &want),
            };
            for rank in 0..n {
                if k as u32 >= plan.rank_steps[rank] {
                    continue;
                }
                let done = states[rank].abort == 0 || (k as u32) < finished[rank];
                if !done && step.goal != Goal::AllReduce {
                    continue;
                }
                let part = rank * step.count..(rank + 1) * step.count;
                let want = match step.goal {
                    Goal::AllReduce => want.clone(),
                    Goal::Broadcast { root } => inputs[k][usize::from(root)].clone(),
                    Goal::AllGather => inputs[k].concat(),
                    Goal::ReduceScatter if step.in_place => {
                        let mut all = inputs[k][rank].clone();
                        all[part.clone()].copy_from_slice(&want[part]);
                        all
                    }
                    Goal::ReduceScatter => want[part].to_vec(),
                };
                let place = format!(
                    "step {k} ({:?}, {} of {}{}, {} {}{}), rank {rank}",
                    step.goal,
                    step.count,
                    step.dtype,
                    step.norm.map_or(String::new(), |norm| format!(" in rows of {}", norm.width)),
                    step.protocol,
                    if step.tables[0].pull != 0 { "pull" } else { "push" },
                    if step.in_place { ", in place" } else { "" }
                );
                let index = 5 * (k * n + rank);
                let in_place = step.norm.is_some_and(|norm| norm.residual_in_place);
                let residual_out = index + if in_place { 2 } else { 3 };
                for (buffer, want) in [(index + 1, &want), (residual_out, &residual)] {
                    let output = self.buffer(buffer);
                    for (i, &w) in want.iter().enumerate() {
                        let mut word = [0; 4];
                        word[..size].copy_from_slice(&output[at + i * size..][..size]);
                        let got = u32::from_le_bytes(word);
                        // A NaN of 16 bits was drawn as 32 ones.
                        let right = w & (u32::MAX >> (32 - 8 * size));
                        let w = if done { right } else { failed(step.dtype) };
                        // A block may be done when its host aborts, and another one begin after that.
                        let of_a_block = plan.abort.is_some() && got == right;
                        if got != w && !of_a_block {
                            let which =
                                if buffer == residual_out { " of the residual" } else { "" };
                            return Some(format!(
                                "{place}: element {i}{which} is {got:#x}, not {w:#x}"
                            ));
                        }
                    }
                    let end = at + want.len() * size;
                    let mut outside = output[..at].iter().chain(&output[end..]);
                    if !want.is_empty() && outside.any(|&b| b != GUARD) {
                        return Some(format!("{place}: wrote outside of its output"));
                    }
                }
            }
        }
        for (rank, c) in channels.iter().enumerate() {
            let steps = plan.rank_steps[rank];
            if states[rank].abort == 0 && steps > 0 {
                let want = (epoch_after(plan.epoch, steps), 0, 0);
                let got = (c.epoch(), c.launch(), c.entered);
                if got != want {
                    return Some(format!("rank {rank}: channel is {got:x?}, not {want:x?}"));
                }
            }
        }
        None
    }
}
