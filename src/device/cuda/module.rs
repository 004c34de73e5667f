//! Kernels: a module is loaded whole when a communicator is created, never at a first launch, which may be inside somebody's
//! capture, where loading is not allowed.

use super::context::{Context, Entered};
use super::driver::{code, CudaVersion};
use super::stream::StreamRef;
use super::symbols::Failure;
use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};
use std::ffi::{c_void, CString};
use std::sync::Arc;

/// A loaded fatbin.
#[derive(Clone, Debug)]
pub struct Module(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    context: Context,
    raw: sys::CUmodule,
}

// SAFETY: the driver synchronises inside.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Module {
    /// Loads a fatbin that was made by the toolkit `built_with`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the driver is older than that toolkit serves, or the fatbin holds nothing for this GPU;
    /// both versions are in the text.
    pub fn load(context: &Context, image: &[u8], built_with: CudaVersion) -> Result<Self> {
        let driver = context.driver().version();
        let facts = context.device().facts();
        if image.is_empty() {
            // The driver takes no length: it would read from wherever the image is not.
            return Err(Error::Unsupported("an empty fatbin holds no kernels".into()));
        }
        // Within a major version machine code runs on older drivers too; across majors it does not.
        if driver.major < built_with.major {
            return Err(Error::Unsupported(format!(
                "the kernels were compiled with CUDA {built_with} and this driver serves CUDA {driver}: update the driver to \
                 one for CUDA {}.0 or newer, or build with a toolkit of CUDA {}",
                built_with.major, driver.major
            )));
        }
        let entered = context.enter()?;
        // The driver reads words from the image, and bytes that were included in a binary are not aligned to any.
        let mut aligned = vec![0u64; image.len().div_ceil(8)];
        bytemuck::cast_slice_mut::<u64, u8>(&mut aligned)[..image.len()].copy_from_slice(image);
        let mut raw = std::ptr::null_mut();
        // SAFETY: the image is complete and is read during the call alone.
        unsafe { entered.symbols().cuModuleLoadData(&mut raw, aligned.as_ptr().cast()) }.map_err(
            |failure| match failure.code {
                code::NO_BINARY_FOR_GPU
                | code::INVALID_IMAGE
                | code::UNSUPPORTED_PTX_VERSION => Error::Unsupported(format!(
                    "{} (compute capability {}.{}) cannot run the kernels, compiled with CUDA {built_with}, on this driver \
                     for CUDA {driver}: {}",
                    facts.name,
                    facts.compute_capability.0,
                    facts.compute_capability.1,
                    Error::from(failure)
                )),
                _ => failure.into(),
            },
        )?;
        Ok(Module(Arc::new(Loaded { context: context.clone(), raw })))
    }

    /// The kernel `name`, loaded at once, whose one parameter is an `A`.
    pub fn function<A: Copy>(&self, name: &str) -> Result<Function<A>> {
        let context = &self.0.context;
        let entered = context.enter()?;
        let symbols = entered.symbols();
        let symbol = CString::new(name)
            .map_err(|_| Error::Internal(format!("a kernel's name with a NUL: {name:?}")))?;
        let named = |failure: Failure| match Error::from(failure) {
            Error::Device(text) => Error::Device(format!("kernel {name}: {text}")),
            other => other,
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle, valid as long as the module, which `Function` holds.
        unsafe { symbols.cuModuleGetFunction(&mut raw, self.0.raw, symbol.as_ptr()) }
            .map_err(named)?;
        // With lazy loading, the default, a function is loaded at its first launch unless this is called.
        // SAFETY: the function lives.
        if let Some(loaded) = unsafe { symbols.cuFuncLoad(raw) } {
            loaded.map_err(named)?;
        }
        let (mut offset, mut bytes) = (0, 0);
        // Drivers before CUDA 12.4 cannot tell.
        // SAFETY: writes two sizes.
        if let Some(info) = unsafe { symbols.cuFuncGetParamInfo(raw, 0, &mut offset, &mut bytes) } {
            info.map_err(named)?;
            if (offset, bytes) != (0, size_of::<A>()) {
                return Err(Error::Internal(format!(
                    "kernel {name} takes {bytes} bytes of parameters and the host hands over {}: the fatbin and the library \
                     are not of one build",
                    size_of::<A>()
                )));
            }
        }
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: writes one int.
            unsafe { symbols.cuFuncGetAttribute(&mut value, which, raw) }.map_err(named)?;
            Ok::<u32, Error>(value.max(0) as u32)
        };
        Ok(Function {
            module: self.clone(),
            raw,
            name: name.to_owned(),
            max_threads: attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            registers: attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: attribute(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            ptx_version: attribute(Attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION)?,
            params: std::marker::PhantomData,
        })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once, when no function of it is left.
        self.context.give_back(|symbols| unsafe { symbols.cuModuleUnload(self.raw) });
    }
}

/// A kernel whose one parameter, by value, is an `A`. It keeps its module loaded.
#[derive(Clone, Debug)]
pub struct Function<A> {
    module: Module,
    raw: sys::CUfunction,
    name: String,
    max_threads: u32,
    registers: u32,
    local_bytes: u32,
    ptx_version: u32,
    params: std::marker::PhantomData<fn(A)>,
}

// SAFETY: a handle of the module's, which may be used from any thread.
unsafe impl<A> Send for Function<A> {}
// SAFETY: as above.
unsafe impl<A> Sync for Function<A> {}

/// The first GPUs that have programmatic launches and clusters.
pub const FIRST_CAPABILITY: (u32, u32) = (9, 0);
/// The same of what source is compiled for: [`Function::ptx_version`].
pub const FIRST_PTX_VERSION: u32 = 90;

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks.
    pub blocks: u32,
    /// Threads of each.
    pub threads: u32,
    /// Bytes of dynamic shared memory of each.
    pub shared_bytes: u32,
    /// The kernel may start before the one before it in the stream has ended, and waits for it inside (programmatic
    /// dependent launch). Compute capability 9.0 and newer; counts twice when residency is budgeted.
    pub programmatic: bool,
    /// So many neighbouring blocks each start together and reach each other's shared memory; `blocks` is a multiple of it. At
    /// most 8; compute capability 9.0 and newer. 0: none do.
    pub cluster: u32,
}

/// Blocks of the largest cluster that every GPU with clusters has.
const PORTABLE_CLUSTER: u32 = 8;

impl LaunchShape {
    /// Blocks and threads, and nothing else.
    pub const fn plain(blocks: u32, threads: u32) -> Self {
        LaunchShape { blocks, threads, shared_bytes: 0, programmatic: false, cluster: 0 }
    }

    /// What a launch has beyond its grid, those that it has first.
    fn attributes(&self) -> [sys::CUlaunchAttribute; 2] {
        use sys::CUlaunchAttributeID::*;
        let empty = sys::CUlaunchAttributeValue { pad: [0; 64] };
        let new = |id| sys::CUlaunchAttribute { id, pad: [0; 4], value: empty };
        let mut programmatic = new(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
        programmatic.value.programmaticStreamSerializationAllowed = 1;
        let mut cluster = new(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
        let (x, y, z) = (self.cluster, 1, 1);
        cluster.value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
        match self.programmatic {
            true => [programmatic, cluster],
            false => [cluster, programmatic],
        }
    }

    /// `attributes`: from [`attributes`](Self::attributes) of the same shape; the result points to them.
    fn config(
        &self,
        stream: sys::CUstream,
        attributes: &mut [sys::CUlaunchAttribute; 2],
    ) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: self.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: u32::from(self.programmatic) + u32::from(self.cluster != 0),
        }
    }
}

impl<A: Copy> Function<A> {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Most threads of a block.
    pub fn max_threads(&self) -> u32 {
        self.max_threads
    }

    /// Registers of a thread.
    pub fn registers(&self) -> u32 {
        self.registers
    }

    /// Bytes of local memory of a thread: above 0 the kernel spills or indexes a struct on its stack.
    pub fn local_bytes(&self) -> u32 {
        self.local_bytes
    }

    /// The architecture that its source was compiled for, ten times `__CUDA_ARCH__ / 100`: 80 also where the driver, or the
    /// compiler, made machine code for a GPU of 9.0 from that; 0 where that is not known.
    pub fn ptx_version(&self) -> u32 {
        self.ptx_version
    }

    /// Tells it from every other kernel that is loaded.
    pub fn id(&self) -> usize {
        self.raw as usize
    }

    pub(super) fn raw(&self) -> sys::CUfunction {
        self.raw
    }

    /// Blocks of this shape that fit on one multiprocessor at a time.
    pub fn blocks_per_sm(&self, threads: u32, shared_bytes: u32) -> Result<u32> {
        let entered = self.module.0.context.enter()?;
        let mut blocks = 0;
        // SAFETY: writes one int.
        unsafe {
            entered.symbols().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                self.raw,
                threads as i32,
                shared_bytes as usize,
            )
        }?;
        Ok(blocks.max(0) as u32)
    }

    /// Clusters of so many blocks that fit on the GPU at a time; of more than 8 (up to 16) only where the GPU has such.
    pub fn most_clusters(&self, threads: u32, cluster: u32) -> Result<u32> {
        let entered = self.module.0.context.enter()?;
        if cluster > PORTABLE_CLUSTER {
            let allowed =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
            // SAFETY: a function that is loaded, and a value that the attribute takes.
            unsafe { entered.symbols().cuFuncSetAttribute(self.raw, allowed, 1) }?;
        }
        let shape = LaunchShape { cluster, ..LaunchShape::plain(cluster, threads) };
        let mut attributes = shape.attributes();
        let config = shape.config(std::ptr::null_mut(), &mut attributes);
        let mut clusters = 0;
        // SAFETY: reads the configuration, whose attributes outlive the call, and writes one int.
        unsafe {
            entered.symbols().cuOccupancyMaxActiveClusters(&mut clusters, self.raw, &config)
        }?;
        Ok(clusters.max(0) as u32)
    }

    /// Queues the kernel, or records it where the stream is being captured. `params` is copied before this returns.
    ///
    /// # Safety
    /// Every address in `params` is what the kernel takes it for, and stays so until the stream has passed the launch, or
    /// the last replay of the graph it was recorded into.
    pub unsafe fn launch(
        &self,
        entered: &Entered<'_>,
        stream: StreamRef,
        shape: &LaunchShape,
        params: &A,
    ) -> Result<()> {
        let mut attributes = shape.attributes();
        let config = shape.config(stream.raw(), &mut attributes);
        let mut pointers = [params as *const A as *mut c_void];
        // SAFETY: one parameter, of the size that was compared when the function was looked up; the rest is the caller's
        // promise.
        unsafe {
            entered.symbols().cuLaunchKernelEx(
                &config,
                self.raw,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .map_err(|failure| match Error::from(failure) {
            Error::Device(text) => Error::Device(format!("kernel {}: {text}", self.name)),
            other => other,
        })
    }
}
