//! What the tests share.

#![allow(dead_code)]

pub mod oracle;
pub mod partitions;
pub mod tables;
pub mod world;
