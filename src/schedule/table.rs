//! From the schedule to one C table per rank: slots are numbered here, and here alone.

use super::model::*;
use super::view::canonical_merges;
use crate::error::{Error, Result};
use crate::launch::*;
use crate::types::Direction;
use std::collections::BTreeMap;

/// A message: reader, phase in which it is sent, piece, writer.
type Message = (u8, usize, u8, u8);
/// A value as a writer publishes it: writer, phase, piece, source.
type Publication = (u8, usize, u8, Source);

/// Slots of all messages. Every reader numbers its arrivals from 0 and each has its own for the whole step, so that a
/// slot is written once per step. Messages without data come last, so that they take flags and no room for data. With pull the data slots are the writer's: readers of the same value in the same phase
/// share one. A value that is sent again in a later phase gets a new one: storing it again, even the same bytes, would
/// race with the earlier reader.
#[derive(Default)]
struct Slots {
    arrival: BTreeMap<Message, u8>,
    publication: BTreeMap<Publication, u8>,
    most_arrivals: u8,
    /// The same of those that carry data.
    most_data_arrivals: u8,
    most_publications: u8,
}

impl Slots {
    fn new(schedule: &Schedule) -> Result<Self> {
        let mut messages: Vec<(bool, Message)> = Vec::new();
        let mut slots = Slots::default();
        for (me, rank) in schedule.ranks.iter().enumerate() {
            let mut published = 0;
            for (p, phase) in rank.phases.iter().enumerate() {
                for send in &phase.sends {
                    let nothing = send.src == Source::Nothing;
                    messages.push((nothing, (send.peer, p, send.piece, me as u8)));
                    if nothing {
                        slots.publication.insert((me as u8, p, send.piece, send.src), 0);
                        continue;
                    }
                    let key = (me as u8, p, send.piece, send.src);
                    if let std::collections::btree_map::Entry::Vacant(entry) =
                        slots.publication.entry(key)
                    {
                        entry.insert(narrow(published, "data slots")?);
                        published += 1;
                    }
                }
            }
            slots.most_publications = slots.most_publications.max(narrow(published, "data slots")?);
        }
        messages.sort_unstable();
        let mut arrived = vec![0usize; schedule.ranks.len()];
        for (nothing, message) in messages {
            let next = &mut arrived[message.0 as usize];
            if slots.arrival.insert(message, narrow(*next, "arrivals")?).is_some() {
                let (reader, phase, piece, writer) = message;
                return Err(Error::Internal(format!(
                    "schedule: rank {writer} sends piece {piece} to rank {reader} twice in phase {phase}"
                )));
            }
            *next += 1;
            slots.most_arrivals = slots.most_arrivals.max(narrow(*next, "arrivals")?);
            if !nothing {
                slots.most_data_arrivals = slots.most_arrivals;
            }
        }
        Ok(slots)
    }
}

impl Schedule {
    /// Compiles the schedule to one table per rank. The tables are not proven yet: see [`check`](super::check()).
    ///
    /// # Errors
    /// [`Error::Internal`] if the schedule does not fit the table's capacities (`PL_MAX_*` in `cuda/launch.h`), or takes a
    /// message that nobody sends.
    pub fn tables(&self, direction: Direction) -> Result<Vec<pl_table>> {
        let slots = Slots::new(self)?;
        (0..self.ranks.len()).map(|rank| self.table(rank as u8, &slots, direction)).collect()
    }

    fn table(&self, me: u8, slots: &Slots, direction: Direction) -> Result<pl_table> {
        let pull = direction == Direction::Pull;
        let rank = &self.ranks[me as usize];
        let mut table = empty_table();
        table.n = self.ranks.len() as u8;
        table.rank = me;
        table.pull = pull.into();
        table.pieces = self.cuts.pieces();
        // At least one of each, so that a layout may divide by them (a single rank has no arrivals).
        table.flag_slots = slots.most_arrivals.max(1);
        table.slots = if pull { slots.most_publications } else { slots.most_data_arrivals }.max(1);
        fill(&mut table.cut_num, self.cuts.num.iter().copied(), 0, "cuts")?;
        table.cut_den = self.cuts.den;
        let (mut sends, mut folds, mut items) = (0, 0, 0);
        for (p, phase) in rank.phases.iter().enumerate() {
            let head = pl_phase {
                send0: narrow(sends, "sends")?,
                sends: narrow(phase.sends.len(), "sends")?,
                fold0: narrow(folds, "folds")?,
                folds: narrow(phase.folds.len(), "folds")?,
                wire_f32: (phase.wire == Wire::Accumulator).into(),
            };
            table.phases = fill(&mut table.phase, [head], p, "phases")? as u8;
            let compiled = phase.sends.iter().map(|s| {
                let slot = slots.arrival.get(&(s.peer, p, s.piece, me)).copied().unwrap_or(u8::MAX);
                let data =
                    slots.publication.get(&(me, p, s.piece, s.src)).copied().unwrap_or(u8::MAX);
                let src = match s.src {
                    Source::Input => PL_SRC_INPUT,
                    Source::Partial => PL_SRC_PARTIAL,
                    Source::Result => PL_SRC_RESULT,
                    Source::Nothing => PL_SRC_NOTHING,
                };
                pl_send {
                    peer: s.peer,
                    piece: s.piece,
                    src: src as u8,
                    slot,
                    data: if pull || s.src == Source::Nothing { data } else { slot },
                }
            });
            sends = fill(&mut table.send, compiled, sends, "sends")?;
            for fold in &phase.folds {
                let compiled = self.fold(me, fold, slots, pull)?;
                let remote = compiled.iter().filter(|i| u32::from(i.from) < PL_MAX_RANKS).count();
                table.fan_in = table.fan_in.max(narrow(remote, "operands")?);
                let merges: Vec<u8> = compiled.iter().map(|i| i.merge).collect();
                let head = pl_fold {
                    item0: items as u16,
                    items: narrow(compiled.len(), "items")?,
                    piece: fold.piece,
                    dst: match fold.dst {
                        Target::Result => PL_DST_RESULT,
                        Target::Partial => PL_DST_PARTIAL,
                        Target::Await => PL_DST_AWAIT,
                    } as u8,
                    canonical: (merges == canonical_merges(merges.len())).into(),
                };
                folds = fill(&mut table.fold, [head], folds, "folds")?;
                items = fill(&mut table.item, compiled, items, "items")?;
            }
        }
        Ok(table)
    }

    fn fold(&self, me: u8, fold: &Fold, slots: &Slots, pull: bool) -> Result<Vec<pl_item>> {
        let local = |from: pl_from, merge| pl_item {
            slot: 0,
            data: 0,
            from: from as u8,
            merge,
            wire_f32: 0,
        };
        let missing = |from: u8, phase: usize| {
            Error::Internal(format!(
                "schedule: rank {me} takes piece {} from rank {from}, which sends it nothing in phase {phase}",
                fold.piece
            ))
        };
        let compile = |item: &Item| match item.operand {
            Operand::Input => Ok(local(PL_FROM_INPUT, item.merge)),
            Operand::Partial => Ok(local(PL_FROM_PARTIAL, item.merge)),
            Operand::Arrival { from, phase } => {
                let sent = self.ranks.get(from as usize).and_then(|r| r.phases.get(phase));
                let sent = sent.ok_or_else(|| missing(from, phase))?;
                let send = sent.sends.iter().find(|s| (s.peer, s.piece) == (me, fold.piece));
                let src = send.ok_or_else(|| missing(from, phase))?.src;
                let slot = slots.arrival.get(&(me, phase, fold.piece, from));
                let data = slots.publication.get(&(from, phase, fold.piece, src));
                let (Some(&slot), Some(&data)) = (slot, data) else {
                    return Err(missing(from, phase));
                };
                let wire_f32 = (sent.wire == Wire::Accumulator).into();
                Ok(pl_item {
                    slot,
                    data: if pull || src == Source::Nothing { data } else { slot },
                    from,
                    merge: item.merge,
                    wire_f32,
                })
            }
        };
        fold.items.iter().map(compile).collect()
    }
}

/// Copies `values` into `array` from index `at` on; returns the index after the last.
fn fill<T>(
    array: &mut [T],
    values: impl IntoIterator<Item = T>,
    at: usize,
    what: &str,
) -> Result<usize> {
    let capacity = array.len();
    let mut next = at;
    for value in values {
        *array.get_mut(next).ok_or_else(|| too_many(what, capacity))? = value;
        next += 1;
    }
    Ok(next)
}

fn narrow(count: usize, what: &str) -> Result<u8> {
    u8::try_from(count).map_err(|_| too_many(what, u8::MAX.into()))
}

fn too_many(what: &str, capacity: usize) -> Error {
    Error::Internal(format!(
        "schedule: more than {capacity} {what}, the table's capacity (cuda/launch.h)"
    ))
}

/// A table of zeros.
fn empty_table() -> pl_table {
    pl_table {
        n: 0,
        rank: 0,
        phases: 0,
        pieces: 0,
        fan_in: 0,
        pull: 0,
        slots: 0,
        flag_slots: 0,
        cut_num: [0; PL_MAX_PIECES as usize + 1],
        cut_den: 0,
        phase: [pl_phase { send0: 0, sends: 0, fold0: 0, folds: 0, wire_f32: 0 };
            PL_MAX_PHASES as usize],
        send: [pl_send { peer: 0, piece: 0, src: 0, slot: 0, data: 0 }; PL_MAX_SENDS as usize],
        item: [pl_item { slot: 0, data: 0, from: 0, merge: 0, wire_f32: 0 }; PL_MAX_ITEMS as usize],
        fold: [pl_fold { item0: 0, items: 0, piece: 0, dst: 0, canonical: 0 };
            PL_MAX_FOLDS as usize],
    }
}
