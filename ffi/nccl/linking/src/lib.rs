//! `libpeerlane_nccl.so`: for callers that are given a path (`SGLANG_NCCL_SO_PATH`, `VLLM_NCCL_SO_PATH`). It needs `libnccl.so.2`,
//! so that a function which it does not define is found there, whatever the version.
#![allow(missing_docs, non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]

use peerlane_nccl_core::define_intercepted;
use peerlane_nccl_core::types::*;
use peerlane_nccl_core::Variant;
use std::ffi::{c_char, c_int, c_void};

const VARIANT: Variant = Variant::Linking;

peerlane_nccl_core::for_each_intercepted!(define_intercepted);
peerlane_nccl_core::define_stats!();
