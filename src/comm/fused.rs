//! The all-reduce with what follows it in a transformer layer: residual add and RMSNorm.

use super::call::{Call, Norm};
use super::Communicator;
use crate::device::Stream;
use crate::error::Result;
use crate::types::{DType, Op};
use std::ffi::c_void;

/// The arguments of [`Communicator::all_reduce_add_rms_norm`]. All matrices are row-major, `rows` x `width`, of `dtype`.
///
/// Outputs may lie over inputs in these ways and no other: `normed` over `input`; `residual_out` over `residual`, or over
/// `input` if `normed` is elsewhere. Whatever overlaps otherwise, in whole or in part, is refused where one of the two
/// is written.
#[derive(Clone, Copy, Debug)]
pub struct AddRmsNorm {
    /// What is summed over the ranks.
    pub input: *const c_void,
    /// Added to the sum; the same on all ranks where they are to agree on the result.
    pub residual: *const c_void,
    /// `width` weights.
    pub gamma: *const c_void,
    /// The normed rows.
    pub normed: *mut c_void,
    /// Sum plus residual, the next layer's residual.
    pub residual_out: *mut c_void,
    /// Rows, often called tokens. Any number; 0 is an empty call.
    pub rows: usize,
    /// Elements of a row, a multiple of 8.
    pub width: usize,
    /// [`DType::F16`] or [`DType::BF16`].
    pub dtype: DType,
    /// Added to the mean of the squares; not negative.
    pub eps: f32,
    /// Added to each weight: 1 for models that store gamma less one, else 0.
    pub weight_bias: f32,
    /// `true`: one kernel does all of it. `false`: an all-reduce into `normed` and a kernel of this rank's own after it, which
    /// gives the same bits and has no limit on `width` but its 2^24.
    pub fused: bool,
}

impl AddRmsNorm {
    fn call(&self) -> Result<Call> {
        let norm = Norm {
            residual: self.residual,
            gamma: self.gamma,
            residual_out: self.residual_out,
            rows: self.rows,
            width: self.width,
            eps: self.eps,
            weight_bias: self.weight_bias,
            fused: self.fused,
        };
        Ok(Call {
            input: self.input,
            output: self.normed,
            count: norm.count()?,
            dtype: self.dtype,
            op: Op::Sum,
            norm: Some(norm),
            other: None,
        })
    }
}

impl Communicator {
    /// All-reduce, residual add and RMSNorm in one:
    ///
    /// ```text
    /// s            = round(sum of input over the ranks)      as all_reduce gives it
    /// residual_out = round(s + residual)
    /// normed       = round(residual_out * 1/sqrt(mean(residual_out^2) + eps) * (gamma + weight_bias))
    /// ```
    ///
    /// `round` is to `dtype`; all else is fp32, the mean over the rounded `residual_out` of a row, summed in an order that the
    /// width alone decides. So all ranks with the same `residual` and `gamma` get the same bits, fused or not, on a GPU or a
    /// CPU, by whichever algorithm. Ranks must agree on rows, width, dtype and `fused`; the rest is each rank's own.
    ///
    /// Streams, groups, return and errors are as for [`all_reduce`](Self::all_reduce). After an error of the communicator both
    /// outputs hold NaN wherever the result is not known; where `residual_out` is `residual`, that is all that is left of the
    /// old residual, so a caller who means to go on with a new communicator keeps a copy.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a null pointer, a width that is 0, above 2^24 or no
    /// multiple of 8, a data type without this operation, an eps that is negative or not finite, buffers that overlap in
    /// another way than those named at [`AddRmsNorm`]; [`Error::Unsupported`](crate::Error::Unsupported) where a fused row is
    /// too wide for the slab. Both leave everything untouched.
    ///
    /// # Safety
    /// `input`, `residual` and `gamma` are readable and `normed` and `residual_out` writable for their elements until the work
    /// is done. Inside a group, `stream` lives until the outermost [`group_end`](super::group_end).
    pub unsafe fn all_reduce_add_rms_norm(
        &self,
        arguments: &AddRmsNorm,
        stream: Option<&Stream>,
    ) -> Result<()> {
        let queue = self.queue(stream)?;
        self.call(&arguments.call()?, queue)
    }

    /// The same on a CUDA stream and channel; see [`all_reduce_cuda`](Self::all_reduce_cuda). The unfused form launches one
    /// kernel more.
    ///
    /// # Safety
    /// As for [`all_reduce_add_rms_norm`](Self::all_reduce_add_rms_norm), in device memory; the work is done when the stream,
    /// or every replay of the graph, has passed it. `stream` lives.
    #[cfg(feature = "cuda")]
    pub unsafe fn all_reduce_add_rms_norm_cuda(
        &self,
        arguments: &AddRmsNorm,
        stream: *mut c_void,
        channel: Option<usize>,
    ) -> Result<()> {
        let queue = self.cuda_queue(stream, channel)?;
        self.call(&arguments.call()?, queue)
    }
}
