//! Our library as a program finds it, and the kernels that the stand-in driver runs.

use super::{built, driver, standin, Way};
use peerlane_nccl_core::stats::Stats;
use peerlane_nccl_core::types::*;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr, CString};
use std::path::Path;

fn dlopen(path: &Path) -> usize {
    let path = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a terminated path; as ctypes opens libraries.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    // SAFETY: the loader's own text.
    assert!(!handle.is_null(), "{}", unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy());
    handle as usize
}

pub fn dlsym(handle: usize, name: &str) -> usize {
    let name = CString::new(name).unwrap();
    // SAFETY: an open library.
    unsafe { libc::dlsym(handle as *mut c_void, name.as_ptr()) as usize }
}

pub fn load(way: Way) -> (Api, Rest, Option<usize>) {
    let real = (way != Way::Alone).then(|| dlopen(&standin().join("libnccl.so.2")));
    // Where the full library is loaded first, as in a container, the other one is not there yet.
    let ours = match way {
        Way::Preload => built("libpeerlane_preload.so"),
        Way::Linking => built("libpeerlane_nccl.so"),
        Way::Full | Way::Alone => built("libpeerlane_libnccl.so"),
    };
    let ours = dlopen(&ours);
    (Api::load(ours), Rest::load(ours), real)
}

macro_rules! api {
    ($(fn $name:ident $(/ $twin:ident)? ($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty;)*) => {
        #[allow(non_snake_case)]
        pub struct Api { $(pub $name: unsafe extern "C" fn($($ty),*) -> $ret,)* pub stats: unsafe extern "C" fn(ncclComm_t, *mut Stats, usize) -> u32 }
        impl Api {
            fn load(library: usize) -> Self {
                Api {
                    $($name: {
                        let found = dlsym(library, stringify!($name));
                        assert!(found != 0, stringify!($name));
                        // SAFETY: the function of this name has this type.
                        unsafe { std::mem::transmute::<usize, unsafe extern "C" fn($($ty),*) -> $ret>(found) }
                    },)*
                    // SAFETY: as above.
                    stats: unsafe { std::mem::transmute::<usize, unsafe extern "C" fn(ncclComm_t, *mut Stats, usize) -> u32>(dlsym(library, "peerlane_nccl_stats")) },
                }
            }
        }
    };
}
peerlane_nccl_core::for_each_intercepted!(api);

macro_rules! rest {
    ($(fn $name:ident $(/ $twin:ident)? ($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty;)*) => {
        #[allow(non_snake_case)]
        pub struct Rest { $(pub $name: unsafe extern "C" fn($($ty),*) -> $ret,)* }
        impl Rest {
            fn load(library: usize) -> Self {
                Rest {
                    $($name: {
                        let found = dlsym(library, stringify!($name));
                        assert!(found != 0, stringify!($name));
                        // SAFETY: the function of this name has this type.
                        unsafe { std::mem::transmute::<usize, unsafe extern "C" fn($($ty),*) -> $ret>(found) }
                    },)*
                }
            }
        }
    };
}
peerlane_nccl_core::for_each_forwarded!(rest);

pub fn register_kernels() {
    type Register =
        unsafe extern "C" fn(*const c_char, unsafe extern "C" fn(*const c_void), usize) -> u32;
    let driver = dlopen(&driver().join("libcuda.so.1"));
    for kernel in hostkernels::kernels() {
        let name = CString::new(kernel.symbol).unwrap();
        // SAFETY: the exported function's own type; each kernel is called with a pointer to the struct whose size is
        // given.
        unsafe {
            let register: Register = std::mem::transmute(dlsym(driver, "fakecuda_register_kernel"));
            assert_eq!(register(name.as_ptr(), kernel.run, kernel.bytes), 0);
        }
    }
}
