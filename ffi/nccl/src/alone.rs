//! Communicators without a real NCCL: the full library by itself, on GPUs or on the CPU.
//!
//! On the CPU buffers are host memory, a `cudaStream_t` is ignored, and a call returns when it is done. What is no all-reduce is
//! made of all-reduces: an all-gather sums integers, every rank's part beside zeros; a broadcast likewise; a reduce-scatter reduces
//! each part everywhere and keeps one. That is exact and safe, and moves up to n times the bytes that it should.

use crate::group;
use crate::status::{fail, failed, first_failure};
use crate::types::*;
use peerlane_core::bootstrap::{UniqueId, UNIQUE_ID_BYTES};
use peerlane_core::comm::{group_end, group_start, Communicator, Config};
use peerlane_core::plan::DeviceKind;
use peerlane_core::types::MAX_RANKS;
use peerlane_core::{DType, Device, Error, Op, Result};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

#[cfg(feature = "cuda")]
use peerlane_core::device::cuda::{self, memory, Context, DeviceMemory, Driver, StreamRef};

/// Results that nobody asked for go here, a part of a message at a time.
const SCRATCH: usize = 256 << 10;

/// What a rank computes with besides the caller's buffers.
enum Place {
    Cpu(Mutex<Box<[u64]>>),
    #[cfg(feature = "cuda")]
    Cuda {
        context: Context,
        ordinal: u32,
        scratch: DeviceMemory,
    },
}

struct Made {
    comm: Communicator,
    place: Place,
}

/// A communicator of ours; its handle is its address in memory that it owns, so no two that live are alike.
#[derive(Default)]
pub struct Own {
    made: OnceLock<Made>,
}

static OWN: LazyLock<Mutex<HashMap<usize, Arc<Own>>>> = LazyLock::new(Mutex::default);

fn table() -> std::sync::MutexGuard<'static, HashMap<usize, Arc<Own>>> {
    OWN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn insert() -> (ncclComm_t, Arc<Own>) {
    let own = Arc::new(Own::default());
    let handle = Arc::as_ptr(&own) as usize;
    table().insert(handle, Arc::clone(&own));
    (handle as ncclComm_t, own)
}

fn find(comm: ncclComm_t) -> std::result::Result<Arc<Own>, ncclResult_t> {
    let own = table().get(&(comm as usize)).cloned();
    own.ok_or_else(|| {
        fail(ncclInvalidArgument, "the communicator is NULL, destroyed, or another library's")
    })
}

impl Own {
    fn made(&self) -> Result<&Made> {
        self.made.get().ok_or_else(|| {
            Error::InvalidArgument("the communicator is created at the end of its group".into())
        })
    }
}

// --- creation ---

/// What a group creates at its end.
enum Creation {
    Init { own: Arc<Own>, handle: usize, id: UniqueId, n: usize, rank: usize, device: Device },
    Split { own: Option<(Arc<Own>, usize)>, parent: Arc<Own>, color: c_int, key: c_int },
}

impl Creation {
    fn run(&self) -> Result<()> {
        let result = match self {
            Creation::Init { own, id, n, rank, device, .. } => make(own, id, *n, *rank, *device),
            Creation::Split { own, parent, color, key } => {
                split_now(own.as_ref().map(|(own, _)| own), parent, *color, *key)
            }
        };
        if result.is_err() {
            let handle = match self {
                Creation::Init { handle, .. } => Some(*handle),
                Creation::Split { own, .. } => own.as_ref().map(|(_, handle)| *handle),
            };
            handle.map(|handle| table().remove(&handle));
        }
        result
    }
}

fn make(own: &Own, id: &UniqueId, n: usize, rank: usize, device: Device) -> Result<()> {
    let config = Config { device, ..Config::from_env(n)? };
    let place = place(device)?;
    let comm = Communicator::create(id, n, rank, &config)?;
    own.made
        .set(Made { comm, place })
        .map_err(|_| Error::Internal("a communicator was made twice".into()))
}

fn place(device: Device) -> Result<Place> {
    match device {
        Device::Cpu => Ok(Place::Cpu(Mutex::new(vec![0; SCRATCH / 8].into()))),
        #[cfg(feature = "cuda")]
        Device::Cuda { ordinal } => {
            let ordinal = ordinal.unwrap_or(0);
            let context = Context::retain(&cuda::Device::by_ordinal(Driver::load()?, ordinal)?)?;
            let scratch = DeviceMemory::new(&context, SCRATCH)?;
            Ok(Place::Cuda { context, ordinal, scratch })
        }
        #[cfg(not(feature = "cuda"))]
        Device::Cuda { .. } => {
            Err(Error::Unsupported("GPUs: this library was built without CUDA".into()))
        }
    }
}

/// The device of a new rank: what `PEERLANE_DEVICE` says; else the current GPU where there is one, else the CPU.
fn device() -> Result<Device> {
    let named = peerlane_core::env::Env::read()?.device;
    #[cfg(feature = "cuda")]
    if let None | Some(Device::Cuda { ordinal: None }) = named {
        match Driver::load() {
            Ok(driver) => {
                let uuid = |device: &cuda::Device| device.facts().uuid;
                let all = cuda::Device::all(driver)?;
                let current = cuda::Device::current(driver)?.as_ref().map(uuid);
                let at = current.and_then(|current| all.iter().position(|d| uuid(d) == current));
                return Ok(Device::Cuda { ordinal: Some(at.unwrap_or(0) as u32) });
            }
            Err(error) if named.is_some() => return Err(error),
            Err(_) => {}
        }
    }
    Ok(named.unwrap_or(Device::Cpu))
}

fn code(result: Result<()>) -> ncclResult_t {
    result.map_or_else(|error| failed(&error), |()| ncclSuccess)
}

fn create(creation: Creation) -> ncclResult_t {
    if group::is_open() {
        group::note_alone(|noted| noted.creations.push(creation));
        return ncclSuccess;
    }
    code(creation.run())
}

/// Runs creations at once: the local ranks of one communicator wait for each other.
fn run_creations(creations: &[Creation]) -> ncclResult_t {
    std::thread::scope(|scope| {
        let threads: Vec<_> = creations
            .iter()
            .map(|creation| {
                std::thread::Builder::new()
                    .name("peerlane-create".into())
                    .spawn_scoped(scope, || creation.run())
                    .map_err(|e| Error::os("starting a thread per rank", &e))
            })
            .collect();
        let mut result = ncclSuccess;
        for thread in threads {
            let outcome = thread.and_then(|thread| {
                thread.join().unwrap_or_else(|_| Err(Error::Internal("a creation panicked".into())))
            });
            result = first_failure(result, code(outcome));
        }
        result
    })
}

/// `ncclGetUniqueId`: the id is peerlane's own, of the same size.
pub unsafe fn unique_id(id: *mut ncclUniqueId) -> ncclResult_t {
    if id.is_null() {
        return fail(ncclInvalidArgument, "ncclGetUniqueId: the id is NULL");
    }
    match UniqueId::new() {
        Ok(made) => {
            // SAFETY: not NULL, 128 bytes, the caller's.
            unsafe { *id = ncclUniqueId { internal: made.as_bytes().map(|b| b as _) } };
            ncclSuccess
        }
        Err(error) => failed(&error),
    }
}

/// `ncclGetVersion`: the API that is served.
pub unsafe fn version(version: *mut c_int) -> ncclResult_t {
    // SAFETY: the caller's.
    unsafe { put(version, NCCL_VERSION_CODE as c_int) }
}

unsafe fn put(to: *mut c_int, value: c_int) -> ncclResult_t {
    if to.is_null() {
        return fail(ncclInvalidArgument, "the place for the result is NULL");
    }
    // SAFETY: not NULL, and the caller's.
    unsafe { *to = value };
    ncclSuccess
}

/// `ncclCommInitRank`.
pub unsafe fn init_rank(
    comm: *mut ncclComm_t,
    n: c_int,
    id: ncclUniqueId,
    rank: c_int,
) -> ncclResult_t {
    if comm.is_null() {
        return fail(ncclInvalidArgument, "the place for the communicator is NULL");
    }
    if !(1..=MAX_RANKS as c_int).contains(&n) || !(0..n).contains(&rank) {
        let text = format!(
            "rank {rank} of {n}; without a real NCCL a communicator has 1 to {MAX_RANKS} ranks"
        );
        return fail(ncclInvalidArgument, &text);
    }
    let ready =
        UniqueId::from_bytes(id.internal.map(|b| b as u8)).and_then(|id| Ok((id, device()?)));
    let (id, device) = match ready {
        Ok(ready) => ready,
        Err(error) => return failed(&error),
    };
    let (handle, own) = insert();
    // SAFETY: not NULL, and the caller's.
    unsafe { *comm = handle };
    create(Creation::Init {
        own,
        handle: handle as usize,
        id,
        n: n as usize,
        rank: rank as usize,
        device,
    })
}

/// `ncclCommInitAll`.
pub unsafe fn init_all(comms: *mut ncclComm_t, n: c_int, devices: *const c_int) -> ncclResult_t {
    if comms.is_null() || !(1..=MAX_RANKS as c_int).contains(&n) {
        return fail(ncclInvalidArgument, "ncclCommInitAll: NULL, or not 1 to 16 ranks");
    }
    let ready = UniqueId::new().and_then(|id| Ok((id, device()?)));
    let (id, own_device) = match ready {
        Ok(ready) => ready,
        Err(error) => return failed(&error),
    };
    let mut creations = Vec::with_capacity(n as usize);
    for rank in 0..n as usize {
        // SAFETY: `devices` is NULL or has as many elements as there are ranks.
        let number = if devices.is_null() { rank as c_int } else { unsafe { *devices.add(rank) } };
        let device = match own_device {
            Device::Cpu => Device::Cpu,
            Device::Cuda { .. } => Device::Cuda { ordinal: Some(number.max(0) as u32) },
        };
        let (handle, own) = insert();
        // SAFETY: the caller's array has room for as many.
        unsafe { *comms.add(rank) = handle };
        creations.push(Creation::Init {
            own,
            handle: handle as usize,
            id,
            n: n as usize,
            rank,
            device,
        });
    }
    run_creations(&creations)
}

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

fn split_now(own: Option<&Arc<Own>>, parent: &Own, color: c_int, key: c_int) -> Result<()> {
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
        Place::Cpu(_) => Device::Cpu,
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
        Place::Cpu(_) => {
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

// --- the end ---

fn remove(comm: ncclComm_t) -> std::result::Result<Arc<Own>, ncclResult_t> {
    let own = find(comm)?;
    table().remove(&(comm as usize));
    Ok(own)
}

/// `ncclCommDestroy`.
pub fn destroy(comm: ncclComm_t) -> ncclResult_t {
    if comm.is_null() {
        return ncclSuccess;
    }
    remove(comm).map_or_else(
        |code| code,
        |own| {
            drop(own);
            ncclSuccess
        },
    )
}

/// `ncclCommFinalize`: calls on the CPU are done when they return, and destroying waits for those on a GPU.
pub fn finalize(comm: ncclComm_t) -> ncclResult_t {
    find(comm).map_or_else(|code| code, |_| ncclSuccess)
}

/// `ncclCommAbort`.
pub fn abort(comm: ncclComm_t) -> ncclResult_t {
    let own = match remove(comm) {
        Ok(own) => own,
        Err(code) => return code,
    };
    if let Some(made) = own.made.get() {
        made.comm.abort();
    }
    ncclSuccess
}

/// `ncclCommGetAsyncError`.
pub unsafe fn async_error(comm: ncclComm_t, to: *mut ncclResult_t) -> ncclResult_t {
    let own = match find(comm) {
        Ok(own) if !to.is_null() => own,
        Ok(_) => return fail(ncclInvalidArgument, "the place for the result is NULL"),
        Err(code) => return code,
    };
    let error = own.made.get().and_then(|made| made.comm.error());
    // SAFETY: not NULL, and the caller's.
    unsafe { *to = error.map_or(ncclSuccess, |error| failed(&error)) };
    ncclSuccess
}

macro_rules! asked {
    ($($(#[$doc:meta])* $name:ident($made:ident) $value:expr;)*) => {$(
        $(#[$doc])*
        pub unsafe fn $name(comm: ncclComm_t, to: *mut c_int) -> ncclResult_t {
            let own = match find(comm) {
                Ok(own) => own,
                Err(code) => return code,
            };
            match own.made() {
                // SAFETY: the caller's.
                Ok($made) => unsafe { put(to, $value as c_int) },
                Err(error) => failed(&error),
            }
        }
    )*};
}

asked! {
    /// `ncclCommCount`.
    comm_count(made) made.comm.size();
    /// `ncclCommUserRank`.
    comm_rank(made) made.comm.rank();
    /// `ncclCommCuDevice`; 0 on the CPU.
    comm_device(made) match &made.place {
        Place::Cpu(_) => 0,
        #[cfg(feature = "cuda")]
        Place::Cuda { ordinal, .. } => *ordinal,
    };
}

// --- collectives ---

#[derive(Clone, Copy)]
enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast { root: usize },
}

/// A collective as the caller made it. `count` is that of NCCL's function.
#[derive(Clone, Copy)]
struct Job {
    kind: Kind,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: DType,
    op: Op,
    stream: cudaStream_t,
}

/// What a group holds.
#[derive(Default)]
pub struct Noted {
    creations: Vec<Creation>,
    jobs: Vec<(Arc<Own>, Job)>,
}

impl Noted {
    /// Starts all of it.
    pub fn run(self) -> ncclResult_t {
        if !self.creations.is_empty() && !self.jobs.is_empty() {
            return fail(ncclInvalidUsage, "a group holds creations or collectives, not both");
        }
        match self.creations.is_empty() {
            true => code(run_jobs(&self.jobs)),
            false => run_creations(&self.creations),
        }
    }
}

/// All jobs of a group; those of several ranks of one thread wait for each other.
fn run_jobs(jobs: &[(Arc<Own>, Job)]) -> Result<()> {
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

fn start(
    comm: ncclComm_t,
    dtype: ncclDataType_t,
    op: ncclRedOp_t,
    job: impl FnOnce(DType, Op) -> Job,
) -> ncclResult_t {
    let own = match find(comm) {
        Ok(own) => own,
        Err(code) => return code,
    };
    let types = DType::from_raw(dtype).and_then(|dtype| Ok((dtype, Op::from_raw(op)?)));
    let (dtype, op) = match types {
        Ok(types) => types,
        Err(error) => return failed(&error),
    };
    let jobs = [(own, job(dtype, op))];
    if group::is_open() {
        group::note_alone(|noted| noted.jobs.extend(jobs));
        return ncclSuccess;
    }
    code(run_jobs(&jobs))
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
    start(comm, dtype, op, |dtype, op| Job {
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
    start(comm, dtype, ncclSum, |dtype, op| Job {
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
    start(comm, dtype, op, |dtype, op| Job {
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
    start(comm, dtype, ncclSum, |dtype, op| Job { kind, input, output, count, dtype, op, stream })
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
