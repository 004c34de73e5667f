//! Calls noted until the group's end, so that a thread which drives several ranks does not wait in one rank's call for a
//! call of another rank that it has yet to make.

use super::call::Call;
use super::communicator::Inner;
use super::engine::{Queue, Submission};
use crate::error::{Error, Result};
use std::cell::RefCell;
use std::sync::Arc;

struct Noted {
    comm: Arc<Inner>,
    call: Call,
    queue: Queue,
}

#[derive(Default)]
struct Group {
    depth: usize,
    calls: Vec<Noted>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// On a thread that is ending, whose own thread-locals may hold communicators, no group is open.
fn with<T>(body: impl FnOnce(&mut Group) -> T) -> T {
    if GROUP.try_with(|_| ()).is_err() {
        return body(&mut Group::default());
    }
    GROUP.with_borrow_mut(body)
}

/// Opens a group on this thread: calls are noted until the outermost [`group_end`], so that no call of one rank waits
/// for one that the same thread has yet to make. Groups nest. A stream named in a group must live until its end, and two
/// ranks of one communicator must not share one.
pub fn group_start() {
    with(|group| group.depth += 1);
}

/// Notes a call if this thread has an open group.
pub(super) fn note(comm: &Arc<Inner>, call: &Call, queue: Queue) -> bool {
    with(|group| {
        if group.depth == 0 {
            return false;
        }
        group.calls.push(Noted { comm: Arc::clone(comm), call: *call, queue });
        true
    })
}

/// Closes a group; the outermost one starts everything noted, in the order it was noted, and returns when the calls of
/// CPU ranks that named no stream are complete; those of ranks on GPUs are launched. The first error of a call is
/// returned, and the others are still made.
pub fn group_end() -> Result<()> {
    let calls = with(|group| match group.depth {
        0 => Err(Error::InvalidArgument("group_end without a group_start on this thread".into())),
        1 => {
            group.depth = 0;
            Ok(std::mem::take(&mut group.calls))
        }
        _ => {
            group.depth -= 1;
            Ok(Vec::new())
        }
    })?;
    // The one's work would wait for the other's behind it.
    for (i, a) in calls.iter().enumerate() {
        let clash = |b: &&Noted| {
            a.queue.same_stream(&b.queue)
                && !Arc::ptr_eq(&a.comm, &b.comm)
                && a.comm.same_communicator(&b.comm)
        };
        if calls[i + 1..].iter().any(|b| clash(&b)) {
            return Err(Error::InvalidArgument(
                "two ranks of one communicator were given the same stream in a group; give each rank its own".into(),
            ));
        }
    }
    // Only where all calls are of one rank may one run on this thread before the next is started.
    let one_rank = calls.windows(2).all(|pair| Arc::ptr_eq(&pair[0].comm, &pair[1].comm));
    let mut submissions: Vec<Result<Submission>> = Vec::with_capacity(calls.len());
    for noted in &calls {
        // SAFETY: a stream named in a group lives until the group's end, says `group_start`.
        submissions.push(unsafe { Inner::submit(&noted.comm, noted.call, noted.queue, one_rank) });
    }
    let mut first = Ok(());
    for submission in submissions {
        let result = submission.and_then(Submission::wait);
        if first.is_ok() {
            first = result;
        }
    }
    first
}
