//! `pairwise`: the whole message is exchanged along the tree, leaves first. At a node every rank of one side gets the
//! other side's sum from one rank there, round robin; where the sides are equal that is recursive doubling.

use super::builder::Builder;
use super::model::*;
use super::tree::Tree;
use super::Islands;
use crate::types::Algorithm;

/// Most ranks that one rank may serve at a node. A third would make its outbound link the whole step's bottleneck.
const MOST_SERVED: usize = 2;

/// Exists where at every node of the tree no rank serves more than two; that is so in every single island of two ranks or
/// more.
pub(super) fn exists(islands: &Islands) -> bool {
    islands.ranks() > 1 && balanced_enough(&Tree::new(islands))
}

fn balanced_enough(tree: &Tree) -> bool {
    match tree {
        Tree::Leaf(_) => true,
        Tree::Sum(left, right) => {
            let (a, b) = (left.leaves().len(), right.leaves().len());
            a.div_ceil(b).max(b.div_ceil(a)) <= MOST_SERVED
                && balanced_enough(left)
                && balanced_enough(right)
        }
    }
}

/// One phase per height of the tree.
pub(super) fn build(islands: &Islands) -> Schedule {
    let tree = Tree::new(islands);
    let mut b = Builder::new(islands.ranks(), tree.height());
    exchange(&mut b, &tree, true);
    b.finish(Algorithm::Pairwise, islands, Cuts::equal(1))
}

/// Exchanges at every node below `tree`, then at its root: there the sum is the result, elsewhere a partial.
fn exchange(b: &mut Builder, tree: &Tree, root: bool) {
    let Tree::Sum(left, right) = tree else { return };
    exchange(b, left, false);
    exchange(b, right, false);
    let phase = tree.height() - 1;
    let dst = if root { Target::Result } else { Target::Partial };
    // Leaf 0 is the left side's sum, leaf 1 the right side's.
    let sum = Tree::over(&[0, 1]);
    for (side, mine, theirs) in [(0, left, right), (1, right, left)] {
        let src = match **theirs {
            Tree::Leaf(_) => Source::Input,
            Tree::Sum(..) => Source::Partial,
        };
        let kept = match **mine {
            Tree::Leaf(_) => Operand::Input,
            Tree::Sum(..) => Operand::Partial,
        };
        let servers = theirs.leaves();
        for (i, &me) in mine.leaves().iter().enumerate() {
            let server = servers[i % servers.len()];
            b.send(phase, server, me, 0, src);
            b.fold(phase, me, 0, dst, &sum, |leaf| match leaf == side {
                true => kept,
                false => Operand::Arrival { from: server, phase },
            });
        }
    }
}
