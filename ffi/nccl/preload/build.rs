//! How `libpeerlane_preload.so` is linked.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libpeerlane_preload.so");
    println!("cargo:rerun-if-changed=build.rs");
    // Threads, thread-locals and the fork handler do not survive dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // The tables of symbols are read-only after load. Binding stays lazy: the process may have no use for most of them.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,relro");
}
