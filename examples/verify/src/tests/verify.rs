//! The golden passes come out right over any number of ranks.

use super::golden::{compare, distance, run, Golden, Setting, DRAFT, HIDDEN};
use crate::observe::{Half, Site};

fn comes_out_right(ranks: usize) {
    let outcomes = run(&Setting::new(ranks));
    let distances = compare(&outcomes);
    println!("{ranks} ranks: {distances}");
    assert!(distances.within(), "{ranks} ranks: {distances}");
    for outcome in &outcomes {
        // Two all-reduces for each of the four layers, and one for the choice of tokens.
        assert_eq!((outcome.verify.calls, outcome.tree.calls), (2 * 4 + 1, 2 * 4 + 1));
    }
}

#[test]
fn one_rank_answers_as_transformers_does() {
    comes_out_right(1);
}

#[test]
fn two_ranks_answer_as_transformers_does() {
    comes_out_right(2);
}

#[test]
fn four_ranks_answer_as_transformers_does() {
    comes_out_right(4);
}

#[test]
fn eight_ranks_answer_as_transformers_does_and_put_in_the_given_partial_sums() {
    comes_out_right(8);
    let outcomes = run(&Setting::new(8));
    for layer in 0..2 {
        for (half, name) in [(Half::Attention, "attn_out"), (Half::Mlp, "mlp_out")] {
            let wanted = Golden::partials().floats(&format!("verify.l{layer}.{name}"));
            let each = 3 * DRAFT * 256;
            for (rank, wanted) in wanted.chunks(each).enumerate() {
                let found = &outcomes[rank].verify.partial[&Site { layer, half }];
                let off = distance(found, wanted);
                assert!(off <= HIDDEN, "rank {rank}, layer {layer}, {name}: off by {off}");
            }
        }
    }
}

#[test]
fn routing_that_is_given_is_followed() {
    let given = |factor| compare(&run(&Setting { given: Some(factor), ..Setting::new(2) }));
    let golden = given(1.0);
    assert!(golden.within(), "{golden}");
    let doubled = given(2.0);
    assert!(doubled.hidden.0 > 100.0 * HIDDEN, "the router decided after all: {doubled}");
}
