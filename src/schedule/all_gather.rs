//! All-gather: every rank sends its part to every other. One hop, and n-1 parts out of every rank, which is the least.
//!
//! Every rank hears from every other, so finishing a step proves that all have finished the one before. Parts are equal, so
//! none is empty where another is not.

use super::builder::Builder;
use super::model::*;
use super::Islands;
use crate::types::Algorithm;

pub(super) fn build(islands: &Islands) -> Schedule {
    let n = islands.ranks() as u8;
    let mut b = Builder::new(n as usize, 1);
    for me in 0..n {
        for peer in (0..n).filter(|&p| p != me) {
            b.send(0, me, peer, me, Source::Input);
            b.take(0, me, peer, Target::Result, peer, 0);
        }
    }
    let schedule = b.finish(Algorithm::OneShot, islands, Cuts::equal(n.into()));
    Schedule { goal: Goal::AllGather, ..schedule }
}
