//! Every schedule that exists is proven, over every partition; and it exists where the table here says so.

mod common;

use common::partitions::{compositions, islands, shuffled};
use peerlane::launch::*;
use peerlane::schedule::model::Phase;
use peerlane::schedule::{build, check, exists, explain, Islands, Tree};
use peerlane::{Algorithm, Direction, Error};

/// Which algorithms exist for a partition. `pairwise` is the one that depends on the sizes: written down here for every
/// kind of partition that matters, never computed.
const EXISTING: &[(usize, &str, &[Algorithm])] = {
    use Algorithm::*;
    &[
        (1, "0", &[OneShot, TwoShot]),
        (2, "0-1", &[OneShot, TwoShot, Pairwise]),
        (2, "0,1", &[OneShot, TwoShot, Hierarchical, DualOwner, Pairwise, Staged]),
        (3, "0-2", &[OneShot, TwoShot, Pairwise]),
        (3, "0,1-2", &[OneShot, TwoShot, Hierarchical, DualOwner, Pairwise, Staged]),
        (3, "0,1,2", &[OneShot, TwoShot, Hierarchical, DualOwner, Pairwise, Staged]),
        (4, "0-3", &[OneShot, TwoShot, Pairwise]),
        (4, "0,1-3", &[OneShot, TwoShot, Hierarchical, DualOwner, Staged]),
        (4, "0-1,2-3", &[OneShot, TwoShot, Hierarchical, DualOwner, Pairwise, Staged]),
        (5, "0-4", &[OneShot, TwoShot, Pairwise]),
        (5, "0-1,2-4", &[OneShot, TwoShot, Hierarchical, DualOwner, Pairwise, Staged]),
        (5, "0,1-4", &[OneShot, TwoShot, Hierarchical, DualOwner, Staged]),
        (6, "0-1,2-5", &[OneShot, TwoShot, Hierarchical, DualOwner, Pairwise, Staged]),
        (7, "0-1,2-6", &[OneShot, TwoShot, Hierarchical, DualOwner, Staged]),
        (7, "0-6", &[OneShot, TwoShot, Pairwise]),
        (8, "0-7", &[OneShot, TwoShot, Pairwise]),
        (8, "0-3,4-7", &[OneShot, TwoShot, Hierarchical, DualOwner, Pairwise, Staged]),
        (8, "0-2,3-7", &[OneShot, TwoShot, Hierarchical, DualOwner, Pairwise, Staged]),
        (8, "0-1,2-3,4-5,6-7", &[OneShot, TwoShot, Hierarchical, DualOwner, Pairwise, Staged]),
        (8, "0-4,5,6,7", &[OneShot, TwoShot, Hierarchical, DualOwner, Staged]),
        (9, "0-2,3-5,6-8", &[OneShot, TwoShot, Hierarchical, DualOwner, Pairwise, Staged]),
        (15, "0-14", &[OneShot, TwoShot, Pairwise]),
        (16, "0-15", &[OneShot, TwoShot, Pairwise]),
        (16, "0-7,8-15", &[OneShot, TwoShot, Hierarchical, DualOwner, Pairwise, Staged]),
        (16, "0-3,4-7,8-11,12-15", &[OneShot, TwoShot, Hierarchical, DualOwner, Pairwise, Staged]),
        (16, "0,1-15", &[OneShot, TwoShot, Hierarchical, DualOwner, Staged]),
        (16, "0,1,2,3-15", &[OneShot, TwoShot, Hierarchical, DualOwner, Staged]),
    ]
};

#[test]
fn the_algorithms_that_exist_are_those_of_the_table() {
    for &(n, text, existing) in EXISTING {
        let islands = Islands::parse(n, text).unwrap();
        for &algorithm in Algorithm::ALL {
            let expected = existing.contains(&algorithm);
            assert_eq!(exists(algorithm, &islands), expected, "{algorithm} over {text}");
            match build(algorithm, &islands) {
                Ok(schedule) => {
                    assert!(expected);
                    assert_eq!((schedule.algorithm, schedule.ranks.len()), (algorithm, n));
                }
                Err(Error::Unsupported(why)) => {
                    assert!(
                        !expected && why.contains(algorithm.name()) && why.contains(text),
                        "{why}"
                    );
                }
                Err(other) => panic!("{algorithm} over {text}: {other}"),
            }
        }
    }
}

#[test]
fn a_partition_of_any_sizes_has_the_algorithms_that_its_islands_allow() {
    for n in 1..=16 {
        for sizes in compositions(n) {
            let islands = islands(&sizes, &shuffled(n, 0));
            for always in [Algorithm::OneShot, Algorithm::TwoShot] {
                assert!(exists(always, &islands));
            }
            for many in [Algorithm::Hierarchical, Algorithm::DualOwner, Algorithm::Staged] {
                assert_eq!(exists(many, &islands), sizes.len() > 1, "{many} over {sizes:?}");
            }
        }
    }
}

#[test]
fn every_schedule_is_proven_over_every_partition_and_any_numbering_of_the_ranks() {
    let mut proven = 0;
    for n in 1..=16 {
        for sizes in compositions(n) {
            for seed in 0..3 {
                // Seed 0 keeps the order of the ranks.
                let ranks = if seed == 0 { (0..n).collect() } else { shuffled(n, seed) };
                let islands = islands(&sizes, &ranks);
                let tree = Tree::new(&islands);
                for &algorithm in Algorithm::ALL.iter().filter(|&&a| exists(a, &islands)) {
                    let schedule = build(algorithm, &islands).unwrap();
                    for &direction in Direction::ALL {
                        let tables = schedule.tables(direction).unwrap();
                        let proof = check(&tables, &tree);
                        assert!(
                            proof.is_ok(),
                            "{algorithm} {direction} over {islands}: {}\n{}",
                            proof.unwrap_err(),
                            explain(&tables)
                        );
                        proven += 1;
                    }
                }
            }
        }
    }
    // 2,516 partitions; a filter that let everything slip would show here.
    assert!(proven > 2516 * 3 * 2 * 4, "{proven}");
}

#[test]
fn hops_and_traffic_are_those_of_the_formulas() {
    let of = |algorithm, text: &str| {
        let islands = Islands::parse(8, text).unwrap();
        let tables = build(algorithm, &islands).unwrap().tables(Direction::Push).unwrap();
        check(&tables, &Tree::new(&islands)).unwrap()
    };
    // Out of every rank, in units of message/den: in the caller's type and in the accumulator type.
    for (algorithm, text, hops, phases, degree, caller, accumulator, den) in [
        (Algorithm::OneShot, "0-7", 1, 1, 7, 7, 0, 1),
        (Algorithm::TwoShot, "0-7", 2, 2, 7, 14, 0, 8),
        (Algorithm::Hierarchical, "0-3,4-7", 3, 3, 4, 6, 1, 4),
        (Algorithm::DualOwner, "0-3,4-7", 2, 2, 7, 10, 0, 4),
        (Algorithm::Pairwise, "0-7", 3, 3, 3, 1, 2, 1),
        (Algorithm::Staged, "0-3,4-7", 7, 7, 4, 6, 1, 4),
    ] {
        let proof = of(algorithm, text);
        assert_eq!((proof.hops, proof.phases, proof.degree), (hops, phases, degree), "{algorithm}");
        assert_eq!(proof.denominator, den, "{algorithm}");
        for out in &proof.out {
            assert_eq!((out.caller, out.accumulator), (caller, accumulator), "{algorithm}");
        }
    }
}

#[test]
fn staged_has_one_stream_out_and_one_in_per_rank_and_phase() {
    for n in 2..=16 {
        for sizes in compositions(n).into_iter().filter(|s| s.len() > 1) {
            let islands = islands(&sizes, &shuffled(n, 5));
            let schedule = build(Algorithm::Staged, &islands).unwrap();
            for p in 0..schedule.ranks[0].phases.len() {
                let mut into = [0u16; 16];
                for (me, rank) in schedule.ranks.iter().enumerate() {
                    let mut out: Vec<u8> = rank.phases[p].sends.iter().map(|s| s.peer).collect();
                    out.dedup();
                    assert!(out.len() <= 1, "rank {me} sends to {out:?} in phase {p} of {islands}");
                    out.iter().for_each(|&peer| into[peer as usize] |= 1 << me);
                }
                assert!(into.iter().all(|i| i.count_ones() <= 1), "phase {p} of {islands}");
            }
        }
    }
}

#[test]
fn ranks_do_not_all_send_to_the_same_peer_first() {
    let islands = Islands::single(8).unwrap();
    for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
        let schedule = build(algorithm, &islands).unwrap();
        let first: Vec<u8> = schedule.ranks.iter().map(|r| r.phases[0].sends[0].peer).collect();
        assert_eq!(first, [1, 2, 3, 4, 5, 6, 7, 0], "{algorithm}");
    }
}

/// Counts what the largest table needs, over every partition and several numberings of the ranks (the waits of `staged`
/// depend on them a little). A table travels as a kernel argument, so its capacities have next to no slack.
#[test]
fn the_capacities_are_what_the_largest_schedule_needs() {
    let mut most = [0usize; 5];
    for (n, seed) in (1..=16).flat_map(|n| (0..6).map(move |seed| (n, seed))) {
        for sizes in compositions(n) {
            let islands = islands(&sizes, &shuffled(n, seed));
            for &algorithm in Algorithm::ALL.iter().filter(|&&a| exists(a, &islands)) {
                let schedule = build(algorithm, &islands).unwrap();
                for rank in &schedule.ranks {
                    let sum = |f: fn(&Phase) -> usize| rank.phases.iter().map(f).sum();
                    for (most, count) in most.iter_mut().zip([
                        schedule.cuts.pieces() as usize,
                        rank.phases.len(),
                        sum(|p| p.sends.len()),
                        sum(|p| p.folds.iter().map(|f| f.items.len()).sum()),
                        sum(|p| p.folds.len()),
                    ]) {
                        *most = count.max(*most);
                    }
                }
            }
        }
    }
    assert_eq!(most, [16, 43, 70, 240, 51], "pieces, phases, sends, items, folds");
    for (needed, capacity) in most.into_iter().zip([
        PL_MAX_PIECES,
        PL_MAX_PHASES,
        PL_MAX_SENDS,
        PL_MAX_ITEMS,
        PL_MAX_FOLDS,
    ]) {
        assert!((needed..needed + 4).contains(&(capacity as usize)), "{needed} of {capacity}");
    }
    assert!(std::mem::size_of::<pl_table>() <= 2560);
}
