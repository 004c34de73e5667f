//! Every function of NCCL, passed on to the real one.

use crate::real::{self, Symbol};
use crate::status;
use crate::types::*;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// What a caller gets from a function that the real NCCL lacks, or where there is none.
trait Missing {
    fn missing(name: &str) -> Self;
}

fn say(name: &str) {
    status::set_last(&match real::exists() {
        true => format!("{name}: the real NCCL is too old to have it"),
        false if real::alone() => {
            format!("{name} is not served without a real NCCL; set PEERLANE_NCCL_LIB to one")
        }
        false => format!("{name}: {}", real::why_not()),
    });
}

impl Missing for ncclResult_t {
    fn missing(name: &str) -> Self {
        say(name);
        match real::exists() || real::alone() {
            true => ncclInvalidUsage,
            false => ncclSystemError,
        }
    }
}

impl Missing for c_int {
    fn missing(name: &str) -> Self {
        say(name);
        -1
    }
}

impl Missing for () {
    fn missing(name: &str) {
        say(name);
    }
}

impl Missing for *const c_char {
    fn missing(name: &str) -> Self {
        say(name);
        c"unknown".as_ptr()
    }
}

impl Missing for ncclTeam_t {
    fn missing(name: &str) -> Self {
        say(name);
        ncclTeam { nRanks: 0, rank: 0, stride: 0 }
    }
}

macro_rules! forwards {
    ($(fn $name:ident $(/ $twin:ident)? ($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty;)*) => {$(
        /// NCCL's own.
        ///
        /// # Safety
        /// As NCCL's documentation asks.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $name($($arg: $ty),*) -> $ret {
            static SYMBOL: Symbol = Symbol::new(&[
                $(concat!(stringify!($twin), "\0"),)?
                concat!(stringify!($name), "\0"),
            ]);
            match SYMBOL.get() {
                Some(address) => {
                    // SAFETY: the function of this name in NCCL has the type that its header declares, from which this
                    // one is generated.
                    let function = unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> $ret>(
                            address.as_ptr(),
                        )
                    };
                    // SAFETY: the caller's promise.
                    unsafe { function($($arg),*) }
                }
                None => Missing::missing(stringify!($name)),
            }
        }
    )*};
}

crate::for_each_intercepted!(forwards);
crate::for_each_forwarded!(forwards);
