//! Reduce-scatter: every rank sends every other the part that is summed there. One hop, and n-1 parts out of every rank, which is
//! the least. Sums follow the communicator's tree, so a part has the bits that an all-reduce of it would have.

use super::builder::Builder;
use super::model::*;
use super::tree::Tree;
use super::Islands;
use crate::types::Algorithm;

pub(super) fn build(islands: &Islands) -> Schedule {
    let n = islands.ranks() as u8;
    let tree = Tree::new(islands);
    let mut b = Builder::new(n as usize, 1);
    for me in 0..n {
        for peer in (0..n).filter(|&p| p != me) {
            b.send(0, me, peer, peer, Source::Input);
        }
        b.fold(0, me, me, Target::Result, &tree, |leaf| Operand::input_of(leaf, me, 0));
    }
    let schedule = b.finish(Algorithm::OneShot, islands, Cuts::equal(n.into()));
    Schedule { goal: Goal::ReduceScatter, ..schedule }
}
