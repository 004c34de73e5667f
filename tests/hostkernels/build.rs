//! Compiles the kernels with unrolled loops for the host: the library has them for GPUs alone.

// A build script talks to cargo through its standard output.
#![allow(clippy::print_stdout)]

fn main() {
    println!("cargo:rerun-if-changed=unrolled.cpp");
    println!("cargo:rerun-if-changed=../../cuda");
    cc::Build::new()
        .cpp(true)
        .cpp_link_stdlib(None)
        .std("c++17")
        .opt_level(2)
        .pic(true)
        .debug(false)
        .include("../../cuda")
        .flag("-ffp-contract=off")
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        .flag("-fvisibility=hidden")
        .define("PL_NAMESPACE", "peerlane_unrolled")
        .warnings(true)
        .extra_warnings(true)
        .file("unrolled.cpp")
        .compile("hostkernels_unrolled");
}
