//! The kernel of somebody else's between which all-reduces are measured: `cuda/foreign.cu`.

use super::rank::GpuRank;
use crate::bench::orders::Call;
use anyhow::{Context as _, Result};
use peerlane::device::cuda::{CudaVersion, Function, LaunchShape, Module};
use std::path::Path;

/// What `build.rs` compiled, or empty.
static BUILT_IN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/foreign.fatbin"));
const THREADS: u32 = 256;
const PACK: u64 = 16;

/// The kernel's parameter, `pl_foreign_args` in its source.
#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    source: u64,
    result: u64,
    next: u64,
    bytes: u64,
}

/// The kernel, loaded for the GPU of every rank of this process.
pub struct Foreign(Vec<Function<Arguments>>);

impl Foreign {
    /// Loads the built-in fatbin, or the file `path`.
    pub fn load(ranks: &[GpuRank], path: Option<&Path>) -> Result<Self> {
        let image = match path {
            Some(path) => std::fs::read(path)
                .with_context(|| format!("--foreign-kernel: cannot read {}", path.display()))?,
            None => BUILT_IN.to_vec(),
        };
        anyhow::ensure!(
            !image.is_empty(),
            "--between: this tool was built where there was no nvcc, so it has no kernel to measure between; build it with \
             nvcc (CUDA_HOME), or name a fatbin of cuda/foreign.cu with --foreign-kernel"
        );
        // Of whichever compiler made the library's kernels, which the driver has taken by now.
        let built_with = CudaVersion { major: 0, minor: 0 };
        let load = |rank: &GpuRank| {
            Module::load(&rank.context, &image, built_with)?.function("peerlane_foreign")
        };
        Ok(Foreign(ranks.iter().map(load).collect::<peerlane::Result<_>>()?))
    }

    /// Queues the kernel on every rank's stream, or records it: it reads the call's last result and writes its next input.
    pub fn queue(&self, ranks: &[GpuRank], call: &Call) -> Result<()> {
        let bytes = call.bytes() as u64;
        let blocks = (bytes / PACK).div_ceil(THREADS.into()).max(1) as u32;
        let shape = LaunchShape::plain(blocks, THREADS);
        for (kernel, rank) in self.0.iter().zip(ranks) {
            let (next, result) = rank.operands(call);
            let arguments = Arguments { source: rank.source(), result, next, bytes };
            let entered = rank.context.enter()?;
            // SAFETY: all three are this rank's device memory of at least `bytes` bytes, which lives until the stream or
            // the graph is done with it, as in `library::enqueue`.
            unsafe { kernel.launch(&entered, rank.stream.as_ref(), &shape, &arguments) }?;
        }
        Ok(())
    }
}
