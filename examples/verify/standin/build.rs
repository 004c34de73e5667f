//! Compiles the runner's kernels for the host.

#![allow(clippy::print_stdout)]

fn main() {
    println!("cargo:rerun-if-changed=../cuda");
    cc::Build::new()
        .cpp(true)
        .cpp_link_stdlib(None)
        .std("c++17")
        .opt_level(2)
        .pic(true)
        .debug(false)
        // The kernels name the operations that must not be contracted; here none is.
        .flag("-ffp-contract=off")
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        .warnings(true)
        .extra_warnings(true)
        .file("../cuda/host.cpp")
        .compile("verify_host");
}
