//! Which part of which tensor a rank holds. Heads, the columns of every MLP and the vocabulary are split; the latent
//! projections, the router, norms and the embedding are on every rank, stored once per device.

use crate::config::Config;
use crate::device::{Device, Experts};
use crate::weights::{Part, Source};
use anyhow::{ensure, Result};
use peerlane::types::MAX_RANKS;
use std::ops::Range;
use std::sync::Arc;

/// Part `rank` of `0..length` in `ranks` parts as equal as can be.
pub fn split(length: usize, rank: usize, ranks: usize) -> Range<usize> {
    rank * length / ranks..(rank + 1) * length / ranks
}

/// Refuses numbers of ranks that the model cannot be split over.
pub fn check_ranks(config: &Config, ranks: usize) -> Result<()> {
    ensure!((1..=MAX_RANKS).contains(&ranks), "--tp {ranks}: there are 1 to {MAX_RANKS} ranks");
    let heads = config.num_attention_heads;
    ensure!(
        heads.is_multiple_of(ranks),
        "--tp {ranks} does not divide the {heads} attention heads; it takes {}",
        (1..=MAX_RANKS.min(heads))
            .filter(|&n| heads.is_multiple_of(n))
            .map(|n| n.to_string())
            .collect::<Vec<_>>()
            .join(", ")
    );
    for (key, length) in [
        ("intermediate_size", config.intermediate_size),
        ("moe_intermediate_size", config.moe_intermediate_size),
        ("vocab_size", config.vocab_size),
    ] {
        ensure!(length >= ranks, "--tp {ranks}: {key} is {length}, less than one for each rank");
    }
    Ok(())
}

/// Sizes of a rank's part of the model.
#[derive(Clone, Debug)]
pub struct Dims {
    pub hidden: usize,
    /// Heads of this rank.
    pub heads: usize,
    pub query_latent: usize,
    pub kv_latent: usize,
    /// Elements of a head's query and key that are not rotated.
    pub plain: usize,
    /// Elements that are.
    pub rotary: usize,
    pub value: usize,
    pub experts: usize,
    pub experts_per_token: usize,
    /// The tokens whose logits this rank computes.
    pub vocabulary: Range<usize>,
    pub softmax_scale: f32,
}

impl Dims {
    pub fn new(config: &Config, rank: usize, ranks: usize) -> Self {
        Dims {
            hidden: config.hidden_size,
            heads: config.num_attention_heads / ranks,
            query_latent: config.q_lora_rank,
            kv_latent: config.kv_lora_rank,
            plain: config.qk_nope_head_dim,
            rotary: config.qk_rope_head_dim,
            value: config.v_head_dim,
            experts: config.n_routed_experts,
            experts_per_token: config.num_experts_per_tok,
            vocabulary: split(config.vocab_size, rank, ranks),
            softmax_scale: config.softmax_scale(),
        }
    }

    /// Elements of a row of the cache.
    pub fn cache_width(&self) -> usize {
        self.kv_latent + self.rotary
    }

    /// Elements of a row that the fused latent projection gives.
    pub fn latents_width(&self) -> usize {
        self.query_latent + self.cache_width()
    }
}

/// What every rank holds.
pub struct Replicated<W> {
    pub embedding: W,
    pub layers: Vec<ReplicatedLayer<W>>,
    pub final_norm: W,
}

pub struct ReplicatedLayer<W> {
    pub input_norm: W,
    /// Query latent, key-value latent and shared rotary key in one matrix.
    pub latents: W,
    pub query_norm: W,
    pub key_norm: W,
    pub post_norm: W,
    /// Router and its correction bias, in layers with experts.
    pub router: Option<(W, W)>,
}

/// What one rank holds.
pub struct Shard<W> {
    pub layers: Vec<ShardLayer<W>>,
    pub head: W,
}

pub struct ShardLayer<W> {
    pub query_up: W,
    pub key_up: W,
    pub value_up: W,
    pub output: W,
    /// The dense MLP, or the shared expert.
    pub always: Experts<W>,
    pub routed: Option<Arc<Experts<W>>>,
}

/// Reads weights onto a device; `progress` hears of the elements read.
pub struct Loader<'a> {
    pub config: &'a Config,
    pub source: &'a Source,
    pub progress: &'a (dyn Fn(usize) + Sync),
}

impl Loader<'_> {
    /// Parts with rows of one length, one below the other.
    fn load<D: Device>(&self, device: &mut D, parts: &[Part], wide: bool) -> Result<D::Weight> {
        let elements = parts.iter().map(|part| part.rows.len() * part.columns.len()).sum();
        let weight = match self.source {
            Source::Random(random) => device.random_weight(random, parts, wide)?,
            source => {
                let mut values = Vec::with_capacity(elements);
                parts.iter().try_for_each(|part| source.append(&mut values, part))?;
                device.weight(values, parts[0].columns.len(), wide)?
            }
        };
        (self.progress)(elements);
        Ok(weight)
    }

    fn take<D: Device>(&self, device: &mut D, parts: &[Part]) -> Result<D::Weight> {
        self.load(device, parts, false)
    }

    fn vector<D: Device>(&self, device: &mut D, name: &str, elements: usize) -> Result<D::Weight> {
        self.take(device, &[Part::vector(name, elements)])
    }

    /// What every rank holds.
    pub fn replicated<D: Device>(&self, device: &mut D) -> Result<Replicated<D::Weight>> {
        let config = self.config;
        let hidden = config.hidden_size;
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for layer in 0..config.num_hidden_layers {
            let name = |tensor: &str| format!("model.layers.{layer}.{tensor}");
            let (query, key) =
                (name("self_attn.q_a_proj.weight"), name("self_attn.kv_a_proj_with_mqa.weight"));
            let latents = [
                Part::whole(&query, [config.q_lora_rank, hidden]),
                Part::whole(&key, [config.cache_width(), hidden]),
            ];
            let router = match config.is_moe(layer) {
                false => None,
                true => {
                    let experts = config.n_routed_experts;
                    let gate = name("mlp.gate.weight");
                    let gate = self.take(device, &[Part::whole(&gate, [experts, hidden])])?;
                    let bias = name("mlp.gate.e_score_correction_bias");
                    // In fp32 everywhere: it decides between scores that are close to each other.
                    let bias = self.load(device, &[Part::vector(&bias, experts)], true)?;
                    Some((gate, bias))
                }
            };
            layers.push(ReplicatedLayer {
                input_norm: self.vector(device, &name("input_layernorm.weight"), hidden)?,
                latents: self.take(device, &latents)?,
                query_norm: self.vector(
                    device,
                    &name("self_attn.q_a_layernorm.weight"),
                    config.q_lora_rank,
                )?,
                key_norm: self.vector(
                    device,
                    &name("self_attn.kv_a_layernorm.weight"),
                    config.kv_lora_rank,
                )?,
                post_norm: self.vector(device, &name("post_attention_layernorm.weight"), hidden)?,
                router,
            });
        }
        let embedding = Part::whole("model.embed_tokens.weight", [config.vocab_size, hidden]);
        Ok(Replicated {
            embedding: self.take(device, &[embedding])?,
            layers,
            final_norm: self.vector(device, "model.norm.weight", hidden)?,
        })
    }

    /// What rank `rank` of `ranks` holds. Layers with experts take theirs from `pools` pools in turn.
    pub fn shard<D: Device>(
        &self,
        device: &mut D,
        rank: usize,
        ranks: usize,
        pools: usize,
    ) -> Result<Shard<D::Weight>> {
        let config = self.config;
        let heads = split(config.num_attention_heads, rank, ranks);
        let mut shared: Vec<Arc<Experts<D::Weight>>> = Vec::new();
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for layer in 0..config.num_hidden_layers {
            let name = |tensor: &str| format!("model.layers.{layer}.{tensor}");
            let (always, routed) = if config.is_moe(layer) {
                let width = config.moe_intermediate_size * config.n_shared_experts;
                let always = vec![name("mlp.shared_experts")];
                let pool = (layer - config.first_k_dense_replace) % pools;
                if pool == shared.len() {
                    let of = |expert| name(&format!("mlp.experts.{expert}"));
                    let names: Vec<_> = (0..config.n_routed_experts).map(of).collect();
                    let width = config.moe_intermediate_size;
                    shared.push(Arc::new(self.mlps(device, &names, width, rank, ranks)?));
                }
                (self.mlps(device, &always, width, rank, ranks)?, Some(Arc::clone(&shared[pool])))
            } else {
                let width = config.intermediate_size;
                (self.mlps(device, &[name("mlp")], width, rank, ranks)?, None)
            };
            let attention = self.attention(device, layer, heads.clone())?;
            let (query_up, key_up, value_up, output) = attention;
            layers.push(ShardLayer { query_up, key_up, value_up, output, always, routed });
        }
        let vocabulary = split(config.vocab_size, rank, ranks);
        let head = Part::whole("lm_head.weight", [config.vocab_size, config.hidden_size]);
        Ok(Shard { layers, head: self.take(device, &[head.rows(vocabulary)])? })
    }

    /// Query, key, value and output projection of some heads.
    #[allow(clippy::type_complexity)]
    fn attention<D: Device>(
        &self,
        device: &mut D,
        layer: usize,
        heads: Range<usize>,
    ) -> Result<(D::Weight, D::Weight, D::Weight, D::Weight)> {
        let config = self.config;
        let name = |tensor: &str| format!("model.layers.{layer}.self_attn.{tensor}.weight");
        let all = config.num_attention_heads;
        let (plain, query, value) =
            (config.qk_nope_head_dim, config.query_width(), config.v_head_dim);

        let tensor = name("q_b_proj");
        let part = Part::whole(&tensor, [all * query, config.q_lora_rank]);
        let query_up = part.rows(heads.start * query..heads.end * query);
        let query_up = self.take(device, &[query_up])?;

        // Key and value of a head stand one after the other, head by head.
        let tensor = name("kv_b_proj");
        let both = plain + value;
        let part = |head: usize, rows: Range<usize>| {
            Part::whole(&tensor, [all * both, config.kv_lora_rank])
                .rows(head * both + rows.start..head * both + rows.end)
        };
        let keys: Vec<Part> = heads.clone().map(|head| part(head, 0..plain)).collect();
        let values: Vec<Part> = heads.clone().map(|head| part(head, plain..both)).collect();
        let (key_up, value_up) = (self.take(device, &keys)?, self.take(device, &values)?);
        let key_up = device.turned(key_up, plain)?;

        let tensor = name("o_proj");
        let part = Part::whole(&tensor, [config.hidden_size, all * value]);
        let output = part.columns(heads.start * value..heads.end * value);
        Ok((query_up, key_up, value_up, self.take(device, &[output])?))
    }

    /// This rank's columns of gated MLPs of the full width `width`.
    fn mlps<D: Device>(
        &self,
        device: &mut D,
        names: &[String],
        width: usize,
        rank: usize,
        ranks: usize,
    ) -> Result<Experts<D::Weight>> {
        let hidden = self.config.hidden_size;
        let mine = split(width, rank, ranks);
        let tensors = |factors: &[&str]| -> Vec<String> {
            let of = |name: &String| {
                factors
                    .iter()
                    .map(move |factor| format!("{name}.{factor}.weight"))
                    .collect::<Vec<_>>()
            };
            names.iter().flat_map(of).collect()
        };
        let (inner, outer) = (tensors(&["gate_proj", "up_proj"]), tensors(&["down_proj"]));
        let gate_up: Vec<Part> = inner
            .iter()
            .map(|tensor| Part::whole(tensor, [width, hidden]).rows(mine.clone()))
            .collect();
        let down: Vec<Part> = outer
            .iter()
            .map(|tensor| Part::whole(tensor, [hidden, width]).columns(mine.clone()))
            .collect();
        Ok(Experts {
            count: names.len(),
            width: mine.len(),
            gate_up: self.take(device, &gate_up)?,
            down: self.take(device, &down)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_everything_once() {
        for (length, ranks) in [(8, 8), (10, 3), (129280, 16), (5, 5)] {
            let parts: Vec<_> = (0..ranks).map(|rank| split(length, rank, ranks)).collect();
            assert_eq!((parts[0].start, parts[ranks - 1].end), (0, length));
            assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(parts.iter().all(|part| part.len().abs_diff(length / ranks) <= 1));
        }
    }

    #[test]
    fn ranks_that_do_not_divide_the_heads_are_refused_with_those_that_do() {
        let config = Config::preset("small").unwrap();
        let error = check_ranks(&config, 3).unwrap_err().to_string();
        assert_eq!(error, "--tp 3 does not divide the 16 attention heads; it takes 1, 2, 4, 8, 16");
        assert!(check_ranks(&config, 0).is_err() && check_ranks(&config, 17).is_err());
        let narrow = Config { moe_intermediate_size: 4, ..config };
        let error = check_ranks(&narrow, 8).unwrap_err().to_string();
        assert!(error.contains("moe_intermediate_size"), "{error}");
    }
}
