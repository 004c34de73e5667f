//! `libnccl.so.2`: every function that NCCL exports, for processes that load it in NVIDIA's place. It looks for the real one and
//! passes on what it does not serve; without one it serves a part of the API by itself.
#![allow(missing_docs, non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]

use peerlane_nccl_core::types::*;
use peerlane_nccl_core::Variant;
use peerlane_nccl_core::{define_forwarded, define_intercepted, define_twins};
use std::ffi::{c_char, c_int, c_uint, c_void};

const VARIANT: Variant = Variant::Full;

peerlane_nccl_core::for_each_intercepted!(define_intercepted);
peerlane_nccl_core::for_each_forwarded!(define_forwarded);
peerlane_nccl_core::for_each_intercepted!(define_twins);
peerlane_nccl_core::for_each_forwarded!(define_twins);
peerlane_nccl_core::define_stats!();
