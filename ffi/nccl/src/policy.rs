//! Which all-reduce is served: a pure function of what all ranks know alike, never of pointers or of what is in a group beside
//! it, which may differ from rank to rank.

use crate::types::*;
use peerlane_core::{DType, Op};

/// Where a call goes by its kind and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Peerlane can serve it.
    Serve(DType, Op),
    /// Larger than what is served, or empty.
    Size,
    /// A type or an operation that peerlane lacks: FP8, operations made by the caller.
    Kind,
}

/// Judges one call of a communicator that serves up to so many bytes.
pub fn judge(most_bytes: u64, count: usize, dtype: ncclDataType_t, op: ncclRedOp_t) -> Verdict {
    let (Ok(dtype), Ok(op)) = (DType::from_raw(dtype), Op::from_raw(op)) else {
        return Verdict::Kind;
    };
    match count.checked_mul(dtype.size()) {
        Some(bytes) if bytes > 0 && bytes as u64 <= most_bytes => Verdict::Serve(dtype, op),
        _ => Verdict::Size,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use peerlane_core::env::ServedBytes;

    #[test]
    fn size_type_and_operation_decide() {
        let served = ServedBytes::new(vec![(2, 1024), (8, 512)]);
        let of = |n, count, dtype, op| judge(served.of(n), count, dtype, op);
        assert_eq!(of(2, 256, ncclFloat32, ncclSum), Verdict::Serve(DType::F32, Op::Sum));
        assert_eq!(of(2, 257, ncclFloat32, ncclSum), Verdict::Size);
        assert_eq!(of(8, 256, ncclFloat32, ncclSum), Verdict::Size);
        assert_eq!(of(8, 256, ncclBfloat16, ncclAvg), Verdict::Serve(DType::BF16, Op::Avg));
        assert_eq!(of(2, 0, ncclFloat32, ncclSum), Verdict::Size);
        assert_eq!(of(2, usize::MAX, ncclFloat64, ncclSum), Verdict::Size);
        assert_eq!(of(2, 4, ncclFloat8e4m3, ncclSum), Verdict::Kind);
        assert_eq!(of(2, 4, ncclFloat32, ncclNumOps), Verdict::Kind, "an operation that NCCL made");
    }
}
