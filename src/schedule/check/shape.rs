//! Every table on its own, and what all have in common.

use super::super::tree::Tree;
use super::super::view::{self, canonical_merges};
use super::Violation;
use crate::launch::*;
use crate::types::MAX_RANKS;

/// Stack entries that a kernel keeps in registers.
const STACK: usize = crate::launch::PL_FOLD_STACK as usize;

/// After this every index of every table may be used.
pub(super) fn check(tables: &[pl_table], tree: &Tree) -> Result<(), Violation> {
    if tables.is_empty() || tables.len() > MAX_RANKS {
        return Err(Violation::RankCount { tables: tables.len() });
    }
    let mut leaves = tree.leaves();
    leaves.sort_unstable();
    if !leaves.iter().map(|&l| l as usize).eq(0..tables.len()) {
        return Err(Violation::TreeLeaves { tree: tree.to_string(), last: tables.len() - 1 });
    }
    for (index, table) in tables.iter().enumerate() {
        if table.rank as usize != index {
            return Err(Violation::RankNumber { index, rank: table.rank });
        }
        head(table, tables.len())?;
        agrees(table, &tables[0])?;
        phases(table)?;
    }
    cuts(&tables[0])
}

/// A range check with words for where and what.
struct Place<'a> {
    rank: usize,
    text: &'a dyn Fn() -> String,
}

impl Place<'_> {
    fn within(
        &self,
        field: &'static str,
        value: usize,
        low: usize,
        high: usize,
    ) -> Result<(), Violation> {
        match (low..=high).contains(&value) {
            true => Ok(()),
            false => Err(Violation::OutOfBounds {
                rank: self.rank,
                place: (self.text)(),
                field,
                value,
                low,
                high,
            }),
        }
    }
}

fn head(t: &pl_table, n: usize) -> Result<(), Violation> {
    let place = Place { rank: t.rank.into(), text: &|| "head of the table".into() };
    place.within("n", t.n.into(), n, n)?;
    place.within("phases", t.phases.into(), 1, PL_MAX_PHASES as usize)?;
    place.within("pieces", t.pieces.into(), 1, PL_MAX_PIECES as usize)?;
    place.within("pull", t.pull.into(), 0, 1)?;
    // A layout divides by these.
    place.within("slots", t.slots.into(), 1, u8::MAX.into())?;
    place.within("flag_slots", t.flag_slots.into(), 1, u8::MAX.into())
}

fn agrees(t: &pl_table, first: &pl_table) -> Result<(), Violation> {
    let same = |field: &dyn Fn() -> String, value: u16, value0: u16| match value == value0 {
        true => Ok(()),
        false => {
            Err(Violation::Disagreement { rank: t.rank.into(), field: field(), value, value0 })
        }
    };
    for (field, a, b) in [
        ("phases", t.phases, first.phases),
        ("pieces", t.pieces, first.pieces),
        ("pull", t.pull, first.pull),
        ("slots", t.slots, first.slots),
        ("flag_slots", t.flag_slots, first.flag_slots),
    ] {
        same(&|| field.into(), a.into(), b.into())?;
    }
    same(&|| "cut_den".into(), t.cut_den, first.cut_den)?;
    for cut in 0..=t.pieces as usize {
        same(&|| format!("cut {cut} at"), t.cut_num[cut], first.cut_num[cut])?;
    }
    for (p, (a, b)) in view::phases(t).iter().zip(view::phases(first)).enumerate() {
        same(&|| format!("wire_f32 of phase {p}"), a.wire_f32.into(), b.wire_f32.into())?;
    }
    Ok(())
}

fn cuts(t: &pl_table) -> Result<(), Violation> {
    let last = t.pieces as usize;
    for index in 0..=last {
        let value = t.cut_num[index];
        let fine = match index {
            0 => value == 0,
            i => value > t.cut_num[i - 1] && (i < last || value == t.cut_den),
        };
        if !fine {
            return Err(Violation::Cuts { index, value, den: t.cut_den });
        }
    }
    Ok(())
}

fn phases(t: &pl_table) -> Result<(), Violation> {
    let rank = t.rank as usize;
    let mut widest = 0;
    for (p, phase) in view::phases(t).iter().enumerate() {
        let place = Place { rank, text: &|| format!("phase {p}") };
        place.within("wire_f32", phase.wire_f32.into(), 0, 1)?;
        let end = phase.send0 as usize + phase.sends as usize;
        place.within("the end of its sends", end, 0, PL_MAX_SENDS as usize)?;
        let end = phase.fold0 as usize + phase.folds as usize;
        place.within("the end of its folds", end, 0, PL_MAX_FOLDS as usize)?;
        for send in view::sends(t, phase) {
            send_fits(t, p, send)?;
        }
        for fold in view::folds(t, phase) {
            fold_fits(t, p, fold)?;
            let remote = view::items(t, fold).iter().filter(|i| is_remote(i)).count();
            widest = widest.max(remote);
        }
    }
    match widest == t.fan_in as usize {
        true => Ok(()),
        false => Err(Violation::FanIn { rank, stated: t.fan_in, actual: widest }),
    }
}

/// Whether an item comes from a peer.
pub(super) fn is_remote(item: &pl_item) -> bool {
    u32::from(item.from) < PL_MAX_RANKS
}

fn send_fits(t: &pl_table, phase: usize, s: &pl_send) -> Result<(), Violation> {
    let rank = t.rank as usize;
    let place = Place {
        rank,
        text: &|| format!("phase {phase}, send of piece {} to rank {}", s.piece, s.peer),
    };
    place.within("peer", s.peer.into(), 0, t.n as usize - 1)?;
    place.within("piece", s.piece.into(), 0, t.pieces as usize - 1)?;
    place.within("src", s.src.into(), 0, PL_SRC_NOTHING as usize)?;
    place.within("slot", s.slot.into(), 0, t.flag_slots as usize - 1)?;
    place.within("data", s.data.into(), 0, t.slots as usize - 1)?;
    if s.peer == t.rank {
        return Err(Violation::SendToSelf { rank, phase, piece: s.piece });
    }
    if u32::from(s.src) == PL_SRC_NOTHING {
        return place.within("data of a message without any", s.data.into(), 0, 0);
    }
    if t.pull == 0 && s.data != s.slot {
        return Err(Violation::PushDataSlot { rank, phase, slot: s.slot, data: s.data });
    }
    Ok(())
}

fn fold_fits(t: &pl_table, phase: usize, fold: &pl_fold) -> Result<(), Violation> {
    let (rank, piece) = (t.rank as usize, fold.piece);
    let place = Place { rank, text: &|| format!("phase {phase}, fold of piece {piece}") };
    place.within("piece", piece.into(), 0, t.pieces as usize - 1)?;
    place.within("dst", fold.dst.into(), 0, PL_DST_AWAIT as usize)?;
    place.within("canonical", fold.canonical.into(), 0, 1)?;
    place.within("items", fold.items.into(), 1, u8::MAX.into())?;
    let end = fold.item0 as usize + fold.items as usize;
    place.within("the end of its items", end, 0, PL_MAX_ITEMS as usize)?;

    let items = view::items(t, fold);
    let (mut depth, mut deepest) = (0usize, 0);
    for (i, item) in items.iter().enumerate() {
        place.within("the source of an item", item.from.into(), 0, PL_FROM_PARTIAL as usize)?;
        if is_remote(item) {
            place.within("the source of an item", item.from.into(), 0, t.n as usize - 1)?;
            place.within("the slot of an item", item.slot.into(), 0, t.flag_slots as usize - 1)?;
            place.within("the data slot of an item", item.data.into(), 0, t.slots as usize - 1)?;
            place.within("wire_f32 of an item", item.wire_f32.into(), 0, 1)?;
        }
        if u32::from(fold.dst) == PL_DST_AWAIT {
            if item.merge > 0 || !is_remote(item) {
                return Err(Violation::AwaitDoesMore { rank, phase, piece, item: i });
            }
            continue;
        }
        depth += 1;
        deepest = deepest.max(depth);
        if item.merge as usize >= depth {
            return Err(Violation::StackUnderflow { rank, phase, piece, item: i });
        }
        depth -= item.merge as usize;
    }
    if depth > 1 {
        return Err(Violation::StackLeftover { rank, phase, piece, left: depth });
    }
    if deepest > STACK {
        return Err(Violation::StackDepth { rank, phase, piece, depth: deepest });
    }
    if fold.canonical == 1 && !items.iter().map(|i| i.merge).eq(canonical_merges(items.len())) {
        return Err(Violation::NotCanonical { rank, phase, piece });
    }
    Ok(())
}
