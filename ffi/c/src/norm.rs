//! `peerlane_add_rms_norm`: the arguments of the fused operation.

use crate::arguments::{enumerator, null, Argument};
use crate::status::{Failure, Outcome};
use crate::structs::read_struct;
use peerlane_core::comm::AddRmsNorm;
use peerlane_core::DType;
use std::ffi::c_void;
use std::mem::size_of;

/// `peerlane_add_rms_norm` of the header.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RawAddRmsNorm {
    pub(crate) size: usize,
    pub(crate) input: *const c_void,
    pub(crate) residual: *const c_void,
    pub(crate) gamma: *const c_void,
    pub(crate) normed: *mut c_void,
    pub(crate) residual_out: *mut c_void,
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) dtype: i32,
    pub(crate) eps: f32,
    pub(crate) weight_bias: f32,
    pub(crate) unfused: i32,
}

impl RawAddRmsNorm {
    /// Every field of the first version is there in all, so none of these values is ever used.
    const UNSET: RawAddRmsNorm = RawAddRmsNorm {
        size: 0,
        input: std::ptr::null(),
        residual: std::ptr::null(),
        gamma: std::ptr::null(),
        normed: std::ptr::null_mut(),
        residual_out: std::ptr::null_mut(),
        rows: 0,
        width: 0,
        dtype: 0,
        eps: 0.0,
        weight_bias: 0.0,
        unfused: 0,
    };
    /// Bytes of the first version of the struct.
    const FIRST: usize = size_of::<RawAddRmsNorm>();
}

/// The same as the library takes it.
pub struct AddRmsNormIn(pub AddRmsNorm);

impl Argument for AddRmsNormIn {
    type Raw = *const RawAddRmsNorm;
    unsafe fn check(raw: *const RawAddRmsNorm, name: &'static str) -> Outcome<Self> {
        if raw.is_null() {
            return Err(null(name));
        }
        let (first, unset) = (RawAddRmsNorm::FIRST, RawAddRmsNorm::UNSET);
        let remedy = "set it to sizeof(peerlane_add_rms_norm)";
        // SAFETY: the caller's promise, and every bit pattern is a value of the fields' types.
        let raw = unsafe { read_struct(raw, name, first, remedy, unset) }?;
        let fused = match raw.unfused {
            0 => true,
            1 => false,
            other => {
                return Err(Failure::argument(format!(
                    "'{name}->unfused' is {other}; it takes 0 or 1"
                )))
            }
        };
        Ok(AddRmsNormIn(AddRmsNorm {
            input: raw.input,
            residual: raw.residual,
            gamma: raw.gamma,
            normed: raw.normed,
            residual_out: raw.residual_out,
            rows: raw.rows,
            width: raw.width,
            dtype: enumerator(raw.dtype, &format!("{name}->dtype"), DType::from_raw)?,
            eps: raw.eps,
            weight_bias: raw.weight_bias,
            fused,
        }))
    }
}
