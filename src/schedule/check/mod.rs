//! Proves a schedule right before anything runs, from its tables alone: what a kernel will read is what is checked.
//!
//! The rules, in the order in which they are checked; [`Violation`] has a variant for each:
//!
//! 1. *shape* (`shape`): every index lies in its array, all ranks agree on what is common, cuts ascend, folds keep stack
//!    discipline.
//! 2. *wiring* (`wiring`): every slot has one writer and is taken once, by its owner, as what was sent.
//! 3. *meaning* (`meaning`): a symbolic run, phase-major as the kernels run. There is no deadlock; every result is the
//!    root of the tree; nothing is rounded twice; nothing is read in place after it was overwritten; reuse of the two
//!    halves is safe.
//!
//! A slot has one writer and a rank runs in program order, so the values do not depend on who is faster: one symbolic
//! run stands for all interleavings.

mod meaning;
mod shape;
mod violation;
mod wiring;

pub use violation::Violation;

use super::model::Goal;
use super::tree::Tree;
use super::view;
use crate::launch::{pl_table, PL_SRC_NOTHING};
use crate::types::MAX_RANKS;

/// What a proven schedule costs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// Phases of the schedule.
    pub phases: usize,
    /// Messages of the longest chain in which each waits for the one before.
    pub hops: usize,
    /// Most peers of any rank, senders and receivers together.
    pub degree: usize,
    /// Messages of one step, over all ranks.
    pub messages: usize,
    /// The denominator of `out`: [`pl_table::cut_den`].
    pub denominator: u32,
    /// What every rank sends in a step.
    pub out: Vec<Traffic>,
}

/// Parts of a message, in units of message/`denominator`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Sent in the caller's type.
    pub caller: u32,
    /// Sent in the accumulator type: twice the bytes for 16-bit floats.
    pub accumulator: u32,
}

impl std::fmt::Display for Proof {
    /// One line, such as `3 phases, 3 hops, at most 4 peers, 56 messages; out of a rank at most 1.50 messages in the
    /// caller's type and 0.25 in the accumulator type`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let most = |of: fn(&Traffic) -> u32| {
            f64::from(self.out.iter().map(of).max().unwrap_or(0))
                / f64::from(self.denominator.max(1))
        };
        write!(
            f,
            "{} phases, {} hops, at most {} peers, {} messages; out of a rank at most {:.2} messages in the caller's \
             type and {:.2} in the accumulator type",
            self.phases,
            self.hops,
            self.degree,
            self.messages,
            most(|t| t.caller),
            most(|t| t.accumulator)
        )
    }
}

/// Proves the tables of a schedule against the communicator's tree.
///
/// # Errors
/// The first [`Violation`] that is found.
pub fn check(tables: &[pl_table], tree: &Tree) -> Result<Proof, Violation> {
    check_with_degree(tables, tree, MAX_RANKS - 1)
}

/// The same for a schedule of any [`Goal`]. Where results do not need every rank's data, every rank must still hear from every
/// other in every step, or nothing would keep a writer from running ahead of its readers, in this schedule or in another that
/// shares the channel.
///
/// # Errors
/// The first [`Violation`] that is found.
pub fn check_goal(tables: &[pl_table], tree: &Tree, goal: Goal) -> Result<Proof, Violation> {
    prove(tables, tree, goal, MAX_RANKS - 1)
}

/// The same where a rank may have at most `limit` peers, for boxes on which a device can map only so many (CUDA allows
/// eight peer connections per device on systems without a switch).
///
/// # Errors
/// The first [`Violation`] that is found.
pub fn check_with_degree(
    tables: &[pl_table],
    tree: &Tree,
    limit: usize,
) -> Result<Proof, Violation> {
    prove(tables, tree, Goal::AllReduce, limit)
}

fn prove(tables: &[pl_table], tree: &Tree, goal: Goal, limit: usize) -> Result<Proof, Violation> {
    shape::check(tables, tree)?;
    wiring::check(tables)?;
    let mut peers = vec![0u16; tables.len()];
    let mut out = vec![Traffic::default(); tables.len()];
    let mut messages = 0;
    for (rank, table) in tables.iter().enumerate() {
        for phase in view::phases(table) {
            for send in view::sends(table, phase) {
                let piece = send.piece as usize;
                let width = u32::from(table.cut_num[piece + 1] - table.cut_num[piece]);
                match phase.wire_f32 {
                    _ if u32::from(send.src) == PL_SRC_NOTHING => {}
                    0 => out[rank].caller += width,
                    _ => out[rank].accumulator += width,
                }
                peers[rank] |= 1 << send.peer;
                peers[send.peer as usize] |= 1 << rank;
                messages += 1;
            }
        }
    }
    let degree = |rank: usize| peers[rank].count_ones() as usize;
    if let Some(rank) = (0..tables.len()).find(|&r| degree(r) > limit) {
        return Err(Violation::Degree { rank, peers: degree(rank), limit });
    }
    let hops = meaning::check(tables, tree, goal)?;
    Ok(Proof {
        phases: tables[0].phases.into(),
        hops,
        degree: (0..tables.len()).map(degree).max().unwrap_or(0),
        messages,
        denominator: tables[0].cut_den.into(),
        out,
    })
}
