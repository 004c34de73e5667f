//! The driver itself and its devices.

use crate::config::config;
use crate::entry::entry;
use crate::errors::{
    put, put_text, INITIALIZATION_ERROR, INVALID_ARGUMENT, INVALID_DEVICE_ORDINAL,
    NAMED_SYMBOL_NOT_FOUND, NO_CUDA_CAPABLE_DEVICE_IS_DETECTED,
};
use cudarc::driver::sys::{CUdevice_attribute as A, CUuuid};
use std::ffi::{c_char, c_int, c_uint, c_void, CString};
use std::sync::atomic::{AtomicU32, Ordering};

/// The process that called `cuInit`; a forked child has another id and cannot go on.
static INITIALIZED: AtomicU32 = AtomicU32::new(0);

/// The GPU of the box behind an ordinal of this process.
pub fn gpu(device: c_int) -> Result<usize, u32> {
    if INITIALIZED.load(Ordering::Relaxed) != std::process::id() {
        return Err(INITIALIZATION_ERROR);
    }
    usize::try_from(device)
        .ok()
        .and_then(|device| config().visible.get(device).copied())
        .ok_or(INVALID_DEVICE_ORDINAL)
}

/// The ordinal in this process of a GPU of the box; one that is hidden cannot be used.
pub fn ordinal(gpu: usize) -> Result<c_int, u32> {
    let position = config().visible.iter().position(|visible| *visible == gpu);
    position.map(|at| at as c_int).ok_or(INVALID_DEVICE_ORDINAL)
}

fn uuid(bytes: [u8; 16]) -> CUuuid {
    CUuuid { bytes: bytes.map(|b| b as c_char) }
}

fn attribute(gpu: usize, which: u32) -> Result<c_int, u32> {
    let config = config();
    let yes = |is: bool| c_int::from(is);
    Ok(match which {
        w if w == A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as u32 => config.capability.0,
        w if w == A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as u32 => config.capability.1,
        w if w == A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as u32 => crate::kernel::SMS as c_int,
        w if w == A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK as u32 => 1024,
        w if w == A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR as u32 => 2048,
        w if w == A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING as u32 => 1,
        w if w == A::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS as u32 => 1,
        w if w == A::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY as u32 => yes(config.host_map),
        w if w == A::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED as u32 => yes(config.host_map),
        w if w == A::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED as u32 => {
            yes(config.vmm)
        }
        w if w == A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED as u32 => {
            yes(config.vmm)
        }
        w if w == A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID as u32 => {
            (gpu >= config.gpus.len() / 2).into()
        }
        w if w == A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID as u32 => 0x10 + gpu as c_int,
        w if w == A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID as u32 => 0,
        w if w == A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID as u32 => 0,
        _ => return Err(INVALID_ARGUMENT),
    })
}

entry! {
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(INVALID_ARGUMENT);
        }
        if config().visible.is_empty() {
            return Err(NO_CUDA_CAPABLE_DEVICE_IS_DETECTED);
        }
        INITIALIZED.store(std::process::id(), Ordering::Relaxed);
        Ok(())
    }
    fn cuDriverGetVersion(version: *mut c_int) {
        put(version, config().driver_version)
    }
    fn cuDeviceGetCount(count: *mut c_int) {
        gpu(0)?;
        put(count, config().visible.len() as c_int)
    }
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        gpu(ordinal)?;
        put(device, ordinal)
    }
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) {
        let mig = config().gpus[gpu(device)?].mig;
        put_text(name, len, if mig { "NVIDIA Fake 9000 MIG 1g.10gb" } else { "NVIDIA Fake 9000" })
    }
    fn cuDeviceGetUuid(out: *mut CUuuid, device: c_int) {
        put(out, uuid(config().gpus[gpu(device)?].uuid))
    }
    fn cuDeviceGetUuid_v2(out: *mut CUuuid, device: c_int) {
        let gpu = &config().gpus[gpu(device)?];
        let mut bytes = gpu.uuid;
        if gpu.mig {
            bytes[0] ^= 0xff;
        }
        put(out, uuid(bytes))
    }
    fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int) {
        put_text(id, len, &format!("0000:{:02X}:00.0", 0x10 + gpu(device)?))
    }
    fn cuDeviceGetAttribute(value: *mut c_int, which: u32, device: c_int) {
        put(value, attribute(gpu(device)?, which)?)
    }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        gpu(device)?;
        put(bytes, crate::memory::MEMORY_BYTES)
    }
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        put(can, config().peers(gpu(device)?, gpu(peer)?).into())
    }
    fn cuGetProcAddress_v2(
        name: *const c_char,
        function: *mut *mut c_void,
        _version: c_int,
        _flags: u64,
        status: *mut u32,
    ) {
        let name = crate::errors::get_text(name)?;
        // Where a function has a second version, that is what a current caller means.
        let found = [format!("{name}_v2"), name].into_iter().find_map(|name| {
            let name = CString::new(name).ok()?;
            let found = libc::dlsym(own_library(), name.as_ptr());
            (!found.is_null()).then_some(found)
        });
        if !status.is_null() {
            put(status, if found.is_some() { 0 } else { 1 })?;
        }
        put(function, found.unwrap_or(std::ptr::null_mut()))?;
        found.map(|_| ()).ok_or(NAMED_SYMBOL_NOT_FOUND)
    }
}

/// This library, wherever it was loaded from and under whatever name.
fn own_library() -> *mut c_void {
    let here = own_library as fn() -> *mut c_void;
    // SAFETY: all-zero is a valid `Dl_info`, `here` is an address of this library, and the name it yields is terminated.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        libc::dladdr(here as *const c_void, &mut info);
        libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD)
    }
}
