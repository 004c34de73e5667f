//! Which schedule and protocol serve which call.
