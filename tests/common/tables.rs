//! Hand-written tables: small enough to be read, for tests of the kernels alone.

use peerlane::launch::*;

/// Merges of each leaf in postfix order, for the tree that halves `n` leaves.
fn merges(n: usize) -> Vec<u8> {
    if n == 1 {
        return vec![0];
    }
    let mut left = merges(n.div_ceil(2));
    left.extend(merges(n / 2));
    if let Some(last) = left.last_mut() {
        *last += 1;
    }
    left
}

fn empty(n: usize, rank: usize, pull: bool) -> pl_table {
    // SAFETY: pl_table is plain integers, for which zeros are valid.
    let mut t: pl_table = unsafe { std::mem::zeroed() };
    (t.n, t.rank, t.pull) = (n as u8, rank as u8, pull as u8);
    t
}

/// (from, slot, data, merge, wire_f32)
type Item = (usize, usize, usize, u8, bool);

struct Writer {
    t: pl_table,
    sends: usize,
    items: usize,
    folds: usize,
}

impl Writer {
    fn phase(&mut self, wire_f32: bool) {
        self.t.phase[self.t.phases as usize] = pl_phase {
            send0: self.sends as u8,
            sends: 0,
            fold0: self.folds as u8,
            folds: 0,
            wire_f32: wire_f32 as u8,
        };
        self.t.phases += 1;
    }
    fn send(&mut self, peer: usize, piece: usize, src: u32, slot: usize, data: usize) {
        self.t.send[self.sends] = pl_send {
            peer: peer as u8,
            piece: piece as u8,
            src: src as u8,
            slot: slot as u8,
            data: if self.t.pull != 0 { data } else { slot } as u8,
        };
        self.sends += 1;
        self.t.phase[self.t.phases as usize - 1].sends += 1;
    }
    fn fold(&mut self, piece: usize, dst: u32, items: &[Item]) {
        self.t.fold[self.folds] = pl_fold {
            item0: self.items as u16,
            items: items.len() as u8,
            piece: piece as u8,
            dst: dst as u8,
            canonical: items.iter().map(|i| i.3).eq(merges(items.len())) as u8,
        };
        self.folds += 1;
        self.t.phase[self.t.phases as usize - 1].folds += 1;
        for &(from, slot, data, merge, wire_f32) in items {
            let data = if self.t.pull != 0 { data } else { slot };
            self.t.item[self.items] = pl_item {
                slot: slot as u8,
                data: data as u8,
                from: from as u8,
                merge,
                wire_f32: wire_f32 as u8,
            };
            self.items += 1;
        }
    }
}

fn cut(t: &mut pl_table, pieces: usize) {
    t.pieces = pieces as u8;
    t.cut_den = pieces as u16;
    for p in 0..=pieces {
        t.cut_num[p] = p as u16;
    }
}

fn slots(t: &mut pl_table, slots: usize) {
    (t.slots, t.flag_slots) = (slots as u8, slots as u8);
}

const INPUT: usize = PL_FROM_INPUT as usize;
const PARTIAL: usize = PL_FROM_PARTIAL as usize;

/// Push all to all, reduce locally.
pub fn one_shot(n: usize, rank: usize, pull: bool) -> pl_table {
    let mut w = Writer { t: empty(n, rank, pull), sends: 0, items: 0, folds: 0 };
    cut(&mut w.t, 1);
    slots(&mut w.t, n);
    w.t.fan_in = (n - 1) as u8;
    w.phase(false);
    for p in (0..n).filter(|&p| p != rank) {
        w.send(p, 0, PL_SRC_INPUT, rank, 0);
    }
    let items: Vec<_> = (0..n)
        .zip(merges(n))
        .map(|(p, m)| if p == rank { (INPUT, 0, 0, m, false) } else { (p, p, 0, m, false) })
        .collect();
    w.fold(0, PL_DST_RESULT, &items);
    w.t
}

/// Reduce-scatter, all-gather.
pub fn two_shot(n: usize, rank: usize, pull: bool) -> pl_table {
    if n == 1 {
        return one_shot(n, rank, pull);
    }
    let mut w = Writer { t: empty(n, rank, pull), sends: 0, items: 0, folds: 0 };
    cut(&mut w.t, n);
    slots(&mut w.t, 2 * n);
    w.t.fan_in = (n - 1) as u8;
    w.phase(false);
    for p in (0..n).filter(|&p| p != rank) {
        w.send(p, p, PL_SRC_INPUT, rank, p);
    }
    let items: Vec<_> = (0..n)
        .zip(merges(n))
        .map(|(p, m)| if p == rank { (INPUT, 0, 0, m, false) } else { (p, p, rank, m, false) })
        .collect();
    w.fold(rank, PL_DST_RESULT, &items);
    w.phase(false);
    for p in (0..n).filter(|&p| p != rank) {
        w.send(p, rank, PL_SRC_RESULT, n + rank, n + rank);
    }
    for p in (0..n).filter(|&p| p != rank) {
        w.fold(p, PL_DST_RESULT, &[(p, n + p, n + p, 0, false)]);
    }
    w.t
}

/// Recursive doubling over 2 or 4 ranks: leaves travel as they are, sums as accumulators. Phase 0 awaits its item in a
/// fold of its own before it consumes it.
pub fn doubling(n: usize, rank: usize, pull: bool) -> pl_table {
    assert!(n == 2 || n == 4);
    let mut w = Writer { t: empty(n, rank, pull), sends: 0, items: 0, folds: 0 };
    cut(&mut w.t, 1);
    slots(&mut w.t, 3);
    w.t.fan_in = 1;
    let ordered = |mine, theirs, low: bool| -> [Item; 2] {
        let (mut a, mut b): (Item, Item) = if low { (mine, theirs) } else { (theirs, mine) };
        (a.3, b.3) = (0, 1);
        [a, b]
    };
    let near = rank ^ 1;
    w.phase(false);
    w.send(near, 0, PL_SRC_INPUT, 0, 0);
    w.fold(0, PL_DST_AWAIT, &[(near, 0, 0, 0, false)]);
    let items = ordered((INPUT, 0, 0, 0, false), (near, 0, 0, 0, false), rank < near);
    w.fold(0, if n == 2 { PL_DST_RESULT } else { PL_DST_PARTIAL }, &items);
    if n == 4 {
        let far = rank ^ 2;
        w.phase(true);
        w.send(far, 0, PL_SRC_PARTIAL, 1, 1);
        let items = ordered((PARTIAL, 0, 0, 0, false), (far, 1, 1, 0, true), rank < far);
        w.fold(0, PL_DST_RESULT, &items);
    }
    w.t
}

/// Rank 0 gathers every input as fp32, sums, and hands the accumulators (not yet rounded or divided) to the others.
pub fn root_sends_accumulators(n: usize, rank: usize, pull: bool) -> pl_table {
    let mut w = Writer { t: empty(n, rank, pull), sends: 0, items: 0, folds: 0 };
    cut(&mut w.t, 1);
    slots(&mut w.t, n + 1);
    w.t.fan_in = (n - 1) as u8;
    w.phase(true);
    if rank != 0 {
        w.send(0, 0, PL_SRC_INPUT, rank, 0);
        w.phase(true);
        w.fold(0, PL_DST_RESULT, &[(0, n, 1, 0, true)]);
        return w.t;
    }
    let items: Vec<_> = (0..n)
        .zip(merges(n))
        .map(|(p, m)| if p == 0 { (INPUT, 0, 0, m, false) } else { (p, p, 0, m, true) })
        .collect();
    w.fold(0, PL_DST_PARTIAL, &items);
    w.phase(true);
    for p in 1..n {
        w.send(p, 0, PL_SRC_PARTIAL, n, 1);
    }
    w.fold(0, PL_DST_RESULT, &[(PARTIAL, 0, 0, 0, false)]);
    w.t
}
