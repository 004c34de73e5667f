//! What the three libraries define: NCCL's names around the functions of `intercept` and `forward`. A library names itself in a
//! constant `VARIANT`, has NCCL's types in scope, and hands these macros to `for_each_intercepted` and `for_each_forwarded`.

/// Defines the functions that peerlane has a say in.
#[macro_export]
macro_rules! define_intercepted {
    ($(fn $name:ident $(/ $twin:ident)? ($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty;)*) => {$(
        #[no_mangle]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
            VARIANT.enter();
            // SAFETY: the caller's promise to NCCL.
            unsafe { $crate::intercept::$name($($arg),*) }
        }
    )*};
}

/// Defines the functions that only go to NCCL.
#[macro_export]
macro_rules! define_forwarded {
    ($(fn $name:ident $(/ $twin:ident)? ($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty;)*) => {$(
        #[no_mangle]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
            VARIANT.enter();
            $crate::passing();
            // SAFETY: the caller's promise to NCCL.
            unsafe { $crate::forward::$name($($arg),*) }
        }
    )*};
}

/// Defines the second names, by which callers ask for NCCL's own.
#[macro_export]
macro_rules! define_twins {
    ($(fn $name:ident $(/ $twin:ident)? ($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty;)*) => {
        $($crate::define_twin! { $name $($twin)? ($($arg: $ty),*) -> $ret })*
    };
}

/// One of them; not every function has one.
#[macro_export]
#[doc(hidden)]
macro_rules! define_twin {
    ($name:ident ($($arg:ident: $ty:ty),*) -> $ret:ty) => {};
    ($name:ident $twin:ident ($($arg:ident: $ty:ty),*) -> $ret:ty) => {
        #[no_mangle]
        pub unsafe extern "C" fn $twin($($arg: $ty),*) -> $ret {
            VARIANT.enter();
            $crate::passing();
            // SAFETY: the caller's promise to NCCL.
            unsafe {
                match $crate::real::alone() {
                    true => $crate::either::$name($($arg),*),
                    false => $crate::forward::$name($($arg),*),
                }
            }
        }
    };
}

/// Defines peerlane's own function.
#[macro_export]
macro_rules! define_stats {
    () => {
        /// Reads the counters of a communicator, or for NULL of the process.
        ///
        /// # Safety
        /// `stats` has room for `size` bytes.
        #[no_mangle]
        pub unsafe extern "C" fn peerlane_nccl_stats(
            comm: ncclComm_t,
            stats: *mut $crate::stats::Stats,
            size: usize,
        ) -> ncclResult_t {
            VARIANT.enter();
            $crate::guarded(|| {
                // SAFETY: the caller's promise.
                unsafe { $crate::stats::read(comm, stats, size) }
            })
        }
    };
}
