//! What every reader of a description is held to: an error is a text of bounded length, a description gives islands, a
//! choice and finite times.

use peerlane::plan::{Model, NOMINAL};
use peerlane::topology::{islands, Topology};
use peerlane::DType;

pub fn check(read: peerlane::Result<Topology>) {
    let topology = match read {
        Ok(topology) => topology,
        Err(error) => return assert!(error.to_string().len() < 1000, "{error}"),
    };
    let _ = topology.matrix();
    let ranks: Vec<usize> = (0..topology.gpus.len().min(16)).collect();
    let Ok(found) = islands(&topology, &ranks) else { return assert!(ranks.is_empty()) };
    assert_eq!(found.islands.ranks(), ranks.len());
    let Ok(model) = Model::new(&topology, &ranks, &found.islands, &NOMINAL) else {
        panic!("no model")
    };
    assert!(model
        .choose(57_344, DType::BF16, |_| true)
        .is_some_and(|line| line.us(57_344).is_finite()));
}
