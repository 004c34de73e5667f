//! Boxes: partitions of a few ranks, and the tables of all schedules for them.

use crate::common::partitions::{islands, shuffled};
use peerlane::launch::*;
use peerlane::schedule::{build, check, exists, Islands, Tree};
use peerlane::{Algorithm, Direction};
use std::collections::BTreeMap;

/// A partition of some ranks and all tables that exist for it.
pub struct Box_ {
    pub n: usize,
    pub name: String,
    pub islands: Islands,
    pub tree: Tree,
    pub tables: BTreeMap<(u32, u32), Vec<pl_table>>,
}

/// Two to five ranks in one to four islands, in order and mixed.
pub fn boxes() -> Vec<Box_> {
    let sizes: [&[usize]; 13] = [
        &[2],
        &[1, 1],
        &[3],
        &[2, 1],
        &[1, 1, 1],
        &[4],
        &[2, 2],
        &[1, 3],
        &[1, 1, 2],
        &[5],
        &[3, 2],
        &[1, 4],
        &[2, 1, 1, 1],
    ];
    let mut all = Vec::new();
    for sizes in sizes {
        let n = sizes.iter().sum();
        for ranks in [(0..n).collect(), shuffled(n, 77)] {
            let partition = islands(sizes, &ranks);
            let tree = Tree::new(&partition);
            let mut tables = BTreeMap::new();
            for &algorithm in Algorithm::ALL {
                if !exists(algorithm, &partition) {
                    continue;
                }
                let schedule = build(algorithm, &partition).unwrap();
                for direction in [Direction::Push, Direction::Pull] {
                    let made = schedule.tables(direction).unwrap();
                    check(&made, &tree).unwrap();
                    tables.insert((algorithm as u32, direction as u32), made);
                }
            }
            let name = partition.to_string();
            all.push(Box_ { n, name, islands: partition, tree, tables });
        }
    }
    all
}

impl Box_ {
    pub fn tables(&self, algorithm: Algorithm, direction: Direction) -> Option<&Vec<pl_table>> {
        self.tables.get(&(algorithm as u32, direction as u32))
    }
}
