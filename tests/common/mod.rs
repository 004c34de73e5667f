//! What the tests share.

// Each test uses a part; helpers may unwrap like the tests that call them.
#![allow(dead_code, clippy::unwrap_used, clippy::type_complexity, clippy::vec_box)]

pub mod oracle;
pub mod partitions;
pub mod tables;
pub mod world;
