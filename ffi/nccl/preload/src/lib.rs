//! `libpeerlane_preload.so`: stands before the real NCCL in the search order of a process (`LD_PRELOAD`). It is not linked to
//! NCCL: where NCCL is on no path, every program would fail to start.
#![allow(missing_docs, non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]

use peerlane_nccl_core::types::*;
use peerlane_nccl_core::Variant;
use peerlane_nccl_core::{define_forwarded, define_intercepted, define_twins};
use std::ffi::{c_char, c_int, c_uint, c_void};

const VARIANT: Variant = Variant::Preload;

peerlane_nccl_core::for_each_intercepted!(define_intercepted);
peerlane_nccl_core::for_each_forwarded!(define_forwarded);
peerlane_nccl_core::for_each_intercepted!(define_twins);
peerlane_nccl_core::for_each_forwarded!(define_twins);
peerlane_nccl_core::define_stats!();
