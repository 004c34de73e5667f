//! Groups on the C side: creation of several ranks by one thread. What is noted of all-reduces is the library's own
//! matter; this adds the creations, which would otherwise wait for ranks that the same thread has yet to create.

use crate::arguments::Out;
use crate::registry::{self, Handle};
use crate::status::{Failure, Outcome};
use peerlane_core::comm::{self, Communicator, Creation};
use peerlane_core::device::Stream;
use std::cell::RefCell;
use std::sync::Arc;

#[derive(Default)]
struct Group {
    depth: u32,
    creations: Vec<(Creation, Out<Handle>)>,
    /// What noted all-reduces name: kept alive until the group's end, so that a destroy on another thread waits for it.
    named: Vec<(Arc<Communicator>, Option<Arc<Stream>>)>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

fn with_group<T>(f: impl FnOnce(&mut Group) -> T) -> Outcome<T> {
    GROUP
        .try_with(|group| f(&mut group.borrow_mut()))
        .map_err(|_| Failure::argument("this thread is ending; groups are over on it"))
}

/// Whether this thread has an open group.
pub fn is_open() -> bool {
    with_group(|group| group.depth > 0).unwrap_or(false)
}

/// Keeps alive what an all-reduce names, if a group is open and will only start it at its end.
pub fn keep(comm: &Arc<Communicator>, stream: Option<&Arc<Stream>>) -> Outcome<()> {
    if is_open() {
        with_group(|group| group.named.push((Arc::clone(comm), stream.cloned())))?;
    }
    Ok(())
}

/// Opens a group.
pub fn start() -> Outcome<()> {
    with_group(|group| {
        group.depth = group.depth.checked_add(1).ok_or_else(|| {
            Failure::argument("too many open groups; every group needs its peerlane_group_end")
        })?;
        comm::group_start();
        Ok(())
    })?
}

/// Creates a rank now, or at the end of the open group.
pub fn create(creation: Creation, out: Out<Handle>) -> Outcome<()> {
    if is_open() {
        return with_group(|group| group.creations.push((creation, out)));
    }
    out.write(registry::insert(creation.run()?)?);
    Ok(())
}

/// Closes a group; the outermost end does what was noted, all of it, and returns the first error.
pub fn end() -> Outcome<()> {
    let closed = with_group(|group| match group.depth {
        0 => Err(Failure::argument(
            "this thread has no open group; peerlane_group_start comes first, on the same thread",
        )),
        1 => Ok(std::mem::take(group)),
        _ => {
            group.depth -= 1;
            Ok(Group::default())
        }
    })??;
    let created = create_all(closed.creations);
    let reduced = comm::group_end().map_err(Failure::from);
    drop(closed.named);
    created.and(reduced)
}

fn create_all(creations: Vec<(Creation, Out<Handle>)>) -> Outcome<()> {
    let (creations, outs): (Vec<_>, Vec<_>) = creations.into_iter().unzip();
    let mut first = Ok(());
    for (created, out) in comm::create_all(&creations)?.into_iter().zip(outs) {
        let written = created
            .map_err(Failure::from)
            .and_then(registry::insert)
            .map(|handle| out.write(handle));
        first = first.and(written);
    }
    first
}
