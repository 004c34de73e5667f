//! Each mistake that is easily made in these layers is noticed: the same comparison that right layers pass fails.

use super::golden::{compare, config, run, Distances, Setting};
use crate::config::Config;
use crate::mistake::Mistake;

fn with(mistake: Option<Mistake>, change: impl FnOnce(&mut Config)) -> Distances {
    let mut config = config();
    change(&mut config);
    compare(&run(&Setting { mistake, config, ..Setting::new(2) }))
}

fn is_noticed(distances: Distances) {
    println!("{distances}");
    assert!(!distances.within(), "not noticed: {distances}");
}

#[test]
fn no_mistake_is_no_difference() {
    let distances = with(None, |_| {});
    assert!(distances.within(), "{distances}");
}

#[test]
fn rotating_halves_is_noticed() {
    is_noticed(with(Some(Mistake::RotateHalves), |_| {}));
}

#[test]
fn bias_in_the_weights_is_noticed() {
    is_noticed(with(Some(Mistake::BiasInWeights), |_| {}));
}

#[test]
fn groups_ranked_by_one_expert_are_noticed() {
    is_noticed(with(Some(Mistake::GroupsByOneExpert), |_| {}));
}

#[test]
fn a_missing_routed_scale_is_noticed() {
    is_noticed(with(None, |config| config.routed_scaling_factor = 1.0));
}

#[test]
fn a_missing_mscale_is_noticed() {
    is_noticed(with(None, |config| {
        if let Some(yarn) = &mut config.rope_scaling {
            (yarn.mscale, yarn.mscale_all_dim) = (0.0, 0.0);
        }
    }));
}

#[test]
fn ten_times_the_epsilon_is_noticed() {
    is_noticed(with(None, |config| config.rms_norm_eps *= 10.0));
}

#[test]
fn a_residual_taken_after_the_norm_is_noticed() {
    is_noticed(with(Some(Mistake::ResidualAfterNorm), |_| {}));
}

#[test]
fn a_shared_expert_added_twice_is_noticed() {
    is_noticed(with(Some(Mistake::SharedExpertTwice), |_| {}));
}
