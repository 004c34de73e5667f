//! Every partition that the schedule tests run over.
#![allow(clippy::unwrap_used)]

use peerlane::schedule::Islands;

/// All ways to write n as an ordered sum of one to four island sizes.
pub fn compositions(n: usize) -> Vec<Vec<usize>> {
    fn extend(left: usize, parts: usize, head: &mut Vec<usize>, all: &mut Vec<Vec<usize>>) {
        if left == 0 {
            all.push(head.clone());
        } else if parts > 0 {
            for first in 1..=left {
                head.push(first);
                extend(left - first, parts - 1, head, all);
                head.pop();
            }
        }
    }
    let mut all = Vec::new();
    extend(n, 4, &mut Vec::new(), &mut all);
    all
}

/// Islands of these sizes over the ranks in the order of `ranks`.
pub fn islands(sizes: &[usize], ranks: &[usize]) -> Islands {
    let mut rest = ranks;
    let groups = sizes
        .iter()
        .map(|&m| {
            let (group, tail) = rest.split_at(m);
            rest = tail;
            group.to_vec()
        })
        .collect();
    Islands::new(ranks.len(), groups).unwrap()
}

/// A permutation of `0..n`, the same for the same seed.
pub fn shuffled(n: usize, mut seed: u64) -> Vec<usize> {
    let mut ranks: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ranks.swap(i, (seed >> 33) as usize % (i + 1));
    }
    ranks
}
