//! A GPU of the run: its context and the kernels on it, shared by the ranks there.

use super::launch::{self, Arguments};
use anyhow::{ensure, Context as _, Result};
use peerlane::device::cuda::{
    Context, CudaVersion, Device, Driver, Entered, Function, LaunchShape, Module, StreamRef,
};
use std::path::Path;

/// What the build script compiled, or empty.
static BUILT_IN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/verify.fatbin"));

macro_rules! kernels {
    ($($field:ident: $args:ident,)*) => {
        /// Every kernel, loaded.
        pub struct Kernels { $(pub $field: Function<launch::$args>,)* }

        impl Kernels {
            fn load(module: &Module) -> peerlane::Result<Self> {
                Ok(Kernels { $($field: module.function(launch::$args::NAME)?,)* })
            }
        }
    };
}

kernels! {
    fill: Fill,
    embed: Embed,
    add_norm: AddNorm,
    latents: Latents,
    few_rows: FewRows,
    query_up: QueryUp,
    queries: Queries,
    turn_over: TurnOver,
    values: Values,
    rotate: Rotate,
    attend: Attend,
    merge: Merge,
    route: Route,
    router: Router,
    dispatch: Dispatch,
    gate_up: GateUp,
    down: Down,
    choose: Choose,
    accept: Accept,
    stamp: Stamp,
}

/// One GPU.
pub struct Gpu {
    pub context: Context,
    pub kernels: Kernels,
}

impl Gpu {
    /// The GPU with this number in this process, with the built-in kernels or those of a file.
    pub fn new(ordinal: u32, kernels: Option<&Path>) -> Result<Self> {
        let context = Context::retain(&Device::by_ordinal(Driver::load()?, ordinal)?)?;
        let image = match kernels {
            Some(path) => std::fs::read(path)
                .with_context(|| format!("--kernels: cannot read {}", path.display()))?,
            None => BUILT_IN.to_vec(),
        };
        ensure!(
            !image.is_empty(),
            "--device cuda: this runner was built where there was no nvcc, so it has no kernels; build it with nvcc \
             (CUDA_HOME), or name a fatbin of examples/verify/cuda/kernels.cu with --kernels"
        );
        // Of whichever compiler made the library's kernels, which the driver judges by itself.
        let module = Module::load(&context, &image, CudaVersion { major: 0, minor: 0 })?;
        let kernels = Kernels::load(&module)?;
        Ok(Gpu { context, kernels })
    }
}

/// Queues a kernel, or records it.
///
/// # Safety
/// Every address in `arguments` is memory of this GPU that holds what the kernel takes it for, until the stream, or every
/// replay of the graph that it is recorded into, has passed the launch.
pub unsafe fn launch<A: Arguments>(
    entered: &Entered<'_>,
    stream: StreamRef,
    kernel: &Function<A>,
    arguments: &A,
) -> Result<()> {
    let shape = LaunchShape::plain(arguments.blocks(), A::THREADS);
    // SAFETY: the caller's promise.
    Ok(unsafe { kernel.launch(entered, stream, &shape, arguments) }?)
}
