//! Modules, functions and launches: a kernel is a host function that runs the whole grid, given a copy of its one parameter.

#[allow(unused)]
#[path = "../../../src/launch.rs"]
mod launch;

use crate::capture::forbid_in_capture;
use crate::config::config;
use crate::context::current;
use crate::entry::{entry, lock};
use crate::errors::{
    get_text, put, CLUSTER_SIZE_IS_NOT_VALID, DEVICE_KERNEL_IMAGE_IS_INVALID, INVALID_ARGUMENT,
    NAMED_SYMBOL_NOT_FOUND,
};
use crate::graph::Task;
use crate::stream::{enqueue_task, resolve};
use crate::table::Table;
use cudarc::driver::sys::{
    CUfunction_attribute as A, CUlaunchAttributeID as Id, CUlaunchConfig, CUDA_KERNEL_NODE_PARAMS,
};
use launch::{pl_args, pl_step, pl_unrolled_1, pl_unrolled_15, pl_unrolled_3, pl_unrolled_7};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_char, c_int, c_void, CString};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

pub type HostKernel = unsafe extern "C" fn(*const c_void);

#[derive(Clone, Copy)]
struct Function {
    run: HostKernel,
    bytes: usize,
    module: usize,
}

static MODULES: Table<()> = Table::new();
static FUNCTIONS: Table<Function> = Table::new();
static KERNELS: Mutex<BTreeMap<String, (HostKernel, usize)>> = Mutex::new(BTreeMap::new());
/// Functions that may be asked about larger clusters than every GPU has.
static LARGE_CLUSTERS: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());
static LAUNCHES: AtomicU64 = AtomicU64::new(1);

/// Sizes of the parameters of kernels that make a step. Those of the tests' own kernels are other ones.
const STEPS: [usize; 5] = [
    size_of::<pl_args>(),
    size_of::<pl_unrolled_1>(),
    size_of::<pl_unrolled_3>(),
    size_of::<pl_unrolled_7>(),
    size_of::<pl_unrolled_15>(),
];

pub fn live_modules() -> usize {
    MODULES.len()
}

/// Makes `name` a kernel of every module from now on.
pub fn register(name: String, run: HostKernel, bytes: usize) {
    lock(&KERNELS).insert(name, (run, bytes));
}

/// The library of host kernels, if one is named.
static LIBRARY: LazyLock<Option<usize>> = LazyLock::new(|| {
    let path = config().kernels.as_ref()?;
    let name = CString::new(path.as_str()).ok()?;
    // SAFETY: a terminated path; its initialisers are the test's own.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        crate::config::bad("FAKECUDA_KERNELS", path);
    }
    Some(library as usize)
});

fn in_library(symbol: &str) -> Option<HostKernel> {
    let symbol = CString::new(symbol).ok()?;
    // SAFETY: an open library and a terminated name.
    let found = unsafe { libc::dlsym((*LIBRARY)? as *mut c_void, symbol.as_ptr()) };
    // SAFETY: a host kernel by its name, so of this type.
    (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, HostKernel>(found) })
}

/// The host function of a kernel and the bytes of its parameter.
fn find(name: &str) -> Result<(HostKernel, usize), u32> {
    let args = size_of::<pl_args>();
    let mapped = config().kernel_map.iter().find(|(prefix, ..)| name.starts_with(prefix));
    let (symbol, bytes) = match mapped {
        Some((_, symbol, 0)) => (symbol.as_str(), args),
        Some((_, symbol, bytes)) => (symbol.as_str(), *bytes),
        None => (name, args),
    };
    if let Some(kernel) = lock(&KERNELS).get(symbol) {
        return Ok(*kernel);
    }
    in_library(symbol).map(|run| (run, bytes)).ok_or(NAMED_SYMBOL_NOT_FOUND)
}

fn function(handle: usize) -> Result<Function, u32> {
    let function = *FUNCTIONS.get(handle)?;
    // A function dies with its module.
    MODULES.get(function.module).map(|_| function)
}

/// The same with the norm by itself, which makes no step: all whose parameter begins with a `pl_step`.
fn begins_with_step(bytes: usize) -> bool {
    STEPS.contains(&bytes) || bytes == size_of::<pl_step>()
}

/// A kernel and all that it runs with.
#[derive(Clone)]
pub struct Launch {
    handle: usize,
    function: Function,
    /// The parameter, in words, so that it is aligned for whatever struct it is.
    words: Vec<u128>,
    pub attributes: Attributes,
    pub blocks: u32,
    pub threads: u32,
}

/// What a launch has beyond its grid.
#[derive(Clone, Copy, Default)]
pub struct Attributes {
    pub programmatic: bool,
    /// Blocks of a cluster; 0: there are none.
    pub cluster: u32,
}

impl Attributes {
    /// # Safety
    /// `config` has as many as it says.
    unsafe fn read(config: &CUlaunchConfig) -> Result<Self, u32> {
        let mut found = Attributes::default();
        if config.numAttrs > 0 && config.attrs.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        for at in 0..config.numAttrs as usize {
            // SAFETY: the caller's contract, and the value that belongs to the id.
            unsafe {
                let attribute = &*config.attrs.add(at);
                match attribute.id as u32 {
                    id if id
                        == Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION as u32 =>
                    {
                        found.programmatic =
                            attribute.value.programmaticStreamSerializationAllowed != 0;
                    }
                    id if id == Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION as u32 => {
                        let dim = attribute.value.clusterDim;
                        if (dim.y, dim.z) != (1, 1) || !(1..=LARGEST_CLUSTER).contains(&dim.x) {
                            return Err(CLUSTER_SIZE_IS_NOT_VALID);
                        }
                        found.cluster = dim.x;
                    }
                    _ => return Err(INVALID_ARGUMENT),
                }
            }
        }
        Ok(found)
    }
}

/// Of a cluster that is launched: a portable one.
const MOST_IN_CLUSTER: u32 = 8;
/// Of one that is asked about, where the function allows it.
const LARGEST_CLUSTER: u32 = 16;
/// Blocks of clusters on a multiprocessor.
const MOST_OF_CLUSTERS: u32 = 8;
/// Multiprocessors of a GPU, and those that are neighbours: a cluster is of one such group. The last group is a smaller one.
pub const SMS: u32 = 132;
const NEIGHBOURS: u32 = 16;

/// Blocks that a multiprocessor holds: as many as fit by their threads, and of more than 512 one, as if for their registers.
fn per_sm(threads: u32) -> u32 {
    if threads > 512 {
        1
    } else {
        (2048 / threads).min(32)
    }
}

impl Launch {
    /// # Safety
    /// `params` points to pointers to the kernel's parameters, as the driver API asks.
    unsafe fn new(
        handle: usize,
        grid: [u32; 3],
        block: [u32; 3],
        attributes: Attributes,
        params: *mut *mut c_void,
    ) -> Result<Self, u32> {
        let function = function(handle)?;
        let threads: u64 = block.iter().map(|n| u64::from(*n)).product();
        if grid.contains(&0) || threads == 0 || threads > 1024 || params.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        if attributes.cluster != 0 && !grid[0].is_multiple_of(attributes.cluster) {
            return Err(CLUSTER_SIZE_IS_NOT_VALID);
        }
        let mut words = vec![0u128; function.bytes.div_ceil(16)];
        // SAFETY: one parameter of the function's size, for which there are enough words; it is copied now, as the real
        // driver does.
        unsafe {
            let from = (*params).cast::<u8>();
            std::ptr::copy_nonoverlapping(from, words.as_mut_ptr().cast(), function.bytes)
        };
        let [blocks, threads] = [grid, block].map(|extents| extents.iter().product());
        let launch = Launch { handle, function, words, attributes, blocks, threads };
        let told = launch.step().map_or(0, |step| step.cluster);
        if launch.is_ours() && told != attributes.cluster {
            eprintln!(
                "fakecuda: a kernel is told of clusters of {told}, not {}",
                attributes.cluster
            );
            return Err(INVALID_ARGUMENT);
        }
        if attributes.cluster > MOST_IN_CLUSTER || attributes.cluster != 0 && !launch.waits_inside()
        {
            return Err(CLUSTER_SIZE_IS_NOT_VALID);
        }
        Ok(launch)
    }

    /// Takes another parameter; the function stays, and so do the attributes.
    ///
    /// # Safety
    /// As the driver API asks.
    pub unsafe fn set(&mut self, node: &CUDA_KERNEL_NODE_PARAMS) -> Result<(), u32> {
        if node.func as usize != self.handle {
            return Err(INVALID_ARGUMENT);
        }
        let grid = [node.gridDimX, node.gridDimY, node.gridDimZ];
        let block = [node.blockDimX, node.blockDimY, node.blockDimZ];
        // SAFETY: the caller's contract.
        *self =
            unsafe { Launch::new(self.handle, grid, block, self.attributes, node.kernelParams) }?;
        Ok(())
    }

    pub fn run(&self) {
        let mut words = self.words.clone();
        if STEPS.contains(&self.function.bytes) {
            // Every launch has an id of its own, every replay of one node included, like %gridid on a GPU.
            let step: *mut pl_step = words.as_mut_ptr().cast();
            // SAFETY: the copy is the struct of a step, by its size, aligned, and begins with a `pl_step`.
            unsafe { (*step).launch = LAUNCHES.fetch_add(1, Ordering::Relaxed) };
        }
        // SAFETY: the host kernel of this name takes a pointer to this struct.
        unsafe { (self.function.run)(words.as_ptr().cast()) };
    }

    /// Whether it is one of the library's that may take part in programmatic launches.
    pub fn is_ours(&self) -> bool {
        begins_with_step(self.function.bytes)
    }

    fn step(&self) -> Option<&pl_step> {
        // SAFETY: aligned, and by its size it begins with a `pl_step`.
        self.is_ours().then(|| unsafe { &*self.words.as_ptr().cast::<pl_step>() })
    }

    pub fn dependents(&self) -> u32 {
        self.step().map_or(0, |step| step.dependents)
    }

    /// Whether the code has, and the GPU knows, what came with 9.0: the instruction to wait with, and clusters.
    pub fn waits_inside(&self) -> bool {
        config().capability >= (9, 0) && config().ptx_version >= 90
    }
}

/// # Safety
/// As for [`Launch::new`].
unsafe fn launch_kernel(
    handle: usize,
    grid: [u32; 3],
    block: [u32; 3],
    attributes: Attributes,
    stream: usize,
    params: *mut *mut c_void,
) -> Result<(), u32> {
    // SAFETY: the caller's contract.
    let launch = unsafe { Launch::new(handle, grid, block, attributes, params) }?;
    let stream = resolve(stream)?;
    if stream.capturing().is_none()
        && launch.is_ours()
        && (attributes.programmatic || launch.dependents() != 0)
    {
        eprintln!("fakecuda: a kernel of ours is programmatic outside a graph");
        return Err(INVALID_ARGUMENT);
    }
    enqueue_task(&stream, Task::Kernel(launch))
}

entry! {
    fn cuModuleLoadData(module: *mut usize, image: *const c_void) {
        current()?;
        forbid_in_capture()?;
        if image.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // Anything is a module, but for what is plainly nothing.
        if *image.cast::<u8>() == 0 {
            return Err(DEVICE_KERNEL_IMAGE_IS_INVALID);
        }
        put(module, MODULES.insert(()))
    }
    fn cuModuleUnload(module: usize) {
        current()?;
        MODULES.remove(module).map(|_| ())
    }
    fn cuModuleGetFunction(out: *mut usize, module: usize, name: *const c_char) {
        MODULES.get(module)?;
        let (run, bytes) = find(&get_text(name)?)?;
        put(out, FUNCTIONS.insert(Function { run, bytes, module }))
    }
    fn cuFuncLoad(handle: usize) {
        function(handle).map(|_| ())
    }
    fn cuFuncGetParamInfo(handle: usize, index: usize, offset: *mut usize, bytes: *mut usize) {
        let function = function(handle)?;
        if index != 0 {
            return Err(INVALID_ARGUMENT);
        }
        put(offset, 0)?;
        if bytes.is_null() { Ok(()) } else { put(bytes, function.bytes) }
    }
    fn cuFuncGetAttribute(value: *mut c_int, which: u32, handle: usize) {
        function(handle)?;
        let answer = match which {
            w if w == A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK as u32 => 1024,
            w if w == A::CU_FUNC_ATTRIBUTE_NUM_REGS as u32 => 32,
            w if w == A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES as u32 => 0,
            w if w == A::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES as u32 => 0,
            w if w == A::CU_FUNC_ATTRIBUTE_PTX_VERSION as u32 => config().ptx_version,
            _ => return Err(INVALID_ARGUMENT),
        };
        put(value, answer)
    }
    fn cuFuncSetAttribute(handle: usize, which: u32, value: c_int) {
        function(handle)?;
        if which == A::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED as u32 && value != 0 {
            lock(&LARGE_CLUSTERS).insert(handle);
        }
        Ok(())
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, handle: usize, block: c_int, _shared: usize) {
        function(handle)?;
        if !(1..=1024).contains(&block) {
            return Err(INVALID_ARGUMENT);
        }
        put(blocks, per_sm(block as u32) as c_int)
    }
    fn cuOccupancyMaxActiveClusters(clusters: *mut c_int, handle: usize, config: *const CUlaunchConfig) {
        function(handle)?;
        let c = config.as_ref().ok_or(INVALID_ARGUMENT)?;
        let cluster = Attributes::read(c)?.cluster;
        if cluster == 0 || !c.gridDimX.is_multiple_of(cluster) || !(1..=1024).contains(&c.blockDimX) {
            return Err(CLUSTER_SIZE_IS_NOT_VALID);
        }
        if cluster > MOST_IN_CLUSTER && !lock(&LARGE_CLUSTERS).contains(&handle) {
            return Err(CLUSTER_SIZE_IS_NOT_VALID);
        }
        let places = per_sm(c.blockDimX).min(MOST_OF_CLUSTERS);
        // Its blocks are on as many multiprocessors.
        let of = |sms: u32| if sms < cluster { 0 } else { sms * places / cluster };
        put(clusters, (SMS / NEIGHBOURS * of(NEIGHBOURS) + of(SMS % NEIGHBOURS)) as c_int)
    }
    fn cuLaunchKernel(
        handle: usize,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        _shared: u32,
        stream: usize,
        params: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) {
        launch_kernel(handle, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], Attributes::default(), stream, params)
    }
    fn cuLaunchKernelEx(
        config: *const CUlaunchConfig,
        handle: usize,
        params: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) {
        let c = config.as_ref().ok_or(INVALID_ARGUMENT)?;
        let attributes = Attributes::read(c)?;
        let grid = [c.gridDimX, c.gridDimY, c.gridDimZ];
        let block = [c.blockDimX, c.blockDimY, c.blockDimZ];
        launch_kernel(handle, grid, block, attributes, c.hStream as usize, params)
    }
}
