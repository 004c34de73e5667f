//! `two_shot`: a flat reduce-scatter, then an all-gather. Two hops, 2(n-1)/n of the message out of every rank.

use super::builder::Builder;
use super::model::*;
use super::tree::Tree;
use super::Islands;
use crate::types::Algorithm;

/// Exists for any partition; piece p belongs to rank p. For one rank it is a copy.
pub(super) fn build(islands: &Islands) -> Schedule {
    let n = islands.ranks() as u8;
    let tree = Tree::new(islands);
    let mut b = Builder::new(n as usize, 2);
    for me in 0..n {
        for peer in (0..n).filter(|&p| p != me) {
            b.send(0, me, peer, peer, Source::Input);
            b.send(1, me, peer, me, Source::Result);
            b.take(1, me, peer, Target::Result, peer, 1);
        }
        b.fold(0, me, me, Target::Result, &tree, |leaf| Operand::input_of(leaf, me, 0));
    }
    b.finish(Algorithm::TwoShot, islands, Cuts::equal(n.into()))
}
