//! The shape of a model: the published `config.json`, or one of the shapes built in.

use crate::presets::PRESETS;
use anyhow::{bail, ensure, Context, Result};
use serde::Deserialize;
use std::path::Path;

/// The keys of `config.json` that decide what is computed, by their published names.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Config {
    pub model_type: String,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    /// The first layers have one dense MLP in place of experts.
    pub first_k_dense_replace: usize,
    pub num_attention_heads: usize,
    pub q_lora_rank: usize,
    pub kv_lora_rank: usize,
    pub qk_nope_head_dim: usize,
    pub qk_rope_head_dim: usize,
    pub v_head_dim: usize,
    pub intermediate_size: usize,
    pub moe_intermediate_size: usize,
    pub n_routed_experts: usize,
    pub num_experts_per_tok: usize,
    pub n_shared_experts: usize,
    pub n_group: usize,
    pub topk_group: usize,
    pub routed_scaling_factor: f32,
    pub norm_topk_prob: bool,
    pub scoring_func: String,
    pub topk_method: String,
    pub hidden_act: String,
    #[serde(default = "one")]
    pub moe_layer_freq: usize,
    #[serde(default)]
    pub attention_bias: bool,
    pub rms_norm_eps: f32,
    pub vocab_size: usize,
    pub rope_theta: f64,
    #[serde(default)]
    pub rope_scaling: Option<Yarn>,
    pub max_position_embeddings: usize,
}

/// How the rotary frequencies are stretched to longer contexts (YaRN).
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Yarn {
    pub r#type: String,
    pub factor: f64,
    #[serde(default = "beta_fast")]
    pub beta_fast: f64,
    #[serde(default = "beta_slow")]
    pub beta_slow: f64,
    pub mscale: f64,
    pub mscale_all_dim: f64,
    pub original_max_position_embeddings: usize,
}

fn one() -> usize {
    1
}
fn beta_fast() -> f64 {
    32.0
}
fn beta_slow() -> f64 {
    1.0
}

/// Brings the ways in which newer files write the rotary parameters back to the published one.
fn published_rope(json: &mut serde_json::Value) {
    let Some(keys) = json.as_object_mut() else { return };
    if let Some(parameters) = keys.remove("rope_parameters") {
        if let Some(theta) = parameters.get("rope_theta") {
            keys.entry("rope_theta").or_insert_with(|| theta.clone());
        }
        keys.entry("rope_scaling").or_insert(parameters);
    }
    let Some(scaling) = keys.get_mut("rope_scaling").and_then(|s| s.as_object_mut()) else {
        return;
    };
    // Some files have both names.
    if let Some(kind) = scaling.remove("rope_type") {
        scaling.entry("type").or_insert(kind);
    }
    if scaling.get("type").is_some_and(|kind| kind == "default") {
        keys.remove("rope_scaling");
    }
}

impl Yarn {
    /// By how much attention grows sharper with the stretch, for one of the two `mscale` keys.
    fn magnitude(&self, mscale: f64) -> f64 {
        if self.factor <= 1.0 {
            1.0
        } else {
            0.1 * mscale * self.factor.ln() + 1.0
        }
    }
}

impl Config {
    /// A shape built in, or the file `name`.
    pub fn named(name: &str) -> Result<Self> {
        match Self::preset(name) {
            Some(config) => Ok(config),
            None if Path::new(name).is_file() => Self::read(Path::new(name)),
            None => bail!(
                "--config {name}: no such file, and no shape built in; those are {}",
                PRESETS.join(", ")
            ),
        }
    }

    /// A `config.json`; multi-modal models keep the language model's under `text_config`.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> Result<Self> {
        let mut json: serde_json::Value = serde_json::from_str(text).context("not JSON")?;
        if let Some(inner) = json.get_mut("text_config") {
            json = inner.take();
        }
        published_rope(&mut json);
        let config: Config = serde_path_to_error::deserialize(json)?;
        config.validate()?;
        Ok(config)
    }

    /// Refuses what the layers here would compute wrongly, and sizes that cannot be.
    pub fn validate(&self) -> Result<()> {
        for (key, found, known) in [
            ("scoring_func", &self.scoring_func, "sigmoid"),
            ("topk_method", &self.topk_method, "noaux_tc"),
            ("hidden_act", &self.hidden_act, "silu"),
        ] {
            ensure!(found == known, "{key} is '{found}', but only '{known}' is implemented");
        }
        ensure!(self.norm_topk_prob, "norm_topk_prob is false, but only true is implemented");
        ensure!(!self.attention_bias, "attention_bias is true, but only false is implemented");
        ensure!(
            self.moe_layer_freq == 1,
            "moe_layer_freq is {}, but only 1 is implemented",
            self.moe_layer_freq
        );
        for (key, value) in [
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("q_lora_rank", self.q_lora_rank),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("v_head_dim", self.v_head_dim),
            ("intermediate_size", self.intermediate_size),
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("n_shared_experts", self.n_shared_experts),
            ("n_group", self.n_group),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            ensure!(value > 0, "{key} is 0");
        }
        ensure!(
            self.qk_rope_head_dim > 0 && self.qk_rope_head_dim.is_multiple_of(2),
            "qk_rope_head_dim is {}, but it is rotated in pairs",
            self.qk_rope_head_dim
        );
        let (experts, groups) = (self.n_routed_experts, self.n_group);
        ensure!(
            experts.is_multiple_of(groups) && experts / groups >= 2,
            "{experts} experts do not form {groups} equal groups of two or more"
        );
        ensure!(
            (1..=groups).contains(&self.topk_group),
            "topk_group is {}, but there are {groups} groups",
            self.topk_group
        );
        let eligible = experts / groups * self.topk_group;
        ensure!(
            (1..=eligible).contains(&self.num_experts_per_tok),
            "num_experts_per_tok is {}, but {} of {groups} groups hold {eligible} experts",
            self.num_experts_per_tok,
            self.topk_group
        );
        if let Some(yarn) = &self.rope_scaling {
            ensure!(
                yarn.r#type == "yarn",
                "rope_scaling is '{}', but only 'yarn' is implemented",
                yarn.r#type
            );
        }
        Ok(())
    }

    /// Whether layer `layer` has experts.
    pub fn is_moe(&self, layer: usize) -> bool {
        layer >= self.first_k_dense_replace
    }

    /// Layers with experts.
    pub fn moe_layers(&self) -> usize {
        self.num_hidden_layers.saturating_sub(self.first_k_dense_replace)
    }

    /// Elements of a row of the KV cache: the latent, then the rotated key that all heads share.
    pub fn cache_width(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }

    /// Elements of a head's query: not rotated, then rotated.
    pub fn query_width(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// What scores are multiplied with before the softmax.
    pub fn softmax_scale(&self) -> f32 {
        let magnitude = self.rope_scaling.as_ref().map_or(1.0, |y| y.magnitude(y.mscale_all_dim));
        ((self.query_width() as f64).powf(-0.5) * magnitude * magnitude) as f32
    }

    /// What sine and cosine are multiplied with.
    pub fn rotary_scale(&self) -> f64 {
        let yarn = self.rope_scaling.as_ref();
        yarn.map_or(1.0, |y| y.magnitude(y.mscale) / y.magnitude(y.mscale_all_dim))
    }

    /// Radians per position for each pair of the rotated part.
    pub fn frequencies(&self) -> Vec<f64> {
        let width = self.qk_rope_head_dim as f64;
        let plain = (0..self.qk_rope_head_dim / 2)
            .map(|pair| self.rope_theta.powf(-2.0 * pair as f64 / width));
        let Some(yarn) = &self.rope_scaling else { return plain.collect() };
        // The pair that turns `rotations` times within the original context.
        let pair_of = |rotations: f64| {
            let context = yarn.original_max_position_embeddings as f64;
            width * (context / (rotations * std::f64::consts::TAU)).ln()
                / (2.0 * self.rope_theta.ln())
        };
        let low = pair_of(yarn.beta_fast).floor().max(0.0);
        let mut high = pair_of(yarn.beta_slow).ceil().min(width - 1.0);
        if low == high {
            high += 0.001; // a step, without a division by zero
        }
        plain
            .enumerate()
            .map(|(pair, frequency)| {
                let ramp = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                frequency / yarn.factor * ramp + frequency * (1.0 - ramp)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_softmax_scales_come_out() {
        let scale = |name: &str| Config::preset(name).unwrap().softmax_scale();
        assert!((scale("deepseek-v3") - 0.135234).abs() < 1e-6);
        assert!((scale("kimi-k2") - 0.144680).abs() < 1e-6);
    }

    #[test]
    fn yarn_stretches_slow_pairs_only() {
        let config = Config::preset("deepseek-v3").unwrap();
        let plain = Config { rope_scaling: None, ..config.clone() }.frequencies();
        let stretched = config.frequencies();
        // The ramp of DeepSeek-V3 rises from pair 10 to pair 23.
        assert_eq!(stretched[..11], plain[..11]);
        assert!(stretched[11] < plain[11]);
        for pair in 23..32 {
            assert!((stretched[pair] * 40.0 / plain[pair] - 1.0).abs() < 1e-12);
        }
        assert_eq!(config.rotary_scale(), 1.0);
    }

    #[test]
    fn what_would_be_computed_wrongly_is_refused_by_key() {
        let config = Config::preset("small").unwrap();
        for (config, what) in [
            (Config { scoring_func: "softmax".into(), ..config.clone() }, "scoring_func"),
            (Config { norm_topk_prob: false, ..config.clone() }, "norm_topk_prob"),
            (Config { n_group: 5, ..config.clone() }, "5 equal groups"),
            (Config { topk_group: 9, ..config.clone() }, "topk_group"),
            (Config { num_experts_per_tok: 17, ..config.clone() }, "hold 16 experts"),
            (Config { qk_rope_head_dim: 7, ..config.clone() }, "pairs"),
            (Config { hidden_size: 0, ..config }, "hidden_size"),
        ] {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
        let text = std::fs::read_to_string("golden/dsv3_tiny/config.json").unwrap();
        let null = text.replace("\"q_lora_rank\": 96", "\"q_lora_rank\": null");
        let error = Config::parse(&null).unwrap_err().to_string();
        assert!(error.contains("q_lora_rank"), "{error}");
        let error = Config::parse("{\"model_type\": \"deepseek_v3\"}").unwrap_err().to_string();
        assert!(error.contains("hidden_size"), "{error}");
    }

    #[test]
    fn rotary_parameters_are_read_however_a_file_writes_them() {
        let text = std::fs::read_to_string("golden/dsv3_tiny/config.json").unwrap();
        let published = Config::parse(&text).unwrap();
        assert_eq!(published.rope_scaling.as_ref().unwrap().factor, 40.0);
        let both =
            text.replace("\"type\": \"yarn\"", "\"type\": \"yarn\", \"rope_type\": \"yarn\"");
        assert_eq!(Config::parse(&both).unwrap(), published);
        let newer = text
            .replace("\"rope_scaling\": {", "\"rope_parameters\": { \"rope_theta\": 10000.0,")
            .replace("\"type\": \"yarn\"", "\"rope_type\": \"yarn\"")
            .replace("\"rope_theta\": 10000.0,\n \"routed", "\"routed");
        assert_eq!(newer.matches("rope_theta").count(), 1);
        assert_eq!(Config::parse(&newer).unwrap(), published);
        let plain = text.replace("\"type\": \"yarn\"", "\"rope_type\": \"default\"");
        assert_eq!(Config::parse(&plain).unwrap().rope_scaling, None);
        let inner = format!("{{\"text_config\": {text}}}");
        assert_eq!(Config::parse(&inner).unwrap(), published);
    }
}
