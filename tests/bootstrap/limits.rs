//! Descriptors: too few of them is an error on all ranks, and none is leaked.

use crate::support::*;

#[test]
fn too_few_descriptors_on_a_rank_are_an_error_on_all_and_no_hang() {
    let (mut failed, mut succeeded) = (0, 0);
    for victim in [0, 2] {
        for room in [0, 1, 2, 4, 6, 8, 9, 10, 12, 14, 60] {
            let dir = Dir::new();
            let id = dir.id();
            let task = format!("limit {victim} {room}");
            let ranks: Vec<Rank> = (0..4).map(|r| process(&id, 4, r, &task, &[])).collect();
            let lines: Vec<_> = ranks.into_iter().map(Rank::finish).collect();
            let errors: Vec<&str> = lines.iter().filter_map(|l| said(l, "error")).collect();
            assert!(errors.is_empty() || errors.len() == 4, "{task}: {lines:?}");
            failed += usize::from(!errors.is_empty());
            succeeded += usize::from(errors.is_empty());
            if !errors.is_empty() {
                assert!(errors.iter().any(|e| e.contains("open files")), "{task}: {errors:?}");
            }
            dir.assert_empty();
        }
    }
    assert!(failed >= 8 && succeeded >= 2, "{failed} failed, {succeeded} succeeded");
}

#[test]
fn no_descriptor_is_leaked_by_communicators_that_end_or_fail() {
    let dir = Dir::new();
    let lines = process(&dir.id(), 1, 0, "cycles 50", &[]).finish();
    let counts = said(&lines, "descriptors").unwrap();
    let (before, after) = counts.split_once(' ').unwrap();
    println!("open before {before}, after 50 communicators {after}");
    assert_eq!(before, after);
}
