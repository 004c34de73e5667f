//! All ranks hold the same bits, whichever schedule carries the sums: routers are on every rank, and one differing bit could
//! send a row to different experts on different ranks.

use super::golden::{run, Outcome, Seen, Setting};
use peerlane::schedule::{exists, Islands};
use peerlane::{Algorithm, Direction};

/// What must be the same on all ranks.
fn shared(seen: &Seen) -> (Vec<u32>, Vec<u32>) {
    let sums = seen.reduced.values().chain(seen.residual.values()).chain([&seen.normed]);
    let bits = sums.chain(&seen.cache).flatten().map(|value| value.to_bits()).collect();
    (bits, seen.chosen.clone())
}

fn all_alike(outcomes: &[Outcome]) -> bool {
    let first = &outcomes[0];
    outcomes.iter().all(|other| {
        shared(&other.verify) == shared(&first.verify)
            && shared(&other.tree) == shared(&first.tree)
            && other.verify.routed == first.verify.routed
            && other.tree.routed == first.tree.routed
    })
}

fn every_schedule(ranks: usize, islands: Islands) {
    let mut first: Option<Outcome> = None;
    let mut served = 0;
    for &algorithm in Algorithm::ALL {
        if !exists(algorithm, &islands) {
            continue;
        }
        for direction in [Direction::Push, Direction::Pull] {
            let mut setting = Setting::new(ranks);
            setting.comm.islands = Some(islands.clone());
            setting.comm.algorithm = Some(algorithm);
            setting.comm.direction = Some(direction);
            let outcomes = run(&setting);
            assert!(all_alike(&outcomes), "{algorithm}, {direction}, islands {islands}");
            let outcome = first.get_or_insert_with(|| outcomes[0].clone());
            let same = shared(&outcome.verify) == shared(&outcomes[0].verify);
            assert!(same, "{algorithm}, {direction}, islands {islands}: not what the first gave");
            served += 1;
        }
    }
    assert!(served >= 4, "{served} schedules");
}

#[test]
fn four_ranks_in_two_islands_hold_the_same_bits() {
    every_schedule(4, Islands::parse(4, "0-1,2-3").unwrap());
}

#[test]
fn eight_ranks_in_unequal_islands_hold_the_same_bits() {
    every_schedule(8, Islands::parse(8, "0-2,3-7").unwrap());
}

#[test]
fn two_ranks_hold_the_same_bits() {
    every_schedule(2, Islands::single(2).unwrap());
}

#[test]
fn a_differing_bit_would_be_seen() {
    let mut outcomes = run(&Setting::new(2));
    assert!(all_alike(&outcomes));
    let value = outcomes[1].tree.normed.last_mut().unwrap();
    *value = f32::from_bits(value.to_bits() ^ 1);
    assert!(!all_alike(&outcomes));
}
