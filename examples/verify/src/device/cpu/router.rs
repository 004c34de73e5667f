//! Which experts a row goes to: sigmoid scores, a correction bias that picks but does not weigh, groups.

use crate::config::Config;
use crate::mistake::{made, Mistake};

/// The sizes of a router.
pub struct Router {
    groups: usize,
    kept_groups: usize,
    kept: usize,
    scale: f32,
}

impl Router {
    pub fn new(config: &Config) -> Self {
        Router {
            groups: config.n_group,
            kept_groups: config.topk_group,
            kept: config.num_experts_per_tok,
            scale: config.routed_scaling_factor,
        }
    }

    /// Experts of a row in ascending order, with their weights.
    pub fn route(&self, logits: &[f32], bias: &[f32], experts: &mut [u32], weights: &mut [f32]) {
        let scores: Vec<f32> = logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect();
        let mut picking: Vec<f32> = scores.iter().zip(bias).map(|(s, b)| s + b).collect();

        let size = logits.len() / self.groups;
        let group_scores: Vec<f32> = picking
            .chunks(size)
            .map(|group| {
                let best = largest(group, 2);
                let second = if made(Mistake::GroupsByOneExpert) { 0.0 } else { group[best[1]] };
                group[best[0]] + second
            })
            .collect();
        let kept_groups = largest(&group_scores, self.kept_groups);
        for (group, scores) in picking.chunks_mut(size).enumerate() {
            if !kept_groups.contains(&group) {
                scores.fill(f32::NEG_INFINITY);
            }
        }

        let mut chosen = largest(&picking, self.kept);
        chosen.sort_unstable();
        let weighing = if made(Mistake::BiasInWeights) { &picking } else { &scores };
        let sum: f32 = chosen.iter().map(|&expert| weighing[expert]).sum();
        for (at, &expert) in chosen.iter().enumerate() {
            experts[at] = expert as u32;
            weights[at] = weighing[expert] / (sum + 1e-20) * self.scale;
        }
    }
}

/// Indices of the `count` largest values, largest first; of equals the lower index comes first.
fn largest(values: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    order.truncate(count);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(logits: &[f32], bias: &[f32]) -> (Vec<u32>, Vec<f32>) {
        let router = Router { groups: 2, kept_groups: 1, kept: 2, scale: 2.0 };
        let (mut experts, mut weights) = (vec![0; 2], vec![0.0; 2]);
        router.route(logits, bias, &mut experts, &mut weights);
        (experts, weights)
    }

    #[test]
    fn a_group_counts_by_its_two_best() {
        // The best expert is in the first group, the better pair in the second.
        let (experts, weights) = route(&[3.0, -3.0, -3.0, 2.0, 0.0, 2.0], &[0.0; 6]);
        assert_eq!(experts, [3, 5]);
        assert_eq!(weights, [1.0, 1.0]);
    }

    #[test]
    fn the_bias_picks_and_does_not_weigh() {
        let (experts, weights) = route(&[0.0; 6], &[0.0, 0.1, 0.2, 0.0, 0.0, 0.0]);
        assert_eq!(experts, [1, 2]);
        assert_eq!(weights, [1.0, 1.0]);
    }

    #[test]
    fn of_equals_the_lower_number_goes_first() {
        assert_eq!(route(&[0.0; 6], &[0.0; 6]).0, [0, 1]);
    }

    #[test]
    fn no_expert_of_a_group_that_is_out_gets_in_however_bad_the_others_are() {
        let bias = [-3.0, -3.0, -9.0, -3.0, -4.0, -2.5];
        assert_eq!(route(&[0.0; 6], &bias).0, [3, 5]);
    }
}
