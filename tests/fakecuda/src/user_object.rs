//! User objects: reference-counted notices that graphs hold.

use crate::entry::{entry, lock, IN_DESTRUCTOR};
use crate::errors::{put, INVALID_ARGUMENT};
use crate::graph::GRAPHS;
use crate::table::Table;
use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

type Destroy = unsafe extern "C" fn(*mut c_void);

pub struct UserObject {
    ptr: usize,
    destroy: Destroy,
    /// References of the caller's own; graphs and executables hold the `Arc`.
    callers: Mutex<(usize, Option<Arc<UserObject>>)>,
}

/// What a graph or an executable holds.
pub type References = Vec<Arc<UserObject>>;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static OBJECTS: Table<Weak> = Table::new();
type Weak = std::sync::Weak<UserObject>;

pub fn live() -> usize {
    LIVE.load(Ordering::SeqCst)
}

impl Drop for UserObject {
    fn drop(&mut self) {
        let (ptr, destroy) = (self.ptr, self.destroy);
        // On a thread of the driver's own, some time later, as with the real one.
        std::thread::spawn(move || {
            IN_DESTRUCTOR.set(true);
            // SAFETY: the last reference is gone, and the pair is as the caller gave it.
            unsafe { destroy(ptr as *mut c_void) };
            LIVE.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

fn object(handle: usize) -> Result<Arc<UserObject>, u32> {
    OBJECTS.get(handle)?.upgrade().ok_or(INVALID_ARGUMENT)
}

/// Takes away references of the caller's.
fn release(object: &UserObject, count: usize) -> Result<(), u32> {
    let mut callers = lock(&object.callers);
    callers.0 = callers.0.checked_sub(count).ok_or(INVALID_ARGUMENT)?;
    if callers.0 == 0 {
        callers.1 = None;
    }
    Ok(())
}

entry! {
    fn cuUserObjectCreate(
        out: *mut usize,
        ptr: *mut c_void,
        destroy: Option<Destroy>,
        references: c_uint,
        flags: c_uint,
    ) {
        let destroy = destroy.ok_or(INVALID_ARGUMENT)?;
        if references == 0 || flags != 1 {
            return Err(INVALID_ARGUMENT);
        }
        let object = Arc::new(UserObject { ptr: ptr as usize, destroy, callers: Mutex::new((0, None)) });
        *lock(&object.callers) = (references as usize, Some(object.clone()));
        LIVE.fetch_add(1, Ordering::SeqCst);
        put(out, OBJECTS.insert(Arc::downgrade(&object)))
    }
    fn cuUserObjectRetain(handle: usize, count: c_uint) {
        let object = object(handle)?;
        let mut callers = lock(&object.callers);
        callers.0 += count as usize;
        if callers.1.is_none() {
            callers.1 = Some(object.clone());
        }
        Ok(())
    }
    fn cuUserObjectRelease(handle: usize, count: c_uint) {
        release(&*object(handle)?, count as usize)
    }
    fn cuGraphRetainUserObject(graph: usize, handle: usize, count: c_uint, flags: c_uint) {
        let (graph, object) = (GRAPHS.get(graph)?, object(handle)?);
        if count == 0 || flags > 1 {
            return Err(INVALID_ARGUMENT);
        }
        lock(&graph.references).push(object.clone());
        if flags == 1 { release(&object, count as usize) } else { Ok(()) }
    }
}
