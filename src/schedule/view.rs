//! Reading a table: slices instead of index pairs. A range that leaves its array reads as empty; the checker reports it.

use crate::launch::{pl_fold, pl_item, pl_phase, pl_send, pl_table};

/// The phases in use.
pub(super) fn phases(table: &pl_table) -> &[pl_phase] {
    table.phase.get(..table.phases as usize).unwrap_or(&[])
}

/// The sends of a phase.
pub(super) fn sends<'t>(table: &'t pl_table, phase: &pl_phase) -> &'t [pl_send] {
    range(&table.send, phase.send0.into(), phase.sends.into())
}

/// The folds of a phase.
pub(super) fn folds<'t>(table: &'t pl_table, phase: &pl_phase) -> &'t [pl_fold] {
    range(&table.fold, phase.fold0.into(), phase.folds.into())
}

/// The items of a fold.
pub(super) fn items<'t>(table: &'t pl_table, fold: &pl_fold) -> &'t [pl_item] {
    range(&table.item, fold.item0.into(), fold.items.into())
}

fn range<T>(all: &[T], first: usize, count: usize) -> &[T] {
    all.get(first..first + count).unwrap_or(&[])
}

/// The merges of the balanced tree over `leaves` operands: a group of m splits into ceil(m/2) and the rest.
pub(super) fn canonical_merges(leaves: usize) -> Vec<u8> {
    fn push(leaves: usize, merges: &mut Vec<u8>) {
        if leaves <= 1 {
            return merges.push(0);
        }
        let left = leaves.div_ceil(2);
        push(left, merges);
        push(leaves - left, merges);
        if let Some(last) = merges.last_mut() {
            *last += 1;
        }
    }
    let mut merges = Vec::with_capacity(leaves);
    push(leaves, &mut merges);
    merges
}
