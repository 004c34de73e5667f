//! NCCL, to compare with: opened when the run begins, and recorded into the same graph as everything else.

use anyhow::{anyhow, bail, ensure, Result};
use peerlane::device::cuda::{Entered, StreamRef};
use peerlane::{DType, Op};
use std::ffi::{c_char, c_int, c_void, CStr};
use std::path::{Path, PathBuf};

/// What the loader looks for unless a file is named.
const DEFAULT: &str = "libnccl.so.2";
/// From this version on NCCL takes several ranks on one GPU, if told to.
const MULTI_RANK: i32 = 23003;

type Comm = *mut c_void;
/// `ncclResult_t`; 0 is success, and so is 7, in progress.
type Code = c_int;

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId([u8; 128]);

impl UniqueId {
    /// As it travels to another process.
    pub fn bytes(&self) -> Vec<u8> {
        self.0.to_vec()
    }

    /// What another process's [`bytes`](Self::bytes) stand for.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bytes = bytes.try_into();
        Ok(UniqueId(bytes.map_err(|_| anyhow!("an NCCL id that is not 128 bytes long"))?))
    }
}

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
    ncclAllReduce: fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Code;
    ncclGroupStart: fn() -> Code;
    ncclGroupEnd: fn() -> Code;
    ncclGetErrorString: fn(Code) -> *const c_char;
}

/// The library. It stays loaded: it has threads of its own.
pub struct Nccl {
    functions: Functions,
    version: i32,
    path: PathBuf,
}

impl Nccl {
    /// Opens the file, or what the loader finds, once for the life of the process.
    pub fn open(named: Option<&Path>) -> Result<&'static Self> {
        let path = named.unwrap_or(Path::new(DEFAULT));
        let install =
            "install NCCL (libnccl2, or the wheel nvidia-nccl-cu13), or name its file with --nccl";
        // SAFETY: the user names this library as NCCL; its initialisers are safe to run.
        let library = unsafe { libloading::Library::new(path) }.map_err(|e| {
            let why = anyhow!(e);
            anyhow!("--all-reduce nccl: cannot load {}: {why:#}; {install}", path.display())
        })?;
        let functions = Functions::load(&library)
            .map_err(|e| anyhow!("--all-reduce nccl: {} is no NCCL: {e}", path.display()))?;
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
            "--all-reduce nccl: NCCL {} takes one rank per GPU, and here are {ranks_per_gpu}; use NCCL 2.30.3 or newer, or a GPU \
             per rank",
            self.version()
        );
        Ok(())
    }

    /// Such as `2.30.7`.
    pub fn version(&self) -> String {
        format!("{}.{}.{}", self.version / 10_000, self.version % 10_000 / 100, self.version % 100)
    }

    /// A new communicator's id.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: writes one id.
        let code = unsafe { (self.functions.ncclGetUniqueId)(&mut id) };
        self.check("ncclGetUniqueId", code)?;
        Ok(id)
    }

    /// One call as a group of its own: NCCL then takes it from a process with several ranks, whichever thread makes it.
    fn group(&self, call: &str, code: impl FnOnce() -> Code) -> Result<()> {
        // SAFETY: a group is this thread's own.
        self.check("ncclGroupStart", unsafe { (self.functions.ncclGroupStart)() })?;
        let made = self.check(call, code());
        // SAFETY: as above; ended whatever happened inside.
        let ended = self.check(call, unsafe { (self.functions.ncclGroupEnd)() });
        made.and(ended)
    }

    fn check(&self, call: &str, code: Code) -> Result<()> {
        if code == 0 || code == 7 {
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
            "--all-reduce nccl: {call} failed with {code} ({text}) in {}; NCCL_DEBUG=WARN makes it say why",
            self.path.display()
        )
    }
}

/// One rank's communicator. Not destroyed when dropped: after an error NCCL may wait for ranks that are gone.
pub struct NcclRank {
    nccl: &'static Nccl,
    comm: Comm,
}

// SAFETY: NCCL's communicators may be used from any thread, one at a time.
unsafe impl Send for NcclRank {}

impl NcclRank {
    /// Joins; waits for the other ranks to join too. NCCL takes the GPU that is current.
    pub fn join(
        nccl: &'static Nccl,
        _entered: &Entered<'_>,
        id: UniqueId,
        ranks: usize,
        rank: usize,
    ) -> Result<Self> {
        let mut comm = std::ptr::null_mut();
        // SAFETY: writes one handle, which the group completes.
        nccl.group("ncclCommInitRank", || unsafe {
            (nccl.functions.ncclCommInitRank)(&mut comm, ranks as c_int, id, rank as c_int)
        })?;
        Ok(NcclRank { nccl, comm })
    }

    /// Queues an all-reduce in place, or records it.
    ///
    /// # Safety
    /// `ptr` is memory of the rank's GPU with `count` elements until the stream, or every replay, has passed this.
    pub unsafe fn all_reduce(
        &self,
        _entered: &Entered<'_>,
        stream: StreamRef,
        ptr: u64,
        count: usize,
        dtype: DType,
        op: Op,
    ) -> Result<()> {
        // Types and operations carry NCCL's own numbers.
        let (dtype, op) = (dtype as c_int, op as c_int);
        let data = ptr as *mut c_void;
        // SAFETY: the caller's promise.
        self.nccl.group("ncclAllReduce", || unsafe {
            let call = self.nccl.functions.ncclAllReduce;
            call(data, data, count, dtype, op, self.comm, stream.as_raw())
        })
    }

    /// Frees it, when all ranks are done.
    pub fn destroy(self) -> Result<()> {
        // SAFETY: made once, destroyed once; no call of it is under way.
        let code = unsafe { (self.nccl.functions.ncclCommDestroy)(self.comm) };
        self.nccl.check("ncclCommDestroy", code)
    }
}
