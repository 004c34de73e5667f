//! The functions that the stand-in has.

use crate::comm::{find, insert, remove, Comm, Made, Region, RANKS};
use crate::cuda::Gpu;
use crate::ops::{Kind, Op};
use peerlane_nccl_core::types::*;
use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::io::Read;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::Arc;

enum Creation {
    Init {
        comm: Arc<Comm>,
        n: usize,
        rank: usize,
        token: String,
    },
    Split {
        comm: Option<Arc<Comm>>,
        parent: Arc<Comm>,
        color: c_int,
        key: c_int,
        number: u64,
    },
    /// A rank of the communicator that grows; the one with an id tells it to the others.
    Grow {
        comm: Arc<Comm>,
        parent: Arc<Comm>,
        n: usize,
        id: Option<u64>,
        number: u64,
    },
}

#[derive(Default)]
struct Group {
    depth: usize,
    creations: Vec<Creation>,
    ops: Vec<(Arc<Comm>, Op, usize)>,
}

thread_local! {
    // As NCCL's own, it is there until the thread is gone.
    static GROUP: RefCell<ManuallyDrop<Group>> = RefCell::default();
}

pub unsafe fn ncclGroupStart() -> ncclResult_t {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    ncclSuccess
}

pub unsafe fn ncclGroupEnd() -> ncclResult_t {
    let group = GROUP.with_borrow_mut(|group| match group.depth {
        0 => Err(ncclInvalidUsage),
        1 => Ok(std::mem::take(&mut **group)),
        _ => {
            group.depth -= 1;
            Ok(Group::default())
        }
    });
    match group {
        Ok(group) if !group.creations.is_empty() && !group.ops.is_empty() => ncclInvalidUsage,
        Ok(group) => {
            create(group.creations);
            let (first, then): (Vec<_>, Vec<_>) =
                group.ops.into_iter().partition(|(_, op, _)| op.is_collective());
            // A group's collectives go before its sends and receives. Those run side by side: what is sent is posted first and
            // waited for last.
            let of = |kind: Kind, to: Kind| {
                let those = then.iter().filter(move |(_, op, _)| op.kind == kind);
                those.map(move |(comm, op, stream)| {
                    (Arc::clone(comm), Op { kind: to, ..*op }, *stream)
                })
            };
            let posted = of(Kind::Send, Kind::Post).chain(of(Kind::Recv, Kind::Recv));
            let p2p: Vec<_> = posted.chain(of(Kind::Send, Kind::Sent)).collect();
            for (comm, op, stream) in first.into_iter().chain(p2p) {
                if !comm.gpu.launch(op, stream) {
                    return ncclUnhandledCudaError;
                }
            }
            ncclSuccess
        }
        Err(code) => code,
    }
}

pub unsafe fn ncclGroupSimulateEnd(_info: *mut ncclSimInfo_t) -> ncclResult_t {
    GROUP.with_borrow_mut(|group| drop(std::mem::take(&mut **group)));
    ncclSuccess
}

/// Posts all, then waits for all: a thread may have several ranks of one communicator.
fn create(creations: Vec<Creation>) {
    for creation in &creations {
        match creation {
            Creation::Init { comm, n, rank, token } => come(comm, *n, *rank, token.clone()),
            Creation::Grow { parent, id, number, .. } => {
                if let Some(id) = id {
                    grown(parent, *number).store(*id, SeqCst);
                }
            }
            Creation::Split { parent, color, key, number, .. } => {
                let made = parent.made();
                color_of(parent, *number, made.rank)
                    .store((*color as u32 as u64) << 32 | *key as u32 as u64, SeqCst);
                made.region.word(2).fetch_add(1, SeqCst);
            }
        }
    }
    let mut come_to: Vec<Arc<Comm>> = Vec::new();
    for creation in creations {
        match creation {
            Creation::Init { comm, .. } => come_to.push(comm),
            Creation::Grow { comm, parent, n, number, .. } => {
                let word = grown(&parent, number);
                parent.wait(|| word.load(SeqCst) != 0);
                let id = word.load(SeqCst).to_be_bytes();
                come(&comm, n, parent.made().rank, hex(&id));
                come_to.push(comm);
            }
            Creation::Split { comm, parent, color, number, .. } => {
                let made = parent.made();
                let until = (number + 1) * made.n as u64;
                parent.wait(|| made.region.word(2).load(SeqCst) >= until);
                let of = |rank: usize| color_of(&parent, number, rank).load(SeqCst);
                let mut members: Vec<(i32, usize)> = (0..made.n)
                    .filter(|&r| (of(r) >> 32) as i32 == color)
                    .map(|r| (of(r) as i32, r))
                    .collect();
                members.sort_unstable();
                if let Some(comm) = comm {
                    let rank =
                        members.iter().position(|(_, r)| *r == made.rank).expect("this rank");
                    come(&comm, members.len(), rank, format!("{}-{number}-{color}", made.token));
                    come_to.push(comm);
                }
            }
        }
    }
    for comm in come_to {
        let made = comm.made();
        comm.wait(|| made.region.word(0).load(SeqCst) >= made.n as u64);
        if made.rank == 0 {
            Region::forget_name(&made.token);
        }
    }
}

/// Two places in turn: nobody writes the split after the next before all have read this one's.
fn color_of(parent: &Comm, number: u64, rank: usize) -> &AtomicU64 {
    parent.made().region.word(16 + (number % 2) as usize * RANKS + rank)
}

/// Where the ranks of a communicator that grows find the id to meet at; never 0 once it is there.
fn grown(parent: &Comm, number: u64) -> &AtomicU64 {
    parent.made().region.word(64 + number as usize)
}

fn come(comm: &Arc<Comm>, n: usize, rank: usize, token: String) {
    let region = Region::open(&token);
    let _ = comm.made.set(Made { n, rank, token, region });
    comm.made().region.word(0).fetch_add(1, SeqCst);
}

fn add(creation: Creation) {
    let now = GROUP.with_borrow_mut(|group| match group.depth {
        0 => Some(creation),
        _ => {
            group.creations.push(creation);
            None
        }
    });
    create(now.into_iter().collect());
}

pub unsafe fn ncclGetVersion(version: *mut c_int) -> ncclResult_t {
    // SAFETY: the caller's.
    unsafe { *version = 23203 };
    ncclSuccess
}

pub unsafe fn ncclGetUniqueId(id: *mut ncclUniqueId) -> ncclResult_t {
    let mut bytes = [0u8; 8];
    let drawn =
        std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    if drawn.is_err() {
        return ncclSystemError;
    }
    let mut internal = [0; 128];
    for (to, from) in internal.iter_mut().zip(bytes) {
        *to = from as _;
    }
    // SAFETY: the caller's.
    unsafe { *id = ncclUniqueId { internal } };
    ncclSuccess
}

fn number_of(id: &ncclUniqueId) -> [u8; 8] {
    std::array::from_fn(|i| id.internal[i] as u8)
}

fn hex(bytes: &[u8; 8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn token(id: &ncclUniqueId) -> String {
    hex(&number_of(id))
}

unsafe fn init(
    comm: *mut ncclComm_t,
    n: c_int,
    token: String,
    rank: c_int,
    ordinal: c_int,
) -> ncclResult_t {
    if !(1..=RANKS as c_int).contains(&n) || !(0..n).contains(&rank) {
        return ncclInvalidArgument;
    }
    let Some((handle, made)) = insert(ordinal) else { return ncclUnhandledCudaError };
    // SAFETY: the caller's.
    unsafe { *comm = handle as ncclComm_t };
    add(Creation::Init { comm: made, n: n as usize, rank: rank as usize, token });
    ncclSuccess
}

pub unsafe fn ncclCommInitRank(
    comm: *mut ncclComm_t,
    n: c_int,
    id: ncclUniqueId,
    rank: c_int,
) -> ncclResult_t {
    // SAFETY: the caller's promise.
    unsafe { init(comm, n, token(&id), rank, Gpu::current()) }
}

pub unsafe fn ncclCommInitRankConfig(
    comm: *mut ncclComm_t,
    n: c_int,
    id: ncclUniqueId,
    rank: c_int,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    // SAFETY: the caller's promise.
    unsafe {
        if !config.is_null() && (*config).magic != NCCL_API_MAGIC {
            return ncclInvalidArgument;
        }
        let result = init(comm, n, token(&id), rank, Gpu::current());
        match !config.is_null() && (*config).blocking == 0 && result == ncclSuccess {
            true => ncclInProgress,
            false => result,
        }
    }
}

pub unsafe fn ncclCommInitAll(
    comms: *mut ncclComm_t,
    n: c_int,
    devices: *const c_int,
) -> ncclResult_t {
    let mut id = ncclUniqueId { internal: [0; 128] };
    // SAFETY: the caller's arrays.
    unsafe {
        ncclGetUniqueId(&mut id);
        ncclGroupStart();
        for rank in 0..n {
            let device = if devices.is_null() { rank } else { *devices.add(rank as usize) };
            let result = init(comms.add(rank as usize), n, token(&id), rank, device);
            if result != ncclSuccess {
                return result;
            }
        }
        ncclGroupEnd()
    }
}

pub unsafe fn ncclCommSplit(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    newcomm: *mut ncclComm_t,
    _config: *mut ncclConfig_t,
) -> ncclResult_t {
    let Some(parent) = find(comm as usize) else { return ncclInvalidArgument };
    let mut child = None;
    let mut handle = 0;
    if color != NCCL_SPLIT_NOCOLOR {
        let Some((at, made)) = insert(parent.gpu.ordinal) else { return ncclUnhandledCudaError };
        (handle, child) = (at, Some(made));
    }
    // SAFETY: the caller's.
    unsafe { *newcomm = handle as ncclComm_t };
    let number = parent.splits.fetch_add(1, SeqCst);
    add(Creation::Split { comm: child, parent, color, key, number });
    ncclSuccess
}

/// The ranks meet at the first id.
pub unsafe fn ncclCommInitRankScalable(
    comm: *mut ncclComm_t,
    n: c_int,
    rank: c_int,
    ids: c_int,
    id: *mut ncclUniqueId,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    if id.is_null() || !(1..=n).contains(&ids) {
        return ncclInvalidArgument;
    }
    // SAFETY: the caller's promise.
    unsafe { ncclCommInitRankConfig(comm, n, *id, rank, config) }
}

/// Ranks that are left out make no call.
pub unsafe fn ncclCommShrink(
    comm: ncclComm_t,
    excluded: *mut c_int,
    count: c_int,
    newcomm: *mut ncclComm_t,
    _config: *mut ncclConfig_t,
    flags: c_int,
) -> ncclResult_t {
    let Some(parent) = find(comm as usize) else { return ncclInvalidArgument };
    if excluded.is_null() || count <= 0 {
        return ncclInvalidArgument;
    }
    // SAFETY: the caller's array.
    let excluded = unsafe { std::slice::from_raw_parts(excluded, count as usize) };
    let made = parent.made();
    let left: Vec<usize> =
        (0..made.n).filter(|&rank| !excluded.contains(&(rank as c_int))).collect();
    let Some(rank) = left.iter().position(|&rank| rank == made.rank) else {
        return ncclInvalidArgument;
    };
    if flags as u32 & NCCL_SHRINK_ABORT != 0 {
        parent.aborted.store(true, SeqCst);
    }
    let Some((handle, child)) = insert(parent.gpu.ordinal) else { return ncclUnhandledCudaError };
    // SAFETY: the caller's.
    unsafe { *newcomm = handle as ncclComm_t };
    let token = format!("{}-shrunk-{}", made.token, parent.shrinks.fetch_add(1, SeqCst));
    add(Creation::Init { comm: child, n: left.len(), rank, token });
    ncclSuccess
}

pub unsafe fn ncclCommGetUniqueId(comm: ncclComm_t, id: *mut ncclUniqueId) -> ncclResult_t {
    // SAFETY: the caller's promise.
    find(comm as usize).map_or(ncclInvalidArgument, |_| unsafe { ncclGetUniqueId(id) })
}

/// New ranks have no communicator and a rank; ranks that there are have a communicator and -1, and one of them the id.
pub unsafe fn ncclCommGrow(
    comm: ncclComm_t,
    n: c_int,
    id: *const ncclUniqueId,
    rank: c_int,
    newcomm: *mut ncclComm_t,
    _config: *mut ncclConfig_t,
) -> ncclResult_t {
    // SAFETY: NULL, or the caller's id.
    let id = unsafe { id.as_ref() };
    if comm.is_null() {
        let Some(id) = id else { return ncclInvalidArgument };
        // SAFETY: the caller's promise.
        return unsafe { init(newcomm, n, token(id), rank, Gpu::current()) };
    }
    let Some(parent) = find(comm as usize) else { return ncclInvalidArgument };
    if rank != -1 || n as usize <= parent.made().n || n as usize > RANKS {
        return ncclInvalidArgument;
    }
    let Some((handle, child)) = insert(parent.gpu.ordinal) else { return ncclUnhandledCudaError };
    // SAFETY: the caller's.
    unsafe { *newcomm = handle as ncclComm_t };
    let number = parent.grows.fetch_add(1, SeqCst);
    let id = id.map(|id| u64::from_be_bytes(number_of(id)));
    add(Creation::Grow { comm: child, parent, n: n as usize, id, number });
    ncclSuccess
}

/// Ends what is under way; the handle stays, for children and the end.
pub unsafe fn ncclCommRevoke(comm: ncclComm_t, flags: c_int) -> ncclResult_t {
    find(comm as usize).filter(|_| flags == 0).map_or(ncclInvalidArgument, |comm| {
        comm.aborted.store(true, SeqCst);
        comm.revoked.store(true, SeqCst);
        ncclSuccess
    })
}

pub unsafe fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t {
    remove(comm as usize).map_or(ncclInvalidArgument, |_| ncclSuccess)
}

pub unsafe fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t {
    find(comm as usize).map_or(ncclInvalidArgument, |comm| match comm.revoked.load(SeqCst) {
        true => ncclInvalidUsage,
        false => ncclSuccess,
    })
}

pub unsafe fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t {
    remove(comm as usize).map_or(ncclInvalidArgument, |comm| {
        comm.aborted.store(true, SeqCst);
        ncclSuccess
    })
}

pub unsafe fn ncclCommGetAsyncError(comm: ncclComm_t, error: *mut ncclResult_t) -> ncclResult_t {
    // SAFETY: the caller's.
    find(comm as usize).map_or(ncclInvalidArgument, |_| unsafe {
        *error = ncclSuccess;
        ncclSuccess
    })
}

pub unsafe fn ncclCommCount(comm: ncclComm_t, to: *mut c_int) -> ncclResult_t {
    // SAFETY: the caller's.
    find(comm as usize).map_or(ncclInvalidArgument, |comm| unsafe {
        *to = comm.made().n as c_int;
        ncclSuccess
    })
}

pub unsafe fn ncclCommUserRank(comm: ncclComm_t, to: *mut c_int) -> ncclResult_t {
    // SAFETY: the caller's.
    find(comm as usize).map_or(ncclInvalidArgument, |comm| unsafe {
        *to = comm.made().rank as c_int;
        ncclSuccess
    })
}

pub unsafe fn ncclCommCuDevice(comm: ncclComm_t, to: *mut c_int) -> ncclResult_t {
    // SAFETY: the caller's.
    find(comm as usize).map_or(ncclInvalidArgument, |comm| unsafe {
        *to = comm.gpu.ordinal;
        ncclSuccess
    })
}

struct Buffers {
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    peer: c_int,
}

fn start(comm: ncclComm_t, kind: Kind, buffers: Buffers, stream: cudaStream_t) -> ncclResult_t {
    let Some(comm) = find(comm as usize) else { return ncclInvalidArgument };
    if comm.revoked.load(SeqCst) {
        return ncclInvalidUsage;
    }
    let size = match buffers.dtype {
        0 | 1 | 10 | 11 => 1,
        6 | 9 => 2,
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        _ => return ncclInvalidArgument,
    };
    let Buffers { send, recv, count, dtype, peer } = buffers;
    let bytes = count * size;
    let op = Op {
        comm: Op::keep(&comm),
        kind,
        send: send.cast(),
        recv: recv.cast(),
        bytes,
        dtype,
        peer: peer as u32,
    };
    let now = GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.ops.push((Arc::clone(&comm), op, stream as usize));
        }
        group.depth == 0
    });
    match !now || comm.gpu.launch(op, stream as usize) {
        true => ncclSuccess,
        false => ncclUnhandledCudaError,
    }
}

pub unsafe fn ncclAllReduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    _op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    start(comm, Kind::AllReduce, Buffers { send, recv, count, dtype, peer: 0 }, stream)
}

pub unsafe fn ncclAllGather(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    start(comm, Kind::AllGather, Buffers { send, recv, count, dtype, peer: 0 }, stream)
}

pub unsafe fn ncclReduceScatter(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    _op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    start(comm, Kind::ReduceScatter, Buffers { send, recv, count, dtype, peer: 0 }, stream)
}

pub unsafe fn ncclBroadcast(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    start(comm, Kind::Broadcast, Buffers { send, recv, count, dtype, peer: root }, stream)
}

pub unsafe fn ncclBcast(
    buffer: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    start(
        comm,
        Kind::Broadcast,
        Buffers { send: buffer, recv: buffer, count, dtype, peer: root },
        stream,
    )
}

pub unsafe fn ncclSend(
    send: *const c_void,
    count: usize,
    dtype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    start(
        comm,
        Kind::Send,
        Buffers { send, recv: std::ptr::null_mut(), count, dtype, peer },
        stream,
    )
}

pub unsafe fn ncclRecv(
    recv: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    start(comm, Kind::Recv, Buffers { send: std::ptr::null(), recv, count, dtype, peer }, stream)
}
