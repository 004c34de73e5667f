//! `libpeerlane.so`: the C ABI. The contract is `include/peerlane.h`; here is how it is kept.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`status`] | fixed numbers for errors; a failure is a number and a message |
//! | [`boundary`] | where panics stop and the thread's last error is kept |
//! | [`arguments`] | one type per kind of argument, which checks what a caller passed |
//! | [`registry`] | handles: names with a generation, never addresses |
//! | [`structs`] | the structs that cross by pointer and can grow |
//! | [`norm`] | the arguments of the fused operation |
//! | [`group`] | creation of several ranks by one thread |
//! | [`calls`] | from a collective's arguments to its communicator's device |
//! | [`api`] | every exported function |

#[macro_use]
mod boundary;
mod api;
mod arguments;
mod calls;
mod group;
mod norm;
mod registry;
mod status;
mod structs;
