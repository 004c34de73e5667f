//! Slabs: the peer-visible buffers, their layout and how they are shared.
