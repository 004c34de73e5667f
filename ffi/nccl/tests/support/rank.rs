//! A started process: its rank, and what it does with our library.

use super::library::{dlsym, Api, Rest};
use super::{Buffer, Gpu, Way};
use peerlane_nccl_core::stats::Stats;
use peerlane_nccl_core::types::*;
use std::ffi::{c_char, c_int, CStr, CString};
use std::path::PathBuf;
use std::time::{Duration, Instant};

pub struct Rank {
    pub way: Way,
    pub rank: usize,
    pub n: usize,
    pub dir: PathBuf,
    pub api: Api,
    pub rest: Rest,
    pub(super) real: Option<usize>,
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
            self.publish_id(name, &id);
            return id;
        }
        self.wait_for(name);
        for (to, from) in id.internal.iter_mut().zip(std::fs::read(path).unwrap()) {
            *to = from as _;
        }
        id
    }

    /// Makes an id known to the other ranks.
    pub fn publish_id(&self, name: &str, id: &ncclUniqueId) {
        let path = self.dir.join(name);
        let bytes: Vec<u8> = id.internal.iter().map(|b| *b as u8).collect();
        std::fs::write(path.with_extension("tmp"), bytes).unwrap();
        std::fs::rename(path.with_extension("tmp"), path).unwrap();
    }

    /// A function of NCCL's, called without our library.
    pub fn past_us<F: Copy>(&self, name: &str) -> F {
        let found = dlsym(self.real.unwrap(), name);
        assert!(found != 0 && size_of::<F>() == size_of::<usize>(), "{name}");
        // SAFETY: the caller names the function's own type.
        unsafe { std::mem::transmute_copy(&found) }
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

    /// GPU 0, and this process's rank of a communicator of all.
    pub fn join(&self) -> (Gpu, ncclComm_t) {
        (Gpu::new(0), self.comm("id"))
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
