//! How collectives are carried out: each by a schedule of its own.

use super::{Made, Own};
use crate::types::*;
use peerlane_core::comm::{group_end, group_start};
use peerlane_core::plan::DeviceKind;
use peerlane_core::{DType, Op, Result};
use std::ffi::c_void;
use std::sync::Arc;

#[derive(Clone, Copy)]
pub enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast { root: usize },
}

/// A collective as the caller made it. `count` is that of NCCL's function.
#[derive(Clone, Copy)]
pub struct Job {
    pub kind: Kind,
    pub input: *const c_void,
    pub output: *mut c_void,
    pub count: usize,
    pub dtype: DType,
    pub op: Op,
    pub stream: cudaStream_t,
}

/// All jobs of a group; those of several ranks of one thread wait for each other.
pub fn run(jobs: &[(Arc<Own>, Job)]) -> Result<()> {
    // A communicator that is not there yet is found before anything starts.
    for (own, _) in jobs {
        own.made()?;
    }
    group_start();
    let mut result = Ok(());
    for (own, job) in jobs {
        // SAFETY: NCCL's rules for the buffers, which the caller keeps.
        result = result.and(own.made().and_then(|made| unsafe { start(made, job) }));
    }
    result.and(group_end())
}

unsafe fn start(made: &Made, job: &Job) -> Result<()> {
    let Made { comm, .. } = made;
    let Job { input, output, count, dtype, op, .. } = *job;
    match comm.device_kind() {
        // SAFETY: the caller's promise.
        DeviceKind::Cpu => unsafe {
            match job.kind {
                Kind::AllReduce => comm.all_reduce(input, output, count, dtype, op, None),
                Kind::AllGather => comm.all_gather(input, output, count, dtype, None),
                Kind::ReduceScatter => comm.reduce_scatter(input, output, count, dtype, op, None),
                Kind::Broadcast { root } => comm.broadcast(input, output, count, dtype, root, None),
            }
        },
        #[cfg(feature = "cuda")]
        DeviceKind::Gpu => {
            let at = job.stream.cast();
            // SAFETY: the caller's promise.
            unsafe {
                match job.kind {
                    Kind::AllReduce => {
                        comm.all_reduce_cuda(input, output, count, dtype, op, at, None)
                    }
                    Kind::AllGather => comm.all_gather_cuda(input, output, count, dtype, at, None),
                    Kind::ReduceScatter => {
                        comm.reduce_scatter_cuda(input, output, count, dtype, op, at, None)
                    }
                    Kind::Broadcast { root } => {
                        comm.broadcast_cuda(input, output, count, dtype, root, at, None)
                    }
                }
            }
        }
        #[cfg(not(feature = "cuda"))]
        DeviceKind::Gpu => Err(peerlane_core::Error::Internal(
            "a communicator on a GPU in a library without CUDA".into(),
        )),
    }
}
