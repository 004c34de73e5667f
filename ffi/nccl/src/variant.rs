//! Which of the three libraries this is.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// The library that this code is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Variant {
    /// `libpeerlane_preload.so`: before the real NCCL in the search order, not linked to it.
    Preload = 1,
    /// `libpeerlane_nccl.so`: linked to the real NCCL. What it does not define, callers find there, unseen.
    Linking = 2,
    /// `libnccl.so.2`: all of it, with or without a real one.
    Full = 3,
}

// A library has no constructor: each exported function says where it is exported from.
static VARIANT: AtomicU8 = AtomicU8::new(0);

impl Variant {
    /// Says which library has been entered.
    #[inline]
    pub fn enter(self) {
        // Read first: a store by every thread would move the line between cores at every call.
        if VARIANT.load(Relaxed) != self as u8 {
            VARIANT.store(self as u8, Relaxed);
        }
    }

    /// Whether every call of NCCL that enqueues work passes through this library.
    pub(crate) fn sees_everything() -> bool {
        VARIANT.load(Relaxed) != Variant::Linking as u8
    }

    /// Whether this library may do without a real NCCL.
    pub(crate) fn may_be_alone() -> bool {
        VARIANT.load(Relaxed) == Variant::Full as u8
    }
}
