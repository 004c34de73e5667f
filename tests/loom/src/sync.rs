//! What the sources use of `std::sync`, as loom has it.

pub use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
pub use std::sync::{Once, PoisonError};

pub mod atomic {
    pub use loom::sync::atomic::*;
}

/// Loom has none. A set value is released by a flag, as the standard library does it.
pub struct OnceLock<T> {
    value: std::cell::UnsafeCell<Option<T>>,
    setting: Mutex<()>,
    is_set: atomic::AtomicBool,
}

// SAFETY: `value` is written under the lock before `is_set`, and only read after it.
unsafe impl<T: Send + Sync> Sync for OnceLock<T> {}

impl<T> OnceLock<T> {
    pub fn new() -> Self {
        OnceLock {
            value: std::cell::UnsafeCell::new(None),
            setting: Mutex::new(()),
            is_set: atomic::AtomicBool::new(false),
        }
    }

    pub fn get(&self) -> Option<&T> {
        if !self.is_set.load(atomic::Ordering::Acquire) {
            return None;
        }
        // SAFETY: set, so nobody writes it any more.
        unsafe { (*self.value.get()).as_ref() }
    }

    pub fn set(&self, value: T) -> Result<(), T> {
        let _setting = self.setting.lock().unwrap();
        if self.get().is_some() {
            return Err(value);
        }
        // SAFETY: under the lock and not yet set, so nobody else reads or writes it.
        unsafe { *self.value.get() = Some(value) };
        self.is_set.store(true, atomic::Ordering::Release);
        Ok(())
    }
}
