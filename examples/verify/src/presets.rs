//! The shapes built in.

use crate::config::{Config, Yarn};

/// Their names, as `--config` takes them.
pub const PRESETS: &[&str] = &["deepseek-v3", "kimi-k2", "lean", SMALL];
/// The one for a CPU.
pub const SMALL: &str = "small";

impl Config {
    /// The shape built in under this name.
    pub fn preset(name: &str) -> Option<Self> {
        let yarn = |factor, beta_fast| Yarn {
            r#type: "yarn".into(),
            factor,
            beta_fast,
            beta_slow: 1.0,
            mscale: 1.0,
            mscale_all_dim: 1.0,
            original_max_position_embeddings: 4096,
        };
        let v3 = Config {
            model_type: "deepseek_v3".into(),
            hidden_size: 7168,
            num_hidden_layers: 61,
            first_k_dense_replace: 3,
            num_attention_heads: 128,
            q_lora_rank: 1536,
            kv_lora_rank: 512,
            qk_nope_head_dim: 128,
            qk_rope_head_dim: 64,
            v_head_dim: 128,
            intermediate_size: 18432,
            moe_intermediate_size: 2048,
            n_routed_experts: 256,
            num_experts_per_tok: 8,
            n_shared_experts: 1,
            n_group: 8,
            topk_group: 4,
            routed_scaling_factor: 2.5,
            norm_topk_prob: true,
            scoring_func: "sigmoid".into(),
            topk_method: "noaux_tc".into(),
            hidden_act: "silu".into(),
            moe_layer_freq: 1,
            attention_bias: false,
            rms_norm_eps: 1e-6,
            vocab_size: 129280,
            rope_theta: 10000.0,
            rope_scaling: Some(yarn(40.0, 32.0)),
            max_position_embeddings: 163840,
        };
        Some(match name {
            "deepseek-v3" => v3,
            "kimi-k2" => Config {
                model_type: "kimi_k2".into(),
                first_k_dense_replace: 1,
                num_attention_heads: 64,
                n_routed_experts: 384,
                n_group: 1,
                topk_group: 1,
                routed_scaling_factor: 2.827,
                vocab_size: 163840,
                rope_theta: 50000.0,
                rope_scaling: Some(yarn(64.0, 1.0)),
                max_position_embeddings: 262144,
                ..v3
            },
            // The messages of the full model, and few enough bytes of weights that the all-reduce is as large a part of a
            // pass as it is on a box whose ranks have a GPU each: 5 to 8 ms without all-reduces for 1 to 16 rows, with eight
            // ranks on one H200. Two things would break that. Sixteen rows touch nearly every expert, so experts are few and
            // narrow. And what is replicated, the latent projections and the router, all eight ranks read through one
            // GPU, where a real rank reads it alone, so the query latent is half as wide.
            "lean" => Config {
                first_k_dense_replace: 1,
                num_attention_heads: 64,
                q_lora_rank: 768,
                intermediate_size: 2048,
                moe_intermediate_size: 64,
                n_routed_experts: 64,
                num_experts_per_tok: 4,
                vocab_size: 32768,
                ..v3
            },
            // For a CPU: every part of the model, in less than 1 GiB of fp32.
            SMALL => Config {
                hidden_size: 1024,
                num_hidden_layers: 8,
                first_k_dense_replace: 1,
                num_attention_heads: 16,
                q_lora_rank: 256,
                kv_lora_rank: 128,
                qk_nope_head_dim: 64,
                qk_rope_head_dim: 32,
                v_head_dim: 64,
                intermediate_size: 2048,
                moe_intermediate_size: 128,
                n_routed_experts: 32,
                num_experts_per_tok: 4,
                n_group: 4,
                topk_group: 2,
                vocab_size: 4096,
                ..v3
            },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_valid() {
        for name in PRESETS {
            Config::named(name).unwrap().validate().unwrap();
        }
    }
}
