//! Ranks as processes of their own, over the stand-in CUDA driver and the stand-in NCCL, with one of our libraries before it.
#![allow(dead_code)]

use peerlane_core::device::cuda::{
    Capture, CaptureMode, Context, Device, DeviceMemory, Driver, Event, GraphExec, Stream,
};
use peerlane_nccl_core::stats::Stats;
use peerlane_nccl_core::types::*;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr, CString};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How a process gets at our library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// The real NCCL is loaded first, as PyTorch does; then the preload library.
    Preload,
    /// The linking library, which brings the real one with it.
    Linking,
    /// The full library; the variable says where the real one is.
    Full,
    /// The full library and no real one.
    Alone,
}

const ROLE: &str = "PEERLANE_TEST_ROLE";

pub fn built(name: &str) -> PathBuf {
    let path = std::env::current_exe().unwrap().with_file_name(name);
    assert!(path.exists(), "{} was not built with the tests", path.display());
    path
}

/// A folder with links of the names that programs look for.
pub fn folder(name: &str, links: &[(&str, &str)]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    for (link, target) in links {
        // Tests share the folder, and it stays for the next run.
        let _ = std::os::unix::fs::symlink(built(target), folder.join(link));
    }
    folder
}

pub fn driver() -> PathBuf {
    folder("nccl-driver", &[("libcuda.so", "libfakecuda.so"), ("libcuda.so.1", "libfakecuda.so")])
}

pub fn standin() -> PathBuf {
    folder("nccl-standin", &[("libnccl.so.2", "libstandin_nccl.so")])
}

/// What a test starts: processes of one role, which share a folder.
pub struct World {
    pub dir: tempfile::TempDir,
    test: String,
    env: Vec<(String, String)>,
}

pub struct Process {
    pub child: Child,
    pub what: String,
    log: PathBuf,
}

impl World {
    pub fn new(test: &str) -> Self {
        World { dir: tempfile::tempdir().unwrap(), test: test.to_owned(), env: Vec::new() }
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts rank `rank` of `n`, as the test of the same name in a process of its own.
    pub fn start(&self, way: Way, rank: usize, n: usize, env: &[(&str, &str)]) -> Process {
        let kernels = self.dir.path().join("fake.fatbin");
        std::fs::write(&kernels, b"an image").unwrap();
        let run = self.dir.path().join("run");
        let mut path = driver().into_os_string();
        if way == Way::Linking {
            path.push(":");
            path.push(standin());
        }
        let log = self.dir.path().join(format!("log-{rank}"));
        let out = std::fs::File::create(&log).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([&self.test, "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{way:?} {rank} {n} {}", self.dir.path().display()))
            .env("LD_LIBRARY_PATH", path)
            .env("FAKECUDA_RANK", rank.to_string())
            .env("FAKECUDA_KERNEL_MAP", hostkernels::REGISTERED)
            .env("PEERLANE_KERNELS", kernels)
            .env("PEERLANE_RUN_DIR", run)
            .env("PEERLANE_SLAB", "4M")
            .env("PEERLANE_PROBE", "off")
            .env("PEERLANE_CACHE_DIR", self.dir.path().join("cache"))
            .env("PEERLANE_LOG", "info")
            .env("PEERLANE_DEADLINE", "60")
            .env("PEERLANE_SETUP_DEADLINE", "60")
            .envs(self.env.iter().map(|(k, v)| (k, v)))
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::from(out.try_clone().unwrap()))
            .stderr(Stdio::from(out));
        if way == Way::Full {
            command.env("PEERLANE_NCCL_LIB", standin().join("libnccl.so.2"));
        }
        Process { child: command.spawn().unwrap(), what: format!("{way:?} rank {rank}"), log }
    }

    /// All ranks, which must all succeed.
    pub fn run(&self, way: Way, n: usize) {
        let ranks: Vec<Process> = (0..n).map(|rank| self.start(way, rank, n, &[])).collect();
        ranks.into_iter().for_each(Process::succeeds);
    }
}

impl Process {
    pub fn output(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn succeeds(mut self) {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break Some(status);
            }
            if start.elapsed() > Duration::from_secs(100) {
                break None;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let text = self.output();
        let passed = status.is_some_and(|status| status.success()) && text.contains("1 passed");
        assert!(passed, "{}: {status:?}\n{text}", self.what);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a started process: who it is, with our library loaded.
pub fn role() -> Option<Rank> {
    let text = std::env::var(ROLE).ok()?;
    let parts: Vec<&str> = text.splitn(4, ' ').collect();
    let way = match parts[0] {
        "Preload" => Way::Preload,
        "Linking" => Way::Linking,
        "Full" => Way::Full,
        _ => Way::Alone,
    };
    register_kernels();
    let (api, rest, real) = load(way);
    Some(Rank {
        way,
        rank: parts[1].parse().unwrap(),
        n: parts[2].parse().unwrap(),
        dir: PathBuf::from(parts[3]),
        api,
        rest,
        real,
    })
}

pub struct Rank {
    pub way: Way,
    pub rank: usize,
    pub n: usize,
    pub dir: PathBuf,
    pub api: Api,
    pub rest: Rest,
    real: Option<usize>,
}

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

fn load(way: Way) -> (Api, Rest, Option<usize>) {
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

fn register_kernels() {
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

/// One local rank's GPU.
pub struct Gpu {
    pub context: Context,
    pub stream: Stream,
}

impl Gpu {
    pub fn new(ordinal: u32) -> Self {
        let context =
            Context::retain(&Device::by_ordinal(Driver::load().unwrap(), ordinal).unwrap())
                .unwrap();
        let stream = Stream::new(&context, 0).unwrap();
        Gpu { context, stream }
    }

    pub fn buffer(&self, values: &[f32]) -> Buffer {
        let memory = DeviceMemory::new(&self.context, size_of_val(values).max(4)).unwrap();
        let buffer = Buffer { memory, count: values.len() };
        buffer.set(self, values);
        buffer
    }

    pub fn event(&self) -> Event {
        Event::new(&self.context).unwrap()
    }

    pub fn raw(&self) -> cudaStream_t {
        self.stream.as_ref().as_raw().cast()
    }

    pub fn capture(&self, calls: impl FnOnce()) -> GraphExec {
        let capture = Capture::begin(&self.stream, CaptureMode::ThreadLocal).unwrap();
        calls();
        capture.end().unwrap().instantiate().unwrap()
    }

    pub fn replay(&self, graph: &GraphExec) {
        graph.launch(&self.context.enter().unwrap(), self.stream.as_ref()).unwrap();
        self.stream.synchronize().unwrap();
    }
}

pub struct Buffer {
    memory: DeviceMemory,
    pub count: usize,
}

impl Buffer {
    pub fn at(&self) -> *mut c_void {
        self.memory.ptr() as *mut c_void
    }

    pub fn set(&self, gpu: &Gpu, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
        self.memory.write(&gpu.stream, 0, &bytes).unwrap();
    }

    pub fn get(&self, gpu: &Gpu) -> Vec<f32> {
        let mut bytes = vec![0; self.count * 4];
        self.memory.read(&gpu.stream, 0, &mut bytes).unwrap();
        bytes.chunks(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect()
    }
}

/// What rank `rank` brings to call `call`: small integers, so that sums are exact, and another payload in each call.
pub fn values(rank: usize, call: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((rank * 7 + call * 5 + i) % 64) as f32).collect()
}

/// The sum over the ranks, from first principles.
pub fn sum(ranks: impl Iterator<Item = usize> + Clone, call: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ranks.clone().map(|r| ((r * 7 + call * 5 + i) % 64) as f32).sum()).collect()
}

impl Rank {
    /// An id that rank 0 makes and the others read.
    pub fn id(&self, name: &str) -> ncclUniqueId {
        let path = self.dir.join(name);
        let mut id = ncclUniqueId { internal: [0; 128] };
        if self.rank == 0 {
            // SAFETY: writes one id.
            assert_eq!(
                unsafe { (self.api.ncclGetUniqueId)(&mut id) },
                ncclSuccess,
                "{}",
                self.last_error()
            );
            let bytes: Vec<u8> = id.internal.iter().map(|b| *b as u8).collect();
            std::fs::write(path.with_extension("tmp"), bytes).unwrap();
            std::fs::rename(path.with_extension("tmp"), path).unwrap();
            return id;
        }
        self.wait_for(name);
        for (to, from) in id.internal.iter_mut().zip(std::fs::read(path).unwrap()) {
            *to = from as _;
        }
        id
    }

    pub fn wait_for(&self, name: &str) {
        let start = Instant::now();
        while !self.dir.join(name).exists() {
            assert!(start.elapsed() < Duration::from_secs(60), "{name} did not come");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn tell(&self, name: &str) {
        std::fs::write(self.dir.join(name), b"").unwrap();
    }

    pub fn config(&self) -> ncclConfig_t {
        // SAFETY: integers and pointers, for which zero is a value.
        let mut config: ncclConfig_t = unsafe { std::mem::zeroed() };
        config.size = size_of::<ncclConfig_t>();
        config.magic = NCCL_API_MAGIC;
        config.version = NCCL_VERSION_CODE;
        config.blocking = c_int::MIN;
        config
    }

    /// This process's rank of a communicator of all.
    pub fn comm(&self, name: &str) -> ncclComm_t {
        let mut comm = std::ptr::null_mut();
        let id = self.id(name);
        // SAFETY: writes one handle.
        let code = unsafe {
            (self.api.ncclCommInitRank)(&mut comm, self.n as c_int, id, self.rank as c_int)
        };
        assert_eq!(code, ncclSuccess, "{}", self.last_error());
        comm
    }

    pub fn all_reduce(&self, comm: ncclComm_t, gpu: &Gpu, buffer: &Buffer) -> ncclResult_t {
        let at = buffer.at();
        // SAFETY: in place, in device memory.
        unsafe {
            (self.api.ncclAllReduce)(at, at, buffer.count, ncclFloat32, ncclSum, comm, gpu.raw())
        }
    }

    /// One call, eager and in place, right or the test fails.
    pub fn check(&self, comm: ncclComm_t, gpu: &Gpu, call: usize, count: usize) {
        let buffer = gpu.buffer(&values(self.rank, call, count));
        assert_eq!(self.all_reduce(comm, gpu, &buffer), ncclSuccess, "{}", self.last_error());
        gpu.stream.synchronize().unwrap();
        assert!(
            buffer.get(gpu) == sum(0..self.n, call, count),
            "call {call} of {count} elements is wrong"
        );
    }

    pub fn destroy(&self, comm: ncclComm_t) {
        // SAFETY: a communicator of ours.
        assert_eq!(
            unsafe { (self.api.ncclCommDestroy)(comm) },
            ncclSuccess,
            "{}",
            self.last_error()
        );
    }

    pub fn async_error(&self, comm: ncclComm_t) -> ncclResult_t {
        let mut code = ncclSuccess;
        // SAFETY: writes one number.
        assert_eq!(unsafe { (self.api.ncclCommGetAsyncError)(comm, &mut code) }, ncclSuccess);
        code
    }

    pub fn last_error(&self) -> String {
        // SAFETY: NULL is allowed, and the text is terminated.
        unsafe { CStr::from_ptr((self.api.ncclGetLastError)(std::ptr::null_mut())) }
            .to_string_lossy()
            .into_owned()
    }

    /// Counters of a communicator, or of the process.
    pub fn stats(&self, comm: ncclComm_t) -> Stats {
        let mut stats = Stats::default();
        // SAFETY: a struct of this size.
        assert_eq!(unsafe { (self.api.stats)(comm, &mut stats, size_of::<Stats>()) }, 0);
        stats
    }

    /// How often the stand-in was called.
    pub fn nccl_calls(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        let found = dlsym(self.real.unwrap(), "standin_calls");
        // SAFETY: the exported function's own type.
        unsafe {
            std::mem::transmute::<usize, unsafe extern "C" fn(*const c_char) -> u64>(found)(
                name.as_ptr(),
            )
        }
    }
}

/// For the generated types.
pub type Unused = (c_uint, c_char);
