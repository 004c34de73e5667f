//! Who gets together, and who is named when they do not.

use crate::support::*;
use peerlane::bootstrap::{Mesh, UniqueId};
use peerlane::Error;
use std::time::{Duration, Instant};

#[test]
fn one_to_sixteen_ranks_meet_and_leave_nothing_behind() {
    let dir = Dir::new();
    for n in 1..=16 {
        let id = dir.id();
        let all = threads(n, |rank| {
            let mut mesh = Mesh::connect(&id, n, rank, LONG).unwrap();
            assert_eq!((mesh.rank(), mesh.size()), (rank, n));
            assert!((0..n).all(|r| mesh.same_process(r)) && !mesh.same_process(n));
            let all = mesh.all_gather("squares", Ok((rank * rank) as u64)).unwrap();
            drop(mesh.watch(Box::new(|_| ()), Box::new(|_, _| None), None).unwrap());
            all
        });
        let expected: Vec<u64> = (0..n as u64).map(|r| r * r).collect();
        assert!(all.iter().all(|got| *got == expected), "n = {n}: {all:?}");
    }
    dir.assert_empty();
}

#[test]
fn ranks_may_come_in_any_order() {
    let dir = Dir::new();
    for last in 0..3 {
        let id = dir.id();
        threads(3, |rank| {
            if rank == last {
                std::thread::sleep(Duration::from_millis(50));
            }
            Mesh::connect(&id, 3, rank, LONG).unwrap();
        });
    }
}

#[test]
fn impossible_ranks_are_refused_before_anything_else() {
    let dir = Dir::new();
    let id = dir.id();
    for (n, rank, said) in [(0, 0, "0 ranks"), (17, 0, "17 ranks"), (4, 4, "rank 4 of 4")] {
        let error = Mesh::connect(&id, n, rank, LONG).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument(text) if text.contains(said)), "{error}");
    }
}

#[test]
fn a_missing_rank_is_named_on_all_who_came() {
    let dir = Dir::new();
    let id = dir.id();
    let came = [0, 1, 3];
    let results = threads(3, |i| Mesh::connect(&id, 5, came[i], Duration::from_secs(2)));
    assert_setup(&common_error(results), 2, "rendezvous", "[2, 4] did not come within 2s");
    dir.assert_empty();
}

#[test]
fn without_rank_0_the_others_name_it_at_the_deadline() {
    let dir = Dir::new();
    let id = dir.id();
    let results =
        threads(2, |i| Mesh::connect(&id, 3, i + 1, Duration::from_millis(300)).map(drop));
    for error in results {
        assert_setup(&error.unwrap_err(), 0, "rendezvous", "there is no socket");
    }
}

#[test]
fn a_rank_with_another_n_is_named_on_all_at_once() {
    let dir = Dir::new();
    let id = dir.id();
    let start = Instant::now();
    let results = threads(3, |rank| Mesh::connect(&id, if rank == 2 { 4 } else { 3 }, rank, LONG));
    assert_setup(&common_error(results), 2, "rendezvous", "given 4 ranks, rank 0 was given 3");
    assert!(start.elapsed() < LONG / 2);
    dir.assert_empty();
}

#[test]
fn a_rank_that_comes_twice_is_named_on_all_also_if_it_is_rank_0() {
    for twice in 0..3 {
        let dir = Dir::new();
        let id = dir.id();
        let ranks = [0, 1, 2, twice];
        let start = Instant::now();
        // n is 4, so that the rendezvous still waits for rank 3 when the double comes.
        let results = threads(4, |i| Mesh::connect(&id, 4, ranks[i], LONG));
        assert_setup(&common_error(results), twice as u32, "rendezvous", "two processes came");
        assert!(start.elapsed() < LONG / 2);
        dir.assert_empty();
    }
}

#[test]
fn ranks_that_come_within_a_second_of_a_failure_learn_its_reason() {
    let dir = Dir::new();
    let id = dir.id();
    let results = threads(3, |rank| {
        if rank == 2 {
            eventually(|| socket_of(&id).exists());
            std::thread::sleep(Duration::from_millis(100));
        }
        Mesh::connect(&id, if rank == 1 { 7 } else { 3 }, rank, LONG)
    });
    assert_setup(&common_error(results), 1, "rendezvous", "given 7 ranks");
}

#[test]
fn a_rank_that_comes_twice_takes_nobody_elses_word() {
    let dir = Dir::new();
    let id = dir.id();
    // Two come as rank 1; each is told, and so are ranks 2 and 3, who come after them one by one.
    let came = [(0, 0), (1, 0), (1, 0), (2, 50), (3, 100)];
    let start = Instant::now();
    let results = threads(came.len(), |i| {
        let (rank, late) = came[i];
        if late > 0 {
            eventually(|| socket_of(&id).exists());
        }
        std::thread::sleep(Duration::from_millis(late));
        Mesh::connect(&id, 4, rank, LONG)
    });
    assert_setup(&common_error(results), 1, "rendezvous", "two processes came");
    assert!(start.elapsed() < LONG / 2, "nobody waited for a deadline");
    dir.assert_empty();
}

#[test]
fn an_id_of_another_rendezvous_is_hinted_at() {
    let dir = Dir::new();
    let (id, other) = (dir.id(), dir.id());
    let deadline = Duration::from_millis(300);
    let results = threads(2, |rank| Mesh::connect([&id, &other][rank], 2, rank, deadline));
    let mut errors = results.into_iter().map(Result::unwrap_err);
    assert_setup(&errors.next().unwrap(), 1, "rendezvous", "[1] did not come");
    assert_setup(&errors.next().unwrap(), 0, "rendezvous", "there is no socket");
}

#[test]
fn an_id_of_another_user_is_refused() {
    let dir = Dir::new();
    let mut bytes = *dir.id().as_bytes();
    bytes[12] ^= 1;
    // The checksum is not a secret: recompute it as the format says (FNV-1a over all other bytes).
    let sum = bytes[..40]
        .iter()
        .chain(&bytes[48..])
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    bytes[40..48].copy_from_slice(&sum.to_le_bytes());
    let id = UniqueId::from_bytes(bytes).unwrap();
    for rank in 0..2 {
        let error = Mesh::connect(&id, 2, rank, LONG).unwrap_err().to_string();
        assert!(error.contains("all ranks must run as one user"), "{error}");
    }
}
