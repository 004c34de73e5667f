//! The calls of the stand-in CUDA driver that work is enqueued with.

use crate::ops::{run, Op};
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::sync::LazyLock;

type Result2 = unsafe extern "C" fn(*mut usize, c_int) -> u32;

pub struct Cuda {
    retain: Result2,
    push: unsafe extern "C" fn(usize) -> u32,
    pop: unsafe extern "C" fn(*mut usize) -> u32,
    device: unsafe extern "C" fn(*mut c_int) -> u32,
    load: unsafe extern "C" fn(*mut usize, *const c_void) -> u32,
    function: unsafe extern "C" fn(*mut usize, usize, *const c_char) -> u32,
    #[allow(clippy::type_complexity)]
    launch: unsafe extern "C" fn(
        usize,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        usize,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> u32,
}

fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: terminated names.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null(), "no libcuda.so.1");
        let found = libc::dlsym(library, name.as_ptr());
        assert!(!found.is_null(), "{name:?}");
        found
    }
}

pub static CUDA: LazyLock<Cuda> = LazyLock::new(|| {
    // SAFETY: the functions' own types.
    unsafe {
        let init: unsafe extern "C" fn(c_uint) -> u32 = std::mem::transmute(symbol(c"cuInit"));
        init(0);
        let register: unsafe extern "C" fn(
            *const c_char,
            unsafe extern "C" fn(*const Op),
            usize,
        ) -> u32 = std::mem::transmute(symbol(c"fakecuda_register_kernel"));
        register(c"standin_op".as_ptr(), run, size_of::<Op>());
        Cuda {
            retain: std::mem::transmute::<*mut c_void, Result2>(symbol(
                c"cuDevicePrimaryCtxRetain",
            )),
            push: std::mem::transmute(symbol(c"cuCtxPushCurrent_v2")),
            pop: std::mem::transmute(symbol(c"cuCtxPopCurrent_v2")),
            device: std::mem::transmute(symbol(c"cuCtxGetDevice")),
            load: std::mem::transmute(symbol(c"cuModuleLoadData")),
            function: std::mem::transmute(symbol(c"cuModuleGetFunction")),
            launch: std::mem::transmute(symbol(c"cuLaunchKernel")),
        }
    }
});

/// A GPU that work can be enqueued on.
pub struct Gpu {
    pub ordinal: c_int,
    context: usize,
    function: usize,
}

impl Gpu {
    /// The GPU of the current context, or the first.
    pub fn current() -> c_int {
        let mut ordinal = 0;
        // SAFETY: writes one int.
        match unsafe { (CUDA.device)(&mut ordinal) } {
            0 => ordinal,
            _ => 0,
        }
    }

    pub fn new(ordinal: c_int) -> Option<Self> {
        let (mut context, mut module, mut function) = (0, 0, 0);
        // SAFETY: each writes one handle.
        unsafe {
            if (CUDA.retain)(&mut context, ordinal) != 0 {
                return None;
            }
            (CUDA.push)(context);
            let image = b"an image\0";
            let mut code = (CUDA.load)(&mut module, image.as_ptr().cast());
            if code == 0 {
                code = (CUDA.function)(&mut function, module, c"standin_op".as_ptr());
            }
            (CUDA.pop)(&mut 0);
            (code == 0).then_some(Gpu { ordinal, context, function })
        }
    }

    /// Puts `op` on a stream; true if the driver took it.
    pub fn launch(&self, mut op: Op, stream: usize) -> bool {
        let mut params = [(&raw mut op).cast::<c_void>()];
        // SAFETY: the parameter is copied before the call returns.
        unsafe {
            (CUDA.push)(self.context);
            let code = (CUDA.launch)(
                self.function,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                stream,
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            );
            (CUDA.pop)(&mut 0);
            code == 0
        }
    }
}
