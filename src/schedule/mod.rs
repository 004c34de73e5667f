//! A collective is a schedule, and a schedule is data.
//!
//! A builder (one file per algorithm) writes down for every rank a list of phases: what it sends to whom, and what it
//! sums in which order. [`Schedule::tables`] compiles that to one C table per rank; the [`check`](mod@check) reads only
//! the tables and proves them right; kernels, the simulator and [`explain`](mod@explain) read the same tables.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `islands`, `tree` | the partition of the ranks, and the order of summation that belongs to it |
//! | `model`, `builder`, `pieces`, `colouring` | the schedule as data, and what the algorithms share |
//! | `one_shot` ... `staged` | all-reduces, one algorithm each |
//! | `broadcast`, `all_gather`, `reduce_scatter` | the other collectives |
//! | `table`, `view` | from the schedule to the C tables, and reading those |
//! | `check`, `explain` | the proof and the text, from the tables alone |

mod all_gather;
mod broadcast;
mod builder;
pub mod check;
mod colouring;
mod dual_owner;
pub mod explain;
mod hierarchical;
pub mod islands;
pub mod model;
mod one_shot;
mod pairwise;
mod pieces;
mod reduce_scatter;
mod staged;
mod table;
pub mod tree;
mod two_shot;
mod view;

pub use check::{check, check_goal, Proof, Violation};
pub use explain::explain;
pub use islands::Islands;
pub use model::{Goal, Schedule};
pub use tree::Tree;

use crate::error::{Error, Result};
use crate::types::Algorithm;

/// Whether `algorithm` has a schedule for this partition.
pub fn exists(algorithm: Algorithm, islands: &Islands) -> bool {
    match algorithm {
        Algorithm::OneShot | Algorithm::TwoShot => true,
        Algorithm::Hierarchical | Algorithm::DualOwner | Algorithm::Staged => {
            islands.groups().len() > 1
        }
        Algorithm::Pairwise => pairwise::exists(islands),
    }
}

/// The schedule of `algorithm` for this partition, or [`Error::Unsupported`] where there is none.
pub fn build(algorithm: Algorithm, islands: &Islands) -> Result<Schedule> {
    if !exists(algorithm, islands) {
        let needs = match algorithm {
            Algorithm::Pairwise => {
                "a tree in which no rank serves more than two (PEERLANE_ISLANDS)"
            }
            _ => "two islands or more (PEERLANE_ISLANDS)",
        };
        return Err(Error::Unsupported(format!(
            "{algorithm} over {} rank(s) in islands {islands}: it needs {needs}",
            islands.ranks()
        )));
    }
    Ok(match algorithm {
        Algorithm::OneShot => one_shot::build(islands),
        Algorithm::TwoShot => two_shot::build(islands),
        Algorithm::Hierarchical => hierarchical::build(islands),
        Algorithm::DualOwner => dual_owner::build(islands),
        Algorithm::Pairwise => pairwise::build(islands),
        Algorithm::Staged => staged::build(islands),
    })
}

/// The schedule of another collective than the all-reduce, or of one in parts where `in_parts` (see [`Goal`]). A broadcast has both
/// forms; the others are in parts.
///
/// # Errors
/// [`Error::InvalidArgument`] for a root that is no rank; [`Error::Unsupported`] for what has no such form.
pub fn build_goal(goal: Goal, in_parts: bool, islands: &Islands) -> Result<Schedule> {
    match (goal, in_parts) {
        (Goal::Broadcast { root }, _) if usize::from(root) >= islands.ranks() => {
            Err(Error::InvalidArgument(format!("root {root} of {} rank(s)", islands.ranks())))
        }
        (Goal::Broadcast { root }, false) => Ok(broadcast::flat(islands, root)),
        (Goal::Broadcast { root }, true) => Ok(broadcast::in_parts(islands, root)),
        (Goal::AllGather, true) => Ok(all_gather::build(islands)),
        (Goal::ReduceScatter, true) => Ok(reduce_scatter::build(islands)),
        (Goal::AllReduce, _) | (Goal::AllGather | Goal::ReduceScatter, false) => {
            Err(Error::Unsupported(format!("{goal} in parts: {in_parts}")))
        }
    }
}
