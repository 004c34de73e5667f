//! What a C caller learns of a failure: a number that never changes and a message.

use peerlane_core::Error;
use std::ffi::CStr;

macro_rules! statuses {
    ($($(#[$meta:meta])* $name:ident = $value:literal, $text:literal;)+) => {
        /// `peerlane_status` of the header.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(C)]
        pub enum Status { $($(#[$meta])* $name = $value,)+ }

        impl Status {
            /// Every status, in order of its number.
            #[cfg(test)]
            pub const ALL: &'static [Status] = &[$(Status::$name,)+];

            /// The constant text of the status with this number.
            pub fn text(raw: i32) -> &'static CStr {
                match raw { $($value => $text,)+ _ => c"no status of this library" }
            }
        }
    };
}

statuses! {
    /// It worked.
    Success = 0, c"success";
    /// The caller's mistake.
    InvalidArgument = 1, c"invalid argument";
    /// Not served.
    Unsupported = 2, c"not supported";
    /// A system call failed.
    System = 3, c"system call failed";
    /// The device failed.
    Device = 4, c"device failed";
    /// Creation failed on all ranks.
    Setup = 5, c"set-up failed";
    /// A process ended without a goodbye.
    RankDied = 6, c"rank died";
    /// A wait outlived the deadline.
    Deadline = 7, c"deadline passed";
    /// Calls differ across ranks.
    Mismatch = 8, c"calls differ across ranks";
    /// Two launches met on one channel.
    Concurrent = 9, c"two collectives at once";
    /// A rank aborted.
    Aborted = 10, c"aborted";
    /// Destroyed meanwhile.
    Closed = 11, c"communicator closed";
    /// A defect of this library.
    Internal = 12, c"internal error";
    /// A handle that names nothing.
    InvalidHandle = 13, c"invalid handle";
    /// A rank destroyed its end before a call that needs it.
    RankLeft = 14, c"rank left";
}

impl From<&Error> for Status {
    fn from(error: &Error) -> Self {
        match error {
            Error::InvalidArgument(_) => Status::InvalidArgument,
            Error::Unsupported(_) => Status::Unsupported,
            Error::System { .. } => Status::System,
            Error::Device(_) | Error::Lane(_) => Status::Device,
            Error::Setup { .. } => Status::Setup,
            Error::RankDied { .. } => Status::RankDied,
            Error::RankLeft { .. } => Status::RankLeft,
            Error::Deadline { .. } => Status::Deadline,
            Error::Mismatch(_) => Status::Mismatch,
            Error::Concurrent { .. } => Status::Concurrent,
            Error::Aborted { .. } => Status::Aborted,
            Error::Closed => Status::Closed,
            Error::Internal(_) => Status::Internal,
        }
    }
}

/// Why a function returns something else than success.
#[derive(Debug)]
pub struct Failure {
    /// What is returned.
    pub status: Status,
    /// What `peerlane_last_error` says, behind the function's name.
    pub message: String,
}

/// What the body of an exported function returns.
pub type Outcome<T> = Result<T, Failure>;

impl Failure {
    /// The caller's mistake.
    pub fn argument(message: impl Into<String>) -> Self {
        Error::InvalidArgument(message.into()).into()
    }

    /// A handle that names nothing.
    pub fn handle(message: impl std::fmt::Display) -> Self {
        Failure { status: Status::InvalidHandle, message: format!("invalid handle: {message}") }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure { status: Status::from(&error), message: error.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_a_text_of_its_own_and_other_numbers_have_one_too() {
        let mut texts: Vec<_> = Status::ALL.iter().map(|&s| Status::text(s as i32)).collect();
        texts.push(Status::text(-1));
        assert_eq!(Status::text(99), Status::text(-1));
        let count = texts.len();
        texts.sort_unstable();
        texts.dedup();
        assert_eq!(texts.len(), count);
    }
}
