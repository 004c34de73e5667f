//! What tests of the driver layer share: a context, a kernel that adds, and a look at what it has left.

// Each test binary that includes this uses its own share of it.
#![allow(dead_code)]

use crate::fakecuda::{live, register_kernel};
use peerlane::device::cuda::*;
use std::time::{Duration, Instant};

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Add {
    pub ptr: u64,
    pub count: u64,
    pub value: u32,
    pub reserved: u32,
}

/// A kernel: adds `value` to `count` words at `ptr`.
pub unsafe extern "C" fn add(args: *const Add) {
    // SAFETY: the stand-in driver passes a copy of the launch's parameter, whose addresses are memory of this process.
    unsafe {
        let args = &*args;
        for word in std::slice::from_raw_parts_mut(args.ptr as *mut u32, args.count as usize) {
            *word = word.wrapping_add(args.value);
        }
    }
}

pub const SHAPE: LaunchShape = LaunchShape { programmatic: true, ..LaunchShape::plain(4, 128) };
pub const BUILT_WITH: CudaVersion = CudaVersion { major: 13, minor: 0 };

pub fn device(ordinal: u32) -> Context {
    Context::retain(&Device::by_ordinal(Driver::load().unwrap(), ordinal).unwrap()).unwrap()
}

pub fn adder(context: &Context) -> Function<Add> {
    register_kernel("add", add);
    Module::load(context, b"an image", BUILT_WITH).unwrap().function("add").unwrap()
}

/// Waits for something that another thread brings about.
pub fn soon(what: &str, is: impl Fn() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what}: {:?}", live());
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub fn words(memory: &DeviceMemory, stream: &Stream) -> Vec<u32> {
    let mut bytes = vec![0; memory.bytes()];
    memory.read(stream, 0, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect()
}
