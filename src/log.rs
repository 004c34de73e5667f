//! The library's own log: one line to stderr, level by `PEERLANE_LOG`. No global `log` or `tracing` dispatcher: this code
//! runs inside somebody else's process, whose logger is not ours to take.

use std::sync::atomic::{AtomicU8, Ordering};

/// How much is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// Nothing.
    Off = 0,
    /// Failures.
    Error = 1,
    /// Decisions that cost speed or service.
    Warn = 2,
    /// Every decision.
    Info = 3,
    /// Every call.
    Debug = 4,
}

static LEVEL: AtomicU8 = AtomicU8::new(Level::Warn as u8);

impl Level {
    /// The level with this name, as `PEERLANE_LOG` spells it.
    pub fn parse(text: &str) -> Option<Self> {
        [
            ("off", Level::Off),
            ("error", Level::Error),
            ("warn", Level::Warn),
            ("info", Level::Info),
            ("debug", Level::Debug),
        ]
        .into_iter()
        .find(|(name, _)| *name == text)
        .map(|(_, level)| level)
    }
}

/// Sets the level for the whole process.
pub fn set_level(level: Level) {
    LEVEL.store(level as u8, Ordering::Relaxed);
}

/// Whether a line of this level would be written.
pub fn enabled(level: Level) -> bool {
    level as u8 <= LEVEL.load(Ordering::Relaxed)
}

/// Writes one line. A log that cannot be written is no reason to fail.
pub fn write(level: Level, text: std::fmt::Arguments<'_>) {
    if enabled(level) {
        use std::io::Write;
        let line = format!("peerlane[{}] {:?}: {text}\n", std::process::id(), level);
        let _ = std::io::stderr().lock().write_all(line.as_bytes());
    }
}

/// `log!(Info, "format {}", value)`: formats only when the level is on.
macro_rules! log {
    ($level:ident, $($arg:tt)*) => {
        if $crate::log::enabled($crate::log::Level::$level) {
            $crate::log::write($crate::log::Level::$level, format_args!($($arg)*));
        }
    };
}
pub(crate) use log;
