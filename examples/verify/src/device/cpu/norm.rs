//! RMSNorm, in the order of summation of the fused all-reduce's own: eight neighbours as a balanced tree, lane `l` of 256
//! adds groups `l`, `l + 256`, ... in turn, and the lanes are summed as a tree, 32 of them and then the sums of 32.

const LANES: usize = 256;

fn sum_of_squares(row: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (groups, rest) = row.as_chunks::<8>();
    for (at, group) in groups.iter().enumerate() {
        let s = group.map(|value| value * value);
        lanes[at % LANES] += ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
    }
    // Widths of the model are multiples of eight; a rest makes one more group.
    lanes[groups.len() % LANES] += rest.iter().map(|value| value * value).sum::<f32>();
    for distance in [16, 8, 4, 2, 1] {
        for warp in lanes.chunks_exact_mut(32) {
            for lane in 0..distance {
                warp[lane] += warp[lane + distance];
            }
        }
    }
    for distance in [128, 64, 32] {
        for lane in (0..distance).step_by(32) {
            lanes[lane] += lanes[lane + distance];
        }
    }
    lanes[0]
}

/// `out = row / sqrt(mean(row^2) + eps) * gamma`.
pub fn rms_norm(row: &[f32], gamma: &[f32], eps: f32, out: &mut [f32]) {
    let scale = 1.0 / (sum_of_squares(row) / row.len() as f32 + eps).sqrt();
    for ((out, &value), &gamma) in out.iter_mut().zip(row).zip(gamma) {
        *out = value * scale * gamma;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_comes_out_with_a_mean_square_of_one() {
        for width in [1, 7, 64, 1536, 7168] {
            let row: Vec<f32> = (0..width).map(|i| ((i * 37 % 101) as f32 - 50.0) / 7.0).collect();
            let mut out = vec![0.0; width];
            rms_norm(&row, &vec![2.0; width], 0.0, &mut out);
            let mean = out.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / width as f64;
            assert!((mean - 4.0).abs() < 1e-5, "{width}: {mean}");
        }
    }
}
