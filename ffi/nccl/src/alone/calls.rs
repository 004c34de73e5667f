//! The collectives as NCCL declares them.

use super::collective::{run, Job, Kind};
use super::handle::comm_count;
use super::{code, find};
use crate::group;
use crate::status::{fail, failed};
use crate::types::*;
use peerlane_core::{DType, Op, Result};
use std::ffi::{c_int, c_void};

/// Whether a collective only moves elements, and so carries types that it could not sum.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moves {
    Only,
    AndSums,
}

fn carried(dtype: ncclDataType_t, moves: Moves) -> Result<DType> {
    let fp8 = [ncclFloat8e4m3, ncclFloat8e5m2].contains(&dtype);
    if fp8 && moves == Moves::Only {
        return Ok(DType::U8);
    }
    DType::from_raw(dtype)
}

fn start(
    comm: ncclComm_t,
    dtype: ncclDataType_t,
    op: ncclRedOp_t,
    moves: Moves,
    job: impl FnOnce(DType, Op) -> Job,
) -> ncclResult_t {
    let own = match find(comm) {
        Ok(own) => own,
        Err(code) => return code,
    };
    let types = carried(dtype, moves).and_then(|dtype| Ok((dtype, Op::from_raw(op)?)));
    let (dtype, op) = match types {
        Ok(types) => types,
        Err(error) => return failed(&error),
    };
    let jobs = [(own, job(dtype, op))];
    if group::is_open() {
        group::note_alone(|noted| noted.jobs.extend(jobs));
        return ncclSuccess;
    }
    code(run(&jobs))
}

/// `ncclAllReduce`.
pub unsafe fn all_reduce(
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    start(comm, dtype, op, Moves::AndSums, |dtype, op| Job {
        kind: Kind::AllReduce,
        input,
        output,
        count,
        dtype,
        op,
        stream,
    })
}

/// `ncclAllGather`.
pub unsafe fn all_gather(
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    start(comm, dtype, ncclSum, Moves::Only, |dtype, op| Job {
        kind: Kind::AllGather,
        input,
        output,
        count,
        dtype,
        op,
        stream,
    })
}

/// `ncclReduceScatter`.
pub unsafe fn reduce_scatter(
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    start(comm, dtype, op, Moves::AndSums, |dtype, op| Job {
        kind: Kind::ReduceScatter,
        input,
        output,
        count,
        dtype,
        op,
        stream,
    })
}

/// `ncclBroadcast`.
pub unsafe fn broadcast(
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let mut n = 0;
    // SAFETY: writes one int.
    let known = unsafe { comm_count(comm, &mut n) };
    if known != ncclSuccess {
        return known;
    }
    if !(0..n).contains(&root) {
        return fail(ncclInvalidArgument, &format!("root {root} of {n} ranks"));
    }
    let kind = Kind::Broadcast { root: root as usize };
    start(comm, dtype, ncclSum, Moves::Only, |dtype, op| Job {
        kind,
        input,
        output,
        count,
        dtype,
        op,
        stream,
    })
}

/// `ncclBcast`.
pub unsafe fn bcast(
    buffer: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    // SAFETY: the caller's promise.
    unsafe { broadcast(buffer, buffer, count, dtype, root, comm, stream) }
}
