//! `hierarchical`: reduce-scatter inside every island, swap of the partial sums between the owners of the same piece in
//! all islands, all-gather inside every island. Three hops; each byte crosses between two islands once per direction.

use super::builder::Builder;
use super::model::*;
use super::pieces::Pieces;
use super::tree::Tree;
use super::Islands;
use crate::types::Algorithm;

const SCATTER: usize = 0;
const SWAP: usize = 1;
const GATHER: usize = 2;

/// Exists for two islands or more, equal or not.
pub(super) fn build(islands: &Islands) -> Schedule {
    let groups = islands.groups();
    let pieces = Pieces::new(islands);
    let join = Tree::over(&(0..groups.len() as u8).collect::<Vec<_>>());
    let mut b = Builder::new(islands.ranks(), 3);
    for (island, group) in groups.iter().enumerate() {
        let inside = Tree::over(group);
        for piece in pieces.all() {
            let owner = pieces.owner(island, piece);
            // The only member of an island has nothing to sum: its input is the island's partial.
            let (own, src) = match group.len() {
                1 => (Operand::Input, Source::Input),
                _ => (Operand::Partial, Source::Partial),
            };
            let others = |me: u8| group.iter().copied().filter(move |&m| m != me);
            for member in others(owner) {
                b.send(SCATTER, member, owner, piece, Source::Input);
                b.send(GATHER, owner, member, piece, Source::Result);
                b.take(GATHER, member, piece, Target::Result, owner, GATHER);
            }
            if group.len() > 1 {
                b.fold(SCATTER, owner, piece, Target::Partial, &inside, |leaf| {
                    Operand::input_of(leaf, owner, SCATTER)
                });
            }
            for other in (0..groups.len()).filter(|&i| i != island) {
                b.send(SWAP, owner, pieces.owner(other, piece), piece, src);
            }
            b.fold(SWAP, owner, piece, Target::Result, &join, |leaf| {
                match leaf as usize == island {
                    true => own,
                    false => {
                        Operand::Arrival { from: pieces.owner(leaf as usize, piece), phase: SWAP }
                    }
                }
            });
        }
    }
    b.finish(Algorithm::Hierarchical, islands, pieces.cuts)
}
