//! From the checked arguments of a collective to the call of its communicator's device.

use crate::arguments::{Argument, Use};
use crate::group;
use crate::registry::Handle;
use crate::status::{Failure, Outcome};
use peerlane_core::comm::{AddRmsNorm, Communicator};
use peerlane_core::device::Stream;
use peerlane_core::plan::DeviceKind;
#[cfg(not(feature = "cuda"))]
use peerlane_core::Error;
use peerlane_core::{DType, Op};
use std::ffi::c_void;
use std::sync::Arc;

/// Where a collective reads and writes; `count` is as its function in the header says.
#[derive(Clone, Copy)]
pub struct Buffers {
    pub input: *const c_void,
    pub output: *mut c_void,
    pub count: usize,
    pub dtype: DType,
}

/// A collective.
pub enum Work {
    AllReduce(Buffers, Op),
    /// From the rank of this number.
    Broadcast(Buffers, usize),
    AllGather(Buffers),
    ReduceScatter(Buffers, Op),
    AddRmsNorm(AddRmsNorm),
}

/// Starts a collective, or notes it in the open group.
///
/// # Safety
/// The buffers are good until the work is done, and `stream` is a stream of the communicator's device.
pub unsafe fn start(
    comm: &Arc<Communicator>,
    work: &Work,
    stream: Handle,
    channel: i32,
) -> Outcome<()> {
    let channel = channel_of(comm, channel)?;
    match comm.device_kind() {
        DeviceKind::Cpu => {
            // SAFETY: a handle is looked up, not followed.
            let stream: Option<Use<Stream>> = unsafe { Argument::check(stream, "stream") }?;
            let stream = stream.map(|stream| stream.0);
            group::keep(comm, stream.as_ref())?;
            // SAFETY: the caller's promise.
            unsafe { on_cpu(comm, work, stream.as_deref()) }
        }
        #[cfg(feature = "cuda")]
        DeviceKind::Gpu => {
            group::keep(comm, None)?;
            // SAFETY: the caller's promise.
            unsafe { on_gpu(comm, work, stream.as_pointer(), channel) }
        }
        #[cfg(not(feature = "cuda"))]
        DeviceKind::Gpu => {
            let _ = channel;
            Err(Error::Internal("a communicator on a GPU in a library without CUDA".into()).into())
        }
    }
}

/// # Safety
/// The buffers are good until the work is done.
unsafe fn on_cpu(comm: &Communicator, work: &Work, stream: Option<&Stream>) -> Outcome<()> {
    // SAFETY: the caller's promise, in all of them.
    unsafe {
        match *work {
            Work::AllReduce(Buffers { input, output, count, dtype }, op) => {
                comm.all_reduce(input, output, count, dtype, op, stream)
            }
            Work::Broadcast(Buffers { input, output, count, dtype }, root) => {
                comm.broadcast(input, output, count, dtype, root, stream)
            }
            Work::AllGather(Buffers { input, output, count, dtype }) => {
                comm.all_gather(input, output, count, dtype, stream)
            }
            Work::ReduceScatter(Buffers { input, output, count, dtype }, op) => {
                comm.reduce_scatter(input, output, count, dtype, op, stream)
            }
            Work::AddRmsNorm(ref arguments) => comm.all_reduce_add_rms_norm(arguments, stream),
        }
    }?;
    Ok(())
}

/// # Safety
/// The buffers are device memory and good until the work is done, and `stream` is a stream of CUDA.
#[cfg(feature = "cuda")]
unsafe fn on_gpu(
    comm: &Communicator,
    work: &Work,
    stream: *mut c_void,
    channel: Option<usize>,
) -> Outcome<()> {
    // SAFETY: the caller's promise, in all of them.
    unsafe {
        match *work {
            Work::AllReduce(Buffers { input, output, count, dtype }, op) => {
                comm.all_reduce_cuda(input, output, count, dtype, op, stream, channel)
            }
            Work::Broadcast(Buffers { input, output, count, dtype }, root) => {
                comm.broadcast_cuda(input, output, count, dtype, root, stream, channel)
            }
            Work::AllGather(Buffers { input, output, count, dtype }) => {
                comm.all_gather_cuda(input, output, count, dtype, stream, channel)
            }
            Work::ReduceScatter(Buffers { input, output, count, dtype }, op) => {
                comm.reduce_scatter_cuda(input, output, count, dtype, op, stream, channel)
            }
            Work::AddRmsNorm(ref arguments) => {
                comm.all_reduce_add_rms_norm_cuda(arguments, stream, channel)
            }
        }
    }?;
    Ok(())
}

/// The channel that a caller's number means, `None` where the choice is the library's.
fn channel_of(comm: &Communicator, channel: i32) -> Outcome<Option<usize>> {
    match (channel, comm.device_kind()) {
        (-1, _) | (0, DeviceKind::Cpu) => Ok(None),
        (0..=3, DeviceKind::Gpu) => Ok(Some(channel as usize)),
        (_, kind) => {
            let known = if kind == DeviceKind::Cpu { "0" } else { "0 to 3" };
            Err(Failure::argument(format!(
                "'channel' is {channel}; this communicator has {known}, and -1 leaves the choice to the library"
            )))
        }
    }
}
