//! Compiles the kernels over the explorer's back end, in the shape they have on a GPU and in the shape of the CPU device.

// A build script talks to cargo through its standard output.
#![allow(clippy::print_stdout)]

fn main() {
    println!("cargo:rerun-if-changed=.");
    println!("cargo:rerun-if-changed=../../cuda");
    let new = || {
        let mut build = cc::Build::new();
        build
            .cpp(true)
            .std("c++17")
            .opt_level(2)
            .warnings(true)
            .extra_warnings(true)
            .include("../../cuda")
            .include(".")
            .flag("-ffp-contract=off")
            .flag("-fno-exceptions")
            .flag("-fno-rtti")
            .flag("-Wno-unknown-pragmas")
            .define("PL_DEV_BACKEND", "\"backend.cuh\"");
        build
    };
    let shape = |name: &str, strip: &str| {
        new()
            .define("PL_NAMESPACE", name)
            .define("EXPLORER_STRIP", strip)
            .file("kernels.cpp")
            .compile(&format!("explorer_{name}"));
    };
    new().file("world.cpp").file("meet.cpp").compile("explorer_world");
    shape("gpu_shape", "1");
    shape("cpu_shape", "4");
}
