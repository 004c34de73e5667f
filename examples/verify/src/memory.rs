//! What a run needs of memory, and what to do where there is less.

use crate::config::Config;
use anyhow::{bail, ensure, Context, Result};

/// Layers that share their experts must not read them from a cache: between two uses of a pool lie at least so many others.
pub const LEAST_POOLS: usize = 4;

/// What a run needs, in elements.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    /// All weights but routed experts.
    pub common: usize,
    /// Those of them that every rank holds, once per device.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub replicated: usize,
    /// The routed experts of one layer.
    pub pool: usize,
    /// Caches and activations of all ranks.
    pub buffers: usize,
}

impl Need {
    /// For `ranks` ranks on one device, passes of `rows` rows and `cache_rows` tokens in all.
    pub fn new(config: &Config, ranks: usize, rows: usize, cache_rows: usize) -> Self {
        let hidden = config.hidden_size;
        let (layers, moe) = (config.num_hidden_layers, config.moe_layers());
        let heads = config.num_attention_heads;
        let (query, cache) = (config.query_width(), config.cache_width());
        let latents =
            (config.q_lora_rank + cache) * hidden + config.q_lora_rank + config.kv_lora_rank;
        let attention = heads
            * (query * config.q_lora_rank
                + (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank
                + config.v_head_dim * hidden);
        let mlp = |width: usize| 3 * hidden * width;
        let each = latents + attention + 2 * hidden;
        let each_moe = mlp(config.moe_intermediate_size * config.n_shared_experts)
            + config.n_routed_experts * (hidden + 1);
        let common = layers * each
            + moe * each_moe
            + (layers - moe) * mlp(config.intermediate_size)
            + 2 * config.vocab_size * hidden
            + hidden;
        let replicated = layers * (latents + 2 * hidden)
            + moe * config.n_routed_experts * (hidden + 1)
            + config.vocab_size * hidden
            + hidden;
        // Those of all heads, over all ranks once.
        let split =
            heads * (query + cache + config.kv_lora_rank + config.v_head_dim) + config.vocab_size;
        let whole = 4 * hidden + config.q_lora_rank + cache + config.n_routed_experts;
        Need {
            common,
            replicated,
            pool: mlp(config.moe_intermediate_size) * config.n_routed_experts,
            buffers: rows * (split + ranks * whole) + ranks * layers * cache_rows * cache,
        }
    }

    /// What a device needs that carries `here` of `ranks` ranks, and `copies` times what is replicated.
    #[cfg(feature = "cuda")]
    pub fn on_device(&self, here: usize, ranks: usize, copies: usize) -> Self {
        let part = |whole: usize| (whole * here).div_ceil(ranks);
        Need {
            common: self.replicated * copies + part(self.common - self.replicated),
            replicated: self.replicated,
            pool: part(self.pool),
            buffers: part(self.buffers),
        }
    }

    /// Bytes with `pools` pools of experts.
    pub fn bytes(&self, pools: usize, element: usize) -> u64 {
        (self.common + pools * self.pool + self.buffers) as u64 * element as u64
    }

    /// How many pools of experts fit into `available` bytes, at most one for each of `layers` layers.
    pub fn pools(
        &self,
        layers: usize,
        may_share: bool,
        element: usize,
        available: u64,
    ) -> Result<usize> {
        let all = self.bytes(layers, element);
        if all <= available {
            return Ok(layers);
        }
        let least = if may_share { LEAST_POOLS.min(layers) } else { layers };
        let needed = self.bytes(least, element);
        if needed <= available {
            let spare = (available - self.bytes(0, element)) / (self.pool * element) as u64;
            return Ok((spare as usize).clamp(least, layers));
        }
        let how = match may_share && least < layers {
            true => {
                format!("{} even with {least} pools of experts for {layers} layers", bytes(needed))
            }
            false => bytes(needed),
        };
        bail!(
            "too little memory: the model needs {how}, and there are {}; run fewer layers (--layers) or a smaller model (--config)",
            bytes(available)
        )
    }
}

/// Bytes, for people.
pub fn bytes(bytes: u64) -> String {
    let value = bytes as f64;
    match bytes {
        0..=9_999 => format!("{bytes} B"),
        10_000..=9_999_999 => format!("{:.1} KB", value / 1e3),
        10_000_000..=999_999_999 => format!("{:.1} MB", value / 1e6),
        _ => format!("{:.1} GB", value / 1e9),
    }
}

/// Bytes that the system can give without swapping.
pub fn available() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map(|kib| kib * 1024).context("/proc/meminfo names no MemAvailable; give --memory")
}

/// A size as people type it: a number, with K, M or G for powers of 1024.
pub fn parse(text: &str) -> Result<u64> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(1 << shift));
    let number =
        number.with_context(|| format!("'{text}' is no size; give such as 800M or 16G"))?;
    ensure!(number > 0, "a size of 0");
    Ok(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_models_have_their_published_sizes() {
        for (name, parameters) in [("deepseek-v3", 671.03e9), ("kimi-k2", 1026.4e9)] {
            let config = Config::preset(name).unwrap();
            let need = Need::new(&config, 8, 0, 0);
            let found = need.bytes(config.moe_layers(), 1) as f64;
            assert!((found / parameters - 1.0).abs() < 1e-4, "{name}: {found}");
        }
    }

    #[test]
    fn pools_are_shared_only_where_they_must_and_may_be() {
        let need = Need { common: 100, replicated: 40, pool: 50, buffers: 10 };
        assert_eq!(need.pools(10, true, 1, 610).unwrap(), 10);
        assert_eq!(need.pools(10, true, 1, 609).unwrap(), 9);
        assert_eq!(need.pools(10, true, 1, 310).unwrap(), 4);
        let error = need.pools(10, true, 1, 309).unwrap_err().to_string();
        assert!(error.contains("310 B even with 4 pools"), "{error}");
        let error = need.pools(10, false, 1, 609).unwrap_err().to_string();
        assert!(error.contains("needs 610 B"), "{error}");
    }

    #[test]
    fn sizes_are_read_as_typed() {
        assert_eq!(parse("3G").unwrap(), 3 << 30);
        assert_eq!(parse("17").unwrap(), 17);
        assert!(parse("x").is_err() && parse("").is_err() && parse("0").is_err());
    }
}
