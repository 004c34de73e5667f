//! GPUs and what is known about them. A GPU is its UUID: ordinals depend on `CUDA_VISIBLE_DEVICES`, which may also hold
//! UUIDs, short UUIDs or a reordered list, so neither is ever taken for an identity.

use super::driver::{code, Driver};
use super::symbols::Failure;
use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use serde::{Deserialize, Serialize};
use std::ffi::{c_char, CStr};

/// What a GPU is known by, the same in every process of the box.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Uuid(pub [u8; 16]);

impl std::fmt::Display for Uuid {
    /// As `nvidia-smi -L` writes it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GPU")?;
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 0 | 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Uuid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// What the driver says about a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceFacts {
    /// Its identity.
    pub uuid: Uuid,
    /// The name that NVIDIA gave it.
    pub name: String,
    /// Where it sits, in sysfs's spelling: `0000:3b:00.0`.
    pub pci_bus_id: String,
    /// Major and minor compute capability.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// The host's NUMA node nearest to it, where the driver knows.
    pub host_numa: Option<u32>,
    /// It is a MIG slice.
    pub mig: bool,
    /// Allocations can be made with the virtual memory calls and travel as POSIX file descriptors.
    pub vmm_fd: bool,
    /// Registered host memory can be mapped into its address space.
    pub maps_host_memory: bool,
}

/// A GPU that this process sees.
#[derive(Clone, Debug)]
pub struct Device {
    driver: Driver,
    raw: sys::CUdevice,
    facts: DeviceFacts,
}

impl Device {
    /// All GPUs that this process sees, in its own order.
    pub fn all(driver: Driver) -> Result<Vec<Self>> {
        let mut count = 0;
        // SAFETY: writes one int.
        unsafe { driver.symbols().cuDeviceGetCount(&mut count) }?;
        (0..count).map(|ordinal| Self::by_ordinal(driver, ordinal as u32)).collect()
    }

    /// The GPU with this number in this process.
    pub fn by_ordinal(driver: Driver, ordinal: u32) -> Result<Self> {
        let mut raw = 0;
        // SAFETY: writes one handle; an ordinal out of range is an error of the call.
        unsafe { driver.symbols().cuDeviceGet(&mut raw, ordinal as i32) }?;
        Self::from_raw(driver, raw)
    }

    /// The GPU with this identity, if this process sees it.
    pub fn by_uuid(driver: Driver, uuid: Uuid) -> Result<Option<Self>> {
        Ok(Self::all(driver)?.into_iter().find(|device| device.facts.uuid == uuid))
    }

    /// The GPU of the calling thread's current context; `None` if it has no context.
    pub fn current(driver: Driver) -> Result<Option<Self>> {
        let mut raw = 0;
        // SAFETY: writes one handle.
        match unsafe { driver.symbols().cuCtxGetDevice(&mut raw) } {
            Ok(()) => Self::from_raw(driver, raw).map(Some),
            Err(Failure { code: code::INVALID_CONTEXT, .. }) => Ok(None),
            Err(failure) => Err(failure.into()),
        }
    }

    fn from_raw(driver: Driver, raw: sys::CUdevice) -> Result<Self> {
        let symbols = driver.symbols();
        let attribute = |which| -> std::result::Result<u32, Failure> {
            let mut value = 0;
            // SAFETY: writes one int.
            unsafe { symbols.cuDeviceGetAttribute(&mut value, which, raw) }?;
            Ok(value.max(0) as u32)
        };
        let mut text = [0 as c_char; 256];
        // SAFETY: the length given is the buffer's, and the driver terminates the text within it.
        let name = unsafe {
            symbols.cuDeviceGetName(text.as_mut_ptr(), text.len() as i32, raw)?;
            CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
        };
        // SAFETY: as above.
        let pci_bus_id = unsafe {
            symbols.cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as i32, raw)?;
            CStr::from_ptr(text.as_ptr()).to_string_lossy().to_ascii_lowercase()
        };
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        let mut gpu_uuid = sys::CUuuid { bytes: [0; 16] };
        let mut memory_bytes = 0;
        // SAFETY: each writes one value of the type given.
        unsafe {
            symbols.cuDeviceGetUuid_v2(&mut uuid, raw)?;
            symbols.cuDeviceGetUuid(&mut gpu_uuid, raw)?;
            symbols.cuDeviceTotalMem_v2(&mut memory_bytes, raw)?;
        }
        let facts = DeviceFacts {
            uuid: Uuid(uuid.bytes.map(|b| b as u8)),
            pci_bus_id,
            compute_capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            sm_count: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory_bytes: memory_bytes as u64,
            host_numa: host_numa(driver, raw),
            // On a MIG slice the second version of the call gives the slice's UUID and the first the GPU's; the name says
            // so too, and either is enough.
            mig: uuid.bytes != gpu_uuid.bytes || name.contains(" MIG "),
            vmm_fd: attribute(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?
                != 0
                && attribute(
                    Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                )? != 0,
            maps_host_memory: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY)? != 0
                && attribute(Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)? != 0,
            name,
        };
        Ok(Device { driver, raw, facts })
    }

    /// What the driver says about it.
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// The driver it was found with.
    pub fn driver(&self) -> Driver {
        self.driver
    }

    pub(super) fn raw(&self) -> sys::CUdevice {
        self.raw
    }

    /// Refuses a GPU that cannot carry a rank, with the reason.
    pub fn check_usable(&self) -> Result<()> {
        let facts = &self.facts;
        let refuse = |why: &str| {
            Err(Error::Unsupported(format!(
                "{} at {} ({}): {why}",
                facts.name, facts.pci_bus_id, facts.uuid
            )))
        };
        if facts.mig {
            return refuse(
                "it is a MIG slice; slices have no peer access, and slices of one GPU share its bus id. Give the process a \
                 whole GPU",
            );
        }
        if facts.compute_capability < (7, 0) {
            return refuse(
                "compute capability 7.0 (Volta) or newer is needed for the memory model the kernels rely on",
            );
        }
        Ok(())
    }
}

/// The attribute is newer than some drivers that are served; they refuse it, and then it is simply not known.
fn host_numa(driver: Driver, raw: sys::CUdevice) -> Option<u32> {
    let mut node = -1;
    // SAFETY: writes one int.
    unsafe {
        driver.symbols().cuDeviceGetAttribute(
            &mut node,
            Attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID,
            raw,
        )
    }
    .ok()?;
    u32::try_from(node).ok()
}

/// Whose kernels can reach whose memory: `[i][j]` for the i-th device's kernels and the j-th device's memory. A device
/// reaches itself. A pair without access is an answer, not an error.
pub fn peer_matrix(devices: &[Device]) -> Result<Vec<Vec<bool>>> {
    devices.iter().map(|from| devices.iter().map(|to| can_access(from, to)).collect()).collect()
}

pub(super) fn can_access(from: &Device, to: &Device) -> Result<bool> {
    if from.facts.uuid == to.facts.uuid {
        return Ok(true);
    }
    let mut can = 0;
    // SAFETY: writes one int.
    unsafe { from.driver.symbols().cuDeviceCanAccessPeer(&mut can, from.raw, to.raw) }?;
    Ok(can != 0)
}
