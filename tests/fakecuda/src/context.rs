//! Primary contexts, each thread's stack of current ones, and edges to peers.

use crate::config::config;
use crate::device::gpu;
use crate::entry::{entry, lock};
use crate::errors::{
    put, CONTEXT_IS_DESTROYED, INVALID_DEVICE_CONTEXT, INVALID_DEVICE_ORDINAL,
    PEER_ACCESS_HAS_NOT_BEEN_ENABLED, PEER_ACCESS_IS_ALREADY_ENABLED, PEER_ACCESS_IS_NOT_SUPPORTED,
    PEER_MAPPING_RESOURCES_EXHAUSTED,
};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint};
use std::sync::Mutex;

const FIRST: usize = 0xc0de_0000;

/// How often each GPU's primary context is retained.
static RETAINED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());
/// Open edges, from whom to whom, by GPU of the box.
static EDGES: Mutex<BTreeSet<(usize, usize)>> = Mutex::new(BTreeSet::new());

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

pub fn retained() -> usize {
    lock(&RETAINED).values().sum()
}

fn gpu_of(context: usize) -> Result<usize, u32> {
    let gpu = context.checked_sub(FIRST).filter(|gpu| *gpu < config().gpus.len());
    let gpu = gpu.ok_or(INVALID_DEVICE_CONTEXT)?;
    match lock(&RETAINED).get(&gpu) {
        Some(1..) => Ok(gpu),
        _ => Err(CONTEXT_IS_DESTROYED),
    }
}

/// The GPU of the calling thread's current context.
pub fn current() -> Result<usize, u32> {
    gpu_of(CURRENT.with_borrow(|stack| stack.last().copied()).ok_or(INVALID_DEVICE_CONTEXT)?)
}

/// Opens the way from one GPU to another's memory, as explicit access, a handle's opening or a mapping's does. True if it
/// was open already.
pub fn connect(from: usize, to: usize) -> Result<bool, u32> {
    if from == to {
        return Ok(true);
    }
    if !config().peers(from, to) {
        return Err(PEER_ACCESS_IS_NOT_SUPPORTED);
    }
    let mut edges = lock(&EDGES);
    if edges.contains(&(from, to)) {
        return Ok(true);
    }
    if edges.iter().filter(|(f, _)| *f == from).count() >= config().peer_limit {
        return Err(PEER_MAPPING_RESOURCES_EXHAUSTED);
    }
    edges.insert((from, to));
    Ok(false)
}

entry! {
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) {
        let gpu = gpu(device)?;
        *lock(&RETAINED).entry(gpu).or_default() += 1;
        put(context, FIRST + gpu)
    }
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        let gpu = gpu(device)?;
        let mut retained = lock(&RETAINED);
        let count = retained.get_mut(&gpu).filter(|count| **count > 0).ok_or(INVALID_DEVICE_CONTEXT)?;
        *count -= 1;
        if *count == 0 {
            lock(&EDGES).retain(|(from, to)| *from != gpu && *to != gpu);
        }
        Ok(())
    }
    fn cuCtxGetCurrent(context: *mut usize) {
        put(context, CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0)))
    }
    fn cuCtxSetCurrent(context: usize) {
        if context != 0 {
            gpu_of(context)?;
        }
        CURRENT.with_borrow_mut(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        });
        Ok(())
    }
    fn cuCtxPushCurrent_v2(context: usize) {
        gpu_of(context)?;
        CURRENT.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    }
    fn cuCtxPopCurrent_v2(context: *mut usize) {
        let popped = CURRENT.with_borrow_mut(Vec::pop).ok_or(INVALID_DEVICE_CONTEXT)?;
        if context.is_null() { Ok(()) } else { put(context, popped) }
    }
    fn cuCtxGetDevice(device: *mut c_int) {
        put(device, crate::device::ordinal(current()?)?)
    }
    fn cuCtxEnablePeerAccess(peer: usize, _flags: c_uint) {
        let (from, to) = (current()?, gpu_of(peer)?);
        if from == to {
            return Err(INVALID_DEVICE_ORDINAL);
        }
        if connect(from, to)? { Err(PEER_ACCESS_IS_ALREADY_ENABLED) } else { Ok(()) }
    }
    fn cuCtxDisablePeerAccess(peer: usize) {
        let edge = (current()?, gpu_of(peer)?);
        if lock(&EDGES).remove(&edge) { Ok(()) } else { Err(PEER_ACCESS_HAS_NOT_BEEN_ENABLED) }
    }
    fn cuCtxSynchronize() {
        crate::stream::synchronize_device(current()?)
    }
}
