//! `dual_owner`: every input piece goes to its owner in every island at once, each owner sums all ranks, and an
//! all-gather inside the island spreads the result. Two hops: one less than `hierarchical`, for more bytes between islands.

use super::builder::Builder;
use super::model::*;
use super::pieces::Pieces;
use super::tree::Tree;
use super::Islands;
use crate::types::Algorithm;

/// Exists for two islands or more, equal or not.
pub(super) fn build(islands: &Islands) -> Schedule {
    let n = islands.ranks() as u8;
    let pieces = Pieces::new(islands);
    let tree = Tree::new(islands);
    let mut b = Builder::new(n as usize, 2);
    for (island, group) in islands.groups().iter().enumerate() {
        for piece in pieces.all() {
            let owner = pieces.owner(island, piece);
            for rank in (0..n).filter(|&r| r != owner) {
                b.send(0, rank, owner, piece, Source::Input);
            }
            b.fold(0, owner, piece, Target::Result, &tree, |leaf| {
                Operand::input_of(leaf, owner, 0)
            });
            for member in group.iter().copied().filter(|&m| m != owner) {
                b.send(1, owner, member, piece, Source::Result);
                b.take(1, member, piece, Target::Result, owner, 1);
            }
        }
    }
    b.finish(Algorithm::DualOwner, islands, pieces.cuts)
}
