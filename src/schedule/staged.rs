//! `staged`: the steps of `hierarchical` as permutation passes, so that a rank has one outbound and one inbound stream at
//! a time. For messages whose bytes matter more than the number of passes, and for fabrics that collapse under fan-out.

use super::builder::Builder;
use super::colouring::colour;
use super::model::*;
use super::pieces::Pieces;
use super::tree::Tree;
use super::Islands;
use crate::types::Algorithm;

/// Exists for two islands or more, equal or not. Small islands idle in the passes that only larger ones need.
pub(super) fn build(islands: &Islands) -> Schedule {
    let groups = islands.groups();
    let pieces = Pieces::new(islands);
    let local = groups.iter().map(Vec::len).max().unwrap_or(1) - 1;
    let edges = swap_edges(islands, &pieces);
    let (pass_of, swaps) = colour(&edges);
    let swap_phase = |from: u8, to: u8| {
        local + edges.iter().position(|&e| e == (from, to)).map_or(0, |e| pass_of[e])
    };
    let gather = local + swaps;
    let join = Tree::over(&(0..groups.len() as u8).collect::<Vec<_>>());
    let mut b = Builder::new(islands.ranks(), gather + local);

    for (island, group) in groups.iter().enumerate() {
        let m = group.len();
        let inside = Tree::over(group);
        let position = |rank: u8| group.iter().position(|&g| g == rank).unwrap_or(0);
        // Pass q of 1..m: member i sends to member (i + q) mod m.
        let pass = |from: u8, to: u8| (position(to) + m - position(from)) % m - 1;
        for piece in pieces.all() {
            let owner = pieces.owner(island, piece);
            for member in group.iter().copied().filter(|&g| g != owner) {
                let (scatter, gather) = (pass(member, owner), gather + pass(owner, member));
                b.send(scatter, member, owner, piece, Source::Input);
                b.send(gather, owner, member, piece, Source::Result);
                b.take(gather, member, piece, Target::Result, owner, gather);
            }
            let (own, src) = match m {
                1 => (Operand::Input, Source::Input),
                _ => (Operand::Partial, Source::Partial),
            };
            if m > 1 {
                paced_fold(&mut b, owner, piece, Target::Partial, 0, &inside, |leaf| {
                    match leaf == owner {
                        true => Operand::Input,
                        false => Operand::Arrival { from: leaf, phase: pass(leaf, owner) },
                    }
                });
            }
            // In place the result overwrites the input, which a lone rank still sends: its fold comes no earlier than that.
            let mut sent = 0;
            for other in (0..groups.len()).filter(|&i| i != island) {
                let to = pieces.owner(other, piece);
                sent = sent.max(swap_phase(owner, to));
                b.send(swap_phase(owner, to), owner, to, piece, src);
            }
            let not_before = if m == 1 { sent } else { 0 };
            paced_fold(&mut b, owner, piece, Target::Result, not_before, &join, |leaf| {
                if leaf as usize == island {
                    return own;
                }
                let from = pieces.owner(leaf as usize, piece);
                Operand::Arrival { from, phase: swap_phase(from, owner) }
            });
        }
    }
    b.finish(Algorithm::Staged, islands, pieces.cuts)
}

/// Who sends partial sums to whom between islands.
fn swap_edges(islands: &Islands, pieces: &Pieces) -> Vec<(u8, u8)> {
    let count = islands.groups().len();
    let mut edges = Vec::new();
    for piece in pieces.all() {
        for (from, to) in
            (0..count).flat_map(|a| (0..count).map(move |b| (a, b))).filter(|(a, b)| a != b)
        {
            edges.push((pieces.owner(from, piece), pieces.owner(to, piece)));
        }
    }
    edges.sort_unstable();
    edges.dedup();
    edges
}

/// Folds where the last operand arrives, but not before phase `not_before`, and in every earlier pass waits for what that pass brought: a rank that ran ahead
/// would open a second stream into a peer that still receives.
fn paced_fold(
    b: &mut Builder,
    rank: u8,
    piece: u8,
    dst: Target,
    not_before: usize,
    tree: &Tree,
    operand: impl Fn(u8) -> Operand,
) {
    let arrivals: Vec<(usize, u8)> = tree
        .leaves()
        .into_iter()
        .filter_map(|leaf| match operand(leaf) {
            Operand::Arrival { from, phase } => Some((phase, from)),
            _ => None,
        })
        .collect();
    let last = arrivals.iter().map(|a| a.0).fold(not_before, usize::max);
    for &(phase, from) in arrivals.iter().filter(|a| a.0 < last) {
        b.take(phase, rank, piece, Target::Await, from, phase);
    }
    b.fold(last, rank, piece, dst, tree, operand);
}
