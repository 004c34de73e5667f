//! One all-reduce as the caller made it.

use crate::error::{Error, Result};
use crate::types::{DType, Op};
use std::ffi::c_void;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub input: *const c_void,
    pub output: *mut c_void,
    pub count: usize,
    pub dtype: DType,
    pub op: Op,
}

// SAFETY: the caller of `all_reduce` promises that the buffers are good until the work is done, on whatever thread it is
// done; nothing else is shared through these addresses.
unsafe impl Send for Call {}

impl Call {
    /// Bytes of the message; checked by `validate`.
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Fills the output from element `from` on with what no result is: NaN, or zero for integers. A caller who reads on
    /// after an error must not find old data, or its own input, and take it for a sum.
    pub fn fill_failed(&self, from: usize) {
        let size = self.dtype.size();
        let nan: &[u8] = match self.dtype {
            DType::F16 | DType::BF16 => &0x7fffu16.to_ne_bytes(),
            DType::F32 => &0x7fff_ffffu32.to_ne_bytes(),
            DType::F64 => &0x7fff_ffff_ffff_ffffu64.to_ne_bytes(),
            _ => &[0; 8][..size],
        };
        for i in from..self.count {
            // SAFETY: element `i` of the output, which the caller of `all_reduce` gave to be written.
            unsafe {
                let to = self.output.cast::<u8>().add(i * size);
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
        if bytes == 0 {
            return Ok(());
        }
        let (input, output) = (self.input as usize, self.output as usize);
        for (name, address) in [("input", input), ("output", output)] {
            if address == 0 {
                return Err(Error::InvalidArgument(format!(
                    "{name} is null, but count is {}; only an empty call may pass null",
                    self.count
                )));
            }
            if address % self.dtype.size() != 0 {
                return Err(Error::InvalidArgument(format!(
                    "{name} {address:#x} is not aligned to the {} bytes of one {}",
                    self.dtype.size(),
                    self.dtype
                )));
            }
            if address.checked_add(bytes).is_none() {
                return Err(Error::InvalidArgument(format!(
                    "{name} {address:#x} plus {bytes} bytes overflows the address space"
                )));
            }
        }
        if input != output && input.abs_diff(output) < bytes {
            return Err(Error::InvalidArgument(format!(
                "input {input:#x} and output {output:#x} overlap within {bytes} bytes; they must be the same or apart"
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(input: usize, output: usize, count: usize, dtype: DType) -> String {
        let call = Call { input: input as _, output: output as _, count, dtype, op: Op::Sum };
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
}
