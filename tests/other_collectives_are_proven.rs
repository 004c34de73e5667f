//! Broadcast, all-gather and reduce-scatter: their schedules for every number of ranks, and what the checker refuses.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/flags.rs"]
mod flags;

use flags::without_flags;
use peerlane::launch::*;
use peerlane::schedule::{build_goal, check_goal, Goal, Islands, Proof, Tree, Violation};
use peerlane::types::MAX_RANKS;
use peerlane::Direction;

fn tables(goal: Goal, in_parts: bool, n: usize, direction: Direction) -> (Vec<pl_table>, Tree) {
    let islands = Islands::single(n).unwrap();
    let schedule = build_goal(goal, in_parts, &islands).unwrap();
    (schedule.tables(direction).unwrap(), Tree::new(&islands))
}

fn goals(n: usize) -> Vec<(Goal, bool)> {
    let mut goals = vec![(Goal::AllGather, true), (Goal::ReduceScatter, true)];
    for root in 0..n as u8 {
        goals.extend([(Goal::Broadcast { root }, false), (Goal::Broadcast { root }, true)]);
    }
    goals
}

fn most_out(proof: &Proof) -> f64 {
    let out = |t: &peerlane::schedule::check::Traffic| t.caller + t.accumulator;
    f64::from(proof.out.iter().map(out).max().unwrap()) / f64::from(proof.denominator)
}

#[test]
fn all_are_right_for_every_number_of_ranks_and_send_no_more_than_they_must() {
    for n in 2..=MAX_RANKS {
        for direction in [Direction::Push, Direction::Pull] {
            for (goal, in_parts) in goals(n) {
                let (tables, tree) = tables(goal, in_parts, n, direction);
                let proof = check_goal(&tables, &tree, goal)
                    .unwrap_or_else(|v| panic!("{goal:?} of {n} ({direction}): {v}"));
                let others = (n - 1) as f64;
                // In whole messages, of which a part is one n-th.
                let (hops, out) = match (goal, in_parts) {
                    (Goal::Broadcast { .. }, false) => (1, others),
                    (Goal::Broadcast { .. }, true) => (2, 2.0 * others / n as f64),
                    _ => (1, others / n as f64),
                };
                assert_eq!(proof.hops, hops, "{goal:?} {in_parts} of {n}");
                assert!((most_out(&proof) - out).abs() < 1e-9, "{goal:?} of {n}: {proof}");
                // Flags without data take no room for data.
                let data = match (goal, in_parts, direction) {
                    (Goal::Broadcast { .. }, false, _) => 1,
                    (Goal::Broadcast { .. }, true, Direction::Push) => n,
                    _ => tables[0].slots.into(),
                };
                assert_eq!(usize::from(tables[0].slots), data, "{goal:?} {in_parts} {direction}");
            }
        }
    }
}

#[test]
fn a_broadcast_that_nobody_acknowledges_is_refused() {
    for n in 2..=8 {
        for in_parts in [false, true] {
            for direction in [Direction::Push, Direction::Pull] {
                let goal = Goal::Broadcast { root: 1 };
                let (mut tables, tree) = tables(goal, in_parts, n, direction);
                without_flags(&mut tables);
                let refused = check_goal(&tables, &tree, goal).unwrap_err();
                assert!(matches!(refused, Violation::Unheard { .. }), "{refused}");
            }
        }
    }
}

#[test]
fn each_way_to_be_wrong_is_named() {
    let broken = |goal, in_parts, change: &dyn Fn(&mut Vec<pl_table>)| {
        let (mut tables, tree) = tables(goal, in_parts, 3, Direction::Push);
        change(&mut tables);
        check_goal(&tables, &tree, goal).unwrap_err()
    };
    let broadcast = Goal::Broadcast { root: 0 };
    // A flag taken for a value.
    let taken = broken(broadcast, false, &|t| {
        let fold = t[1].fold.iter_mut().find(|f| u32::from(f.dst) == PL_DST_AWAIT).unwrap();
        fold.dst = PL_DST_PARTIAL as u8;
    });
    assert!(matches!(taken, Violation::TakesNothing { .. }), "{taken}");
    // One that claims a data slot: with pull its flag would keep the data that belongs there from being stored.
    let slot = broken(broadcast, false, &|t| {
        t[1].send.iter_mut().find(|s| u32::from(s.src) == PL_SRC_NOTHING).unwrap().data = 1;
    });
    assert!(matches!(slot, Violation::OutOfBounds { .. }), "{slot}");
    // A rank that sends what it has not.
    let sends = broken(broadcast, true, &|t| {
        let send = t[1].send.iter_mut().find(|s| u32::from(s.src) == PL_SRC_RESULT).unwrap();
        send.src = PL_SRC_INPUT as u8;
    });
    assert!(matches!(sends, Violation::Undefined { rank: 1, .. }), "{sends}");
    // The data of another than the root.
    let (all_gather, tree) = tables(Goal::AllGather, true, 4, Direction::Push);
    let gathered = check_goal(&all_gather, &tree, broadcast).unwrap_err();
    assert!(matches!(gathered, Violation::Undefined { .. }), "{gathered}");
    // A sum in another order than the tree's.
    let (scatter, _) = tables(Goal::ReduceScatter, true, 4, Direction::Push);
    let other = Tree::new(&Islands::parse(4, "0-2,3").unwrap());
    let order = check_goal(&scatter, &other, Goal::ReduceScatter).unwrap_err();
    assert!(matches!(order, Violation::WrongResult { .. }), "{order}");
    // A rank that keeps a sum which belongs to another would write outside of its output.
    let kept = check_goal(&scatter, &tree, Goal::AllReduce).unwrap_err();
    assert!(
        matches!(kept, Violation::MissingResult { .. } | Violation::Unacknowledged { .. }),
        "{kept}"
    );
}

#[test]
fn a_root_that_is_no_rank_is_refused() {
    let islands = Islands::single(3).unwrap();
    let error = build_goal(Goal::Broadcast { root: 3 }, false, &islands).unwrap_err();
    assert!(error.to_string().contains("root 3 of 3"), "{error}");
    assert!(build_goal(Goal::AllReduce, true, &islands).is_err());
}
