//! What must be settled before the driver starts, and which GPUs there are.

use super::super::args::Args;
use super::super::orders::Gpu;
use anyhow::{ensure, Result};
use peerlane::device::cuda::{Device, Driver};
use peerlane::env::Env;

/// The most that the driver takes.
const CONNECTIONS: &str = "32";

/// Sets the variables that the driver and NCCL read when they start, in this process and so in the ranks' processes; what
/// was set is said in the table's head. Call it before any thread exists.
///
/// Virtual ranks wait for each other on the GPU. The driver spreads a process's streams over hardware queues, 8 unless told
/// otherwise, and kernels of streams that share a queue start one after the other: a rank's kernel could stand behind one that
/// waits for it.
pub fn prepare(args: &Args, env: &Env) -> Vec<String> {
    let mut said = Vec::new();
    let mut set = |name: &str, value: &str, present: Option<&str>, why: &str| match present {
        Some(value) => said.push(format!("{name}={value} (from the environment)")),
        None => {
            std::env::set_var(name, value);
            said.push(format!("{name}={value} (set by this tool: {why})"));
        }
    };
    set(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        CONNECTIONS,
        env.cuda_connections.as_deref(),
        "a hardware queue per stream",
    );
    if args.rival == Some(super::super::args::Rival::Nccl) && args.ranks > 1 {
        set(
            "NCCL_MULTI_RANK_GPU_ENABLE",
            "1",
            env.nccl_multi_rank.as_deref(),
            "for ranks that share a GPU",
        );
    }
    said
}

/// Which GPU carries which rank, from the flags and the GPUs that this process sees.
pub fn place(args: &Args) -> Result<Gpu> {
    let gpus = Device::all(Driver::load()?)?;
    ensure!(!gpus.is_empty(), "--device cuda: this process sees no GPU (CUDA_VISIBLE_DEVICES?)");
    let ranks_per_gpu = args.ranks_per_gpu.unwrap_or(args.ranks.div_ceil(gpus.len()));
    let needed = args.ranks.div_ceil(ranks_per_gpu);
    ensure!(
        needed <= gpus.len(),
        "--ranks {} --ranks-per-gpu {ranks_per_gpu}: that takes {needed} GPUs and there {}; use --ranks-per-gpu {} or more",
        args.ranks,
        if gpus.len() == 1 { "is 1".into() } else { format!("are {}", gpus.len()) },
        args.ranks.div_ceil(gpus.len())
    );
    for gpu in &gpus[..needed] {
        gpu.check_usable()?;
    }
    Ok(Gpu {
        ranks_per_gpu,
        lane: args.lane,
        blocks: args.blocks,
        threads: args.block_threads,
        foreign_kernel: args.foreign_kernel.clone(),
    })
}

/// The GPUs in use and their driver, in a line.
pub fn describe(gpu: &Gpu, ranks: usize) -> Result<String> {
    let driver = Driver::load()?;
    let used = ranks.div_ceil(gpu.ranks_per_gpu);
    let gpus = Device::all(driver)?;
    let names: Vec<String> = gpus[..used.min(gpus.len())]
        .iter()
        .map(|gpu| format!("{} ({})", gpu.facts().name, gpu.facts().uuid))
        .collect();
    Ok(format!("{}, driver for CUDA {}", names.join(", "), driver.version()))
}
