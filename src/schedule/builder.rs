//! Collects the sends and folds of all ranks and settles what every schedule has in common.

use super::model::*;
use super::tree::Tree;
use super::Islands;
use crate::types::Algorithm;

/// A schedule in the making.
pub(super) struct Builder {
    ranks: Vec<RankSchedule>,
}

impl Builder {
    /// `phases` empty phases on each of `n` ranks.
    pub fn new(n: usize, phases: usize) -> Self {
        Builder { ranks: vec![RankSchedule { phases: vec![Phase::default(); phases] }; n] }
    }

    /// In `phase`, `from` sends its `src` of `piece` to `to`.
    pub fn send(&mut self, phase: usize, from: u8, to: u8, piece: u8, src: Source) {
        self.ranks[from as usize].phases[phase].sends.push(Send { peer: to, piece, src });
    }

    /// In `phase`, `rank` folds along `tree`, whose leaves `operand` explains.
    pub fn fold(
        &mut self,
        phase: usize,
        rank: u8,
        piece: u8,
        dst: Target,
        tree: &Tree,
        operand: impl Fn(u8) -> Operand,
    ) {
        let items = tree
            .postfix()
            .into_iter()
            .map(|step| Item { operand: operand(step.leaf), merge: step.merge })
            .collect();
        self.ranks[rank as usize].phases[phase].folds.push(Fold { piece, dst, items });
    }

    /// In `phase`, `rank` takes `piece` as `from` sent it in `sent`: as its result, or only waits for it.
    pub fn take(&mut self, phase: usize, rank: u8, piece: u8, dst: Target, from: u8, sent: usize) {
        let items = vec![Item { operand: Operand::Arrival { from, phase: sent }, merge: 0 }];
        self.ranks[rank as usize].phases[phase].folds.push(Fold { piece, dst, items });
    }

    /// In `phase`, `rank` waits until all of `from` have told it, in the same phase, that they have begun the step.
    pub fn hear(&mut self, phase: usize, rank: u8, piece: u8, from: impl Iterator<Item = u8>) {
        let item = |from| Item { operand: Operand::Arrival { from, phase }, merge: 0 };
        let items: Vec<Item> = from.map(item).collect();
        if !items.is_empty() {
            let fold = Fold { piece, dst: Target::Await, items };
            self.ranks[rank as usize].phases[phase].folds.push(fold);
        }
    }

    /// Drops phases in which nobody does anything, settles each phase's wire type (partial sums need the accumulator's)
    /// and orders the sends.
    pub fn finish(mut self, algorithm: Algorithm, islands: &Islands, cuts: Cuts) -> Schedule {
        let n = self.ranks.len();
        let phases = self.ranks.first().map_or(0, |r| r.phases.len());
        let busy: Vec<bool> = (0..phases)
            .map(|p| {
                self.ranks
                    .iter()
                    .any(|r| !r.phases[p].sends.is_empty() || !r.phases[p].folds.is_empty())
            })
            .collect();
        let renumbered = |phase: usize| busy[..phase].iter().filter(|b| **b).count();
        let wide: Vec<bool> = (0..phases)
            .map(|p| {
                self.ranks
                    .iter()
                    .any(|r| r.phases[p].sends.iter().any(|s| s.src == Source::Partial))
            })
            .collect();
        for (me, rank) in self.ranks.iter_mut().enumerate() {
            for (p, phase) in rank.phases.iter_mut().enumerate() {
                phase.wire = if wide[p] { Wire::Accumulator } else { Wire::Caller };
                order_sends(me, n, &mut phase.sends);
                for item in phase.folds.iter_mut().flat_map(|f| &mut f.items) {
                    if let Operand::Arrival { phase, .. } = &mut item.operand {
                        *phase = renumbered(*phase);
                    }
                }
            }
            let mut keep = busy.iter();
            rank.phases.retain(|_| keep.next() == Some(&true));
        }
        let goal = Goal::AllReduce;
        Schedule { goal, algorithm, islands: islands.clone(), cuts, ranks: self.ranks }
    }
}

/// Every rank starts at the rank after its own, so that not all write to the same peer first; sends of one value stay
/// together, so that a kernel loads it once.
fn order_sends(me: usize, n: usize, sends: &mut [Send]) {
    let distance = |peer: u8| (peer as usize + n - me) % n;
    let nearest: Vec<((u8, Source), usize)> = sends.iter().fold(Vec::new(), |mut groups, s| {
        let key = (s.piece, s.src);
        match groups.iter_mut().find(|(k, _)| *k == key) {
            Some((_, d)) => *d = distance(s.peer).min(*d),
            None => groups.push((key, distance(s.peer))),
        }
        groups
    });
    let group =
        |s: &Send| nearest.iter().find(|(k, _)| *k == (s.piece, s.src)).map_or(n, |(_, d)| *d);
    sends.sort_by_key(|s| (group(s), s.piece, s.src, distance(s.peer)));
}
