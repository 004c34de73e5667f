//! One collective as the caller made it: an all-reduce, with or without add + RMSNorm, or another.

use crate::error::{Error, Result};
use crate::launch::pl_step;
use crate::schedule::Goal;
use crate::types::{DType, Op, PACK_BYTES};
use std::ffi::c_void;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub input: *const c_void,
    pub output: *mut c_void,
    pub count: usize,
    pub dtype: DType,
    pub op: Op,
    /// What follows the sum; `output` is then the normed one.
    pub norm: Option<Norm>,
    /// None for an all-reduce.
    pub other: Option<Other>,
}

/// Another collective than an all-reduce. `count` is then that of a rank's part, or of what is broadcast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Other {
    pub goal: Goal,
    pub ranks: usize,
    pub rank: usize,
    /// Of a part of the work: bytes from one part to the next in the input and in the output; none where it is in one piece.
    pub parts: Option<[u64; 2]>,
}

/// A copy that is this rank's own business: from where, to where, how many bytes.
pub(crate) type OwnCopy = (*const c_void, *mut c_void, usize);

/// Residual add and RMSNorm over the rows of the sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm {
    pub residual: *const c_void,
    pub gamma: *const c_void,
    pub residual_out: *mut c_void,
    pub rows: usize,
    pub width: usize,
    pub eps: f32,
    pub weight_bias: f32,
    /// In the kernel of the all-reduce, or in one of its own after it.
    pub fused: bool,
}

/// Up to it a width is exact in fp32.
const MAX_WIDTH: usize = 1 << 24;

// SAFETY: the caller of `all_reduce` promises that the buffers are good until the work is done, on whatever thread it is
// done; nothing else is shared through these addresses.
unsafe impl Send for Call {}

impl Call {
    /// Bytes of the message; checked by `validate`.
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// What of the result this rank has itself.
    pub fn own_copy(&self) -> Option<OwnCopy> {
        let Other { goal, rank, .. } = self.other?;
        let to = match goal {
            Goal::Broadcast { root } if usize::from(root) == rank => self.output,
            Goal::AllGather => self.output.wrapping_byte_add(rank * self.bytes()),
            _ => return None,
        };
        (to.cast_const() != self.input && self.count > 0).then_some((self.input, to, self.bytes()))
    }

    /// Rows and their width, if they are normed in the kernel of the all-reduce.
    pub fn rows(&self) -> Option<(u64, u64)> {
        let fused = self.norm.filter(|norm| norm.fused)?;
        Some((fused.rows as u64, fused.width as u64))
    }

    /// The norm, if it takes a kernel of its own after the all-reduce.
    pub fn norm_after(&self) -> Option<&Norm> {
        self.norm.as_ref().filter(|norm| !norm.fused)
    }

    /// Fills the outputs from element `from` on with what no result is: NaN, or zero for integers. A caller who reads on
    /// after an error must not find old data, or its own input, and take it for a result.
    pub fn fill_failed(&self, from: usize) {
        // Sums that nobody will norm are no result either.
        let from = if self.norm_after().is_some() { 0 } else { from };
        let outputs = [Some(self.output), self.norm.map(|norm| norm.residual_out)];
        for output in outputs.into_iter().flatten() {
            self.fill(output, from);
        }
        if let Some(Other { goal: Goal::AllGather, ranks, .. }) = self.other {
            (1..ranks).for_each(|part| {
                self.fill(self.output.wrapping_byte_add(part * self.bytes()), from);
            });
        }
    }

    fn fill(&self, output: *mut c_void, from: usize) {
        let size = self.dtype.size();
        let nan: &[u8] = match self.dtype {
            DType::F16 | DType::BF16 => &0x7fffu16.to_ne_bytes(),
            DType::F32 => &0x7fff_ffffu32.to_ne_bytes(),
            DType::F64 => &0x7fff_ffff_ffff_ffffu64.to_ne_bytes(),
            _ => &[0; 8][..size],
        };
        for i in from..self.count {
            // SAFETY: element `i` of an output, which the caller gave to be written.
            unsafe {
                let to = output.cast::<u8>().add(i * size);
                to.copy_from_nonoverlapping(nan.as_ptr(), size);
            }
        }
    }

    pub fn validate(&self) -> Result<()> {
        let bytes = self
            .count
            .checked_mul(self.dtype.size())
            .filter(|&b| b <= isize::MAX as usize)
            .ok_or_else(|| {
                Error::InvalidArgument(format!(
                    "count {} of {} overflows the address space",
                    self.count, self.dtype
                ))
            })?;
        if let Some(norm) = &self.norm {
            norm.validate(self.dtype)?;
        }
        if bytes == 0 {
            return Ok(());
        }
        if let Some(norm) = &self.norm {
            return norm.validate_buffers(self, bytes);
        }
        let mut input = Buffer { name: "input", at: self.input as usize, bytes };
        let mut output = Buffer { name: "output", at: self.output as usize, bytes };
        let Some(other) = self.other else {
            input.validate(self)?;
            output.validate(self)?;
            return input.same_or_apart(&output);
        };
        let all = bytes.checked_mul(other.ranks).filter(|&all| all <= isize::MAX as usize);
        let all = all.ok_or_else(|| {
            Error::InvalidArgument(format!(
                "{} parts of {} {} overflow the address space",
                other.ranks, self.count, self.dtype
            ))
        })?;
        let in_place = match other.goal {
            Goal::AllGather => {
                output.bytes = all;
                Some(input.at) == output.at.checked_add(other.rank * bytes)
            }
            Goal::ReduceScatter => {
                input.bytes = all;
                Some(output.at) == input.at.checked_add(other.rank * bytes)
            }
            // Only the root's input is looked at.
            Goal::Broadcast { root } if usize::from(root) != other.rank => {
                return output.validate(self);
            }
            _ => input.at == output.at,
        };
        input.validate(self)?;
        output.validate(self)?;
        match in_place {
            true => Ok(()),
            false => input.refuse_overlap(&output, "apart, or this rank's part the same in both"),
        }
    }
}

impl Norm {
    /// Elements of the message.
    pub fn count(&self) -> Result<usize> {
        self.rows.checked_mul(self.width).ok_or_else(|| {
            Error::InvalidArgument(format!(
                "{} rows of {} elements overflow the address space",
                self.rows, self.width
            ))
        })
    }

    /// Points a step's arguments at its part, `count` elements from element `done` of the call.
    pub fn prepare(&self, step: &mut pl_step, dtype: DType, done: u64, count: u64) {
        let offset = done as usize * dtype.size();
        step.count = count;
        step.rows = count / self.width as u64;
        step.width = self.width as u64;
        step.residual = self.residual.wrapping_byte_add(offset);
        step.gamma = self.gamma;
        step.residual_out = self.residual_out.wrapping_byte_add(offset);
        step.eps = self.eps;
        step.weight_bias = self.weight_bias;
    }

    fn validate(&self, dtype: DType) -> Result<()> {
        let refuse = |why: String| Err(Error::InvalidArgument(why));
        if !matches!(dtype, DType::F16 | DType::BF16) {
            return refuse(format!(
                "add + RMSNorm of {dtype}; it is there for {} and {}",
                DType::F16,
                DType::BF16
            ));
        }
        let per_pack = PACK_BYTES / dtype.size();
        if self.width == 0 || self.width > MAX_WIDTH || !self.width.is_multiple_of(per_pack) {
            return refuse(format!(
                "width {}; a row has a multiple of {per_pack} elements, at least {per_pack} and at most {MAX_WIDTH}",
                self.width
            ));
        }
        if !(self.eps >= 0.0 && self.eps.is_finite()) {
            return refuse(format!("eps {}; it must be 0 or a positive number", self.eps));
        }
        if !self.weight_bias.is_finite() {
            return refuse(format!("weight_bias {}; it must be a finite number", self.weight_bias));
        }
        Ok(())
    }

    fn validate_buffers(&self, call: &Call, bytes: usize) -> Result<()> {
        let whole = |name, at| Buffer { name, at, bytes };
        let input = whole("input", call.input as usize);
        let residual = whole("residual", self.residual as usize);
        let normed = whole("normed", call.output as usize);
        let residual_out = whole("residual_out", self.residual_out as usize);
        let gamma = Buffer {
            name: "gamma",
            at: self.gamma as usize,
            bytes: self.width * call.dtype.size(),
        };
        for buffer in [&input, &residual, &gamma, &normed, &residual_out] {
            buffer.validate(call)?;
        }
        // What is written lies over nothing else, with three exceptions.
        input.same_or_apart(&normed)?;
        input.same_or_apart(&residual_out)?;
        residual.same_or_apart(&residual_out)?;
        for (written, other) in [
            (&normed, &residual),
            (&normed, &residual_out),
            (&normed, &gamma),
            (&residual_out, &gamma),
        ] {
            written.apart(other)?;
        }
        Ok(())
    }
}

/// Part of the caller's memory.
struct Buffer {
    name: &'static str,
    at: usize,
    bytes: usize,
}

impl Buffer {
    fn validate(&self, call: &Call) -> Result<()> {
        let Buffer { name, at, bytes } = *self;
        if at == 0 {
            return Err(Error::InvalidArgument(format!(
                "{name} is null, but count is {}; only an empty call may pass null",
                call.count
            )));
        }
        if at % call.dtype.size() != 0 {
            return Err(Error::InvalidArgument(format!(
                "{name} {at:#x} is not aligned to the {} bytes of one {}",
                call.dtype.size(),
                call.dtype
            )));
        }
        if at.checked_add(bytes).is_none() {
            return Err(Error::InvalidArgument(format!(
                "{name} {at:#x} plus {bytes} bytes overflows the address space"
            )));
        }
        Ok(())
    }

    fn overlaps(&self, other: &Buffer) -> bool {
        self.at < other.at + other.bytes && other.at < self.at + self.bytes
    }

    fn same_or_apart(&self, other: &Buffer) -> Result<()> {
        if self.at == other.at {
            return Ok(());
        }
        self.refuse_overlap(other, "the same or apart")
    }

    fn apart(&self, other: &Buffer) -> Result<()> {
        self.refuse_overlap(other, "apart")
    }

    fn refuse_overlap(&self, other: &Buffer, demand: &str) -> Result<()> {
        if !self.overlaps(other) {
            return Ok(());
        }
        Err(Error::InvalidArgument(format!(
            "{} {:#x} and {} {:#x} overlap within {} bytes; they must be {demand}",
            self.name, self.at, other.name, other.at, self.bytes
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(input: usize, output: usize, count: usize, dtype: DType) -> String {
        let (input, output) = (input as _, output as _);
        let call = Call { input, output, count, dtype, op: Op::Sum, norm: None, other: None };
        call.validate().map_or_else(|e| e.to_string(), |()| String::new())
    }

    #[test]
    fn in_place_and_apart_are_fine_and_so_is_null_when_empty() {
        assert_eq!(check(64, 64, 4, DType::F32), "");
        assert_eq!(check(64, 80, 4, DType::F32), "");
        assert_eq!(check(0, 0, 0, DType::F32), "");
    }

    #[test]
    fn each_mistake_is_named() {
        assert!(check(0, 64, 1, DType::F32).contains("input is null"));
        assert!(check(64, 0, 1, DType::F32).contains("output is null"));
        assert!(check(64, 76, 4, DType::F32).contains("overlap"));
        assert!(check(76, 64, 4, DType::F32).contains("overlap"));
        assert!(check(66, 128, 4, DType::F32).contains("not aligned"));
        assert!(check(64, 128, usize::MAX, DType::F64).contains("overflows"));
        assert!(check(usize::MAX - 7, 64, 4, DType::F64).contains("overflows"));
    }

    /// Rows of 8 bf16, two of them: 32 bytes each buffer, 16 of gamma.
    fn normed() -> (Call, Norm) {
        let norm = Norm {
            residual: 128 as _,
            gamma: 192 as _,
            residual_out: 320 as _,
            rows: 2,
            width: 8,
            eps: 1e-6,
            weight_bias: 0.0,
            fused: true,
        };
        let (input, output) = (64 as _, 256 as _);
        let call = Call {
            input,
            output,
            count: 16,
            dtype: DType::BF16,
            op: Op::Sum,
            norm: None,
            other: None,
        };
        (call, norm)
    }

    fn check_norm(change: impl Fn(&mut Call, &mut Norm)) -> String {
        let (mut call, mut norm) = normed();
        change(&mut call, &mut norm);
        match norm.count() {
            Ok(count) => call.count = count,
            Err(e) => return e.to_string(),
        }
        call.norm = Some(norm);
        call.validate().map_or_else(|e| e.to_string(), |()| String::new())
    }

    #[test]
    fn outputs_lie_over_inputs_in_the_named_ways() {
        assert_eq!(check_norm(|_, _| ()), "");
        assert_eq!(check_norm(|c, _| c.output = 64 as _), "", "normed over input");
        assert_eq!(check_norm(|_, n| n.residual_out = 128 as _), "", "residual in place");
        assert_eq!(check_norm(|_, n| n.residual_out = 64 as _), "", "residual_out over input");
        assert_eq!(
            check_norm(|c, n| (c.output, n.residual_out) = (64 as _, 128 as _)),
            "",
            "both in place"
        );
        assert_eq!(check_norm(|_, n| n.residual = 64 as _), "", "one operand twice");
        assert_eq!(
            check_norm(|c, n| {
                (n.rows, c.input, c.output) = (0, std::ptr::null(), std::ptr::null_mut())
            }),
            "",
            "empty"
        );
    }

    #[test]
    fn each_mistake_of_a_norm_is_named() {
        for (text, said) in [
            ("normed 0x80 and residual", check_norm(|c, _| c.output = 128 as _)),
            ("normed 0x100 and residual_out", check_norm(|_, n| n.residual_out = 256 as _)),
            ("normed 0x100 and gamma", check_norm(|_, n| n.gamma = 272 as _)),
            ("residual_out 0x140 and gamma", check_norm(|_, n| n.gamma = 336 as _)),
            ("input 0x40 and normed 0x50", check_norm(|c, _| c.output = 80 as _)),
            ("input 0x40 and residual_out 0x50", check_norm(|_, n| n.residual_out = 80 as _)),
            ("residual 0x80 and residual_out 0x90", check_norm(|_, n| n.residual_out = 144 as _)),
            ("gamma is null", check_norm(|_, n| n.gamma = std::ptr::null())),
            ("residual is null", check_norm(|_, n| n.residual = std::ptr::null())),
            ("residual_out is null", check_norm(|_, n| n.residual_out = std::ptr::null_mut())),
            ("normed is null", check_norm(|c, _| c.output = std::ptr::null_mut())),
            ("gamma 0xc1 is not aligned", check_norm(|_, n| n.gamma = 193 as _)),
            ("width 12", check_norm(|_, n| n.width = 12)),
            ("width 0", check_norm(|_, n| n.width = 0)),
            ("width 16777224", check_norm(|_, n| n.width = MAX_WIDTH + 8)),
            ("RMSNorm of float;", check_norm(|c, _| c.dtype = DType::F32)),
            ("eps -1", check_norm(|_, n| n.eps = -1.0)),
            ("eps NaN", check_norm(|_, n| n.eps = f32::NAN)),
            ("weight_bias inf", check_norm(|_, n| n.weight_bias = f32::INFINITY)),
            ("overflow", check_norm(|_, n| n.rows = usize::MAX)),
        ] {
            assert!(said.contains(text), "{text}: {said}");
        }
    }
}
