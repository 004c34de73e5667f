//! Dense products by cuBLAS, opened when the run begins: nothing is linked. Each rank has a handle on its own stream with a
//! workspace of its own: without one cuBLAS would allocate inside a capture, and ranks would share.

use super::arena::Slice;
use anyhow::{anyhow, bail, ensure, Context as _, Result};
use peerlane::device::cuda::{Entered, StreamRef};
use std::ffi::{c_char, c_int, c_longlong, c_void, CStr};
use std::path::{Path, PathBuf};

/// As much as cuBLAS takes for itself on the largest GPUs.
pub const WORKSPACE: usize = 32 << 20;

type Handle = *mut c_void;
/// `cublasStatus_t`; 0 is success.
type Status = c_int;

// Of `cublas_api.h` and `library_types.h`.
const OP_N: c_int = 0;
const OP_T: c_int = 1;
const R_32F: c_int = 0;
const R_16BF: c_int = 14;
const COMPUTE_32F: c_int = 68;
const GEMM_DEFAULT: c_int = -1;

/// Defines the table of functions and how it is filled.
macro_rules! functions {
    ($($name:ident: fn($($arg:ty),* $(,)?) -> $ret:ty;)*) => {
        #[allow(non_snake_case)]
        struct Functions { $($name: unsafe extern "C" fn($($arg),*) -> $ret,)* }

        impl Functions {
            fn load(library: &libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Functions { $(
                    // SAFETY: the function's type in cublas_api.h, the same in cuBLAS 12 and 13.
                    $name: unsafe { *library.get(concat!(stringify!($name), "\0").as_bytes())? },
                )* })
            }
        }
    };
}

functions! {
    cublasCreate_v2: fn(*mut Handle) -> Status;
    cublasDestroy_v2: fn(Handle) -> Status;
    cublasGetVersion_v2: fn(Handle, *mut c_int) -> Status;
    cublasSetStream_v2: fn(Handle, *mut c_void) -> Status;
    cublasSetWorkspace_v2: fn(Handle, *mut c_void, usize) -> Status;
    cublasGetStatusString: fn(Status) -> *const c_char;
    cublasGemmStridedBatchedEx: fn(
        Handle, c_int, c_int, c_int, c_int, c_int, *const c_void,
        *const c_void, c_int, c_int, c_longlong,
        *const c_void, c_int, c_int, c_longlong, *const c_void,
        *mut c_void, c_int, c_int, c_longlong, c_int, c_int, c_int,
    ) -> Status;
    cublasGemmEx: fn(
        Handle, c_int, c_int, c_int, c_int, c_int, *const c_void,
        *const c_void, c_int, c_int, *const c_void, c_int, c_int, *const c_void,
        *mut c_void, c_int, c_int, c_int, c_int,
    ) -> Status;
}

/// The library. It stays loaded: graphs hold its kernels.
pub struct Blas {
    functions: Functions,
    path: PathBuf,
}

/// What the loader is asked for where no file is named.
const NAMES: [&str; 2] = ["libcublas.so.13", "libcublas.so.12"];

/// Where cuBLAS may be: the file that was named and nothing else, or by name, or where toolkits and wheels put it.
fn candidates(named: Option<&Path>) -> Vec<PathBuf> {
    if let Some(path) = named {
        return vec![path.to_owned()];
    }
    let mut all: Vec<PathBuf> = NAMES.iter().map(PathBuf::from).collect();
    let mut folders = vec![PathBuf::from("/usr/local/cuda/lib64")];
    for python in ["/opt/*/.venv/lib", "/opt/*/lib", "/usr/local/lib", "/usr/lib"] {
        for version in expand(Path::new(python)).iter().flat_map(|lib| entries(lib, "python3")) {
            for packages in ["site-packages", "dist-packages"] {
                folders.push(version.join(packages).join("nvidia/cu13/lib"));
                folders.push(version.join(packages).join("nvidia/cublas/lib"));
            }
        }
    }
    let files = folders.iter().flat_map(|folder| NAMES.iter().map(|name| folder.join(name)));
    all.extend(files.filter(|file| file.is_file()));
    all
}

/// A path in which one component may be `*`.
fn expand(pattern: &Path) -> Vec<PathBuf> {
    pattern.components().fold(vec![PathBuf::new()], |paths, component| {
        match component.as_os_str() == "*" {
            true => paths.iter().flat_map(|path| entries(path, "")).collect(),
            false => paths.into_iter().map(|path| path.join(component)).collect(),
        }
    })
}

fn entries(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    paths
}

impl Blas {
    /// Opens the library, once for the life of the process.
    pub fn open(named: Option<&Path>) -> Result<&'static Self> {
        let mut refused = Vec::new();
        for path in candidates(named) {
            preload_light(&path);
            // SAFETY: the user, or a toolkit's folder, names this library as cuBLAS; its initialisers are safe to run.
            let library = match unsafe { libloading::Library::new(&path) } {
                Ok(library) => library,
                Err(error) => {
                    refused.push(format!("{}: {:#}", path.display(), anyhow!(error)));
                    continue;
                }
            };
            let functions = Functions::load(&library)
                .map_err(|e| anyhow!("--device cuda: {} is no cuBLAS: {e}", path.display()))?;
            // Unloading it would pull the code from under its threads.
            std::mem::forget(library);
            return Ok(Box::leak(Box::new(Blas { functions, path })));
        }
        bail!(
            "--device cuda: no cuBLAS ({}); install it with the CUDA toolkit or the wheel nvidia-cublas, or name libcublas.so.13 \
             or .12 with --cublas",
            refused.join("; ")
        )
    }

    fn check(&self, call: &str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: returns a static string for any status.
        let text = unsafe { (self.functions.cublasGetStatusString)(status) };
        let text = match text.is_null() {
            true => "no text".into(),
            // SAFETY: the library's static, terminated string.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy(),
        };
        bail!("{call} failed with {status} ({text}) in {}", self.path.display())
    }
}

/// cuBLAS needs cublasLt of the same folder, which the loader finds by itself only where the library says so.
fn preload_light(path: &Path) {
    let name =
        path.file_name().map(|name| name.to_string_lossy().replace("libcublas", "libcublasLt"));
    let light = name.map(|name| path.with_file_name(name)).filter(|file| file.is_file());
    if let Some(light) = light {
        use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
        // SAFETY: NVIDIA's own library beside the one that is opened next. Where it cannot be opened, that one says why.
        if let Ok(library) = unsafe { Library::open(Some(&light), RTLD_NOW | RTLD_GLOBAL) } {
            std::mem::forget(library);
        }
    }
}

/// `out = left right` for matrices in device memory, row-major; `right` is [columns, inner] where it is transposed, as weights
/// are, else [inner, columns]. bf16 with sums in fp32; `wide`: the result is fp32 too. Several at once stand `step`s apart.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    pub rows: usize,
    pub inner: usize,
    pub columns: usize,
    pub left: Matrix,
    pub right: Matrix,
    pub transposed: bool,
    pub out: Matrix,
    pub wide: bool,
    pub count: usize,
}

/// Where a matrix is, elements from one row to the next, and from one matrix to the next.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    pub ptr: u64,
    pub row: usize,
    pub step: usize,
}

/// A rank's handle.
pub struct Products {
    blas: &'static Blas,
    handle: Handle,
    _workspace: Slice,
}

// SAFETY: a handle may be used from any thread, one at a time.
unsafe impl Send for Products {}

impl Products {
    /// A handle of the current context on `stream`.
    pub fn new(
        blas: &'static Blas,
        _entered: &Entered<'_>,
        stream: StreamRef,
        workspace: Slice,
    ) -> Result<Self> {
        let functions = &blas.functions;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed once by drop.
        blas.check("cublasCreate", unsafe { (functions.cublasCreate_v2)(&mut handle) })?;
        let (ptr, bytes) = (workspace.ptr() as *mut c_void, workspace.bytes());
        let products = Products { blas, handle, _workspace: workspace };
        // Setting the stream puts the workspace back to cuBLAS's own, so the stream comes first.
        // SAFETY: the handle is this one; the stream lives longer, as fields of `Cuda` are dropped in their order.
        let set = unsafe { (functions.cublasSetStream_v2)(handle, stream.as_raw()) };
        blas.check("cublasSetStream", set)?;
        // SAFETY: device memory of that size, kept as long as the handle.
        let set = unsafe { (functions.cublasSetWorkspace_v2)(handle, ptr, bytes) };
        blas.check("cublasSetWorkspace", set)?;
        Ok(products)
    }

    /// Such as `cuBLAS 13.1`, and its file.
    pub fn describe(&self) -> Result<String> {
        let mut version = 0;
        // SAFETY: writes one int.
        let code = unsafe { (self.blas.functions.cublasGetVersion_v2)(self.handle, &mut version) };
        self.blas.check("cublasGetVersion", code)?;
        let (major, minor) = (version / 10_000, version % 10_000 / 100);
        Ok(format!("cuBLAS {major}.{minor} ({})", self.blas.path.display()))
    }

    /// Queues a product, or records it.
    ///
    /// # Safety
    /// The matrices lie in memory of the handle's GPU and stay there until the stream, or every replay, has passed this.
    pub unsafe fn multiply(&self, _entered: &Entered<'_>, product: &Product) -> Result<()> {
        let int = |value: usize| c_int::try_from(value).context("a matrix too large for cuBLAS");
        let Product { left, right, out, .. } = product;
        ensure!(product.count > 0, "no product");
        // cuBLAS counts by columns, so each matrix is the transpose of what it is here, and out^T = right^T left^T.
        let right_op = if product.transposed { OP_T } else { OP_N };
        let (m, n, k) = (int(product.columns)?, int(product.rows)?, int(product.inner)?);
        let (one, zero) = (1.0f32, 0.0f32);
        let (one, zero) = (&raw const one as *const c_void, &raw const zero as *const c_void);
        let kind = if product.wide { R_32F } else { R_16BF };
        let pointer = |matrix: &Matrix| matrix.ptr as *mut c_void;
        let (a, b, c) = (pointer(right), pointer(left), pointer(out));
        let (lda, ldb, ldc) = (int(right.row)?, int(left.row)?, int(out.row)?);
        let status = if product.count == 1 {
            // SAFETY: the caller's promise; scalars are read during the call.
            unsafe {
                (self.blas.functions.cublasGemmEx)(
                    self.handle,
                    right_op,
                    OP_N,
                    m,
                    n,
                    k,
                    one,
                    a,
                    R_16BF,
                    lda,
                    b,
                    R_16BF,
                    ldb,
                    zero,
                    c,
                    kind,
                    ldc,
                    COMPUTE_32F,
                    GEMM_DEFAULT,
                )
            }
        } else {
            let step = |matrix: &Matrix| matrix.step as c_longlong;
            // SAFETY: as above.
            unsafe {
                (self.blas.functions.cublasGemmStridedBatchedEx)(
                    self.handle,
                    right_op,
                    OP_N,
                    m,
                    n,
                    k,
                    one,
                    a,
                    R_16BF,
                    lda,
                    step(right),
                    b,
                    R_16BF,
                    ldb,
                    step(left),
                    zero,
                    c,
                    kind,
                    ldc,
                    step(out),
                    int(product.count)?,
                    COMPUTE_32F,
                    GEMM_DEFAULT,
                )
            }
        };
        self.blas.check("cublasGemmEx", status).with_context(|| format!("multiplying {product:?}"))
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once. The context is this process's primary one and lives.
        unsafe { (self.blas.functions.cublasDestroy_v2)(self.handle) };
    }
}
