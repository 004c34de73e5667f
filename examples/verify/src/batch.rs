//! The rows of a pass: which token, at which position, and what it may see.

use anyhow::{bail, ensure, Result};

/// Most rows of one sequence in one pass: what a row sees of its own block is a word of this many bits.
pub const MOST_DRAFT: usize = 64;
/// Most rows of a pass over all sequences.
pub const MOST_ROWS: usize = 1024;
/// The parent of a tree's root.
pub const ROOT: i32 = -1;

/// How the rows of a block follow each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Draft {
    /// Each row follows the one before it.
    Chain(usize),
    /// Row `i` follows row `parents[i]`, or the context where that is [`ROOT`].
    Tree(Vec<i32>),
}

impl Draft {
    /// A tree; parents stand before their children.
    pub fn tree(parents: Vec<i32>) -> Result<Self> {
        ensure!(!parents.is_empty(), "a tree has at least one node");
        check_width(parents.len())?;
        for (node, &parent) in parents.iter().enumerate() {
            let before = usize::try_from(parent).is_ok_and(|parent| parent < node);
            ensure!(
                parent == ROOT || before,
                "node {node} of the tree has the parent {parent}; it takes -1 or a node before it"
            );
        }
        Ok(Draft::Tree(parents))
    }

    /// A chain.
    pub fn chain(rows: usize) -> Result<Self> {
        ensure!(rows > 0, "a chain has at least one row");
        check_width(rows)?;
        Ok(Draft::Chain(rows))
    }

    /// Rows of a block.
    pub fn rows(&self) -> usize {
        match self {
            Draft::Chain(rows) => *rows,
            Draft::Tree(parents) => parents.len(),
        }
    }

    /// The row before `row`, if that is in the block.
    pub fn parent(&self, row: usize) -> Option<usize> {
        match self {
            Draft::Chain(_) => row.checked_sub(1),
            Draft::Tree(parents) => usize::try_from(parents[row]).ok(),
        }
    }

    /// The most tokens that one pass can commit: the longest path, whose last row adds a token of its own.
    pub fn depth(&self) -> usize {
        (0..self.rows())
            .map(|row| std::iter::successors(Some(row), |&row| self.parent(row)).count())
            .max()
            .unwrap_or(0)
    }
}

fn check_width(rows: usize) -> Result<()> {
    ensure!(
        rows <= MOST_DRAFT,
        "{rows} rows a sequence; a pass takes at most {MOST_DRAFT} (longer contexts are filled in several passes)"
    );
    Ok(())
}

/// The consecutive rows of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its first row in the batch.
    pub row: usize,
    pub rows: usize,
    /// Where the sequence begins in the cache.
    pub cache: usize,
    /// Rows of the cache before this block; row `i` of the block writes row `context + i`.
    pub context: usize,
}

/// All rows of a pass, sequence by sequence.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    pub tokens: Vec<u32>,
    pub positions: Vec<u32>,
    /// Bit `i`: the row sees row `i` of its block. Every row sees itself and the whole context.
    pub visible: Vec<u64>,
    pub blocks: Vec<Block>,
}

impl Batch {
    /// Rows over all sequences.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Adds a block for the sequence that begins at `cache` in the cache and has `context` rows there.
    pub fn push(&mut self, cache: usize, context: usize, draft: &Draft, tokens: &[u32]) {
        let row = self.rows();
        for at in 0..draft.rows() {
            let (seen, depth) = match draft.parent(at) {
                Some(parent) => {
                    (self.visible[row + parent], self.positions[row + parent] as usize + 1)
                }
                None => (0, context),
            };
            self.visible.push(seen | 1 << at);
            self.positions.push(depth as u32);
        }
        self.tokens.extend_from_slice(&tokens[..draft.rows()]);
        self.blocks.push(Block { row, rows: draft.rows(), cache, context });
    }

    /// How many tokens a greedy verifier commits for each sequence, when the rows chose `chosen`: from row 0 along the rows whose
    /// token is what the row before them chose, and one more token that the last of them chose.
    pub fn accepted(&self, chosen: &[u32]) -> Vec<u32> {
        let of = |block: &Block| {
            let rows = block.row..block.row + block.rows;
            let (tokens, visible) = (&self.tokens[rows.clone()], &self.visible[rows.clone()]);
            let chosen = &chosen[rows];
            // The row that a row follows is the last one before it that it sees.
            let parent = |row: usize| (visible[row] & ((1 << row) - 1)).checked_ilog2();
            let next = |at: usize| {
                (at + 1..block.rows)
                    .find(|&row| parent(row) == Some(at as u32) && tokens[row] == chosen[at])
            };
            std::iter::successors(Some(0), |&at| next(at)).count() as u32
        };
        self.blocks.iter().map(of).collect()
    }

    /// Refuses a batch that does not fit a pass.
    pub fn validate(&self, vocabulary: usize) -> Result<()> {
        ensure!(
            self.rows() <= MOST_ROWS,
            "{} rows over all sequences; a pass takes at most {MOST_ROWS}",
            self.rows()
        );
        if let Some(token) = self.tokens.iter().find(|&&token| token as usize >= vocabulary) {
            bail!("token {token} is beyond the vocabulary of {vocabulary}");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_sees_its_ancestors_and_stands_behind_its_parent() {
        let draft = Draft::tree(vec![-1, 0, 0, 1, 1, 2]).unwrap();
        let mut batch = Batch::default();
        batch.push(0, 3, &Draft::chain(2).unwrap(), &[7, 8]);
        batch.push(40, 13, &draft, &[1, 2, 3, 4, 5, 6]);
        assert_eq!(batch.positions, [3, 4, 13, 14, 14, 15, 15, 15]);
        assert_eq!(batch.visible[..2], [0b1, 0b11]);
        assert_eq!(batch.visible[2..], [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101]);
        assert_eq!(batch.blocks[1], Block { row: 2, rows: 6, cache: 40, context: 13 });
        assert_eq!((draft.depth(), Draft::chain(5).unwrap().depth()), (3, 5));
    }

    #[test]
    fn a_verifier_commits_the_path_it_would_have_taken_and_one_more() {
        let accepted = |draft: &Draft, tokens: &[u32], chosen: &[u32]| {
            let mut batch = Batch::default();
            // Not the first sequence, and behind a context.
            batch.push(0, 3, &Draft::chain(1).unwrap(), &[1]);
            batch.push(20, 5, draft, tokens);
            batch.accepted(&[&[9], chosen].concat())
        };
        let chain = Draft::chain(4).unwrap();
        assert_eq!(accepted(&chain, &[5, 6, 7, 8], &[6, 7, 8, 9]), [1, 4]);
        assert_eq!(accepted(&chain, &[5, 6, 7, 8], &[6, 9, 8, 9]), [1, 2]);
        assert_eq!(accepted(&chain, &[5, 6, 7, 8], &[0, 7, 8, 9]), [1, 1]);
        let tree = Draft::tree(vec![-1, 0, 0, 2, 2]).unwrap();
        // Row 0 chose 3 (row 2), row 2 chose 5 (row 4), which is a leaf.
        assert_eq!(accepted(&tree, &[1, 2, 3, 4, 5], &[3, 0, 5, 0, 9]), [1, 3]);
    }

    #[test]
    fn what_is_no_tree_or_too_wide_is_refused() {
        for (parents, what) in [
            (vec![], "at least one"),
            (vec![0], "node 0"),
            (vec![-1, 2, 0], "node 1"),
            (vec![-2], "parent -2"),
            (vec![-1; 65], "at most 64"),
        ] {
            let error = Draft::tree(parents).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
        assert!(Draft::chain(64).is_ok() && Draft::chain(65).is_err() && Draft::chain(0).is_err());
    }
}
