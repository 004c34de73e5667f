//! What the tests share.

#![allow(dead_code, clippy::unwrap_used)]

pub mod oracle;
pub mod partitions;
pub mod tables;
pub mod world;
