//! Where weights come from: a checkpoint with the published tensor names, or a seed.

mod checkpoint;
mod fp8;
mod random;

use anyhow::{bail, Context, Result};
#[cfg(feature = "cuda")]
pub use random::Drawn;
pub use random::Random;
use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;

/// What `--weights` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Values that a seed determines, the same for any number of ranks.
    Random(u64),
    /// A folder of safetensors files.
    Folder(PathBuf),
}

impl FromStr for Origin {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> Result<Self> {
        match text.strip_prefix("random:") {
            Some(seed) => match seed.parse() {
                Ok(seed) => Ok(Origin::Random(seed)),
                Err(_) => bail!("--weights {text}: '{seed}' is no seed; give a whole number"),
            },
            None => Ok(Origin::Folder(text.into())),
        }
    }
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Origin::Random(seed) => write!(f, "random, seed {seed}"),
            Origin::Folder(path) => write!(f, "{}", path.display()),
        }
    }
}

/// An opened source of weights; ranks read it at the same time.
pub enum Source {
    Random(Random),
    Checkpoint(checkpoint::Checkpoint),
}

/// A part of a matrix, appended to `values` row by row.
pub struct Part<'a> {
    pub name: &'a str,
    /// Rows and columns of the whole matrix; a vector is one row.
    pub shape: [usize; 2],
    pub rows: Range<usize>,
    pub columns: Range<usize>,
}

impl<'a> Part<'a> {
    pub fn whole(name: &'a str, shape: [usize; 2]) -> Self {
        Part { name, shape, rows: 0..shape[0], columns: 0..shape[1] }
    }

    pub fn vector(name: &'a str, elements: usize) -> Self {
        Self::whole(name, [1, elements])
    }

    pub fn rows(self, rows: Range<usize>) -> Self {
        Part { rows, ..self }
    }

    pub fn columns(self, columns: Range<usize>) -> Self {
        Part { columns, ..self }
    }
}

impl Source {
    pub fn open(origin: &Origin) -> Result<Self> {
        Ok(match origin {
            Origin::Random(seed) => Source::Random(Random::new(*seed)),
            Origin::Folder(path) => Source::Checkpoint(
                checkpoint::Checkpoint::open(path)
                    .with_context(|| format!("--weights {}", path.display()))?,
            ),
        })
    }

    /// Whether layers may share their experts: a checkpoint's belong to their layer.
    pub fn may_share_experts(&self) -> bool {
        matches!(self, Source::Random(_))
    }

    /// Appends a part of a tensor, as fp32.
    pub fn append(&self, values: &mut Vec<f32>, part: &Part) -> Result<()> {
        values.reserve(part.rows.len() * part.columns.len());
        match self {
            Source::Random(random) => random.append(values, part),
            Source::Checkpoint(checkpoint) => checkpoint.append(values, part)?,
        }
        Ok(())
    }
}
