//! Slots: who writes them, and who takes what is there.

use super::super::view;
use super::shape::is_remote;
use super::Violation;
use crate::launch::*;

/// What is sent to one slot.
#[derive(Clone, Copy)]
struct Sent {
    writer: usize,
    phase: usize,
    piece: u8,
    data: u8,
    wire_f32: u8,
    /// It carries no data: awaiting it takes it.
    nothing: bool,
    taken: bool,
}

/// One writer and one taking read per slot, and both agree on what it holds. Tables have passed `shape`.
pub(super) fn check(tables: &[pl_table]) -> Result<(), Violation> {
    let mut slots = written(tables)?;
    for (rank, table) in tables.iter().enumerate().filter(|(_, t)| t.pull == 1) {
        data_slots(rank, table)?;
    }
    for (rank, table) in tables.iter().enumerate() {
        for (p, phase) in view::phases(table).iter().enumerate() {
            for fold in view::folds(table, phase) {
                for item in view::items(table, fold).iter().filter(|i| is_remote(i)) {
                    let sent = &mut slots[rank][item.slot as usize];
                    read(rank, p, fold, item, sent)?;
                }
            }
        }
    }
    for (reader, slots) in slots.iter().enumerate() {
        for (slot, sent) in slots.iter().enumerate() {
            if let Some(Sent { writer, phase, piece, taken: false, .. }) = *sent {
                return Err(Violation::NeverTaken {
                    reader,
                    slot: slot as u8,
                    writer,
                    phase,
                    piece,
                });
            }
        }
    }
    Ok(())
}

fn written(tables: &[pl_table]) -> Result<Vec<Vec<Option<Sent>>>, Violation> {
    let mut slots = vec![vec![None; tables[0].flag_slots as usize]; tables.len()];
    for (writer, table) in tables.iter().enumerate() {
        for (phase, head) in view::phases(table).iter().enumerate() {
            for s in view::sends(table, head) {
                let reader = s.peer as usize;
                let sent = Sent {
                    writer,
                    phase,
                    piece: s.piece,
                    data: s.data,
                    wire_f32: head.wire_f32,
                    nothing: u32::from(s.src) == PL_SRC_NOTHING,
                    taken: false,
                };
                if let Some(first) = slots[reader][s.slot as usize].replace(sent) {
                    return Err(Violation::TwoWriters {
                        reader,
                        slot: s.slot,
                        first: first.writer,
                        first_phase: first.phase,
                        second: writer,
                        second_phase: phase,
                    });
                }
            }
        }
    }
    Ok(slots)
}

/// With pull, sends that share a data slot follow each other in one phase and carry the same value: a kernel stores it
/// once and then raises all flags.
fn data_slots(rank: usize, table: &pl_table) -> Result<(), Violation> {
    let mut used = [false; 256];
    for (phase, head) in view::phases(table).iter().enumerate() {
        let mut before: Option<&pl_send> = None;
        let moves = |s: &&pl_send| u32::from(s.src) != PL_SRC_NOTHING;
        for s in view::sends(table, head).iter().filter(moves) {
            let same = before.is_some_and(|b| (b.data, b.piece, b.src) == (s.data, s.piece, s.src));
            if !same && std::mem::replace(&mut used[s.data as usize], true) {
                return Err(Violation::DataSlotReused { rank, phase, data: s.data });
            }
            before = Some(s);
        }
    }
    Ok(())
}

fn read(
    rank: usize,
    phase: usize,
    fold: &pl_fold,
    item: &pl_item,
    sent: &mut Option<Sent>,
) -> Result<(), Violation> {
    let (piece, slot) = (fold.piece, item.slot);
    let Some(sent) = sent else {
        return Err(Violation::Unwritten { rank, phase, piece, slot });
    };
    if sent.writer != item.from as usize {
        return Err(Violation::WrongWriter {
            rank,
            phase,
            piece,
            slot,
            expected: item.from,
            writer: sent.writer,
        });
    }
    if sent.piece != piece {
        return Err(Violation::WrongPiece { rank, phase, piece, slot, sent: sent.piece });
    }
    if sent.wire_f32 != item.wire_f32 {
        let (read, written) = (item.wire_f32, sent.wire_f32);
        return Err(Violation::WrongWire { rank, phase, piece, slot, read, written });
    }
    if sent.data != item.data {
        let (read, written) = (item.data, sent.data);
        return Err(Violation::WrongDataSlot { rank, phase, piece, slot, read, written });
    }
    if sent.taken {
        return Err(Violation::TakenTwice { rank, phase, piece, slot });
    }
    let waits = u32::from(fold.dst) == PL_DST_AWAIT;
    if sent.nothing && !waits {
        return Err(Violation::TakesNothing { rank, phase, piece, slot });
    }
    sent.taken = sent.nothing || !waits;
    Ok(())
}
