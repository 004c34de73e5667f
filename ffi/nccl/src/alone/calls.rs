//! The collectives as NCCL declares them.

use super::collective::{run, Job, Kind};
use super::handle::comm_count;
use super::{code, find};
use crate::group;
use crate::status::{fail, failed};
use crate::types::*;
use peerlane_core::{DType, Op, Result};
use std::ffi::{c_int, c_void};

/// What a function of NCCL is given beside type and operation.
struct Given {
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    comm: ncclComm_t,
    stream: cudaStream_t,
}

/// The type that carries `dtype`. A collective that only moves elements takes those that it could not sum.
fn carried(dtype: ncclDataType_t, kind: Kind) -> Result<DType> {
    let moves = matches!(kind, Kind::AllGather | Kind::Broadcast { .. });
    if moves && [ncclFloat8e4m3, ncclFloat8e5m2].contains(&dtype) {
        return Ok(DType::U8);
    }
    DType::from_raw(dtype)
}

/// Runs a collective, or notes it in the open group.
fn start(kind: Kind, given: Given, dtype: ncclDataType_t, op: ncclRedOp_t) -> ncclResult_t {
    let Given { input, output, count, comm, stream } = given;
    let own = match find(comm) {
        Ok(own) => own,
        Err(code) => return code,
    };
    let types = carried(dtype, kind).and_then(|dtype| Ok((dtype, Op::from_raw(op)?)));
    let (dtype, op) = match types {
        Ok(types) => types,
        Err(error) => return failed(&error),
    };
    let jobs = [(own, Job { kind, input, output, count, dtype, op, stream })];
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
    start(Kind::AllReduce, Given { input, output, count, comm, stream }, dtype, op)
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
    start(Kind::AllGather, Given { input, output, count, comm, stream }, dtype, ncclSum)
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
    start(Kind::ReduceScatter, Given { input, output, count, comm, stream }, dtype, op)
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
    start(kind, Given { input, output, count, comm, stream }, dtype, ncclSum)
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
