//! Which rank is on which GPU, what is free there, and what must be settled before the driver starts.

use super::nccl::Nccl;
use super::{Blas, Cuda, Gpu, Limits};
use crate::args::Wanted;
use crate::config::Config;
use anyhow::{ensure, Result};
use peerlane::bootstrap::UniqueId;
use peerlane::comm::{create_all, Communicator, Config as CommConfig, Creation};
use peerlane::device::cuda::{memory, Device, Driver};
use std::sync::Arc;

/// Sets the variables that the driver and NCCL read when they start. Call it before any thread exists.
///
/// Virtual ranks wait for each other on the GPU. The driver spreads a process's streams over hardware queues, 8 unless told
/// otherwise, and kernels of streams that share a queue start one after the other: a rank's kernel could stand behind one that
/// waits for it.
///
/// NCCL on shared GPUs gets as many blocks as peerlane has there with eight ranks on a large one: its waiting kernels must leave
/// room for what they wait for, and a kernel of cuBLAS may need a multiprocessor to itself. It connects its ranks when they
/// join, not at a first call, which would allocate while other ranks' kernels wait.
pub fn prepare(nccl: bool, ranks_per_gpu: Option<usize>) {
    let mut wanted = vec![("CUDA_DEVICE_MAX_CONNECTIONS", "32")];
    if nccl && ranks_per_gpu != Some(1) {
        wanted.extend([
            ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
            ("NCCL_MAX_CTAS", "4"),
            ("NCCL_RUNTIME_CONNECT", "0"),
        ]);
    }
    for (name, value) in wanted {
        if std::env::var_os(name).is_none() {
            std::env::set_var(name, value);
        }
    }
}

/// The GPUs of a run.
pub struct Gpus {
    /// Those of this process's ranks, from number `first` on.
    pub gpus: Vec<Arc<Gpu>>,
    first: usize,
    pub ranks: usize,
    pub ranks_per_gpu: usize,
    pub blas: &'static Blas,
}

impl Gpus {
    /// As many as `ranks` ranks take.
    pub fn new(wanted: &Wanted, ranks: usize) -> Result<Self> {
        Self::of_ranks(wanted, ranks, None)
    }

    /// The one that carries `rank`, for a process that is this rank alone.
    pub fn of_rank(wanted: &Wanted, ranks: usize, rank: usize) -> Result<Self> {
        Self::of_ranks(wanted, ranks, Some(rank))
    }

    fn of_ranks(wanted: &Wanted, ranks: usize, alone: Option<usize>) -> Result<Self> {
        let all = Device::all(Driver::load()?)?;
        ensure!(!all.is_empty(), "--device cuda: this process sees no GPU (CUDA_VISIBLE_DEVICES?)");
        let ranks_per_gpu = wanted.ranks_per_gpu.unwrap_or(ranks.div_ceil(all.len()));
        ensure!(ranks_per_gpu > 0, "--ranks-per-gpu 0: there is at least one");
        let needed = ranks.div_ceil(ranks_per_gpu);
        ensure!(
            needed <= all.len(),
            "--tp {ranks} --ranks-per-gpu {ranks_per_gpu}: that takes {needed} GPUs and there {}; use --ranks-per-gpu {} or more",
            if all.len() == 1 { "is 1".into() } else { format!("are {}", all.len()) },
            ranks.div_ceil(all.len())
        );
        let blas = Blas::open(wanted.cublas.as_deref())?;
        let kernels = wanted.kernels.as_deref();
        let numbers = match alone {
            Some(rank) => rank / ranks_per_gpu..rank / ranks_per_gpu + 1,
            None => 0..needed,
        };
        let first = numbers.start;
        let gpus = numbers.map(|number| Ok(Arc::new(Gpu::new(number as u32, kernels)?)));
        Ok(Gpus { gpus: gpus.collect::<Result<_>>()?, first, ranks, ranks_per_gpu, blas })
    }

    /// Which of `gpus` carries `rank`.
    pub fn of(&self, rank: usize) -> usize {
        rank / self.ranks_per_gpu - self.first
    }

    /// Bytes that models, caches and activations may take on the GPU where there is least: what is free, without what ranks
    /// need besides.
    pub fn room(&self, config: &Config, limits: &Limits) -> Result<u64> {
        let mut least = u64::MAX;
        for (number, gpu) in self.gpus.iter().enumerate() {
            let free = memory::available(&gpu.context.enter()?)?;
            let ranks =
                (0..self.ranks).filter(|&rank| rank / self.ranks_per_gpu == self.first + number);
            let own = ranks.map(|rank| Cuda::own_bytes(config, rank, self.ranks, limits) + SLAB);
            least = least.min(free.saturating_sub(own.sum::<u64>() + BESIDE));
        }
        Ok(least)
    }

    /// The communicators of all ranks, each on its GPU.
    pub fn communicators(&self, config: &CommConfig) -> Result<Vec<Communicator>> {
        let id = UniqueId::in_dir(config.run_dir.as_deref())?;
        let creation =
            |rank: usize| Creation { id, n: self.ranks, rank, config: self.config(config, rank) };
        let creations: Vec<_> = (0..self.ranks).map(creation).collect();
        Ok(create_all(&creations)?.into_iter().collect::<peerlane::Result<_>>()?)
    }

    /// What the communicator of `rank` is created with.
    pub fn config(&self, config: &CommConfig, rank: usize) -> CommConfig {
        let ordinal = Some((rank / self.ranks_per_gpu) as u32);
        CommConfig { device: peerlane::Device::Cuda { ordinal }, ..config.clone() }
    }

    /// GPUs, driver and libraries, in a line.
    pub fn machine(&self, device: &Cuda, nccl: Option<&Nccl>) -> Result<String> {
        let nccl = nccl.map(|nccl| format!(", NCCL {}", nccl.version())).unwrap_or_default();
        Ok(format!("{}, {}{nccl}", self.describe()?, device.describe_blas()?))
    }

    /// The GPUs and their driver, in a line.
    fn describe(&self) -> Result<String> {
        let name = |gpu: &Arc<Gpu>| gpu.context.device().facts().name.clone();
        let names: Vec<String> = self.gpus.iter().map(name).collect();
        Ok(format!(
            "{}, driver for CUDA {}, {} rank(s) a GPU",
            names.join(", "),
            Driver::load()?.version(),
            self.ranks_per_gpu
        ))
    }
}

/// Of a communicator, with its state.
const SLAB: u64 = 48 << 20;
/// Kernels of cuBLAS and of the library, and what the driver keeps for itself.
const BESIDE: u64 = 1 << 30;
