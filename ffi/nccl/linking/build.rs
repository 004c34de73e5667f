//! How `libpeerlane_nccl.so` is linked: to `libnccl.so.2`, by its name alone. The real one need not be there at build time.

use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libpeerlane_nccl.so");
    println!("cargo:rerun-if-changed=build.rs");
    // Threads, thread-locals and the fork handler do not survive dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // The tables of symbols are read-only after load. Binding stays lazy: the process may have no use for most of them.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,relro");
    let folder = std::env::var("OUT_DIR")?;
    let (source, library) =
        (Path::new(&folder).join("empty.c"), Path::new(&folder).join("libnccl.so.2"));
    std::fs::write(&source, "")?;
    let compiled = cc::Build::new()
        .get_compiler()
        .to_command()
        .args(["-shared", "-nostdlib", "-Wl,-soname,libnccl.so.2", "-o"])
        .args([&library, &source])
        .status()?;
    if !compiled.success() {
        return Err(
            format!("the C compiler could not make {}: {compiled}", library.display()).into()
        );
    }
    // Needed although nothing is taken from it: that is what it is there for.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--no-as-needed");
    println!("cargo:rustc-cdylib-link-arg={}", library.display());
    Ok(())
}
