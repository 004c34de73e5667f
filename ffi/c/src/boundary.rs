//! The boundary between C and Rust: no panic crosses it, and what went wrong is kept for `peerlane_last_error`.

use crate::status::{Failure, Outcome, Status};
use peerlane_core::Error;
use std::cell::{Cell, RefCell};
use std::ffi::{c_char, CString};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Once;

/// Defines exported functions; the only place where `extern "C"` stands.
///
/// Each argument has a type that implements [`Argument`](crate::arguments::Argument): C passes its `Raw` form, and the
/// body runs only if every check passed. A function without a return type returns a [`Status`]: its body is a
/// `Outcome<()>`, the thread's last error is cleared before and set after a failure. The other form,
/// `fn name() -> Type, on_panic(value)`, is for functions that cannot fail; it leaves the last error alone.
macro_rules! exports {
    () => {};
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block $($rest:tt)*) => {
        $(#[$meta])*
        #[no_mangle]
        pub unsafe extern "C" fn $name(
            $($arg: <$ty as $crate::arguments::Argument>::Raw),*
        ) -> $crate::status::Status {
            $crate::boundary::fallible(stringify!($name), || -> $crate::status::Outcome<()> {
                $(
                    // SAFETY: what is not NULL is valid for its type, says the header's paragraph on pointers.
                    let $arg = unsafe {
                        <$ty as $crate::arguments::Argument>::check($arg, stringify!($arg))
                    }?;
                )*
                $body
            })
        }
        exports! { $($rest)* }
    };
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty, on_panic($default:expr) $body:block $($rest:tt)*) => {
        $(#[$meta])*
        #[no_mangle]
        pub extern "C" fn $name($($arg: $ty),*) -> $ret {
            $crate::boundary::caught(|| $body).unwrap_or($default)
        }
        exports! { $($rest)* }
    };
}

/// Runs the body of an exported function.
pub fn fallible(function: &'static str, body: impl FnOnce() -> Outcome<()>) -> Status {
    clear_last_error();
    let failure = match caught(body) {
        Ok(Ok(())) => return Status::Success,
        Ok(Err(failure)) => failure,
        Err(panic) => Failure::from(Error::Internal(panic)),
    };
    set_last_error(&format!("{function}: {}", failure.message));
    failure.status
}

thread_local! {
    static LAST_ERROR: RefCell<Option<CString>> = const { RefCell::new(None) };
    static INSIDE: Cell<u32> = const { Cell::new(0) };
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs `body`; a panic in it becomes an `Err` that says where it was.
pub fn caught<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    // This shared object has a copy of the standard library of its own, so the hook sees our panics only. Those that are
    // caught here are reported as an error instead of being printed into somebody else's terminal.
    HOOK.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let kept = INSIDE.try_with(Cell::get).is_ok_and(|depth| depth > 0)
                && PANIC
                    .try_with(|text| {
                        text.try_borrow_mut().map(|mut t| *t = info.to_string()).is_ok()
                    })
                    .unwrap_or(false);
            if !kept {
                previous(info);
            }
        }));
    });
    // A thread whose thread-locals are gone (a caller's own destructor runs late) can still call; `try_with` throughout.
    let count = |by: i32| {
        let _ = INSIDE.try_with(|depth| depth.set(depth.get().wrapping_add_signed(by)));
    };
    count(1);
    // AssertUnwindSafe: a body reaches shared state through locks and atomics alone, and its own locals are gone.
    let result = catch_unwind(AssertUnwindSafe(body));
    count(-1);
    result.map_err(|_| {
        PANIC
            .try_with(|text| text.take())
            .unwrap_or_else(|_| "panic on an ending thread".to_owned())
    })
}

fn clear_last_error() {
    let _ = LAST_ERROR.try_with(|slot| slot.take());
}

/// Keeps `message` for this thread until the next function that returns a status begins.
pub fn set_last_error(message: &str) {
    // A 0 inside would cut the text for C.
    let text = CString::new(message.replace('\0', "\u{fffd}")).unwrap_or_default();
    let _ = LAST_ERROR.try_with(|slot| slot.replace(Some(text)));
}

/// The text for C; it stays where it is until the slot is written again.
pub fn last_error() -> *const c_char {
    LAST_ERROR
        .try_with(|slot| slot.borrow().as_ref().map_or(c"".as_ptr(), |text| text.as_ptr()))
        .unwrap_or(c"".as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn text() -> String {
        // SAFETY: points to this thread's text, which nothing writes before the copy is made.
        unsafe { CStr::from_ptr(last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_an_internal_error_that_says_where() {
        let status = fallible("peerlane_made_up", || panic!("the sky fell"));
        assert_eq!(status, Status::Internal);
        let text = text();
        for part in ["peerlane_made_up", "report", "boundary.rs", "the sky fell"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn the_next_success_clears_the_last_error() {
        fallible("f", || Err(Failure::argument("nope")));
        assert_eq!(text(), "f: invalid argument: nope");
        assert_eq!(fallible("f", || Ok(())), Status::Success);
        assert_eq!(text(), "");
    }

    #[test]
    fn each_thread_has_its_own_last_error() {
        fallible("f", || Err(Failure::argument("mine")));
        std::thread::scope(|s| s.spawn(|| assert_eq!(text(), "")).join().unwrap());
        assert!(text().contains("mine"));
    }

    #[test]
    fn a_zero_inside_a_message_does_not_cut_it() {
        fallible("f", || Err(Failure::argument("a\0b")));
        assert!(text().ends_with('b'));
    }
}
