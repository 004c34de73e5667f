//! A broken table of each kind, and the rule that refuses it. Every case starts from tables that are proven and changes
//! as little as it can.
#![allow(clippy::unwrap_used, clippy::panic)]

use peerlane::launch::*;
use peerlane::schedule::check::check_with_degree;
use peerlane::schedule::{build, build_goal, check, check_goal, Goal, Islands, Tree, Violation};
use peerlane::Algorithm::{self, *};
use peerlane::Direction::{self, Pull, Push};
use std::collections::BTreeSet;

/// Lists every kind of violation; a new one that is not listed does not compile, one without a case fails below.
macro_rules! kinds {
    ($($kind:ident)*) => {
        const KINDS: &[&str] = &[$(stringify!($kind)),*];
        fn kind(violation: &Violation) -> &'static str {
            match violation { $(Violation::$kind { .. } => stringify!($kind),)* }
        }
    };
}
kinds! {
    RankCount RankNumber TreeLeaves Disagreement OutOfBounds Cuts SendToSelf PushDataSlot StackUnderflow StackLeftover
    StackDepth AwaitDoesMore NotCanonical FanIn TwoWriters DataSlotReused Unwritten WrongWriter WrongPiece WrongWire
    WrongDataSlot NeverTaken TakenTwice Deadlock Undefined PartialOnNarrowWire ResultOnWideWire RoundedOperand
    InputOverwritten ResultTwice TakesNothing Unacknowledged Unheard Degree MissingResult WrongResult
}

fn good(
    algorithm: Algorithm,
    n: usize,
    islands: &str,
    direction: Direction,
) -> (Vec<pl_table>, Tree) {
    let islands = Islands::parse(n, islands).unwrap();
    let tables = build(algorithm, &islands).unwrap().tables(direction).unwrap();
    let tree = Tree::new(&islands);
    check(&tables, &tree).unwrap();
    (tables, tree)
}

/// The items that fold `f` of a table takes.
fn items(t: &mut pl_table, f: usize) -> &mut [pl_item] {
    let (first, count) = (t.fold[f].item0 as usize, t.fold[f].items as usize);
    &mut t.item[first..first + count]
}

/// All items of the folds of a phase.
fn items_of_phase(t: &mut pl_table, phase: usize) -> Vec<&mut pl_item> {
    let p = t.phase[phase];
    let first = t.fold[p.fold0 as usize].item0 as usize;
    let last = t.fold[p.fold0 as usize + p.folds as usize - 1];
    t.item[first..last.item0 as usize + last.items as usize].iter_mut().collect()
}

/// `one_shot` over two ranks, reduced to a broadcast of rank 0's input.
fn broadcast() -> Vec<pl_table> {
    let (mut t, _) = good(OneShot, 2, "0-1", Push);
    t[1].phase[0].sends = 0;
    for (rank, t) in t.iter_mut().enumerate() {
        let from_0 =
            *items(t, 0).iter().find(|i| i.from == if rank == 0 { 16 } else { 0 }).unwrap();
        t.item[0] = pl_item { merge: 0, ..from_0 };
        t.fold[0].items = 1;
        t.fold[0].canonical = 0;
    }
    t[0].fan_in = 0;
    t
}

type Case = (&'static str, &'static str, fn() -> Result<(), Violation>);

/// What is broken, which rule refuses it, and the tables.
const CASES: &[Case] = &[
    ("a flag without data that is taken for a value", "TakesNothing", || {
        let (islands, goal) = (Islands::single(3).unwrap(), Goal::Broadcast { root: 0 });
        let mut t = build_goal(goal, false, &islands).unwrap().tables(Push).unwrap();
        let waits = t[1].fold.iter_mut().find(|f| u32::from(f.dst) == PL_DST_AWAIT);
        waits.unwrap().dst = PL_DST_PARTIAL as u8;
        check_goal(&t, &Tree::new(&islands), goal).map(drop)
    }),
    ("a broadcast whose root hears from nobody", "Unheard", || {
        let tree = Tree::new(&Islands::single(2).unwrap());
        check_goal(&broadcast(), &tree, Goal::Broadcast { root: 0 }).map(drop)
    }),
    ("no table", "RankCount", || refuse((vec![], Tree::Leaf(0)), |_| {})),
    ("17 tables", "RankCount", || refuse(good(OneShot, 1, "0", Push), |t| *t = vec![t[0]; 17])),
    ("tables in the wrong order", "RankNumber", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| t.swap(1, 2))
    }),
    ("a tree without rank 3", "TreeLeaves", || {
        let (t, _) = good(OneShot, 4, "0-3", Push);
        check(&t, &Tree::over(&[0, 1, 2])).map(|_| ())
    }),
    ("a tree with rank 2 twice", "TreeLeaves", || {
        let (t, _) = good(OneShot, 4, "0-3", Push);
        check(&t, &Tree::over(&[0, 1, 2, 2])).map(|_| ())
    }),
    ("one rank cuts elsewhere", "Disagreement", || {
        refuse(good(TwoShot, 4, "0-3", Push), |t| t[2].cut_num[1] = 2)
    }),
    ("one rank has fewer phases", "Disagreement", || {
        refuse(good(TwoShot, 4, "0-3", Push), |t| t[2].phases = 1)
    }),
    ("one rank pulls", "Disagreement", || refuse(good(OneShot, 4, "0-3", Push), |t| t[3].pull = 1)),
    ("one rank sends a phase in another type", "Disagreement", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| t[1].phase[0].wire_f32 = 1)
    }),
    ("a slab layout of its own", "Disagreement", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| t[1].slots += 1)
    }),
    ("a peer beyond the ranks", "OutOfBounds", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| t[1].send[0].peer = 4)
    }),
    ("a slot beyond the slots", "OutOfBounds", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| t[1].send[0].slot = 3)
    }),
    ("an item beyond the items", "OutOfBounds", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| t[1].fold[0].item0 = PL_MAX_ITEMS as u16)
    }),
    ("a piece beyond the pieces", "OutOfBounds", || {
        refuse(good(TwoShot, 4, "0-3", Push), |t| t[1].fold[0].piece = 4)
    }),
    ("more phases than there is room for", "OutOfBounds", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| t.iter_mut().for_each(|t| t.phases = 45))
    }),
    ("no slots to divide the slab by", "OutOfBounds", || {
        refuse(good(OneShot, 1, "0", Push), |t| t[0].slots = 0)
    }),
    ("cuts that go back", "Cuts", || {
        refuse(good(TwoShot, 4, "0-3", Push), |t| t.iter_mut().for_each(|t| t.cut_num[2] = 1))
    }),
    ("cuts that end early", "Cuts", || {
        refuse(good(TwoShot, 4, "0-3", Push), |t| t.iter_mut().for_each(|t| t.cut_den = 5))
    }),
    ("cuts that start late", "Cuts", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| {
            for t in t {
                (t.cut_num[0], t.cut_num[1], t.cut_den) = (1, 2, 2);
            }
        })
    }),
    ("a send to itself", "SendToSelf", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| t[1].send[0].peer = 1)
    }),
    ("a push whose flag is elsewhere", "PushDataSlot", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| t[1].send[0].data ^= 1)
    }),
    ("a merge of nothing", "StackUnderflow", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| items(&mut t[0], 0)[0].merge = 1)
    }),
    ("a value that is left over", "StackLeftover", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| items(&mut t[0], 0)[3].merge -= 1)
    }),
    ("a stack of eight", "StackDepth", || {
        refuse(good(OneShot, 8, "0-7", Push), |t| {
            items(&mut t[0], 0)
                .iter_mut()
                .enumerate()
                .for_each(|(i, item)| item.merge = i as u8 / 7 * 7)
        })
    }),
    ("a wait that sums", "AwaitDoesMore", || {
        refuse(good(Staged, 6, "0-2,3-5", Push), |t| items(&mut t[0], 0)[0].merge = 1)
    }),
    ("a wait for one's own input", "AwaitDoesMore", || {
        refuse(good(Staged, 6, "0-2,3-5", Push), |t| {
            items(&mut t[0], 0)[0].from = PL_FROM_INPUT as u8
        })
    }),
    ("a chain that is marked as the balanced tree", "NotCanonical", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| chain(&mut t[0]))
    }),
    ("a kernel with too few values in flight", "FanIn", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| t[0].fan_in = 2)
    }),
    ("two ranks write one slot", "TwoWriters", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| {
            let slot = t[1].send.iter().find(|s| s.peer == 0).unwrap().slot;
            let other = t[2].send.iter_mut().find(|s| s.peer == 0).unwrap();
            (other.slot, other.data) = (slot, slot);
        })
    }),
    ("a send to the wrong peer", "TwoWriters", || {
        refuse(good(OneShot, 3, "0-2", Push), |t| t[0].send[0].peer = 2)
    }),
    ("a send that is done again in the next phase", "TwoWriters", || {
        refuse(good(TwoShot, 4, "0-3", Push), |t| {
            (t[0].phase[1].send0, t[0].phase[1].sends) = (2, t[0].phase[1].sends + 1)
        })
    }),
    ("a data slot that gets a second value", "DataSlotReused", || {
        refuse(good(TwoShot, 4, "0-3", Pull), |t| {
            let first = t[0].send[0].data;
            let p = t[0].phase[1];
            t[0].send[p.send0 as usize..][..p.sends as usize]
                .iter_mut()
                .for_each(|s| s.data = first)
        })
    }),
    ("a value that is stored while it is read", "DataSlotReused", || {
        // Rank 0's two results go to two peers each; alternating them would store each twice.
        refuse(good(Hierarchical, 8, "0-2,3-7", Pull), |t| {
            let p = t[0].phase[2];
            let sends = &mut t[0].send[p.send0 as usize..][..p.sends as usize];
            assert_ne!(sends[1].data, sends[2].data);
            sends.swap(1, 2)
        })
    }),
    ("a dropped send", "Unwritten", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| t[1].phase[0].sends -= 1)
    }),
    ("an item that names the wrong writer", "WrongWriter", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| {
            let item = items(&mut t[0], 0).iter_mut().find(|i| i.from == 1).unwrap();
            item.from = 2;
        })
    }),
    ("a send of the wrong piece", "WrongPiece", || {
        refuse(good(TwoShot, 4, "0-3", Push), |t| t[1].send[0].piece ^= 1)
    }),
    ("a fold of the wrong piece", "WrongPiece", || {
        refuse(good(TwoShot, 4, "0-3", Push), |t| t[1].fold[0].piece ^= 1)
    }),
    ("a narrow slot that is read as f32", "WrongWire", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| items(&mut t[0], 0)[1].wire_f32 = 1)
    }),
    ("a load from the neighbour's value", "WrongDataSlot", || {
        refuse(good(TwoShot, 4, "0-3", Pull), |t| items(&mut t[0], 0)[1].data ^= 1)
    }),
    ("an extra send", "NeverTaken", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| {
            t.iter_mut().for_each(|t| (t.slots, t.flag_slots) = (4, 4));
            let again = t[0].send[0];
            t[0].send[3] = pl_send { slot: 3, data: 3, ..again };
            t[0].phase[0].sends = 4;
        })
    }),
    ("a dropped copy", "NeverTaken", || {
        refuse(good(TwoShot, 4, "0-3", Push), |t| t[3].phase[1].folds -= 1)
    }),
    ("a wait that takes", "TakenTwice", || {
        refuse(good(Staged, 6, "0-2,3-5", Push), |t| t[0].fold[0].dst = PL_DST_PARTIAL as u8)
    }),
    ("a wait for what was taken", "TakenTwice", || {
        refuse(good(OneShot, 2, "0-1", Push), |t| {
            t[0].phase[0].folds = 2;
            t[0].item[10] = *items(&mut t[0], 0).iter().find(|i| i.from == 1).unwrap();
            t[0].item[10].merge = 0;
            t[0].fold[1] =
                pl_fold { item0: 10, items: 1, piece: 0, dst: PL_DST_AWAIT as u8, canonical: 0 };
        })
    }),
    ("ranks that wait for each other's next phase", "Deadlock", || {
        refuse(good(TwoShot, 2, "0-1", Push), |t| {
            for t in t {
                t.phase[0].sends = 0;
                (t.phase[1].send0, t.phase[1].sends) = (0, 2);
            }
        })
    }),
    ("a result before there is one", "Undefined", || {
        refuse(good(TwoShot, 4, "0-3", Push), |t| t[1].send[0].src = PL_SRC_RESULT as u8)
    }),
    ("a partial before there is one", "Undefined", || {
        refuse(good(Hierarchical, 4, "0-1,2-3", Push), |t| {
            items(&mut t[0], 0)[0].from = PL_FROM_PARTIAL as u8
        })
    }),
    ("a partial in the caller's type", "PartialOnNarrowWire", || {
        refuse(good(Hierarchical, 4, "0-1,2-3", Push), |t| wire_of_phase(t, 1, 0))
    }),
    ("a result in the accumulator type", "ResultOnWideWire", || {
        refuse(good(Hierarchical, 4, "0-1,2-3", Push), |t| wire_of_phase(t, 2, 1))
    }),
    ("a rounded value that is kept as a partial", "RoundedOperand", || {
        refuse(good(TwoShot, 4, "0-3", Push), |t| t[0].fold[1].dst = PL_DST_PARTIAL as u8)
    }),
    ("a rounded value that is summed", "RoundedOperand", || {
        refuse(good(TwoShot, 2, "0-1", Push), |t| {
            let copied = items(&mut t[0], 1)[0];
            t[0].item[10] =
                pl_item { slot: 0, data: 0, from: PL_FROM_INPUT as u8, merge: 0, wire_f32: 0 };
            t[0].item[11] = pl_item { merge: 1, ..copied };
            (t[0].fold[1].item0, t[0].fold[1].items) = (10, 2);
        })
    }),
    ("an input that is sent after the result overwrote it", "InputOverwritten", || {
        refuse(good(TwoShot, 4, "0-3", Push), |t| {
            let first = t[0].phase[1].send0 as usize;
            t[0].send[first].src = PL_SRC_INPUT as u8
        })
    }),
    ("a result that is written twice", "ResultTwice", || {
        refuse(good(Pairwise, 4, "0-3", Push), |t| {
            t[0].item[20] =
                pl_item { slot: 0, data: 0, from: PL_FROM_PARTIAL as u8, merge: 0, wire_f32: 0 };
            t[0].fold[2] =
                pl_fold { item0: 20, items: 1, piece: 0, dst: PL_DST_RESULT as u8, canonical: 1 };
            t[0].phase[1].folds = 2;
        })
    }),
    ("a broadcast that nobody acknowledges", "Unacknowledged", || {
        check(&broadcast(), &Tree::over(&[0, 1])).map(|_| ())
    }),
    ("more peers than the device can map", "Degree", || {
        let (t, tree) = good(OneShot, 4, "0-3", Push);
        check_with_degree(&t, &tree, 3).unwrap();
        check_with_degree(&t, &tree, 2).map(|_| ())
    }),
    ("a result that nobody writes", "MissingResult", || {
        refuse(good(OneShot, 1, "0", Push), |t| t[0].phase[0].folds = 0)
    }),
    ("a chain instead of the tree", "WrongResult", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| {
            chain(&mut t[0]);
            t[0].fold[0].canonical = 0;
        })
    }),
    ("operands in another order", "WrongResult", || {
        refuse(good(OneShot, 4, "0-3", Push), |t| {
            let four = items(&mut t[2], 0);
            (four[1], four[2]) = (
                pl_item { merge: four[1].merge, ..four[2] },
                pl_item { merge: four[2].merge, ..four[1] },
            );
        })
    }),
    ("a sum over another partition's tree", "WrongResult", || {
        let (t, _) = good(OneShot, 6, "0-5", Push);
        check(&t, &Tree::new(&Islands::parse(6, "0-1,2-5").unwrap())).map(|_| ())
    }),
    ("one's own input instead of a peer's result", "NeverTaken", || {
        refuse(good(TwoShot, 2, "0-1", Push), |t| items(&mut t[0], 1)[0].from = PL_FROM_INPUT as u8)
    }),
];

fn refuse(
    (mut tables, tree): (Vec<pl_table>, Tree),
    damage: fn(&mut Vec<pl_table>),
) -> Result<(), Violation> {
    damage(&mut tables);
    check(&tables, &tree).map(|_| ())
}

fn chain(t: &mut pl_table) {
    items(t, 0).iter_mut().enumerate().for_each(|(i, item)| item.merge = (i > 0).into());
}

fn wire_of_phase(tables: &mut [pl_table], phase: usize, wire_f32: u8) {
    for t in tables {
        t.phase[phase].wire_f32 = wire_f32;
        let remote = items_of_phase(t, phase).into_iter().filter(|i| i.from < 16);
        remote.for_each(|i| i.wire_f32 = wire_f32);
    }
}

#[test]
fn every_rule_refuses_the_table_that_breaks_it() {
    let mut met = BTreeSet::new();
    for &(what, expected, case) in CASES {
        let violation = case().expect_err(what);
        assert_eq!(kind(&violation), expected, "{what}: {violation}");
        met.insert(expected);
    }
    let all: BTreeSet<&str> = KINDS.iter().copied().collect();
    assert_eq!(met, all, "kinds without a case");
}

#[test]
fn a_violation_says_who_and_when() {
    let violation =
        refuse(good(TwoShot, 4, "0-3", Push), |t| t[1].phase[0].sends -= 1).unwrap_err();
    let text = violation.to_string();
    assert!(text.contains("rank 0, phase 0"), "{text}");
    let error: peerlane::Error = violation.into();
    assert!(error.to_string().contains(&text), "{error}");
}

/// The broadcast is refused for the missing acknowledgement and for nothing else: with one it only has the wrong result.
#[test]
fn an_acknowledged_broadcast_passes_the_reuse_rule() {
    let mut t = broadcast();
    t[1].phase[0].sends = 1;
    let slot = t[1].send[0].slot;
    t[0].item[1] = pl_item { slot, data: slot, from: 1, merge: 0, wire_f32: 0 };
    t[0].fold[1] =
        pl_fold { item0: 1, items: 1, piece: 0, dst: PL_DST_PARTIAL as u8, canonical: 1 };
    t[0].phase[0].folds = 2;
    t[0].fan_in = 1;
    let violation = check(&t, &Tree::over(&[0, 1])).unwrap_err();
    assert_eq!(kind(&violation), "WrongResult", "{violation}");
}
