//! Groups, which span peerlane and NCCL.
//!
//! NCCL's own group is opened and closed with the caller's, so calls that are forwarded join it as they are made. Calls that
//! peerlane serves wait for the outermost end. NCCL runs the collectives of a group before its sends, so neither order on one
//! stream would be safe: a rank's send may be waited for by a peer that has yet to send its part of our all-reduce, or the
//! other way round. So ours run on a side stream that forks from the caller's before NCCL's group and joins it after.

use crate::alone;
use crate::create::{self, Coming};
use crate::entry::{Entry, Phase};
use crate::forward;
use crate::real;
use crate::stats::count;
use crate::status::{self, first_failure};
use crate::types::*;
use crate::variant::Variant;
use peerlane_core::{DType, Op};
use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::Arc;

/// An all-reduce that peerlane can serve.
#[derive(Clone, Copy)]
pub struct Call {
    /// Where it reads.
    pub input: *const c_void,
    /// Where it writes.
    pub output: *mut c_void,
    /// Elements.
    pub count: usize,
    /// Their type.
    pub dtype: DType,
    /// The operation.
    pub op: Op,
    /// The caller's stream.
    pub stream: cudaStream_t,
    /// NCCL's communicator.
    pub comm: ncclComm_t,
}

impl Call {
    /// Lets NCCL do it.
    ///
    /// # Safety
    /// As NCCL asks.
    pub unsafe fn forward(&self) -> ncclResult_t {
        let Call { input, output, count, dtype, op, stream, comm } = *self;
        // SAFETY: the caller's promise; the numbers are NCCL's.
        unsafe {
            forward::ncclAllReduce(input, output, count, dtype as u32, op as u32, comm, stream)
        }
    }
}

#[derive(Default)]
struct Group {
    depth: usize,
    /// Calls that peerlane serves.
    calls: Vec<(Arc<Entry>, Call)>,
    /// Communicators that NCCL creates at the end.
    coming: Vec<Coming>,
    /// NCCL has calls in this group.
    shared: bool,
    /// Without a real NCCL: everything.
    alone: alone::Noted,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// On a thread that is ending, whose own thread-locals may hold communicators, no group is open for peerlane; NCCL keeps its own.
fn with<T>(body: impl FnOnce(&mut Group) -> T) -> T {
    if GROUP.try_with(|_| ()).is_err() {
        return body(&mut Group::default());
    }
    GROUP.with_borrow_mut(body)
}

/// Whether this thread has an open group.
pub fn is_open() -> bool {
    with(|group| group.depth > 0)
}

/// NCCL has a call in this thread's group, if it has one open.
pub fn shared() {
    with(|group| group.shared = group.depth > 0);
}

/// Keeps a call for the end.
pub fn queue(entry: Arc<Entry>, call: Call) {
    with(|group| group.calls.push((entry, call)));
}

/// Notes a communicator that NCCL creates at the end.
pub fn coming(coming: Coming) {
    with(|group| group.coming.push(coming));
}

/// What is done without a real NCCL, at the end.
pub fn note_alone<T>(note: impl FnOnce(&mut alone::Noted) -> T) -> T {
    with(|group| note(&mut group.alone))
}

/// Opens a group.
pub fn start() -> ncclResult_t {
    if !real::alone() {
        // SAFETY: no arguments.
        let result = unsafe { forward::ncclGroupStart() };
        if result != ncclSuccess {
            return result;
        }
    }
    with(|group| group.depth += 1);
    ncclSuccess
}

/// Closes a level; true where it is the outermost, with what the group holds.
fn close() -> Option<Group> {
    with(|group| {
        if group.depth > 1 {
            group.depth -= 1;
            return None;
        }
        // A call made on the way, such as a callback of NCCL's, finds no group.
        Some(std::mem::take(group))
    })
}

/// Closes a group; the outermost one starts all of it.
pub fn end() -> ncclResult_t {
    let Some(group) = close() else {
        // SAFETY: no arguments.
        return if real::alone() { ncclSuccess } else { unsafe { forward::ncclGroupEnd() } };
    };
    if real::alone() {
        return match group.depth {
            0 => status::fail(
                ncclInvalidUsage,
                "ncclGroupEnd without an ncclGroupStart on this thread",
            ),
            _ => group.alone.run(),
        };
    }
    let Group { calls, coming, mut shared, .. } = group;
    let mut result = ncclSuccess;

    set_up(&calls);
    let (ours, theirs): (Vec<_>, Vec<_>) =
        calls.into_iter().partition(|(entry, _)| entry.phase() == Phase::Ready);
    for (entry, call) in theirs {
        count(entry.counters(), |c| &c.forwarded_unready, 1);
        // SAFETY: the caller's call, as he made it; NCCL's group is still open.
        result = first_failure(result, unsafe { call.forward() });
        shared = true;
    }
    let shares = shares(&ours, shared || !Variant::sees_everything());
    for share in shares.iter().filter(|share| share.aside) {
        for &stream in &share.streams {
            let forked = share.entry.fork(stream);
            if forked.is_err() {
                // Its calls would run before their input is there. The others wait for them: they are told.
                share.entry.abort();
            }
            result = first_failure(result, ok(forked));
        }
    }
    // Ours first: launching never waits, while the end of NCCL's group may wait for other ranks.
    for (entry, call) in &ours {
        let aside = shares.iter().any(|share| share.aside && Arc::ptr_eq(&share.entry, entry));
        // SAFETY: the caller's call, as he made it.
        result = first_failure(result, ok(unsafe { entry.launch(call, aside) }));
    }
    // SAFETY: no arguments.
    let theirs = unsafe { forward::ncclGroupEnd() };
    for share in shares.iter().filter(|share| share.aside) {
        for &stream in &share.streams {
            result = first_failure(result, ok(share.entry.join(stream)));
        }
    }
    result = first_failure(result, theirs);
    if result == ncclSuccess && !coming.is_empty() {
        let handle = |c: &Coming| match c.handle.is_null() {
            false => c.handle,
            // SAFETY: the caller keeps it until the end of the group, for NCCL to write to.
            true => unsafe { *c.at },
        };
        let handles: Vec<ncclComm_t> = coming.iter().map(handle).collect();
        result = create::created(&handles);
    }
    result
}

/// Drops what the group holds: a simulated end launches nothing.
pub fn drop_calls() {
    drop(close());
}

fn ok(result: peerlane_core::Result<()>) -> ncclResult_t {
    result.map_or_else(|error| status::failed(&error), |()| ncclSuccess)
}

/// Sets up what has calls here for the first time, all at once: the local ranks of one communicator wait for each other.
fn set_up(calls: &[(Arc<Entry>, Call)]) {
    let mut waiting: Vec<&Arc<Entry>> = Vec::new();
    for (entry, _) in calls.iter().filter(|(entry, _)| entry.phase() == Phase::Waiting) {
        if !waiting.iter().any(|other| Arc::ptr_eq(other, entry)) {
            waiting.push(entry);
        }
    }
    let Some((last, others)) = waiting.split_last() else { return };
    std::thread::scope(|scope| {
        for entry in others {
            let started = std::thread::Builder::new()
                .name("peerlane-set-up".into())
                .spawn_scoped(scope, move || entry.set_up());
            if started.is_err() {
                // One after the other is right where the ranks are of different communicators; else it ends in the deadline.
                entry.set_up();
            }
        }
        last.set_up();
    });
}

/// The calls of one communicator in a group.
struct Share {
    entry: Arc<Entry>,
    streams: Vec<cudaStream_t>,
    /// They run on its side stream.
    aside: bool,
}

fn shares(calls: &[(Arc<Entry>, Call)], shared: bool) -> Vec<Share> {
    let mut shares: Vec<Share> = Vec::new();
    for (entry, call) in calls {
        let at = shares.iter().position(|share| Arc::ptr_eq(&share.entry, entry));
        let at = at.unwrap_or_else(|| {
            shares.push(Share { entry: Arc::clone(entry), streams: Vec::new(), aside: shared });
            shares.len() - 1
        });
        let share = &mut shares[at];
        if !share.streams.contains(&call.stream) {
            share.streams.push(call.stream);
        }
        // To NCCL, several streams in a group are as if each call were posted on all of them.
        share.aside |= share.streams.len() > 1;
    }
    shares
}
