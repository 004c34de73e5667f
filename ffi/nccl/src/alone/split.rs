//! Communicators out of one: its ranks tell each other color, key and where to meet, over the communicator itself.

use super::create::{create, make, Creation};
use super::{find, insert, Made, Own, Place};
use crate::status::fail;
use crate::types::*;
use peerlane_core::bootstrap::{UniqueId, UNIQUE_ID_BYTES};
use peerlane_core::{DType, Device, Error, Op, Result};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

#[cfg(feature = "cuda")]
use peerlane_core::device::cuda::{self, DeviceMemory};

/// `ncclCommSplit`.
pub unsafe fn split(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    newcomm: *mut ncclComm_t,
) -> ncclResult_t {
    let parent = match find(comm) {
        Ok(parent) if !newcomm.is_null() => parent,
        Ok(_) => {
            return fail(
                ncclInvalidArgument,
                "ncclCommSplit: the place for the communicator is NULL",
            )
        }
        Err(code) => return code,
    };
    if color < 0 && color != NCCL_SPLIT_NOCOLOR {
        return fail(
            ncclInvalidArgument,
            "ncclCommSplit: a color is 0 or above, or NCCL_SPLIT_NOCOLOR",
        );
    }
    let own = (color != NCCL_SPLIT_NOCOLOR).then(|| {
        let (handle, own) = insert();
        (own, handle as usize)
    });
    // SAFETY: not NULL, and the caller's.
    unsafe { *newcomm = own.as_ref().map_or(0, |(_, handle)| *handle) as ncclComm_t };
    create(Creation::Split { own, parent, color, key })
}

/// Color, key and an id to meet at, of every rank.
const SPLIT_BYTES: usize = 16 + UNIQUE_ID_BYTES;

pub fn split_now(own: Option<&Arc<Own>>, parent: &Own, color: c_int, key: c_int) -> Result<()> {
    let made = parent.made()?;
    let mut record = vec![0u8; SPLIT_BYTES];
    record[..4].copy_from_slice(&color.to_le_bytes());
    record[4..8].copy_from_slice(&key.to_le_bytes());
    record[16..].copy_from_slice(UniqueId::new()?.as_bytes());
    let all = exchange(made, &record)?;
    let Some(own) = own else { return Ok(()) };
    let number = |rank: usize, at: usize| {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&all[rank * SPLIT_BYTES + at..][..4]);
        i32::from_le_bytes(bytes)
    };
    let mut members: Vec<(i32, usize)> = (0..made.comm.size())
        .filter(|&rank| number(rank, 0) == color)
        .map(|rank| (number(rank, 4), rank))
        .collect();
    // By key, then by rank in the parent.
    members.sort_unstable();
    let rank = members.iter().position(|(_, rank)| *rank == made.comm.rank());
    let (rank, &(_, first)) = match (rank, members.first()) {
        (Some(rank), Some(first)) => (rank, first),
        _ => return Err(Error::Internal("a rank is not among those of its own color".into())),
    };
    let mut id = [0; UNIQUE_ID_BYTES];
    id.copy_from_slice(&all[first * SPLIT_BYTES + 16..][..UNIQUE_ID_BYTES]);
    let device = match &made.place {
        Place::Cpu => Device::Cpu,
        #[cfg(feature = "cuda")]
        Place::Cuda { ordinal, .. } => Device::Cuda { ordinal: Some(*ordinal) },
    };
    make(own, &UniqueId::from_bytes(id)?, members.len(), rank, device)
}

/// All-gathers records over host memory, whatever the ranks run on.
fn exchange(made: &Made, record: &[u8]) -> Result<Vec<u8>> {
    let Made { comm, place } = made;
    let mut all = vec![0u8; record.len() * comm.size()];
    all[record.len() * comm.rank()..][..record.len()].copy_from_slice(record);
    match place {
        Place::Cpu => {
            let at: *mut c_void = all.as_mut_ptr().cast();
            // SAFETY: in place, as many bytes as there are, alive until the call returns.
            unsafe { comm.all_reduce(at, at, all.len(), DType::U8, Op::Sum, None) }?;
        }
        #[cfg(feature = "cuda")]
        Place::Cuda { context, .. } => {
            let stream = cuda::Stream::new(context, 0)?;
            let buffer = DeviceMemory::new(context, all.len())?;
            buffer.write(&stream, 0, &all)?;
            let at = buffer.ptr() as *mut c_void;
            let raw = stream.as_ref().as_raw();
            // SAFETY: in place, as many bytes as there are; the read below waits for it.
            unsafe { comm.all_reduce_cuda(at, at, all.len(), DType::U8, Op::Sum, raw, None) }?;
            buffer.read(&stream, 0, &mut all)?;
        }
    }
    Ok(all)
}
