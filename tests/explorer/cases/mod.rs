//! Cases for the explorer: boxes, plans drawn from a seed, and the verdict over what the ranks did.

// Each test binary that includes this uses its own share of it.
#![allow(dead_code)]

pub mod boxes;
mod expected;
#[path = "../../common/flags.rs"]
pub mod flags;
pub mod layout;
pub mod plan;
pub mod random;
#[path = "../../common/rows.rs"]
mod rows;
pub mod runner;
pub mod step;
mod unrolled;
pub mod verdict;

use peerlane::{Direction, Protocol};

pub type Way = (Protocol, Direction);
pub const WAYS: [Way; 4] = [
    (Protocol::Ll, Direction::Push),
    (Protocol::Sentinel, Direction::Push),
    (Protocol::Flagged, Direction::Push),
    (Protocol::Flagged, Direction::Pull),
];
