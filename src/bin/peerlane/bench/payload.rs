//! What the ranks reduce, and what must come out.
//!
//! The numbers are small integers, so that every operation is exact in every data type whatever the order in which it is
//! applied; then equality of bits is the only check. They depend on the seed, the call, the rank and the element: a result
//! left from an earlier call, a rank counted twice or a piece in the wrong place all show.
//! `benches/rivals/mpi.c` draws the same numbers.

use bytemuck::Pod;
use half::{bf16, f16};
use peerlane::types::MAX_RANKS;
use peerlane::{DType, Op};

/// A data type of the table, as a Rust type.
pub trait Element: Pod {
    /// The small integer `value`.
    fn of(value: i64) -> Self;
    /// `sum / n`: rounded once where the type has fractions, else cut off.
    fn quotient(sum: i64, n: i64) -> Self;
}

macro_rules! integer {
    ($($t:ty)*) => { $(impl Element for $t {
        fn of(value: i64) -> Self { value as $t }
        fn quotient(sum: i64, n: i64) -> Self { (sum / n) as $t }
    })* };
}
integer!(i8 u8 i32 u32 i64 u64);

impl Element for f32 {
    fn of(value: i64) -> Self {
        value as f32
    }
    fn quotient(sum: i64, n: i64) -> Self {
        sum as f32 / n as f32
    }
}

impl Element for f64 {
    fn of(value: i64) -> Self {
        value as f64
    }
    fn quotient(sum: i64, n: i64) -> Self {
        sum as f64 / n as f64
    }
}

macro_rules! half_float {
    ($($t:ty)*) => { $(impl Element for $t {
        fn of(value: i64) -> Self { <$t>::from_f32(value as f32) }
        fn quotient(sum: i64, n: i64) -> Self { <$t>::from_f32(f32::quotient(sum, n)) }
    })* };
}
half_float!(f16 bf16);

/// Runs `$body` with `$t` as the Rust type of `$dtype`.
macro_rules! with_element {
    ($dtype:expr, $t:ident => $body:expr) => {{
        macro_rules! arm {
            ($rust:ty) => {{
                type $t = $rust;
                $body
            }};
        }
        match $dtype {
            DType::I8 => arm!(i8),
            DType::U8 => arm!(u8),
            DType::I32 => arm!(i32),
            DType::U32 => arm!(u32),
            DType::I64 => arm!(i64),
            DType::U64 => arm!(u64),
            DType::F16 => arm!(f16),
            DType::F32 => arm!(f32),
            DType::F64 => arm!(f64),
            DType::BF16 => arm!(bf16),
        }
    }};
}

/// The numbers of one call, of all its ranks.
pub struct Payload {
    ranks: usize,
    dtype: DType,
    op: Op,
    signed: bool,
    /// `keys[r]` for rank r; the last one for what the ranks of an element share.
    keys: [u64; MAX_RANKS + 1],
}

impl Payload {
    /// The numbers of call number `call`.
    pub fn new(seed: u64, call: u64, ranks: usize, dtype: DType, op: Op) -> Self {
        let base = mix(mix(seed) ^ call);
        let keys = std::array::from_fn(|r| mix(base.wrapping_add(r as u64 + 1)));
        let signed = !matches!(dtype, DType::U8 | DType::U32 | DType::U64);
        Payload { ranks, dtype, op, signed, keys }
    }

    /// Element `i` of rank `rank`. Sums of 16 stay within -64..=112, products within -15..=15.
    pub fn value(&self, rank: usize, i: u64) -> i64 {
        let own = mix(self.keys[rank] ^ i);
        match self.op {
            Op::Sum | Op::Avg => (own & 7) as i64 - if self.signed { 4 } else { 0 },
            Op::Max | Op::Min => (own & 127) as i64 - if self.signed { 64 } else { 0 },
            Op::Prod => {
                // At most two ranks of an element differ from 1, so that the product fits into 8 bits.
                let shared = mix(self.keys[MAX_RANKS] ^ i);
                let n = self.ranks as u64;
                let mut factor = 1;
                if (shared & 0xffff) % n == rank as u64 {
                    factor *= 2 + (shared >> 32 & 1) as i64;
                }
                if (shared >> 16 & 0xffff) % n == rank as u64 {
                    factor *= 3 + 2 * (shared >> 33 & 1) as i64;
                }
                if self.signed && own & 1 == 1 {
                    -factor
                } else {
                    factor
                }
            }
        }
    }

    /// Element `i` of the sum of all ranks.
    #[cfg(feature = "cuda")]
    pub fn sum(&self, i: u64) -> i64 {
        (0..self.ranks).map(|rank| self.value(rank, i)).sum()
    }

    /// Element `i` of the result, from first principles.
    fn expected<T: Element>(&self, i: u64) -> T {
        let values = (0..self.ranks).map(|rank| self.value(rank, i));
        match self.op {
            Op::Sum => T::of(values.sum()),
            Op::Prod => T::of(values.product()),
            Op::Max => T::of(values.max().unwrap_or(0)),
            Op::Min => T::of(values.min().unwrap_or(0)),
            Op::Avg => T::quotient(values.sum(), self.ranks as i64),
        }
    }

    /// Writes what `rank` contributes.
    pub fn fill(&self, rank: usize, bytes: &mut [u8]) {
        with_element!(self.dtype, T => {
            for (i, x) in bytemuck::cast_slice_mut::<u8, T>(bytes).iter_mut().enumerate() {
                *x = T::of(self.value(rank, i as u64));
            }
        });
    }

    /// How many elements differ from what `rank` contributes.
    pub fn wrong_input(&self, rank: usize, bytes: &[u8]) -> u64 {
        with_element!(self.dtype, T => differing::<T>(bytes, |i| T::of(self.value(rank, i))))
    }

    /// How many elements differ from the result.
    pub fn wrong_output(&self, bytes: &[u8]) -> u64 {
        with_element!(self.dtype, T => differing::<T>(bytes, |i| self.expected::<T>(i)))
    }
}

fn differing<T: Element>(bytes: &[u8], expected: impl Fn(u64) -> T) -> u64 {
    bytemuck::cast_slice::<u8, T>(bytes)
        .iter()
        .enumerate()
        .filter(|(i, x)| bytemuck::bytes_of(*x) != bytemuck::bytes_of(&expected(*i as u64)))
        .count() as u64
}

fn mix(mut x: u64) -> u64 {
    x ^= x >> 32;
    x = x.wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^= x >> 29;
    x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^ x >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A result computed rank by rank in the type itself, as a library would.
    fn reduce<T: Element + PartialOrd>(inputs: &[Vec<u8>], apply: impl Fn(T, T) -> T) -> Vec<u8> {
        let mut result = bytemuck::cast_slice::<u8, T>(&inputs[0]).to_vec();
        for input in &inputs[1..] {
            for (x, y) in result.iter_mut().zip(bytemuck::cast_slice::<u8, T>(input)) {
                *x = apply(*x, *y);
            }
        }
        bytemuck::cast_slice(&result).to_vec()
    }

    fn inputs(payload: &Payload, count: usize) -> Vec<Vec<u8>> {
        (0..payload.ranks)
            .map(|rank| {
                let mut bytes = vec![0; count * payload.dtype.size()];
                payload.fill(rank, &mut bytes);
                bytes
            })
            .collect()
    }

    #[test]
    fn reductions_in_the_type_itself_are_exact_and_one_flipped_bit_is_one_wrong_element() {
        for ranks in [1, 2, 3, 16] {
            for op in [Op::Sum, Op::Prod, Op::Max, Op::Min] {
                macro_rules! both {
                    ($dtype:expr, $t:ty) => {{
                        let payload = Payload::new(7, 3, ranks, $dtype, op);
                        let mut result =
                            reduce::<$t>(&inputs(&payload, 1000), |a: $t, b: $t| match op {
                                Op::Sum => a + b,
                                Op::Prod => a * b,
                                Op::Max => {
                                    if a > b {
                                        a
                                    } else {
                                        b
                                    }
                                }
                                _ => {
                                    if a < b {
                                        a
                                    } else {
                                        b
                                    }
                                }
                            });
                        assert_eq!(payload.wrong_output(&result), 0, "{ranks} {op} {}", $dtype);
                        result[17] ^= 1;
                        assert_eq!(payload.wrong_output(&result), 1);
                    }};
                }
                // Overflow would panic here: nothing leaves the range even of 8 bits.
                both!(DType::I8, i8);
                both!(DType::U8, u8);
                both!(DType::I32, i32);
                both!(DType::U64, u64);
                both!(DType::F16, f16);
                both!(DType::BF16, bf16);
                both!(DType::F32, f32);
                both!(DType::F64, f64);
            }
        }
    }

    #[test]
    fn averages_divide_the_sum() {
        for ranks in [1, 3, 8] {
            let payload = Payload::new(1, 1, ranks, DType::F32, Op::Avg);
            let mut sums = reduce::<f32>(&inputs(&payload, 333), |a, b| a + b);
            for x in bytemuck::cast_slice_mut::<u8, f32>(&mut sums) {
                *x /= ranks as f32;
            }
            assert_eq!(payload.wrong_output(&sums), 0);
        }
        assert_eq!(i8::quotient(-7, 4), -1);
    }

    #[test]
    fn calls_ranks_and_seeds_differ() {
        let count = 256;
        let of = |seed, call, rank: usize| {
            let payload = Payload::new(seed, call, 4, DType::I32, Op::Sum);
            inputs(&payload, count)[rank].clone()
        };
        assert_eq!(of(1, 1, 0), of(1, 1, 0));
        for other in [of(1, 2, 0), of(2, 1, 0), of(1, 1, 1)] {
            assert_ne!(of(1, 1, 0), other);
        }
        // The result of one call is wrong nearly everywhere for the next.
        let first = Payload::new(1, 1, 4, DType::I32, Op::Sum);
        let next = Payload::new(1, 2, 4, DType::I32, Op::Sum);
        let result = reduce::<i32>(&inputs(&first, count), |a, b| a + b);
        assert!(next.wrong_output(&result) > count as u64 / 2);
    }
}
