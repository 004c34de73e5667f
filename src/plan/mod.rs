//! Which schedule and protocol serve which call.

pub mod choose;

pub use choose::{choose, Choice, DeviceKind};
