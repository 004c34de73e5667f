//! Rotary position embedding: pair `i` of the rotary part, elements `2 i` and `2 i + 1`, turns by the position times the
//! pair's frequency.

use crate::config::Config;
use crate::mistake::{made, Mistake};

/// Cosine and sine of every pair at every position so far asked for.
pub struct Rope {
    frequencies: Vec<f64>,
    scale: f64,
    /// Cosine and sine, position by position, pair by pair.
    table: Vec<(f32, f32)>,
}

impl Rope {
    pub fn new(config: &Config) -> Self {
        let frequencies = config.frequencies();
        Rope { frequencies, scale: config.rotary_scale(), table: Vec::new() }
    }

    /// Makes the table reach `positions` positions.
    pub fn reserve(&mut self, positions: usize) {
        for position in self.table.len() / self.frequencies.len()..positions {
            self.table.extend(self.frequencies.iter().map(|frequency| {
                let (sine, cosine) = (position as f64 * frequency).sin_cos();
                ((cosine * self.scale) as f32, (sine * self.scale) as f32)
            }));
        }
    }

    /// Cosine and sine of every position, pair by pair.
    #[cfg(feature = "cuda")]
    pub fn table(&self) -> &[(f32, f32)] {
        &self.table
    }

    /// Turns `from` into `to`.
    pub fn rotate(&self, position: u32, from: &[f32], to: &mut [f32]) {
        let pairs = self.frequencies.len();
        let turns = &self.table[position as usize * pairs..][..pairs];
        for (pair, &(cosine, sine)) in turns.iter().enumerate() {
            let (a, b) = match made(Mistake::RotateHalves) {
                true => (pair, pair + pairs),
                false => (2 * pair, 2 * pair + 1),
            };
            to[a] = from[a] * cosine - from[b] * sine;
            to[b] = from[b] * cosine + from[a] * sine;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_depend_on_the_distance_alone() {
        let mut rope = Rope::new(&Config::preset("small").unwrap());
        rope.reserve(50);
        let row = |seed: usize| (0..32).map(|i| ((i * seed) % 13) as f32 - 6.0).collect::<Vec<_>>();
        let (query, key) = (row(5), row(7));
        let score = |at: u32, before: u32| -> f32 {
            let (mut q, mut k) = (vec![0.0; 32], vec![0.0; 32]);
            rope.rotate(at, &query, &mut q);
            rope.rotate(before, &key, &mut k);
            q.iter().zip(&k).map(|(a, b)| a * b).sum()
        };
        assert!((score(9, 4) - score(49, 44)).abs() < 1e-3);
        assert!((score(9, 4) - score(9, 5)).abs() > 1e-1);
    }
}
