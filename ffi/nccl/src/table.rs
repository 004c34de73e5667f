//! Entries by the handle of their communicator.

use crate::entry::Entry;
use crate::fork;
use crate::types::ncclComm_t;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

type Entries = HashMap<usize, Arc<Entry>>;

static TABLE: LazyLock<RwLock<Entries>> = LazyLock::new(RwLock::default);

/// The entry of a communicator; none for one that NCCL serves alone, and none in a forked child.
pub fn find(comm: ncclComm_t) -> Option<Arc<Entry>> {
    // Before the lock: another thread of the parent may have held it at the fork.
    if comm.is_null() || fork::forked() {
        return None;
    }
    TABLE.read().unwrap_or_else(PoisonError::into_inner).get(&(comm as usize)).cloned()
}

/// Adds an entry. NCCL may give a new communicator the address of one that was destroyed past this library: what stood there
/// goes.
pub fn insert(comm: ncclComm_t, entry: Arc<Entry>) {
    let old = TABLE.write().unwrap_or_else(PoisonError::into_inner).insert(comm as usize, entry);
    // Outside the lock: it may wait for work.
    drop(old);
}

/// Takes an entry out, before the handle goes to NCCL to be freed.
pub fn remove(comm: ncclComm_t) -> Option<Arc<Entry>> {
    if comm.is_null() || fork::forked() {
        return None;
    }
    TABLE.write().unwrap_or_else(PoisonError::into_inner).remove(&(comm as usize))
}
