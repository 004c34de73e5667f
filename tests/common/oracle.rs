//! The naive all-reduce: one element at a time, along the balanced tree, rounded once. Elements are bit patterns.

use half::{bf16, f16};
use peerlane::{DType, Op};

/// Sums (or whatever `op` says) the ranks' elements and gives the bits that every rank must see.
pub fn reduce(dtype: DType, op: Op, inputs: &[u64]) -> u64 {
    let n = inputs.len();
    match dtype {
        DType::F16 => {
            let leaves: Vec<f32> =
                inputs.iter().map(|&b| f16::from_bits(b as u16).to_f32()).collect();
            let v = average(op, tree(&leaves, &|a, b| float(op, a, b)), n as f32);
            if v.is_nan() {
                0x7fff
            } else {
                f16::from_f32(v).to_bits() as u64
            }
        }
        DType::BF16 => {
            let leaves: Vec<f32> =
                inputs.iter().map(|&b| bf16::from_bits(b as u16).to_f32()).collect();
            let v = average(op, tree(&leaves, &|a, b| float(op, a, b)), n as f32);
            if v.is_nan() {
                0x7fff
            } else {
                bf16::from_f32(v).to_bits() as u64
            }
        }
        DType::F32 => {
            let leaves: Vec<f32> = inputs.iter().map(|&b| f32::from_bits(b as u32)).collect();
            let v = average(op, tree(&leaves, &|a, b| float(op, a, b)), n as f32);
            if v.is_nan() {
                0x7fff_ffff
            } else {
                v.to_bits() as u64
            }
        }
        DType::F64 => {
            let leaves: Vec<f64> = inputs.iter().map(|&b| f64::from_bits(b)).collect();
            let v = average(op, tree(&leaves, &|a, b| float(op, a, b)), n as f64);
            if v.is_nan() {
                0x7fff_ffff_ffff_ffff
            } else {
                v.to_bits()
            }
        }
        _ => {
            let leaves: Vec<i128> = inputs.iter().map(|&b| wrap(dtype, b as i128)).collect();
            let v = tree(&leaves, &|a, b| integer(dtype, op, a, b));
            let v = if op == Op::Avg { v / n as i128 } else { v };
            v as u64 & (u64::MAX >> (64 - 8 * dtype.size()))
        }
    }
}

/// The first half of the leaves (rounded up), then the rest.
fn tree<T: Copy>(leaves: &[T], combine: &dyn Fn(T, T) -> T) -> T {
    match leaves {
        [one] => *one,
        _ => {
            let (a, b) = leaves.split_at(leaves.len().div_ceil(2));
            combine(tree(a, combine), tree(b, combine))
        }
    }
}

fn average<T: std::ops::Div<Output = T>>(op: Op, v: T, n: T) -> T {
    if op == Op::Avg {
        v / n
    } else {
        v
    }
}

trait Float: Copy + PartialOrd + std::ops::Add<Output = Self> + std::ops::Mul<Output = Self> {
    fn negative(self) -> bool;
}
impl Float for f32 {
    fn negative(self) -> bool {
        self.is_sign_negative()
    }
}
impl Float for f64 {
    fn negative(self) -> bool {
        self.is_sign_negative()
    }
}

#[allow(clippy::eq_op)]
fn float<T: Float>(op: Op, a: T, b: T) -> T {
    match op {
        Op::Sum | Op::Avg => a + b,
        Op::Prod => a * b,
        Op::Min | Op::Max if a != a => b,
        Op::Min | Op::Max if b != b => a,
        Op::Min if a == b => {
            if a.negative() {
                a
            } else {
                b
            }
        }
        Op::Max if a == b => {
            if a.negative() {
                b
            } else {
                a
            }
        }
        Op::Min => {
            if a < b {
                a
            } else {
                b
            }
        }
        Op::Max => {
            if a > b {
                a
            } else {
                b
            }
        }
    }
}

fn wrap(dtype: DType, v: i128) -> i128 {
    match dtype {
        DType::I8 => v as i8 as i128,
        DType::U8 => v as u8 as i128,
        DType::I32 => v as i32 as i128,
        DType::U32 => v as u32 as i128,
        DType::I64 => v as i64 as i128,
        _ => v as u64 as i128,
    }
}

fn integer(dtype: DType, op: Op, a: i128, b: i128) -> i128 {
    match op {
        Op::Sum | Op::Avg => wrap(dtype, a + b),
        Op::Prod => wrap(dtype, a.wrapping_mul(b)),
        Op::Min => a.min(b),
        Op::Max => a.max(b),
    }
}
