//! The golden data, and the passes that they are the answers to (see `golden/README.md`).

use crate::batch::{Batch, Draft};
use crate::config::Config;
use crate::device::{Device, Routed};
use crate::moe::Routing;
use crate::pass::Rank;
use anyhow::{ensure, Context, Result};
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

/// Contexts of the three sequences, and the rows verified behind each.
pub const CONTEXTS: [usize; 3] = [13, 7, 21];
pub const DRAFT: usize = 4;
/// Rows of the largest pass, and of the cache.
pub const ROWS: usize = 64;
pub const CACHE: usize = 80;

/// A file of tensors, and the folder it is in.
pub struct Golden {
    folder: PathBuf,
    bytes: Vec<u8>,
}

impl Golden {
    /// The file `name` in `folder`.
    pub fn open(folder: &Path, name: &str) -> Result<Self> {
        let path = folder.join(name);
        let bytes =
            std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Golden { folder: folder.to_owned(), bytes })
    }

    /// The answers.
    pub fn answers(folder: &Path) -> Result<Self> {
        Self::open(folder, "golden.safetensors")
    }

    /// The model's shape.
    pub fn config(&self) -> Result<Config> {
        Config::read(&self.folder.join("config.json"))
    }

    fn words(&self, name: &str, dtype: Dtype) -> Result<Vec<u32>> {
        let file = SafeTensors::deserialize(&self.bytes)
            .with_context(|| self.folder.display().to_string())?;
        let tensor = file.tensor(name).with_context(|| format!("{name} in the golden data"))?;
        ensure!(tensor.dtype() == dtype, "{name} is {:?}, not {dtype:?}", tensor.dtype());
        Ok(tensor.data().as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }

    pub fn floats(&self, name: &str) -> Result<Vec<f32>> {
        Ok(self.words(name, Dtype::F32)?.into_iter().map(f32::from_bits).collect())
    }

    /// Whole numbers, none negative but a tree's first parent.
    pub fn integers(&self, name: &str) -> Result<Vec<i32>> {
        Ok(self.words(name, Dtype::I32)?.into_iter().map(|word| word as i32).collect())
    }

    pub fn tokens(&self, name: &str) -> Result<Vec<u32>> {
        self.words(name, Dtype::I32)
    }

    /// Of three sequences' tensors the rows one below the other.
    pub fn of_sequences(&self, name: impl Fn(usize) -> String) -> Result<Vec<f32>> {
        let parts = (0..CONTEXTS.len()).map(|s| self.floats(&name(s)));
        Ok(parts.collect::<Result<Vec<_>>>()?.concat())
    }

    fn input(&self, s: usize) -> Result<Vec<u32>> {
        self.tokens(&format!("s{s}.input_ids"))
    }

    /// Fills the caches of all three sequences.
    pub fn prefill(&self) -> Result<Batch> {
        let mut batch = Batch::default();
        for (s, &context) in CONTEXTS.iter().enumerate() {
            batch.push(cache_start(s), 0, &Draft::chain(context)?, &self.input(s)?);
        }
        Ok(batch)
    }

    /// Verifies the rows behind all three.
    pub fn verify(&self) -> Result<Batch> {
        let mut batch = Batch::default();
        for (s, &context) in CONTEXTS.iter().enumerate() {
            let tokens = self.input(s)?;
            batch.push(cache_start(s), context, &Draft::chain(DRAFT)?, &tokens[context..]);
        }
        Ok(batch)
    }

    /// Verifies the tree behind the first. It stands on the context alone, so its rows take the place of the chain's.
    pub fn tree(&self) -> Result<Batch> {
        let mut batch = Batch::default();
        let draft = Draft::tree(self.integers("tree.parent")?)?;
        batch.push(cache_start(0), CONTEXTS[0], &draft, &self.tokens("tree.input_ids")?);
        ensure!(batch.positions == self.tokens("tree.position")?, "the tree's positions");
        Ok(batch)
    }

    /// Puts the golden routing of the passes `names` in the place of the router's, its weights times `factor`.
    pub fn give<D: Device>(&self, rank: &mut Rank<D>, names: &[&str], factor: f32) -> Result<()> {
        rank.decision = Routing::Given;
        for (layer, routing) in rank.routing.iter_mut().enumerate() {
            let Some(routing) = routing else { continue };
            let mut routed = Routed::default();
            for name in names {
                routed.experts.extend(self.tokens(&format!("{name}.l{layer}.topk_idx"))?);
                routed.weights.extend(self.floats(&format!("{name}.l{layer}.topk_weight"))?);
            }
            routed.weights.iter_mut().for_each(|weight| *weight *= factor);
            rank.device.write_routing(routing, &routed)?;
        }
        Ok(())
    }
}

/// What [`Golden::give`] is given for each pass.
pub const PREFILL: [&str; 3] = ["s0.prefill", "s1.prefill", "s2.prefill"];
pub const VERIFY: [&str; 3] = ["s0.verify", "s1.verify", "s2.verify"];
pub const TREE: [&str; 1] = ["tree"];

/// Where sequence `s` begins in the cache.
pub fn cache_start(s: usize) -> usize {
    CONTEXTS[..s].iter().map(|context| context + 8).sum()
}

/// The number of the largest value.
pub fn largest(values: &[f32]) -> usize {
    (0..values.len()).max_by(|&a, &b| values[a].total_cmp(&values[b])).unwrap_or(0)
}

/// How far `found` is from `wanted`, relative to that one's norm; a NaN is infinitely far.
pub fn relative(found: &[f32], wanted: &[f32]) -> f32 {
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>().sqrt();
    let off = norm(&mut found.iter().zip(wanted).map(|(a, b)| a - b));
    let relative = off / norm(&mut wanted.iter().copied());
    if relative.is_nan() || found.len() != wanted.len() {
        f32::INFINITY
    } else {
        relative
    }
}
