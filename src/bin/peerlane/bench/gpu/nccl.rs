//! The rival on GPUs: NCCL itself, opened at run time.

use super::library::Library;
use super::rank::GpuRank;
use crate::bench::orders::Call;
use anyhow::{anyhow, bail, ensure, Context, Result};
use peerlane::{DType, Op};
use std::ffi::{c_char, c_int, c_void, CStr};
use std::path::{Path, PathBuf};

/// What the loader looks for unless a file is named.
const DEFAULT: &str = "libnccl.so.2";
/// From this version on NCCL takes several ranks on one GPU, if told to.
const MULTI_RANK: i32 = 23003;

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([u8; 128]);

type Comm = *mut c_void;
/// `ncclResult_t`; 0 is success, and so is 7, in progress.
type Code = c_int;

const SUCCESS: Code = 0;
const IN_PROGRESS: Code = 7;

/// Defines the table of functions and how it is filled.
macro_rules! functions {
    ($($name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        #[allow(non_snake_case)]
        struct Functions { $($name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)* }

        impl Functions {
            fn load(library: &libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Functions { $(
                    // SAFETY: the function's type in nccl.h, unchanged since NCCL 2.
                    $name: unsafe { *library.get(concat!(stringify!($name), "\0").as_bytes())? },
                )* })
            }
        }
    };
}

functions! {
    ncclGetVersion: fn(*mut c_int) -> Code;
    ncclGetUniqueId: fn(*mut UniqueId) -> Code;
    ncclCommInitRank: fn(*mut Comm, c_int, UniqueId, c_int) -> Code;
    ncclCommDestroy: fn(Comm) -> Code;
    ncclCommGetAsyncError: fn(Comm, *mut Code) -> Code;
    ncclAllReduce: fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Code;
    ncclGroupStart: fn() -> Code;
    ncclGroupEnd: fn() -> Code;
    ncclGetErrorString: fn(Code) -> *const c_char;
}

/// The library. It stays loaded: it has threads of its own.
pub struct Nccl {
    functions: Functions,
    /// As in `ncclGetVersion`: 23007 is 2.30.7.
    version: i32,
    path: PathBuf,
}

/// The file that `--nccl-lib` names, else that of `PEERLANE_NCCL_LIB`, else whatever the loader finds.
pub fn find(flag: Option<&Path>, variable: Option<&Path>) -> PathBuf {
    flag.or(variable).unwrap_or(Path::new(DEFAULT)).to_owned()
}

/// Whether NCCL's result may differ in its last bit from the sum divided by `n`: it scales floats by 1/n before it adds, which
/// is exact for powers of two alone.
pub fn rounds_otherwise(call: &Call, n: usize) -> bool {
    let float = matches!(call.dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
    float && call.op == Op::Avg && !n.is_power_of_two()
}

impl Nccl {
    /// Opens the library, once for the life of the process.
    pub fn open(path: &Path) -> Result<&'static Self> {
        let install = "install NCCL (libnccl2, or the wheel nvidia-nccl-cu13), or name its file with --nccl-lib or \
                       PEERLANE_NCCL_LIB";
        // SAFETY: the user names this library as NCCL; its initialisers are safe to run.
        let library = unsafe { libloading::Library::new(path) }
            .map_err(|e| anyhow!("--rival nccl: cannot load {}: {e}; {install}", path.display()))?;
        let functions = Functions::load(&library)
            .map_err(|e| anyhow!("--rival nccl: {} is no NCCL: {e}; {install}", path.display()))?;
        // Unloading it would pull the code from under its threads.
        std::mem::forget(library);
        let mut nccl = Nccl { functions, version: 0, path: path.to_owned() };
        // SAFETY: writes one int.
        let code = unsafe { (nccl.functions.ncclGetVersion)(&mut nccl.version) };
        nccl.check("ncclGetVersion", code)?;
        Ok(Box::leak(Box::new(nccl)))
    }

    /// Refuses what this version of NCCL refuses, in words.
    pub fn require_sharing(&self, ranks_per_gpu: usize) -> Result<()> {
        ensure!(
            ranks_per_gpu == 1 || self.version >= MULTI_RANK,
            "--rival nccl: NCCL {} takes one rank per GPU and --ranks-per-gpu is {ranks_per_gpu}: nothing was measured; use \
             NCCL 2.30.3 or newer, or a GPU per rank, or leave --rival out",
            self.version()
        );
        Ok(())
    }

    /// Such as `2.30.7`.
    pub fn version(&self) -> String {
        let v = self.version;
        // Before 2.9 the numbers were packed otherwise.
        let (major, minor) =
            if v < 10_000 { (v / 1000, v % 1000 / 100) } else { (v / 10_000, v % 10_000 / 100) };
        format!("{major}.{minor}.{}", v % 100)
    }

    /// A new communicator's unique id in hexadecimal. The ranks find each other through this process, which must outlive
    /// their joining.
    pub fn unique_id(&self) -> Result<String> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: writes one id.
        let code = unsafe { (self.functions.ncclGetUniqueId)(&mut id) };
        self.check("ncclGetUniqueId", code)?;
        Ok(id.0.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    fn check(&self, call: &str, code: Code) -> Result<()> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: returns a static string for any code.
        let text = unsafe { (self.functions.ncclGetErrorString)(code) };
        let text = match text.is_null() {
            true => "no text".into(),
            // SAFETY: the library's static, terminated string.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy(),
        };
        bail!(
            "--rival nccl: {call} failed with {code} ({text}) in {}; NCCL_DEBUG=WARN makes it say why",
            self.path.display()
        )
    }

    /// Runs `calls` as one NCCL group: several ranks of one thread must be launched together.
    fn group(&self, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        // SAFETY: a group is this thread's own.
        self.check("ncclGroupStart", unsafe { (self.functions.ncclGroupStart)() })?;
        let made = calls();
        // SAFETY: as above; ended whatever happened inside.
        let ended = self.check("ncclGroupEnd", unsafe { (self.functions.ncclGroupEnd)() });
        made.and(ended)
    }
}

/// NCCL's communicators of this process's ranks.
pub struct NcclRanks {
    nccl: &'static Nccl,
    comms: Vec<Comm>,
}

// SAFETY: NCCL's communicators may be used from any thread, one at a time.
unsafe impl Send for NcclRanks {}

impl NcclRanks {
    /// Has this process's ranks join the communicator `id` of `size` ranks.
    pub fn join(nccl: &'static Nccl, id: &str, size: usize, ranks: &[GpuRank]) -> Result<Self> {
        let id = parse(id).context("not NCCL's unique id")?;
        let mut comms: Vec<Comm> = vec![std::ptr::null_mut(); ranks.len()];
        nccl.group(|| {
            for (comm, rank) in comms.iter_mut().zip(ranks) {
                // NCCL takes the GPU that is current.
                let _entered = rank.context.enter()?;
                // SAFETY: writes one handle, which the group completes.
                let code = unsafe {
                    (nccl.functions.ncclCommInitRank)(comm, size as c_int, id, rank.number as c_int)
                };
                nccl.check("ncclCommInitRank", code)?;
            }
            Ok(())
        })?;
        Ok(NcclRanks { nccl, comms })
    }

    /// Frees the communicators. Not by dropping: after an error NCCL may wait for ranks that are gone.
    pub fn destroy(self) -> Result<()> {
        self.comms.iter().try_for_each(|&comm| {
            // SAFETY: made once, destroyed once; no call of it is under way.
            let code = unsafe { (self.nccl.functions.ncclCommDestroy)(comm) };
            self.nccl.check("ncclCommDestroy", code)
        })
    }
}

impl Library for NcclRanks {
    fn queue(&self, ranks: &[GpuRank], call: &Call, times: u32) -> Result<()> {
        self.nccl.group(|| {
            for (&comm, rank) in (0..times).flat_map(|_| self.comms.iter().zip(ranks)) {
                let (input, output) = rank.operands(call);
                let _entered = rank.context.enter()?;
                // Types and operations carry NCCL's own numbers.
                let (dtype, op) = (call.dtype as c_int, call.op as c_int);
                // SAFETY: device memory with room for `count` elements that outlives the stream's work and every graph.
                let code = unsafe {
                    (self.nccl.functions.ncclAllReduce)(
                        input as *const c_void,
                        output as *mut c_void,
                        call.count,
                        dtype,
                        op,
                        comm,
                        rank.stream.as_ref().as_raw(),
                    )
                };
                self.nccl.check("ncclAllReduce", code)?;
            }
            Ok(())
        })
    }

    fn failure(&self) -> Option<anyhow::Error> {
        self.comms.iter().find_map(|&comm| {
            let mut code = SUCCESS;
            // SAFETY: writes one code.
            let asked = unsafe { (self.nccl.functions.ncclCommGetAsyncError)(comm, &mut code) };
            let outcome = self.nccl.check("ncclCommGetAsyncError", asked);
            outcome.and_then(|()| self.nccl.check("ncclAllReduce", code)).err()
        })
    }
}

fn parse(hex: &str) -> Option<UniqueId> {
    let mut id = UniqueId([0; 128]);
    if hex.len() != 2 * id.0.len() || !hex.is_ascii() {
        return None;
    }
    for (byte, digits) in id.0.iter_mut().zip(hex.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_travel_as_text() {
        let text: String = (0..128).map(|i| format!("{:02x}", i * 2)).collect();
        assert_eq!(parse(&text).unwrap().0[127], 254);
        assert!(parse(&text[2..]).is_none());
        assert!(parse(&text.replace("00", "zz")).is_none());
    }

    #[test]
    fn only_averages_that_nccl_rounds_otherwise_are_left_unchecked() {
        let call = |dtype, op| Call { count: 1, dtype, op, in_place: false };
        assert!(rounds_otherwise(&call(DType::F32, Op::Avg), 3));
        assert!(!rounds_otherwise(&call(DType::F32, Op::Avg), 4));
        assert!(!rounds_otherwise(&call(DType::I32, Op::Avg), 3));
        assert!(!rounds_otherwise(&call(DType::F32, Op::Sum), 3));
    }

    #[test]
    fn the_file_is_the_flag_s_then_the_variable_s_then_the_loader_s() {
        let (a, b) = (Path::new("/a"), Path::new("/b"));
        assert_eq!(find(Some(a), Some(b)), a);
        assert_eq!(find(None, Some(b)), b);
        assert_eq!(find(None, None), Path::new("libnccl.so.2"));
    }
}
