//! What sums, residuals and normed rows are kept as between the halves of layers: fp32, or bf16 as in the models that GPUs
//! run. The fused all-reduce is for 16-bit floats.

use anyhow::Result;
use half::bf16;
use peerlane::comm::{AddRmsNorm, Communicator};
use peerlane::{DType, Op};

/// The type of what crosses between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sums {
    Fp32,
    Bf16,
}

impl Sums {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Sums::Fp32 => size_of::<f32>(),
            Sums::Bf16 => size_of::<bf16>(),
        }
    }

    /// The value as it is kept.
    pub fn round(self, value: f32) -> f32 {
        match self {
            Sums::Fp32 => value,
            Sums::Bf16 => bf16::from_f32(value).to_f32(),
        }
    }
}

/// Rows in bf16, on their way into a call and out of it.
#[derive(Default)]
pub struct Staging {
    input: Vec<bf16>,
    residual: Vec<bf16>,
    gamma: Vec<bf16>,
}

fn down(from: &[f32], to: &mut Vec<bf16>) {
    to.clear();
    to.extend(from.iter().map(|&value| bf16::from_f32(value)));
}

fn up(from: &[bf16], to: &mut [f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f32());
}

impl Staging {
    /// Sums `data` over all ranks, in place.
    pub fn all_reduce(&mut self, comm: &Communicator, sums: Sums, data: &mut [f32]) -> Result<()> {
        match sums {
            Sums::Fp32 => {
                let pointer = data.as_mut_ptr().cast();
                // SAFETY: in place, the slice lives until the call returns.
                unsafe {
                    comm.all_reduce(pointer, pointer, data.len(), DType::F32, Op::Sum, None)?
                };
            }
            Sums::Bf16 => {
                down(data, &mut self.input);
                let pointer = self.input.as_mut_ptr().cast();
                // SAFETY: in place, as many elements as `data` has, alive until the call returns.
                unsafe {
                    comm.all_reduce(pointer, pointer, data.len(), DType::BF16, Op::Sum, None)?
                };
                up(&self.input, data);
            }
        }
        Ok(())
    }

    /// The fused call on rows of bf16: `residual += sum of x over the ranks`, `normed = rms_norm(residual) * gamma`.
    pub fn all_reduce_add_rms_norm(
        &mut self,
        comm: &Communicator,
        x: &[f32],
        residual: &mut [f32],
        gamma: &[f32],
        eps: f32,
        normed: &mut [f32],
    ) -> Result<()> {
        down(x, &mut self.input);
        down(residual, &mut self.residual);
        down(gamma, &mut self.gamma);
        let (rows, residual_out) = (self.input.as_mut_ptr(), self.residual.as_mut_ptr());
        let arguments = AddRmsNorm {
            input: rows.cast(),
            residual: residual_out.cast(),
            gamma: self.gamma.as_ptr().cast(),
            normed: rows.cast(),
            residual_out: residual_out.cast(),
            rows: x.len() / gamma.len(),
            width: gamma.len(),
            dtype: DType::BF16,
            eps,
            weight_bias: 0.0,
            fused: true,
        };
        // SAFETY: both outputs lie over inputs as the call allows; every buffer holds its elements (`x` and `residual` are
        // rows of the same number) until the call returns.
        unsafe { comm.all_reduce_add_rms_norm(&arguments, None)? };
        up(&self.residual, residual);
        up(&self.input, normed);
        Ok(())
    }
}
