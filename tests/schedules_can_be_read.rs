//! `explain` tells from the tables what a schedule does, and what does not compile is refused with a reason.
#![allow(clippy::unwrap_used)]

use peerlane::schedule::model::Operand;
use peerlane::schedule::{build, check, explain, Islands, Tree};
use peerlane::{Algorithm, Direction};

fn text(algorithm: Algorithm, n: usize, islands: &str, direction: Direction) -> String {
    explain(
        &build(algorithm, &Islands::parse(n, islands).unwrap()).unwrap().tables(direction).unwrap(),
    )
}

#[test]
fn explain_shows_messages_types_and_sums() {
    let text = text(Algorithm::Hierarchical, 5, "0-1,2-4", Direction::Push);
    for line in [
        "5 rank(s), 3 phase(s), push; 4 piece(s) cut at 0 2 3 4 6 of 6;",
        "phase 0, wire: caller's type\n",
        "  rank  0 sends input of piece 2 to 1\n",
        "  rank  2 partial of piece 0 = ((input + from 3) + from 4)\n",
        "phase 1, wire: accumulator type",
        "  rank  0 sends partial of piece 1 to 3\n",
        "  rank  0 result of piece 1 = (partial + from 3)\n",
        "phase 2, wire: caller's type\n",
        "  rank  3 sends result of piece 1 to 4, 2\n",
        "  rank  1 result of piece 0 = from 0\n",
    ] {
        assert!(text.contains(line), "'{line}' is not in\n{text}");
    }
}

#[test]
fn explain_shows_the_waits_that_pace_staged() {
    let text = text(Algorithm::Staged, 6, "0-2,3-5", Direction::Pull);
    assert!(text.contains("6 rank(s), 5 phase(s), pull;"), "{text}");
    assert!(text.contains("  rank  0 waits for piece 0 from 2\n"), "{text}");
    assert!(
        text.contains("  rank  0 partial of piece 0 = ((input + from 1) + from 2)\n"),
        "{text}"
    );
}

#[test]
fn explain_of_no_tables_says_so() {
    assert_eq!(explain(&[]), "no ranks\n");
}

#[test]
fn readers_of_one_value_share_its_data_slot_when_they_pull() {
    let islands = Islands::single(4).unwrap();
    let schedule = build(Algorithm::TwoShot, &islands).unwrap();
    let push = schedule.tables(Direction::Push).unwrap();
    let pull = schedule.tables(Direction::Pull).unwrap();
    // 3 arrivals of inputs and 3 of results; published are 3 pieces of the input and one result.
    assert_eq!((push[0].slots, push[0].flag_slots), (6, 6));
    assert_eq!((pull[0].slots, pull[0].flag_slots), (4, 6));
}

#[test]
fn a_schedule_that_does_not_fit_or_does_not_match_is_refused() {
    let good = build(Algorithm::TwoShot, &Islands::single(4).unwrap()).unwrap();

    let mut unsent = good.clone();
    unsent.ranks[1].phases[0].sends.clear();
    let error = unsent.tables(Direction::Push).unwrap_err().to_string();
    assert!(
        error.contains("rank 0 takes piece 0 from rank 1") && error.contains("phase 0"),
        "{error}"
    );

    let mut twice = good.clone();
    let again = twice.ranks[1].phases[0].sends[0];
    twice.ranks[1].phases[0].sends.push(again);
    let error = twice.tables(Direction::Push).unwrap_err().to_string();
    assert!(error.contains("twice in phase 0"), "{error}");

    let mut long = good.clone();
    let idle = peerlane::schedule::model::Phase::default();
    long.ranks.iter_mut().for_each(|r| r.phases.resize(50, idle.clone()));
    let error = long.tables(Direction::Push).unwrap_err().to_string();
    assert!(error.contains("more than 44 phases"), "{error}");

    let mut lost = good;
    lost.ranks[0].phases[0].folds[0].items[0].operand = Operand::Arrival { from: 9, phase: 0 };
    assert!(lost.tables(Direction::Push).is_err());
}

#[test]
fn a_proof_says_what_the_schedule_costs() {
    let islands = Islands::parse(8, "0-3,4-7").unwrap();
    let tables = build(Algorithm::Hierarchical, &islands).unwrap().tables(Direction::Push).unwrap();
    // 24 inputs to owners and 24 results back inside the islands, a partial each way between the 4 pairs of owners.
    assert_eq!(
        check(&tables, &Tree::new(&islands)).unwrap().to_string(),
        "3 phases, 3 hops, at most 4 peers, 56 messages; out of a rank at most 1.50 messages in the caller's type and 0.25 \
         in the accumulator type"
    );
}
