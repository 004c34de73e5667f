//! What C passes and what a function's body gets: one type per kind of argument, with its check.

use crate::registry::{self, Handle, Named};
use crate::status::{Failure, Outcome};
use peerlane_core::bootstrap::{UniqueId, UNIQUE_ID_BYTES};
use peerlane_core::types::MAX_RANKS;
use peerlane_core::{DType, Op};
use std::ffi::c_void;
use std::sync::Arc;

/// A kind of argument.
pub trait Argument: Sized {
    /// As it crosses the boundary.
    type Raw;

    /// What the body gets, or why it gets nothing. `name` is the argument's, for the message.
    ///
    /// # Safety
    /// A pointer in `raw` that is not NULL is valid for the type, as the header demands.
    unsafe fn check(raw: Self::Raw, name: &'static str) -> Outcome<Self>;
}

macro_rules! passed_as_they_are {
    ($($ty:ty)*) => {$(
        impl Argument for $ty {
            type Raw = $ty;
            unsafe fn check(raw: $ty, _name: &'static str) -> Outcome<Self> {
                Ok(raw)
            }
        }
    )*};
}

// Numbers, buffers whose NULL is judged together with their length, and streams, whose kind depends on the communicator.
passed_as_they_are! { i32 usize *const c_void *mut c_void Handle }

pub(crate) fn null(name: &str) -> Failure {
    Failure::argument(format!("'{name}' is NULL; pass a valid pointer"))
}

/// Where a result goes; `write` is the last thing that a body does.
#[derive(Clone, Copy)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes the result.
    pub fn write(self, value: T) {
        // SAFETY: not NULL (checked) and valid for a T (the header's demand); C may have put it at any alignment.
        unsafe { self.0.write_unaligned(value) }
    }
}

impl<T> Argument for Out<T> {
    type Raw = *mut T;
    unsafe fn check(raw: *mut T, name: &'static str) -> Outcome<Self> {
        if raw.is_null() {
            return Err(null(name));
        }
        Ok(Out(raw))
    }
}

impl<T> Argument for Option<Out<T>> {
    type Raw = *mut T;
    unsafe fn check(raw: *mut T, _name: &'static str) -> Outcome<Self> {
        Ok((!raw.is_null()).then_some(Out(raw)))
    }
}

/// Where one handle per rank goes; the length is another argument's.
pub struct OutArray(*mut Handle);

impl OutArray {
    /// Writes the handles of ranks 0, 1, ...
    ///
    /// # Safety
    /// The caller of the C function said that there is room for as many.
    pub unsafe fn write(self, handles: Vec<Handle>) {
        for (rank, handle) in handles.into_iter().enumerate() {
            // SAFETY: not NULL (checked), and long enough (the caller's demand); any alignment.
            unsafe { self.0.add(rank).write_unaligned(handle) }
        }
    }
}

impl Argument for OutArray {
    type Raw = *mut Handle;
    unsafe fn check(raw: *mut Handle, name: &'static str) -> Outcome<Self> {
        if raw.is_null() {
            return Err(null(name));
        }
        Ok(OutArray(raw))
    }
}

/// A handle whose object the body uses; it stays alive until the body is done.
pub struct Use<T>(pub Arc<T>);

impl<T: Named> Argument for Use<T> {
    type Raw = Handle;
    unsafe fn check(raw: Handle, name: &'static str) -> Outcome<Self> {
        registry::get(raw).map(Use).map_err(|failure| named(failure, name))
    }
}

/// The same where NULL stands for none.
impl<T: Named> Argument for Option<Use<T>> {
    type Raw = Handle;
    unsafe fn check(raw: Handle, name: &'static str) -> Outcome<Self> {
        if raw.is_null() {
            return Ok(None);
        }
        // SAFETY: nothing is dereferenced.
        unsafe { Use::check(raw, name) }.map(Some)
    }
}

/// A handle that the body takes away.
pub struct Take<T>(pub Handle, std::marker::PhantomData<T>);

impl<T: Named> Argument for Take<T> {
    type Raw = Handle;
    unsafe fn check(raw: Handle, name: &'static str) -> Outcome<Self> {
        registry::get::<T>(raw).map_err(|failure| named(failure, name))?;
        Ok(Take(raw, std::marker::PhantomData))
    }
}

fn named(failure: Failure, name: &str) -> Failure {
    Failure { message: format!("{} (argument '{name}')", failure.message), ..failure }
}

impl Argument for UniqueId {
    type Raw = *const [u8; UNIQUE_ID_BYTES];
    unsafe fn check(raw: Self::Raw, name: &'static str) -> Outcome<Self> {
        if raw.is_null() {
            return Err(null(name));
        }
        // SAFETY: not NULL, and valid for the struct; bytes have no alignment.
        Ok(UniqueId::from_bytes(unsafe { *raw })?)
    }
}

/// A number of ranks.
#[derive(Clone, Copy)]
pub struct Ranks(pub usize);

impl Argument for Ranks {
    type Raw = i32;
    unsafe fn check(raw: i32, name: &'static str) -> Outcome<Self> {
        match usize::try_from(raw) {
            Ok(n @ 1..=MAX_RANKS) => Ok(Ranks(n)),
            _ => Err(Failure::argument(format!(
                "'{name}' is {raw}; a communicator has 1 to {MAX_RANKS} ranks"
            ))),
        }
    }
}

/// The value of an enum of the header, from its number.
pub fn enumerator<T>(
    raw: i32,
    name: &str,
    from_raw: impl Fn(u32) -> peerlane_core::Result<T>,
) -> Outcome<T> {
    // A negative number is none either; as a u32 it only would be misprinted.
    let value = match u32::try_from(raw) {
        Ok(number) => from_raw(number).map_err(|e| e.to_string()),
        Err(_) => Err(format!("invalid argument: {raw} is not among the enum's numbers")),
    };
    value.map_err(|text| {
        let text = text.strip_prefix("invalid argument: ").unwrap_or(&text);
        Failure::argument(format!("'{name}': {text}"))
    })
}

impl Argument for DType {
    type Raw = i32;
    unsafe fn check(raw: i32, name: &'static str) -> Outcome<Self> {
        enumerator(raw, name, DType::from_raw)
    }
}

impl Argument for Op {
    type Raw = i32;
    unsafe fn check(raw: i32, name: &'static str) -> Outcome<Self> {
        enumerator(raw, name, Op::from_raw)
    }
}
