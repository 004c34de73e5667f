//! All ranks hold the same bits, whichever schedule carries the sums: routers are on every rank, and one differing bit could
//! send a row to different experts on different ranks.

use super::golden::{run, Outcome, Seen, Setting};
use crate::device::cpu::Sums;
use peerlane::schedule::{exists, Islands};
use peerlane::{Algorithm, Direction};

/// What must be the same on all ranks.
fn shared(seen: &Seen) -> (Vec<u32>, Vec<u32>) {
    let rows = seen.residual.values().chain([&seen.normed]);
    let bits = rows.chain(&seen.cache).flatten().map(|value| value.to_bits()).collect();
    (bits, seen.chosen.clone())
}

fn all_alike(outcomes: &[Outcome]) -> bool {
    let first = &outcomes[0];
    outcomes.iter().all(|other| {
        shared(&other.verify) == shared(&first.verify)
            && other.verify.reduced == first.verify.reduced
            && other.tree.reduced == first.tree.reduced
            && shared(&other.tree) == shared(&first.tree)
            && other.verify.routed == first.verify.routed
            && other.tree.routed == first.tree.routed
    })
}

/// All schedules that exist for `islands`, in both directions, with add and norm fused and apart.
fn every_schedule(ranks: usize, islands: Islands, sums: Sums) {
    let mut first: Option<Outcome> = None;
    let mut served = 0;
    let fusings: &[bool] = if sums == Sums::Bf16 { &[true, false] } else { &[false] };
    for &algorithm in Algorithm::ALL {
        if !exists(algorithm, &islands) {
            continue;
        }
        for (direction, &fused) in [Direction::Push, Direction::Pull]
            .into_iter()
            .flat_map(|d| fusings.iter().map(move |f| (d, f)))
        {
            let mut setting = Setting { sums, fused, ..Setting::new(ranks) };
            setting.comm.islands = Some(islands.clone());
            setting.comm.algorithm = Some(algorithm);
            setting.comm.direction = Some(direction);
            let outcomes = run(&setting);
            let how =
                format!("{algorithm}, {direction}, islands {islands}, {sums:?}, fused {fused}");
            assert!(all_alike(&outcomes), "{how}");
            // A fused pass shows no sums.
            assert_eq!(outcomes[0].verify.reduced.is_empty(), fused, "{how}");
            let outcome = first.get_or_insert_with(|| outcomes[0].clone());
            let same = shared(&outcome.verify) == shared(&outcomes[0].verify)
                && shared(&outcome.tree) == shared(&outcomes[0].tree);
            assert!(same, "{how}: not what the first gave");
            served += 1;
        }
    }
    assert!(served >= 4, "{served} schedules");
}

#[test]
fn four_ranks_in_two_islands_hold_the_same_bits() {
    every_schedule(4, Islands::parse(4, "0-1,2-3").unwrap(), Sums::Fp32);
}

#[test]
fn eight_ranks_in_unequal_islands_hold_the_same_bits() {
    every_schedule(8, Islands::parse(8, "0-2,3-7").unwrap(), Sums::Fp32);
}

#[test]
fn two_ranks_hold_the_same_bits() {
    every_schedule(2, Islands::single(2).unwrap(), Sums::Fp32);
}

#[test]
fn four_ranks_hold_the_same_bits_whether_the_norm_is_fused_or_apart() {
    every_schedule(4, Islands::parse(4, "0-1,2-3").unwrap(), Sums::Bf16);
}

#[test]
fn eight_ranks_hold_the_same_bits_whether_the_norm_is_fused_or_apart() {
    every_schedule(8, Islands::parse(8, "0-2,3-7").unwrap(), Sums::Bf16);
}

#[test]
fn a_differing_bit_would_be_seen() {
    let mut outcomes = run(&Setting::new(2));
    assert!(all_alike(&outcomes));
    let value = outcomes[1].tree.normed.last_mut().unwrap();
    *value = f32::from_bits(value.to_bits() ^ 1);
    assert!(!all_alike(&outcomes));
}
