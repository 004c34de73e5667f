//! The driver library: found, opened and initialised at run time, or an error that says why not.

use super::symbols::{Failure, Symbols};
use crate::error::{Error, Result};
use cudarc::driver::sys;
use std::ffi::{c_char, CStr};
use std::sync::OnceLock;

/// The initialised driver of this process.
#[derive(Clone, Copy)]
pub struct Driver(&'static Loaded);

struct Loaded {
    symbols: Symbols,
    version: CudaVersion,
}

/// A CUDA version, such as 12.8; 0.0 where it is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion {
    /// 12 of 12.8.
    pub major: u32,
    /// 8 of 12.8.
    pub minor: u32,
}

impl std::fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if *self == (CudaVersion { major: 0, minor: 0 }) {
            return f.write_str("of an unknown version");
        }
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Driver {
    /// Loads and initialises the driver, once per process; a failure is not remembered, so a later call tries again.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where there is no driver or no device; [`Error::Device`] where the driver is too old, a stub,
    /// or refuses to start.
    pub fn load() -> Result<Self> {
        static LOADED: OnceLock<Loaded> = OnceLock::new();
        if let Some(loaded) = LOADED.get() {
            return Ok(Driver(loaded));
        }
        let loaded = Loaded::new()?;
        Ok(Driver(LOADED.get_or_init(|| loaded)))
    }

    /// The newest CUDA version that this driver serves.
    pub fn version(&self) -> CudaVersion {
        self.0.version
    }

    pub(super) fn symbols(&self) -> &'static Symbols {
        &self.0.symbols
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Driver(CUDA {})", self.version())
    }
}

impl Loaded {
    fn new() -> Result<Self> {
        // SAFETY: opens libcuda by its usual names; its initialisers are NVIDIA's own and safe to run.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::Unsupported(
                "CUDA: the driver's library (libcuda.so.1) was not found; install NVIDIA's driver, or give the container \
                 its libraries"
                    .into(),
            ));
        }
        let symbols = Symbols::load().map_err(|missing| {
            Error::Device(format!(
                "libcuda lacks {} function(s), {} the first; a driver for CUDA 12.0 or newer is needed (525 or newer), and \
                 no other library of that name before it in the search path",
                missing.len(),
                missing[0]
            ))
        })?;
        // SAFETY: 0 is the only flag there is.
        unsafe { symbols.cuInit(0) }.map_err(|failure| {
            let text = failure.describe(&symbols);
            match failure.code {
                code::NO_DEVICE => Error::Unsupported(format!(
                    "CUDA: no device: {text}; is CUDA_VISIBLE_DEVICES empty, or are /dev/nvidia* missing?"
                )),
                _ => Error::Device(text),
            }
        })?;
        let mut version = 0;
        // SAFETY: writes one int.
        unsafe { symbols.cuDriverGetVersion(&mut version) }
            .map_err(|failure| Error::Device(failure.describe(&symbols)))?;
        let version = u32::try_from(version).unwrap_or(0);
        Ok(Loaded {
            symbols,
            version: CudaVersion { major: version / 1000, minor: version % 1000 / 10 },
        })
    }
}

/// The result codes that this layer acts on, as the numbers that the driver returns.
pub(super) mod code {
    use cudarc::driver::sys::CUresult;
    pub const NOT_INITIALIZED: u32 = CUresult::CUDA_ERROR_NOT_INITIALIZED as u32;
    pub const STUB_LIBRARY: u32 = CUresult::CUDA_ERROR_STUB_LIBRARY as u32;
    pub const NO_DEVICE: u32 = CUresult::CUDA_ERROR_NO_DEVICE as u32;
    pub const INVALID_DEVICE: u32 = CUresult::CUDA_ERROR_INVALID_DEVICE as u32;
    pub const INVALID_IMAGE: u32 = CUresult::CUDA_ERROR_INVALID_IMAGE as u32;
    pub const INVALID_CONTEXT: u32 = CUresult::CUDA_ERROR_INVALID_CONTEXT as u32;
    pub const NO_BINARY_FOR_GPU: u32 = CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU as u32;
    pub const PEER_ACCESS_UNSUPPORTED: u32 = CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED as u32;
    pub const UNSUPPORTED_PTX_VERSION: u32 = CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as u32;
    pub const NOT_READY: u32 = CUresult::CUDA_ERROR_NOT_READY as u32;
    pub const PEER_ACCESS_ALREADY_ENABLED: u32 =
        CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED as u32;
    pub const TOO_MANY_PEERS: u32 = CUresult::CUDA_ERROR_TOO_MANY_PEERS as u32;
    pub const SYSTEM_NOT_READY: u32 = CUresult::CUDA_ERROR_SYSTEM_NOT_READY as u32;
    pub const STREAM_CAPTURE_IMPLICIT: u32 = CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT as u32;
}

impl Failure {
    /// The call, the code's name and the driver's own text.
    fn describe(&self, symbols: &Symbols) -> String {
        type Lookup =
            unsafe fn(&Symbols, u32, *mut *const c_char) -> std::result::Result<(), Failure>;
        let text = |lookup: Lookup| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: writes one pointer to a static string, or fails.
            unsafe { lookup(symbols, self.code, &mut text) }.ok()?;
            // SAFETY: the driver's static, terminated string.
            (!text.is_null())
                .then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        let name = text(Symbols::cuGetErrorName).unwrap_or_else(|| format!("error {}", self.code));
        let detail = text(Symbols::cuGetErrorString).unwrap_or_else(|| "no text".into());
        let hint = match self.code {
            code::NOT_INITIALIZED => {
                "; a process forked after CUDA was initialised cannot use it: start ranks by spawn or exec"
            }
            code::STUB_LIBRARY => {
                "; the toolkit's stub library came before the real driver in LD_LIBRARY_PATH"
            }
            code::SYSTEM_NOT_READY => "; is the fabric manager running?",
            code::STREAM_CAPTURE_IMPLICIT => {
                "; the legacy default stream cannot be used while a stream that waits for it is being captured"
            }
            _ => "",
        };
        format!("{} failed: {name} ({detail}){hint}", self.call)
    }
}

/// A failure can only come from a driver that has been loaded, so its text is there to be asked for.
impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match Driver::load() {
            Ok(driver) => Error::Device(failure.describe(driver.symbols())),
            Err(_) => Error::Device(format!("{} failed: error {}", failure.call, failure.code)),
        }
    }
}
