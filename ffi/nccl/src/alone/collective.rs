//! How collectives are carried out: as all-reduces.

use super::{Made, Own, Place, SCRATCH};
use crate::types::*;
use peerlane_core::comm::{group_end, group_start};
use peerlane_core::plan::DeviceKind;
use peerlane_core::{DType, Error, Op, Result};
use std::ffi::c_void;
use std::sync::{Arc, PoisonError};

#[cfg(feature = "cuda")]
use peerlane_core::device::cuda::{memory, StreamRef};

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
    // What can be seen to be wrong is found before anything starts.
    for (own, job) in jobs {
        prepare(own.made()?, job)?;
    }
    group_start();
    let mut result = Ok(());
    for (own, job) in jobs {
        result = result.and(own.made().and_then(|made| reduce(made, job)));
    }
    result.and(group_end())
}

/// The integer type that carries elements unchanged through a sum with zeros.
fn carrier(dtype: DType) -> DType {
    match dtype.size() {
        8 => DType::U64,
        4 => DType::U32,
        _ => DType::U8,
    }
}

fn total(a: usize, b: usize, c: usize) -> Result<usize> {
    let product = a.checked_mul(b).and_then(|ab| ab.checked_mul(c));
    product.filter(|&bytes| bytes <= isize::MAX as usize).ok_or_else(|| {
        Error::InvalidArgument(format!(
            "{a} times {b} elements of {c} bytes overflow the address space"
        ))
    })
}

/// Puts this rank's part into the output, and zeros beside it.
fn prepare(made: &Made, job: &Job) -> Result<()> {
    let (n, rank, size) = (made.comm.size(), made.comm.rank(), job.dtype.size());
    let bytes = total(n, job.count, size)? / n;
    if bytes == 0 {
        return Ok(());
    }
    if job.input.is_null() && !matches!(job.kind, Kind::Broadcast { root } if root != rank)
        || job.output.is_null()
    {
        return Err(Error::InvalidArgument(format!(
            "a buffer is NULL, but the count is {}",
            job.count
        )));
    }
    // SAFETY: NCCL's rules for the buffers' sizes, which the caller keeps.
    unsafe {
        match job.kind {
            Kind::AllReduce | Kind::ReduceScatter => Ok(()),
            Kind::AllGather => {
                let own = job.output.byte_add(rank * bytes);
                zero(made, job, job.output, rank * bytes)?;
                zero(made, job, own.byte_add(bytes), (n - 1 - rank) * bytes)?;
                copy(made, job, own, job.input, bytes)
            }
            Kind::Broadcast { root } if root == rank => {
                copy(made, job, job.output, job.input, bytes)
            }
            Kind::Broadcast { .. } => zero(made, job, job.output, bytes),
        }
    }
}

unsafe fn zero(made: &Made, job: &Job, at: *mut c_void, bytes: usize) -> Result<()> {
    match &made.place {
        Place::Cpu(_) => {
            let _ = job;
            // SAFETY: the caller's promise.
            unsafe { at.cast::<u8>().write_bytes(0, bytes) };
            Ok(())
        }
        #[cfg(feature = "cuda")]
        Place::Cuda { context, .. } => {
            let stream = StreamRef::from_raw(job.stream.cast());
            // SAFETY: the caller's promise.
            unsafe { memory::fill(&context.enter()?, at as u64, 0, bytes, stream) }
        }
    }
}

unsafe fn copy(
    made: &Made,
    job: &Job,
    to: *mut c_void,
    from: *const c_void,
    bytes: usize,
) -> Result<()> {
    if to.cast_const() == from {
        return Ok(());
    }
    match &made.place {
        Place::Cpu(_) => {
            let _ = job;
            // SAFETY: the caller's promise; the ranges may overlap where he broke the rules.
            unsafe { std::ptr::copy(from.cast::<u8>(), to.cast::<u8>(), bytes) };
            Ok(())
        }
        #[cfg(feature = "cuda")]
        Place::Cuda { context, .. } => {
            let stream = StreamRef::from_raw(job.stream.cast());
            // SAFETY: the caller's promise.
            unsafe { memory::copy(&context.enter()?, to as u64, from as u64, bytes, stream) }
        }
    }
}

/// The all-reduces of a job.
fn reduce(made: &Made, job: &Job) -> Result<()> {
    let (n, rank, size) = (made.comm.size(), made.comm.rank(), job.dtype.size());
    let carrier = carrier(job.dtype);
    let all = |input, output, bytes: usize| {
        one(made, job, input, output, bytes / carrier.size(), carrier, Op::Sum)
    };
    match job.kind {
        Kind::AllReduce => one(made, job, job.input, job.output, job.count, job.dtype, job.op),
        Kind::AllGather => all(job.output, job.output, n * job.count * size),
        Kind::Broadcast { .. } => all(job.output, job.output, job.count * size),
        Kind::ReduceScatter => {
            let scratch = match &made.place {
                Place::Cpu(scratch) => {
                    scratch.lock().unwrap_or_else(PoisonError::into_inner).as_mut_ptr().cast()
                }
                #[cfg(feature = "cuda")]
                Place::Cuda { scratch, .. } => scratch.ptr() as *mut c_void,
            };
            for part in 0..n {
                let mut done = 0;
                while done < job.count {
                    let count = (job.count - done).min(SCRATCH / size);
                    let input = job.input.wrapping_byte_add((part * job.count + done) * size);
                    let output = match part == rank {
                        true => job.output.wrapping_byte_add(done * size),
                        false => scratch,
                    };
                    one(made, job, input, output, count, job.dtype, job.op)?;
                    done += count;
                }
            }
            Ok(())
        }
    }
}

fn one(
    made: &Made,
    job: &Job,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: DType,
    op: Op,
) -> Result<()> {
    match made.comm.device_kind() {
        // SAFETY: NCCL's rules for the buffers, which the caller keeps; the scratch lives as long as the communicator, and its
        // calls run one after the other.
        DeviceKind::Cpu => unsafe { made.comm.all_reduce(input, output, count, dtype, op, None) },
        #[cfg(feature = "cuda")]
        DeviceKind::Gpu => {
            // SAFETY: as above.
            unsafe {
                made.comm.all_reduce_cuda(input, output, count, dtype, op, job.stream.cast(), None)
            }
        }
        #[cfg(not(feature = "cuda"))]
        DeviceKind::Gpu => {
            let _ = job;
            Err(Error::Internal("a communicator on a GPU in a library without CUDA".into()))
        }
    }
}
