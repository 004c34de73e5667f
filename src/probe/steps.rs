//! The measurements in order, and who takes part in each: a pure function of what all ranks know, so that all walk through
//! the same ones.

use super::report::{Access, Scope};
use crate::schedule::Islands;

/// What a step measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Pairs of ranks, disjoint, each sending a word to and fro.
    Latency,
    /// One rank that stores to or loads from one other, beside the pairs that a rate of fan-out 1 holds.
    Pair { access: Access },
    /// Ranks that store to or load from several others.
    Rate { access: Access, scope: Scope, fan_out: u8, together: bool },
}

/// One measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub kind: Kind,
    /// By rank, whom it works on: a bit per rank. 0 for those that do not.
    pub to: Vec<u32>,
}

impl Step {
    /// Who works on `rank`, a bit per rank.
    pub fn from(&self, rank: usize) -> u32 {
        let works = |(writer, to): (usize, &u32)| (to >> rank & 1) << writer;
        self.to.iter().enumerate().map(works).sum()
    }

    /// Who alone works on whose memory alone, if it is such a step: access, rank, owner of the memory.
    pub fn pair(&self) -> Option<(Access, usize, usize)> {
        let access = match self.kind {
            Kind::Pair { access } | Kind::Rate { access, fan_out: 1, together: false, .. } => {
                access
            }
            Kind::Latency | Kind::Rate { .. } => return None,
        };
        let rank = self.to.iter().position(|to| *to != 0)?;
        Some((access, rank, self.to[rank].trailing_zeros() as usize))
    }
}

/// Fan-outs that are measured, beside all ranks there are.
const FAN_OUTS: [usize; 2] = [1, 3];

/// Every step. `reach` holds for each rank the ranks whose slabs it has mapped, a bit per rank. With `every_pair` each edge
/// is measured by itself, which takes n (n - 1) steps more.
pub(crate) fn steps(islands: &Islands, reach: &[u32], every_pair: bool) -> Vec<Step> {
    let n = reach.len();
    let mut steps = pairs(n, reach);
    for access in [Access::Store, Access::Load] {
        for scope in [Scope::Within, Scope::Across] {
            let others: Vec<Vec<usize>> =
                (0..n).map(|rank| candidates(islands, rank, scope, reach[rank])).collect();
            let most = others.iter().map(Vec::len).max().unwrap_or(0);
            for fan_out in FAN_OUTS.into_iter().filter(|&k| k < most).chain([most]) {
                // Ranks that have fewer sit out, but for the last fan-out, which is "all there are".
                let mask = |others: &Vec<usize>| match others.len() {
                    0 => 0,
                    len if len < fan_out && fan_out < most => 0,
                    _ => others.iter().take(fan_out).map(|r| 1 << r).sum(),
                };
                let to: Vec<u32> = others.iter().map(mask).collect();
                let kind =
                    |together| Kind::Rate { access, scope, fan_out: fan_out as u8, together };
                let busy = |rank: &usize| to[*rank] != 0;
                for rank in (0..n).filter(busy) {
                    let alone = (0..n).map(|r| if r == rank { to[r] } else { 0 }).collect();
                    steps.push(Step { kind: kind(false), to: alone });
                }
                if (0..n).filter(busy).count() > 1 {
                    steps.push(Step { kind: kind(true), to });
                }
            }
        }
    }
    if every_pair {
        steps.extend(single_pairs(&steps, reach));
    }
    steps
}

/// A step for every edge that no step of `steps` measures alone.
fn single_pairs(steps: &[Step], reach: &[u32]) -> Vec<Step> {
    let n = reach.len();
    let mut pairs = Vec::new();
    for access in [Access::Store, Access::Load] {
        for (rank, reach) in reach.iter().enumerate() {
            for memory in (0..n).filter(|memory| reach >> memory & 1 == 1) {
                let to: Vec<u32> = (0..n).map(|r| u32::from(r == rank) << memory).collect();
                let known = steps.iter().any(|step| step.pair() == Some((access, rank, memory)));
                if !known {
                    pairs.push(Step { kind: Kind::Pair { access }, to });
                }
            }
        }
    }
    pairs
}

/// Every pair that has an edge, in rounds of disjoint ones: a round-robin tournament.
fn pairs(n: usize, reach: &[u32]) -> Vec<Step> {
    let seats = n.next_multiple_of(2);
    let mut rounds = Vec::new();
    for round in 0..seats.saturating_sub(1) {
        let mut to = vec![0; n];
        // One seat stays, the others move on by one.
        let seat = |i: usize| if i == 0 { 0 } else { 1 + (i - 1 + round) % (seats - 1) };
        for i in 0..seats / 2 {
            let (a, b) = (seat(i), seat(seats - 1 - i));
            if a < n && b < n && reach[a] >> b & 1 == 1 && reach[b] >> a & 1 == 1 {
                (to[a], to[b]) = (1 << b, 1 << a);
            }
        }
        if to.iter().any(|&mask| mask != 0) {
            rounds.push(Step { kind: Kind::Latency, to });
        }
    }
    rounds
}

/// The ranks that `rank` would turn to, the first first. Ranks that do so at once spread over all of them: each begins with
/// another.
fn candidates(islands: &Islands, rank: usize, scope: Scope, reach: u32) -> Vec<usize> {
    let groups = islands.groups();
    let home = groups.iter().position(|g| g.contains(&(rank as u8))).unwrap_or(0);
    let seat = groups[home].iter().position(|&r| usize::from(r) == rank).unwrap_or(0);
    let mut ring: Vec<usize> = match scope {
        Scope::Within => groups[home].iter().map(|&r| r.into()).collect(),
        Scope::Across => (1..groups.len())
            .flat_map(|i| &groups[(home + i) % groups.len()])
            .map(|&r| r.into())
            .collect(),
    };
    let len = ring.len().max(1);
    ring.rotate_left(match scope {
        Scope::Within => (seat + 1) % len,
        Scope::Across => seat % len,
    });
    ring.retain(|&r| r != rank && reach >> r & 1 == 1);
    ring
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(n: usize) -> Vec<u32> {
        (0..n).map(|r| ((1 << n) - 1) & !(1 << r)).collect()
    }

    #[test]
    fn every_pair_meets_once_and_nobody_twice_in_a_round() {
        for n in 1..=16 {
            let mut met = std::collections::BTreeSet::new();
            for step in steps(&Islands::single(n).unwrap(), &all(n), false) {
                if step.kind != Kind::Latency {
                    continue;
                }
                for (a, to) in step.to.iter().enumerate().filter(|(_, to)| **to != 0) {
                    let b = to.trailing_zeros() as usize;
                    assert_eq!((to.count_ones(), step.to[b]), (1, 1 << a), "{n}");
                    assert!(a > b || met.insert((a, b)), "{n}: {a} and {b} twice");
                }
            }
            assert_eq!(met.len(), n * (n - 1) / 2, "{n}");
        }
    }

    #[test]
    fn fan_outs_are_one_three_and_all_within_and_across() {
        let islands = Islands::parse(8, "0-3,4-7").unwrap();
        let steps = steps(&islands, &all(8), false);
        let mut together: Vec<_> = Vec::new();
        for step in &steps {
            let Kind::Rate { access: Access::Store, scope, fan_out, together: at_once } = step.kind
            else {
                continue;
            };
            let busy = step.to.iter().filter(|to| **to != 0).count();
            assert_eq!(busy, if at_once { 8 } else { 1 });
            for (rank, to) in step.to.iter().enumerate().filter(|(_, to)| **to != 0) {
                assert_eq!(to.count_ones(), u32::from(fan_out));
                let home = if rank < 4 { 0x0f } else { 0xf0 };
                assert_eq!(to & home == 0, scope == Scope::Across);
                assert_eq!(to >> rank & 1, 0);
            }
            if at_once {
                together.push((scope, fan_out));
                // Nobody is a hot spot.
                assert!((0..8).all(|r| step.from(r).count_ones() == u32::from(fan_out)));
            }
        }
        use Scope::{Across, Within};
        assert_eq!(together, [(Within, 1), (Within, 3), (Across, 1), (Across, 3), (Across, 4)]);
    }

    #[test]
    fn every_edge_is_measured_alone_once_if_asked_for() {
        for (n, islands) in [(2, "0-1"), (5, "0-2,3-4"), (8, "0-3,4-7")] {
            let islands = Islands::parse(n, islands).unwrap();
            let pairs = |every| -> Vec<_> {
                steps(&islands, &all(n), every).iter().filter_map(Step::pair).collect()
            };
            let mut every = pairs(true);
            assert_eq!(every.len(), 2 * n * (n - 1), "{n}");
            every.sort_by_key(|(access, a, b)| (*access == Access::Load, *a, *b));
            every.dedup();
            assert_eq!(every.len(), 2 * n * (n - 1), "{n}");
            let scopes = islands.groups().len().min(2);
            assert_eq!(pairs(false).len(), 2 * n * scopes, "{n}");
        }
    }

    #[test]
    fn only_edges_that_are_mapped_are_measured() {
        let ring: Vec<u32> = (0..6).map(|r| 1 << ((r + 1) % 6) | 1 << ((r + 5) % 6)).collect();
        for step in steps(&Islands::single(6).unwrap(), &ring, true) {
            assert!(step.to.iter().zip(&ring).all(|(to, reach)| to & !reach == 0), "{step:?}");
        }
        assert!(steps(&Islands::single(1).unwrap(), &[0], true).is_empty());
    }
}
