//! How `libpeerlane.so` is linked.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The name programs record as needed. Its number is the major version: an incompatible ABI gets another.
    println!(
        "cargo:rustc-cdylib-link-arg=-Wl,-soname,libpeerlane.so.{}",
        env!("CARGO_PKG_VERSION_MAJOR")
    );
    // Threads, thread-locals and the fork handler do not survive dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Every symbol is bound at load, and the tables that hold them are read-only afterwards.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,relro,-z,now");
}
