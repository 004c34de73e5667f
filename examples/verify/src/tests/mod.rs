//! What the runner promises, shown against the golden data.

mod bits;
mod golden;
mod mistakes;
mod verify;
