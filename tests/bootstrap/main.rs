//! Bootstrap: ranks meet, agree, exchange descriptors, and learn of each other's death.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::exit
)]

mod child;
mod deaths;
mod limits;
mod rendezvous;
mod stages;
mod strangers;
mod support;
mod watch;
