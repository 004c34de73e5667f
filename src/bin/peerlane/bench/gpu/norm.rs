//! The fused operation: all-reduce, residual add and RMSNorm, in one kernel or as all-reduce and a kernel after it.

use super::library::{failure, Library};
use super::rank::GpuRank;
use crate::bench::orders::Call;
use crate::bench::payload::Payload;
use anyhow::Result;
use half::{bf16, f16};
use peerlane::comm::{AddRmsNorm, Communicator, Stats};
use peerlane::DType;

const EPS: f32 = 1e-6;
/// Data sets of residual and weights: beside those of the inputs, which are counted from 1.
const RESIDUALS: u64 = 1 << 40;
/// How far a normed element may be from fp64's, in steps of its type: half a step is rounding, the rest is fp32's share.
const STEPS: f64 = 0.51;

/// The operation on rows of `width`.
pub struct Norm<'a> {
    pub comms: &'a [Communicator],
    pub width: usize,
    pub fused: bool,
}

impl Library for Norm<'_> {
    fn queue(&self, ranks: &[GpuRank], call: &Call, times: u32) -> Result<()> {
        for (comm, rank) in (0..times).flat_map(|_| self.comms.iter().zip(ranks)) {
            let (input, normed) = rank.operands(call);
            let extra = rank.norm_operands(call);
            let arguments = AddRmsNorm {
                input: input as *const _,
                residual: extra.residual as *const _,
                gamma: extra.gamma as *const _,
                normed: normed as *mut _,
                residual_out: extra.residual_out as *mut _,
                rows: call.count / self.width,
                width: self.width,
                dtype: call.dtype,
                eps: EPS,
                weight_bias: 0.0,
                fused: self.fused,
            };
            // SAFETY: this rank's device memory of the call's size, which lives as in `library::enqueue`; in place the normed
            // rows lie over the input and the new residual over the old one, as the operation allows.
            unsafe {
                comm.all_reduce_add_rms_norm_cuda(&arguments, rank.stream.as_ref().as_raw(), None)
            }?;
        }
        Ok(())
    }

    fn failure(&self) -> Option<anyhow::Error> {
        failure(self.comms)
    }

    fn stats(&self) -> Stats {
        self.comms.first().map(Communicator::stats).unwrap_or_default()
    }
}

/// The residual and the weights of a data set, the same on all ranks.
pub struct Rows {
    numbers: Payload,
    width: usize,
}

impl Rows {
    /// Those of data set `data`.
    pub fn new(seed: u64, data: u64, call: &Call, width: usize) -> Self {
        Rows { numbers: Payload::new(seed, RESIDUALS | data, 2, call.dtype, call.op), width }
    }

    /// Element `i` of the residual.
    fn residual(&self, i: u64) -> i64 {
        self.numbers.value(0, i)
    }

    /// Weight `i`, 1 to 8.
    fn gamma(&self, i: u64) -> i64 {
        self.numbers.value(1, i) + 5
    }

    /// The residual of `count` elements as the GPU takes it.
    pub fn residual_bytes(&self, dtype: DType, count: usize) -> Vec<u8> {
        (0..count as u64).flat_map(|i| bits(dtype, self.residual(i) as f64)).collect()
    }

    /// The weights as the GPU takes them.
    pub fn gamma_bytes(&self, dtype: DType) -> Vec<u8> {
        (0..self.width as u64).flat_map(|i| bits(dtype, self.gamma(i) as f64)).collect()
    }

    /// How many elements of either result are wrong. The sum with the residual is a small whole number, hence exact; the normed
    /// element may differ from fp64's by one rounding.
    pub fn wrong(&self, call: &Call, payload: &Payload, normed: &[u8], residual_out: &[u8]) -> u64 {
        let mut wrong = 0;
        for row in 0..call.count / self.width {
            let first = (row * self.width) as u64;
            let sums: Vec<f64> = (first..first + self.width as u64)
                .map(|i| (payload.sum(i) + self.residual(i)) as f64)
                .collect();
            let mean = sums.iter().map(|r| r * r).sum::<f64>() / self.width as f64;
            let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
            for (column, r) in sums.iter().enumerate() {
                let at = 2 * (first as usize + column);
                let expected = r * scale * self.gamma(column as u64) as f64;
                let got = value(call.dtype, [normed[at], normed[at + 1]]);
                // A NaN is not within reach of anything.
                let close = (got - expected).abs() <= STEPS * step(call.dtype, expected);
                let exact = residual_out[at..at + 2] == bits(call.dtype, *r);
                wrong += u64::from(!close) + u64::from(!exact);
            }
        }
        wrong
    }
}

fn bits(dtype: DType, value: f64) -> [u8; 2] {
    match dtype {
        DType::F16 => f16::from_f64(value).to_le_bytes(),
        _ => bf16::from_f64(value).to_le_bytes(),
    }
}

fn value(dtype: DType, bytes: [u8; 2]) -> f64 {
    match dtype {
        DType::F16 => f16::from_le_bytes(bytes).to_f64(),
        _ => bf16::from_le_bytes(bytes).to_f64(),
    }
}

/// The distance of neighbouring numbers of the type around `value`.
fn step(dtype: DType, value: f64) -> f64 {
    let (digits, least) = if dtype == DType::F16 { (10, -24) } else { (7, -133) };
    let exponent = if value == 0.0 { least } else { value.abs().log2().floor() as i32 - digits };
    2f64.powi(exponent.max(least))
}

#[cfg(test)]
mod tests {
    use super::*;
    use peerlane::Op;

    #[test]
    fn steps_are_those_of_the_types() {
        for value in [1.0, 1.99, 3.7, 0.1, 300.0] {
            let next = f16::from_bits(f16::from_f64(value).to_bits() + 1);
            let gap = next.to_f64() - f16::from_f64(value).to_f64();
            assert_eq!(step(DType::F16, f16::from_f64(value).to_f64()), gap, "{value}");
            let next = bf16::from_bits(bf16::from_f64(value).to_bits() + 1);
            let gap = next.to_f64() - bf16::from_f64(value).to_f64();
            assert_eq!(step(DType::BF16, bf16::from_f64(value).to_f64()), gap, "{value}");
        }
        assert_eq!(step(DType::F16, 0.0), f16::from_bits(1).to_f64());
    }

    /// A result computed in fp64 and rounded passes; with one element two steps off, or a residual's lowest bit, it does not.
    #[test]
    fn two_steps_off_are_one_wrong_element() {
        for dtype in [DType::F16, DType::BF16] {
            let call = Call { count: 4 * 264, dtype, op: Op::Sum, in_place: false };
            let payload = Payload::new(1, 1, 3, dtype, Op::Sum);
            let rows = Rows::new(1, 1, &call, 264);
            let (mut normed, mut sums) = (Vec::new(), Vec::new());
            for row in 0..4u64 {
                let r: Vec<f64> = (row * 264..(row + 1) * 264)
                    .map(|i| (payload.sum(i) + rows.residual(i)) as f64)
                    .collect();
                let mean = r.iter().map(|r| r * r).sum::<f64>() / 264.0;
                for (i, r) in r.iter().enumerate() {
                    let x = r / (mean + f64::from(EPS)).sqrt() * rows.gamma(i as u64) as f64;
                    normed.extend(bits(dtype, x));
                    sums.extend(bits(dtype, *r));
                }
            }
            assert_eq!(rows.wrong(&call, &payload, &normed, &sums), 0);
            // Two steps: one may be the other neighbour of a number half-way between.
            normed[0] ^= 2;
            assert_eq!(rows.wrong(&call, &payload, &normed, &sums), 1);
            sums[20] ^= 1;
            assert_eq!(rows.wrong(&call, &payload, &normed, &sums), 2);
            let ones = vec![0xff; normed.len()];
            assert_eq!(rows.wrong(&call, &payload, &ones, &sums), 4 * 264 + 1);
        }
    }
}
