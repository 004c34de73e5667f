//! `one_shot`: everybody pushes the whole message to everybody and sums locally. One hop.

use super::builder::Builder;
use super::model::*;
use super::tree::Tree;
use super::Islands;
use crate::types::Algorithm;

/// Exists for any partition; for one rank it is a copy.
pub(super) fn build(islands: &Islands) -> Schedule {
    let n = islands.ranks() as u8;
    let tree = Tree::new(islands);
    let mut b = Builder::new(n as usize, 1);
    for me in 0..n {
        for peer in (0..n).filter(|&p| p != me) {
            b.send(0, me, peer, 0, Source::Input);
        }
        b.fold(0, me, 0, Target::Result, &tree, |leaf| Operand::input_of(leaf, me, 0));
    }
    b.finish(Algorithm::OneShot, islands, Cuts::equal(1))
}
