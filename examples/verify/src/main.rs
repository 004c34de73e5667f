//! The verify runner.
mod attention;
mod batch;
mod config;
mod device;
mod layer;
mod mistake;
mod moe;
mod observe;
mod pass;
mod reduce;
mod shard;
mod stamp;
#[cfg(test)]
mod tests;
mod weights;
fn main() {}
