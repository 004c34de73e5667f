//! Where the time of a pass goes.

use serde::{Deserialize, Serialize};

/// What a stretch of a pass was spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Embedding, the first norm.
    Embed,
    /// Projections and attention, up to the output projection's partial sums.
    Attention,
    /// Router, experts or dense MLP, up to their partial sums.
    Mlp,
    /// Waiting for late ranks, where a barrier shows it.
    Wait,
    /// The all-reduce; the fused one with its norm.
    AllReduce,
    /// Residual add and norm, where they are not fused.
    Norm,
    /// Logits and the choice of tokens.
    Head,
}

impl Part {
    pub const ALL: [Part; 7] = [
        Part::Embed,
        Part::Attention,
        Part::Mlp,
        Part::Wait,
        Part::AllReduce,
        Part::Norm,
        Part::Head,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Part::Embed => "embedding",
            Part::Attention => "attention",
            Part::Mlp => "MLP and experts",
            Part::Wait => "waiting for ranks",
            Part::AllReduce => "all-reduce",
            Part::Norm => "add and norm",
            Part::Head => "logits",
        }
    }
}

/// What a layer is; the parts of a pass that are in no layer are apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Dense,
    Moe,
    Outside,
}

impl Kind {
    pub const ALL: [Kind; 3] = [Kind::Dense, Kind::Moe, Kind::Outside];

    pub fn name(self) -> &'static str {
        match self {
            Kind::Dense => "dense layers",
            Kind::Moe => "MoE layers",
            Kind::Outside => "outside layers",
        }
    }
}

/// Seconds by kind of layer and part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Times {
    seconds: [[f64; Part::ALL.len()]; Kind::ALL.len()],
}

impl Times {
    pub fn add(&mut self, kind: Kind, part: Part, seconds: f64) {
        self.seconds[kind as usize][part as usize] += seconds;
    }

    pub fn get(&self, kind: Kind, part: Part) -> f64 {
        self.seconds[kind as usize][part as usize]
    }

    /// Over all kinds.
    pub fn part(&self, part: Part) -> f64 {
        Kind::ALL.iter().map(|&kind| self.get(kind, part)).sum()
    }

    pub fn total(&self) -> f64 {
        self.seconds.iter().flatten().sum()
    }

    /// The mean of several.
    pub fn mean(all: &[Times]) -> Times {
        let mut mean = Times::default();
        for times in all {
            for kind in Kind::ALL {
                for part in Part::ALL {
                    mean.add(kind, part, times.get(kind, part) / all.len() as f64);
                }
            }
        }
        mean
    }
}
