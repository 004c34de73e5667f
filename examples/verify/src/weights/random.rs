//! Weights from a seed. A value depends on the seed, the tensor's name and the element's place in the whole tensor, so that
//! any sharding, and a GPU in place of a CPU, holds the same model.

use super::Part;
use half::bf16;

pub struct Random {
    seed: u64,
}

/// How a tensor's values are drawn: element `i` from the hash of `key + i`, uniform in `centre` plus or minus `reach`.
pub struct Drawn {
    pub key: u64,
    pub centre: f32,
    pub reach: f32,
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Random { seed }
    }

    /// What the values of `part` are drawn from.
    pub fn drawn(&self, part: &Part) -> Drawn {
        let key = part.name.bytes().fold(mix(self.seed), |key, byte| mix(key ^ u64::from(byte)));
        let (centre, reach) = range(part.name, part.shape[1]);
        Drawn { key, centre, reach }
    }

    pub fn append(&self, values: &mut Vec<f32>, part: &Part) {
        let Drawn { key, centre, reach } = self.drawn(part);
        for row in part.rows.clone() {
            let from = row * part.shape[1];
            values.extend(part.columns.clone().map(|column| {
                let bits = mix(key.wrapping_add((from + column) as u64)) >> 40;
                let unit = bits as f32 / (1u64 << 23) as f32 - 1.0;
                // What a bf16 model can hold, so that both precisions run the same one.
                bf16::from_f32(centre + reach * unit).to_f32()
            }));
        }
    }
}

/// Centre and reach of a tensor's uniform values: what keeps activations near one from layer to layer.
fn range(name: &str, columns: usize) -> (f32, f32) {
    if name.ends_with("norm.weight") {
        (1.0, 0.1)
    } else if name.ends_with("e_score_correction_bias") {
        (0.0, 0.1)
    } else if name.ends_with("embed_tokens.weight") {
        (0.0, 1.0)
    } else {
        (0.0, (3.0 / columns as f32).sqrt())
    }
}

/// The output function of SplitMix64.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(seed: u64, part: Part) -> Vec<f32> {
        let mut values = Vec::new();
        Random::new(seed).append(&mut values, &part);
        values
    }

    #[test]
    fn a_part_holds_what_the_whole_holds_there() {
        let whole = read(7, Part::whole("model.a.weight", [6, 10]));
        let part = read(7, Part::whole("model.a.weight", [6, 10]).rows(2..4).columns(3..9));
        assert_eq!(part, [&whole[23..29], &whole[33..39]].concat());
        assert_ne!(whole, read(8, Part::whole("model.a.weight", [6, 10])));
        assert_ne!(whole, read(7, Part::whole("model.b.weight", [6, 10])));
    }

    #[test]
    fn values_spread_over_their_range() {
        let values = read(1, Part::whole("w", [100, 300]));
        let mean = values.iter().sum::<f32>() / 30000.0;
        let square = values.iter().map(|v| v * v).sum::<f32>() / 30000.0;
        // A uniform value in [-a, a] has the variance a^2 / 3, here 1 over the columns.
        assert!(mean.abs() < 2e-3 && (square * 300.0 - 1.0).abs() < 0.03, "{mean} {square}");
    }
}
