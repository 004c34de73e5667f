//! The checker reads whatever bytes it is given: it refuses them, or they describe the same schedule.
#![allow(clippy::unwrap_used)]

use peerlane::launch::pl_table;
use peerlane::schedule::{build, check, explain, Islands, Tree};
use peerlane::{Algorithm, Direction};
use proptest::prelude::*;

const SIZE: usize = std::mem::size_of::<pl_table>();

fn bytes(table: &mut pl_table) -> &mut [u8] {
    // SAFETY: `pl_table` is `repr(C)` of u8 and u16 fields without padding (the sum of the fields' sizes is `SIZE`, asserted below),
    // so all its bytes are initialised and any bytes make a valid one; the slice borrows the table.
    unsafe { std::slice::from_raw_parts_mut((table as *mut pl_table).cast(), SIZE) }
}

#[test]
fn the_table_has_no_padding() {
    use peerlane::launch::*;
    use std::mem::size_of;
    let arrays = size_of::<[pl_phase; PL_MAX_PHASES as usize]>()
        + size_of::<[pl_send; PL_MAX_SENDS as usize]>()
        + size_of::<[pl_item; PL_MAX_ITEMS as usize]>()
        + size_of::<[pl_fold; PL_MAX_FOLDS as usize]>();
    assert_eq!(size_of::<pl_table>(), 8 + 2 * (PL_MAX_PIECES as usize + 2) + arrays);
    let elements =
        [size_of::<pl_phase>(), size_of::<pl_send>(), size_of::<pl_item>(), size_of::<pl_fold>()];
    assert_eq!(elements, [5, 5, 5, 2 + 4]);
}

fn tables(
    algorithm: Algorithm,
    n: usize,
    text: &str,
    direction: Direction,
) -> (Vec<pl_table>, Tree) {
    let islands = Islands::parse(n, text).unwrap();
    let tables = build(algorithm, &islands).unwrap().tables(direction).unwrap();
    (tables, Tree::new(&islands))
}

/// What the tables do, without the waits that only pace (`staged`): one more or one less of those is no error.
fn meaning(tables: &[pl_table]) -> Vec<String> {
    explain(tables).lines().filter(|l| !l.contains("waits for")).map(String::from).collect()
}

#[test]
fn any_changed_byte_is_refused_or_changes_no_message_and_no_sum() {
    let mut refused = 0;
    for (algorithm, n, text) in [
        (Algorithm::OneShot, 3, "0-2"),
        (Algorithm::TwoShot, 4, "0-3"),
        (Algorithm::Hierarchical, 5, "0-1,2-4"),
        (Algorithm::DualOwner, 4, "0,1-3"),
        (Algorithm::Pairwise, 5, "0-4"),
        (Algorithm::Staged, 6, "0-2,3,4-5"),
    ] {
        for &direction in Direction::ALL {
            let (good, tree) = tables(algorithm, n, text, direction);
            let shown = meaning(&good);
            for at in 0..SIZE {
                for mask in [1, 2, 4, 16, 0x80, 0xff] {
                    let mut bad = good.clone();
                    bytes(&mut bad[at % n])[at] ^= mask;
                    match check(&bad, &tree) {
                        Err(_) => refused += 1,
                        Ok(_) => {
                            assert_eq!(meaning(&bad), shown, "{algorithm} byte {at} mask {mask}")
                        }
                    }
                }
            }
        }
    }
    assert!(refused > 5_000, "{refused}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn many_changed_bytes_never_panic(
        which in 0usize..6,
        pull in any::<bool>(),
        changes in prop::collection::vec((0usize..8, 0usize..700, any::<u8>(), any::<bool>()), 1..12),
    ) {
        let algorithm = Algorithm::ALL[which];
        let direction = if pull { Direction::Pull } else { Direction::Push };
        let (mut bad, tree) = tables(algorithm, 8, "0-3,4-7", direction);
        for (rank, at, value, everywhere) in changes {
            // The same change on all ranks gets past the rules on agreement.
            let ranks = if everywhere { 0..8 } else { rank..rank + 1 };
            bad[ranks].iter_mut().for_each(|t| bytes(t)[at] = value);
        }
        let _ = check(&bad, &tree);
        let _ = explain(&bad);
    }
}
