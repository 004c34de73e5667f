//! Handles: numbers that are never used twice, so that a stale one is noticed.

use crate::entry::lock;
use crate::errors::INVALID_RESOURCE_HANDLE;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

static NEXT: AtomicUsize = AtomicUsize::new(0x1000);

/// A number for something new.
pub fn fresh() -> usize {
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

pub struct Table<T>(Mutex<BTreeMap<usize, Arc<T>>>);

impl<T> Table<T> {
    pub const fn new() -> Self {
        Table(Mutex::new(BTreeMap::new()))
    }

    pub fn insert_at(&self, handle: usize, value: Arc<T>) {
        lock(&self.0).insert(handle, value);
    }

    pub fn insert(&self, value: T) -> usize {
        let handle = fresh();
        self.insert_at(handle, Arc::new(value));
        handle
    }

    pub fn get(&self, handle: usize) -> Result<Arc<T>, u32> {
        lock(&self.0).get(&handle).cloned().ok_or(INVALID_RESOURCE_HANDLE)
    }

    pub fn remove(&self, handle: usize) -> Result<Arc<T>, u32> {
        lock(&self.0).remove(&handle).ok_or(INVALID_RESOURCE_HANDLE)
    }

    pub fn all(&self) -> Vec<Arc<T>> {
        lock(&self.0).values().cloned().collect()
    }

    pub fn len(&self) -> usize {
        lock(&self.0).len()
    }
}
