//! Broadcasts: everybody gets what the root has.
//!
//! Readers of a broadcast tell its root nothing, so nothing would keep a root from running two steps ahead and writing into
//! slots that are still being read. So every rank tells every other, by a flag without data, that it has begun the step; whoever
//! finishes one then knows that all have finished the one before, as after an all-reduce. The flags leave first of all and are
//! waited for last, so they cost no hop.

use super::builder::Builder;
use super::model::*;
use super::Islands;
use crate::types::Algorithm;

/// The root sends all of it to everybody: one hop, and n-1 messages out of one rank.
pub(super) fn flat(islands: &Islands, root: u8) -> Schedule {
    let n = islands.ranks() as u8;
    let mut b = Builder::new(n as usize, 1);
    for me in 0..n {
        let src = if me == root { Source::Input } else { Source::Nothing };
        for peer in (0..n).filter(|&p| p != me) {
            b.send(0, me, peer, 0, src);
        }
        if me != root {
            b.take(0, me, 0, Target::Result, root, 0);
        }
        b.hear(0, me, 0, (0..n).filter(|&p| p != me && p != root));
    }
    let schedule = b.finish(Algorithm::OneShot, islands, Cuts::equal(1));
    Schedule { goal: Goal::Broadcast { root }, ..schedule }
}

/// The root sends every rank a part, and all gather: two hops, and two messages out of any rank. Pieces are parts, so none is empty.
pub(super) fn in_parts(islands: &Islands, root: u8) -> Schedule {
    let n = islands.ranks() as u8;
    let mut b = Builder::new(n as usize, 2);
    for me in 0..n {
        for peer in (0..n).filter(|&p| p != me) {
            if me == root {
                b.send(0, me, peer, peer, Source::Input);
                b.send(1, me, peer, me, Source::Input);
            } else {
                // The root has the part; that this rank is there it must be told.
                let src = if peer == root { Source::Nothing } else { Source::Result };
                b.send(1, me, peer, me, src);
            }
        }
        if me == root {
            for peer in (0..n).filter(|&p| p != me) {
                b.hear(1, me, peer, std::iter::once(peer));
            }
            continue;
        }
        b.take(0, me, me, Target::Result, root, 0);
        for peer in (0..n).filter(|&p| p != me) {
            b.take(1, me, peer, Target::Result, peer, 1);
        }
    }
    let schedule = b.finish(Algorithm::TwoShot, islands, Cuts::equal(n.into()));
    Schedule { goal: Goal::Broadcast { root }, ..schedule }
}
