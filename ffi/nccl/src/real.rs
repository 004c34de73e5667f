//! The real NCCL of this process, found at the first call that needs it and never let go.
//!
//! Looked for in this order, and never ourselves: what `PEERLANE_NCCL_LIB` names; a library of that soname that is loaded
//! already; the one that PyTorch's wheels bring; the loader's own search, and the usual folders.

use crate::settings;
use crate::variant::Variant;
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::OnceLock;

const SONAME: &CStr = c"libnccl.so.2";
/// Exported by every library of ours, and by no NCCL.
const OURS: &CStr = c"peerlane_nccl_stats";
const FOLDERS: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
    "/usr/lib64",
];

struct Library {
    handle: NonNull<c_void>,
}

// SAFETY: a handle of dlopen may be used from any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

struct Search {
    found: Option<Library>,
    /// What was tried, for people.
    tried: String,
}

fn search() -> &'static Search {
    static SEARCH: OnceLock<Search> = OnceLock::new();
    SEARCH.get_or_init(find)
}

/// Whether there is a real NCCL.
pub fn exists() -> bool {
    search().found.is_some()
}

/// Whether this library works without one.
pub fn alone() -> bool {
    Variant::may_be_alone() && !exists()
}

/// Why there is none.
pub fn why_not() -> String {
    format!(
        "there is no real NCCL ({}); set PEERLANE_NCCL_LIB to the path of libnccl.so.2",
        search().tried
    )
}

fn find() -> Search {
    let mut tried = Vec::new();
    let named = settings::get().env.as_ref().ok().and_then(|env| env.nccl_lib.clone());
    if let Some(path) = named {
        // What the user named is taken or nothing is: another version in its place would be a surprise.
        let found = open_path(&path, 0, &mut tried);
        return Search { found, tried: tried.join("; ") };
    }
    let found = open(SONAME, libc::RTLD_NOLOAD, &mut tried);
    let loaded = loaded_objects();
    let found = found.or_else(|| {
        let is_nccl = |path: &&PathBuf| {
            path.file_name().is_some_and(|name| name.as_bytes().starts_with(SONAME.to_bytes()))
        };
        loaded
            .iter()
            .filter(is_nccl)
            .find_map(|path| open_path(path, libc::RTLD_NOLOAD, &mut tried))
    });
    let found = found.or_else(|| {
        // PyTorch's library is at site-packages/torch/lib, NCCL's at site-packages/nvidia/nccl/lib; a package of ours would be
        // beside them.
        let beside = |path: &PathBuf| -> Option<PathBuf> {
            let packages = path.parent()?.parent()?.parent()?;
            Some(packages.join("nvidia/nccl/lib/libnccl.so.2")).filter(|path| path.exists())
        };
        let torch = loaded.iter().filter(|path| path.ends_with("libtorch_cuda.so"));
        torch
            .chain(own_path().iter())
            .filter_map(beside)
            .find_map(|path| open_path(&path, 0, &mut tried))
    });
    let found = found.or_else(|| open(SONAME, 0, &mut tried));
    let found = found.or_else(|| {
        let paths = FOLDERS.iter().map(|folder| Path::new(folder).join("libnccl.so.2"));
        paths.filter(|path| path.exists()).find_map(|path| open_path(&path, 0, &mut tried))
    });
    Search { found, tried: tried.join("; ") }
}

fn open_path(path: &Path, flags: c_int, tried: &mut Vec<String>) -> Option<Library> {
    open(&CString::new(path.as_os_str().as_bytes()).ok()?, flags, tried)
}

fn open(name: &CStr, flags: c_int, tried: &mut Vec<String>) -> Option<Library> {
    // Its own references to its own functions stay its own, wherever ours stand in the search order.
    let flags =
        flags | libc::RTLD_LAZY | libc::RTLD_LOCAL | libc::RTLD_NODELETE | libc::RTLD_DEEPBIND;
    // SAFETY: a terminated name; NCCL's initialisers are safe to run.
    let handle = NonNull::new(unsafe { libc::dlopen(name.as_ptr(), flags) });
    let Some(handle) = handle else {
        // SAFETY: dlerror's text is copied before another call of this thread replaces it.
        let why = unsafe {
            let text = libc::dlerror();
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        let quiet = format!("{} is not loaded", name.to_string_lossy());
        tried.push(why.filter(|_| flags & libc::RTLD_NOLOAD == 0).unwrap_or(quiet));
        return None;
    };
    // SAFETY: an open library and a terminated name.
    if !unsafe { libc::dlsym(handle.as_ptr(), OURS.as_ptr()) }.is_null() {
        tried.push(format!("{} is peerlane's own", name.to_string_lossy()));
        return None;
    }
    Some(Library { handle })
}

/// The paths of the libraries that this process has loaded.
fn loaded_objects() -> Vec<PathBuf> {
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, to: *mut c_void) -> c_int {
        // SAFETY: the loader's own struct, and the vector that the caller passed.
        let (name, to) = unsafe { ((*info).dlpi_name, &mut *to.cast::<Vec<PathBuf>>()) };
        if !name.is_null() {
            // SAFETY: a terminated name.
            let name = unsafe { CStr::from_ptr(name) };
            to.push(PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes())));
        }
        0
    }
    let mut paths: Vec<PathBuf> = Vec::new();
    // SAFETY: `visit` gets the vector, and only while this call lasts.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut paths).cast()) };
    paths
}

/// Where this library was loaded from.
fn own_path() -> Option<PathBuf> {
    // SAFETY: a struct of pointers, for which zero is a value.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let address: fn() -> bool = exists;
    // SAFETY: any address may be asked about; the text belongs to the loader and stays.
    unsafe {
        if libc::dladdr(address as *const c_void, &mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        Some(PathBuf::from(std::ffi::OsStr::from_bytes(CStr::from_ptr(info.dli_fname).to_bytes())))
    }
}

/// A function of the real NCCL, looked up at its first call.
pub struct Symbol {
    /// Where it may be found: the strong name first, which nobody stands before.
    names: &'static [&'static str],
    address: AtomicPtr<c_void>,
}

/// Looked up and not there.
const MISSING: *mut c_void = std::ptr::dangling_mut();

impl Symbol {
    /// The function with the first of `names` that is there; each ends with a NUL.
    pub const fn new(names: &'static [&'static str]) -> Self {
        Symbol { names, address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Its address.
    #[inline]
    pub fn get(&self) -> Option<NonNull<c_void>> {
        let address = self.address.load(Ordering::Relaxed);
        if address == MISSING {
            return None;
        }
        NonNull::new(address).or_else(|| self.look_up())
    }

    #[cold]
    fn look_up(&self) -> Option<NonNull<c_void>> {
        let found = search().found.as_ref().and_then(|library| {
            self.names.iter().find_map(|name| {
                debug_assert!(name.ends_with('\0'));
                // SAFETY: an open library, and a name that ends with a NUL.
                NonNull::new(unsafe {
                    libc::dlsym(library.handle.as_ptr(), name.as_ptr().cast::<c_char>())
                })
            })
        });
        // Every thread finds the same.
        self.address.store(found.map_or(MISSING, NonNull::as_ptr), Ordering::Relaxed);
        found
    }
}
