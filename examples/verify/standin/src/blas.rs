//! A stand-in cuBLAS: products of bf16 matrices with sums in fp32, queued on the handle's stream as a kernel of the stand-in
//! driver, so that they run in order and are recorded like cuBLAS's own. Strict where cuBLAS is.

use half::bf16;
use std::ffi::{c_char, c_int, c_longlong, c_void};

type Status = c_int;

const SUCCESS: Status = 0;
const NOT_INITIALIZED: Status = 1;
const INVALID_VALUE: Status = 7;
const EXECUTION_FAILED: Status = 13;
const OP_N: c_int = 0;
const OP_T: c_int = 1;
const R_32F: c_int = 0;
const R_16BF: c_int = 14;
const COMPUTE_32F: c_int = 68;

struct Handle {
    stream: *mut c_void,
    function: *mut c_void,
    module: *mut c_void,
    has_stream: bool,
    has_workspace: bool,
}

/// One launch, column by column as cuBLAS counts.
#[derive(Clone, Copy)]
#[repr(C)]
struct Product {
    a: *const u16,
    b: *const u16,
    c: *mut c_void,
    step_a: i64,
    step_b: i64,
    step_c: i64,
    alpha: f32,
    beta: f32,
    m: i32,
    n: i32,
    k: i32,
    lda: i32,
    ldb: i32,
    ldc: i32,
    transposed: i32,
    wide: i32,
    count: i32,
    unused: i32,
}

/// The driver that the runner has opened.
fn driver<F: Copy>(name: &std::ffi::CStr) -> Option<F> {
    // SAFETY: the library is open already, under this name; `F` is the function's type at each call below.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        let found = libc::dlsym(library, name.as_ptr());
        (!found.is_null()).then(|| std::mem::transmute_copy(&found))
    }
}

unsafe extern "C" fn run(product: *const Product) {
    // SAFETY: the stand-in driver passes a copy of the launch's parameter, whose addresses are memory of this process.
    unsafe {
        let p = &*product;
        for at in 0..p.count as i64 {
            let (a, b) =
                (p.a.offset((at * p.step_a) as isize), p.b.offset((at * p.step_b) as isize));
            for i in 0..p.m as isize {
                for j in 0..p.n as isize {
                    let mut sum = 0.0f32;
                    for l in 0..p.k as isize {
                        let left = match p.transposed {
                            0 => *a.offset(l * p.lda as isize + i),
                            _ => *a.offset(i * p.lda as isize + l),
                        };
                        let right = *b.offset(j * p.ldb as isize + l);
                        sum += bf16::from_bits(left).to_f32() * bf16::from_bits(right).to_f32();
                    }
                    let to = (at * p.step_c) as isize + j * p.ldc as isize + i;
                    match p.wide {
                        0 => *p.c.cast::<bf16>().offset(to) = bf16::from_f32(p.alpha * sum),
                        _ => *p.c.cast::<f32>().offset(to) = p.alpha * sum,
                    }
                }
            }
        }
    }
}

/// Makes a handle.
#[no_mangle]
pub unsafe extern "C" fn cublasCreate_v2(handle: *mut *mut c_void) -> Status {
    type Register =
        unsafe extern "C" fn(*const c_char, unsafe extern "C" fn(*const Product), usize) -> u32;
    type Load = unsafe extern "C" fn(*mut *mut c_void, *const c_void) -> u32;
    type Get = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, *const c_char) -> u32;
    let register = driver::<Register>(c"fakecuda_register_kernel");
    let (load, get) = (driver::<Load>(c"cuModuleLoadData"), driver::<Get>(c"cuModuleGetFunction"));
    let (Some(register), Some(load), Some(get)) = (register, load, get) else {
        return NOT_INITIALIZED;
    };
    let name = c"standin_product".as_ptr();
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: each function has its own type, and writes one handle. A context must be current, as for cuBLAS.
    unsafe {
        if register(name, run, size_of::<Product>()) != 0
            || load(&mut module, c"an image".as_ptr().cast()) != 0
            || get(&mut function, module, name) != 0
        {
            return NOT_INITIALIZED;
        }
        let stream = std::ptr::null_mut();
        let made = Handle { stream, function, module, has_stream: false, has_workspace: false };
        *handle = Box::into_raw(Box::new(made)).cast();
    }
    SUCCESS
}

/// Frees it.
#[no_mangle]
pub unsafe extern "C" fn cublasDestroy_v2(handle: *mut c_void) -> Status {
    // SAFETY: made by `cublasCreate_v2`, freed once.
    let handle = unsafe { Box::from_raw(handle.cast::<Handle>()) };
    if let Some(unload) = driver::<unsafe extern "C" fn(*mut c_void) -> u32>(c"cuModuleUnload") {
        // SAFETY: the handle's own module. Without a context it stays, as it does with cuBLAS.
        unsafe { unload(handle.module) };
    }
    SUCCESS
}

/// 13.0.
#[no_mangle]
pub unsafe extern "C" fn cublasGetVersion_v2(_handle: *mut c_void, version: *mut c_int) -> Status {
    // SAFETY: the caller's int.
    unsafe { *version = 130_000 };
    SUCCESS
}

/// Everything from now on goes to this stream; the workspace goes back to the default.
#[no_mangle]
pub unsafe extern "C" fn cublasSetStream_v2(handle: *mut c_void, stream: *mut c_void) -> Status {
    // SAFETY: a handle made here.
    let handle = unsafe { &mut *handle.cast::<Handle>() };
    (handle.stream, handle.has_stream, handle.has_workspace) = (stream, true, false);
    SUCCESS
}

/// The caller's workspace; none is needed here.
#[no_mangle]
pub unsafe extern "C" fn cublasSetWorkspace_v2(
    handle: *mut c_void,
    workspace: *mut c_void,
    bytes: usize,
) -> Status {
    if !(workspace as usize).is_multiple_of(256) || bytes == 0 {
        return INVALID_VALUE;
    }
    // SAFETY: a handle made here.
    unsafe { (*handle.cast::<Handle>()).has_workspace = true };
    SUCCESS
}

/// Text for people.
#[no_mangle]
pub extern "C" fn cublasGetStatusString(status: Status) -> *const c_char {
    match status {
        SUCCESS => c"success",
        NOT_INITIALIZED => c"the library was not initialized",
        INVALID_VALUE => c"an unsupported value or parameter was passed to the function",
        _ => c"the GPU program failed to execute",
    }
    .as_ptr()
}

/// One product.
#[no_mangle]
pub unsafe extern "C" fn cublasGemmEx(
    handle: *mut c_void,
    transa: c_int,
    transb: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const c_void,
    a: *const c_void,
    a_type: c_int,
    lda: c_int,
    b: *const c_void,
    b_type: c_int,
    ldb: c_int,
    beta: *const c_void,
    c: *mut c_void,
    c_type: c_int,
    ldc: c_int,
    compute: c_int,
    algo: c_int,
) -> Status {
    // SAFETY: the caller's promise, handed on.
    unsafe {
        cublasGemmStridedBatchedEx(
            handle, transa, transb, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0, beta, c,
            c_type, ldc, 0, 1, compute, algo,
        )
    }
}

/// Several.
#[no_mangle]
pub unsafe extern "C" fn cublasGemmStridedBatchedEx(
    handle: *mut c_void,
    transa: c_int,
    transb: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const c_void,
    a: *const c_void,
    a_type: c_int,
    lda: c_int,
    step_a: c_longlong,
    b: *const c_void,
    b_type: c_int,
    ldb: c_int,
    step_b: c_longlong,
    beta: *const c_void,
    c: *mut c_void,
    c_type: c_int,
    ldc: c_int,
    step_c: c_longlong,
    count: c_int,
    compute: c_int,
    _algo: c_int,
) -> Status {
    let right = matches!(transa, OP_N | OP_T)
        && transb == OP_N
        && (a_type, b_type, compute) == (R_16BF, R_16BF, COMPUTE_32F)
        && matches!(c_type, R_16BF | R_32F)
        && m > 0
        && n > 0
        && k > 0
        && count > 0
        && lda >= if transa == OP_N { m } else { k }
        && ldb >= k
        && ldc >= m;
    // SAFETY: a handle made here, and scalars on the host.
    let (handle, alpha, beta) =
        unsafe { (&*handle.cast::<Handle>(), *alpha.cast::<f32>(), *beta.cast::<f32>()) };
    if !right || beta != 0.0 || !handle.has_stream || !handle.has_workspace {
        return INVALID_VALUE;
    }
    let mut product = Product {
        a: a.cast(),
        b: b.cast(),
        c,
        step_a,
        step_b,
        step_c,
        alpha,
        beta,
        m,
        n,
        k,
        lda,
        ldb,
        ldc,
        transposed: (transa == OP_T).into(),
        wide: (c_type == R_32F).into(),
        count,
        unused: 0,
    };
    type Launch = unsafe extern "C" fn(
        *mut c_void,
        u32,
        u32,
        u32,
        u32,
        u32,
        u32,
        u32,
        *mut c_void,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> u32;
    let Some(launch) = driver::<Launch>(c"cuLaunchKernel") else { return NOT_INITIALIZED };
    let mut parameters = [(&raw mut product).cast::<c_void>()];
    let extra = std::ptr::null_mut();
    // SAFETY: one parameter of the size that was registered, copied during the call.
    let code = unsafe {
        launch(handle.function, 1, 1, 1, 1, 1, 1, 0, handle.stream, parameters.as_mut_ptr(), extra)
    };
    if code == 0 {
        SUCCESS
    } else {
        EXECUTION_FAILED
    }
}
