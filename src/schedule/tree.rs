//! The reduction tree of a communicator: in which order its ranks are summed, whatever the algorithm.

use super::Islands;
use std::fmt;

/// A binary tree over ranks. Every schedule of a communicator sums along the same one, in the accumulator type, and
/// rounds once at the root; so the result has the same bits whatever the algorithm, size or protocol.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Tree {
    /// One rank's input.
    Leaf(u8),
    /// The sum of two subtrees.
    Sum(Box<Tree>, Box<Tree>),
}

/// One step of a tree in postfix form: push the leaf, then combine the top two of the stack `merge` times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The leaf to push.
    pub leaf: u8,
    /// Sums to do after pushing it.
    pub merge: u8,
}

impl Tree {
    /// The tree that belongs to a partition: islands in order of their lowest rank, ranks in order inside; a group of m
    /// splits into the first ceil(m/2) and the rest, and the islands are joined the same way.
    pub fn new(islands: &Islands) -> Self {
        let groups = islands.groups();
        Self::balanced(0, groups.len(), &|island| Self::over(&groups[island]))
    }

    /// The balanced tree over these leaves, in this order; there is at least one.
    pub fn over(leaves: &[u8]) -> Self {
        Self::balanced(0, leaves.len(), &|i| Tree::Leaf(leaves[i]))
    }

    fn balanced(first: usize, count: usize, part: &dyn Fn(usize) -> Tree) -> Tree {
        if count <= 1 {
            return part(first);
        }
        let left = count.div_ceil(2);
        Tree::Sum(
            Box::new(Self::balanced(first, left, part)),
            Box::new(Self::balanced(first + left, count - left, part)),
        )
    }

    /// The leaves from left to right.
    pub fn leaves(&self) -> Vec<u8> {
        match self {
            Tree::Leaf(rank) => vec![*rank],
            Tree::Sum(left, right) => {
                let mut leaves = left.leaves();
                leaves.extend(right.leaves());
                leaves
            }
        }
    }

    /// Number of sums on the longest way from a leaf to the root.
    pub fn height(&self) -> usize {
        match self {
            Tree::Leaf(_) => 0,
            Tree::Sum(left, right) => 1 + left.height().max(right.height()),
        }
    }

    /// The postfix form. Of two operands the one that needs more stack is pushed first: that bounds the stack of any
    /// tree over 16 ranks to 5 entries (registers of a kernel), where left first would need 6 for islands of 1, 1, 1
    /// and 13. The bits do not depend on it: every operation is commutative (a NaN result has one encoding), only the
    /// association counts.
    pub fn postfix(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        self.push_postfix(&mut steps);
        steps
    }

    fn push_postfix(&self, steps: &mut Vec<Step>) {
        match self {
            Tree::Leaf(leaf) => steps.push(Step { leaf: *leaf, merge: 0 }),
            Tree::Sum(left, right) => {
                let (first, second) = match right.stack() > left.stack() {
                    true => (right, left),
                    false => (left, right),
                };
                first.push_postfix(steps);
                second.push_postfix(steps);
                if let Some(last) = steps.last_mut() {
                    last.merge += 1;
                }
            }
        }
    }

    /// Stack entries that the postfix form needs.
    pub fn stack(&self) -> usize {
        match self {
            Tree::Leaf(_) => 1,
            Tree::Sum(left, right) => match (left.stack(), right.stack()) {
                (a, b) if a == b => a + 1,
                (a, b) => a.max(b),
            },
        }
    }

    /// The 64-bit FNV-1a hash of the tree's text: the same on every machine and in every version, so that ranks and
    /// logs can compare trees by it.
    pub fn hash64(&self) -> u64 {
        self.to_string()
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
    }
}

impl fmt::Display for Tree {
    /// `((0+1)+(2+3))`; one rank is just its number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tree::Leaf(rank) => write!(f, "{rank}"),
            Tree::Sum(left, right) => write!(f, "({left}+{right})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_follows_the_islands() {
        for (n, islands, text) in [
            (1, "0", "0"),
            (3, "0-2", "((0+1)+2)"),
            (4, "0-3", "((0+1)+(2+3))"),
            (4, "0+2,1+3", "((0+2)+(1+3))"),
            (7, "0-4,5-6", "((((0+1)+2)+(3+4))+(5+6))"),
            (6, "0,1+4,2-3,5", "((0+(1+4))+((2+3)+5))"),
        ] {
            let shown = Tree::new(&Islands::parse(n, islands).unwrap()).to_string();
            assert_eq!(shown, text, "{islands}");
        }
    }

    #[test]
    fn the_hash_is_fnv_1a_of_the_text() {
        // The published value of "a" ties this second spelling to FNV-1a.
        let expect = |text: &str| {
            let mut h: u64 = 0xcbf29ce484222325;
            for b in text.bytes() {
                h = (h ^ b as u64).wrapping_mul(1099511628211);
            }
            h
        };
        assert_eq!(expect("a"), 0xaf63dc4c8601ec8c);
        let tree = Tree::new(&Islands::parse(4, "0-1,2-3").unwrap());
        assert_eq!(tree.hash64(), expect("((0+1)+(2+3))"));
    }

    #[test]
    fn the_stack_never_exceeds_five() {
        let deep = Tree::new(&Islands::parse(16, "0,1,2,3-15").unwrap());
        assert!(deep.stack() <= 5);
        let mut depth = 0usize;
        let mut most = 0;
        for step in deep.postfix() {
            depth += 1;
            most = most.max(depth);
            depth -= step.merge as usize;
        }
        assert_eq!((depth, most), (1, deep.stack()));
    }
}
