//! The `peerlane` command-line tool.

fn main() {}
