//! The golden passes come out right over any number of ranks.

use super::golden::{compare, distance, run, Golden, Setting, DRAFT, HIDDEN, LOGITS};
use crate::check::golden::relative;
use crate::device::cpu::Sums;
use crate::observe::{Half, Site};

fn comes_out_right(ranks: usize) {
    let outcomes = run(&Setting::new(ranks));
    let distances = compare(&outcomes);
    println!("{ranks} ranks: {distances}");
    assert!(distances.within(), "{ranks} ranks: {distances}");
    for outcome in &outcomes {
        assert_eq!((outcome.verify.reduced.len(), outcome.tree.reduced.len()), (8, 8));
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

/// At bf16 a right implementation may pick other experts, so it is given the golden ones.
#[test]
fn in_bf16_sums_stay_within_eight_percent_and_choices_are_the_same() {
    let golden = Golden::answers();
    for fused in [false, true] {
        let setting = Setting { given: Some(1.0), sums: Sums::Bf16, fused, ..Setting::new(4) };
        let outcomes = run(&setting);
        let mut worst = 0.0f32;
        for (site, sums) in &outcomes[0].verify.reduced {
            let half = if site.half == Half::Attention { "attn_out" } else { "mlp_out" };
            let name = |s: usize| format!("s{s}.verify.l{}.{half}", site.layer);
            let wanted = golden.of_sequences(name);
            worst = worst.max(relative(sums, &wanted));
        }
        let distances = compare(&outcomes);
        println!("bf16, fused {fused}: sums off by {worst:.4}, {distances}");
        assert!(worst < 0.08, "{worst}");
        assert_eq!(worst == 0.0, fused, "a fused pass shows no sums");
        assert_eq!(distances.mischosen, 0, "{distances}");
        assert!(distances.logits.0 < 0.2 && distances.logits.0 > LOGITS, "{distances}");
    }
}
