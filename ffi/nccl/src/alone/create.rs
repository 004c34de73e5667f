//! New communicators: at once, or at the end of a group.

use super::split::split_now;
use super::{code, insert, table, Made, Own, Place};
use crate::group;
use crate::status::{fail, failed, first_failure};
use crate::types::*;
use peerlane_core::bootstrap::UniqueId;
use peerlane_core::comm::{Communicator, Config};
use peerlane_core::types::MAX_RANKS;
use peerlane_core::{Device, Error, Result};
use std::ffi::c_int;
use std::sync::Arc;

#[cfg(feature = "cuda")]
use peerlane_core::device::cuda::{self, Context, Driver};

/// What a group creates at its end.
pub enum Creation {
    Init { own: Arc<Own>, handle: usize, id: UniqueId, n: usize, rank: usize, device: Device },
    Split { own: Option<(Arc<Own>, usize)>, parent: Arc<Own>, color: c_int, key: c_int },
}

impl Creation {
    fn run(&self) -> Result<()> {
        let result = match self {
            Creation::Init { own, id, n, rank, device, .. } => make(own, id, *n, *rank, *device),
            Creation::Split { own, parent, color, key } => {
                split_now(own.as_ref().map(|(own, _)| own), parent, *color, *key)
            }
        };
        if result.is_err() {
            let handle = match self {
                Creation::Init { handle, .. } => Some(*handle),
                Creation::Split { own, .. } => own.as_ref().map(|(_, handle)| *handle),
            };
            handle.map(|handle| table().remove(&handle));
        }
        result
    }
}

pub fn make(own: &Own, id: &UniqueId, n: usize, rank: usize, device: Device) -> Result<()> {
    let config = Config { device, ..Config::from_env(n)? };
    let place = place(device)?;
    let comm = Communicator::create(id, n, rank, &config)?;
    own.made
        .set(Made { comm, place })
        .map_err(|_| Error::Internal("a communicator was made twice".into()))
}

fn place(device: Device) -> Result<Place> {
    match device {
        Device::Cpu => Ok(Place::Cpu),
        #[cfg(feature = "cuda")]
        Device::Cuda { ordinal } => {
            let ordinal = ordinal.unwrap_or(0);
            let context = Context::retain(&cuda::Device::by_ordinal(Driver::load()?, ordinal)?)?;
            Ok(Place::Cuda { context, ordinal })
        }
        #[cfg(not(feature = "cuda"))]
        Device::Cuda { .. } => {
            Err(Error::Unsupported("GPUs: this library was built without CUDA".into()))
        }
    }
}

/// The device of a new rank: what `PEERLANE_DEVICE` says; else the current GPU where there is one, else the CPU.
fn device() -> Result<Device> {
    let named = peerlane_core::env::Env::read()?.device;
    #[cfg(feature = "cuda")]
    if let None | Some(Device::Cuda { ordinal: None }) = named {
        match Driver::load() {
            Ok(driver) => {
                let uuid = |device: &cuda::Device| device.facts().uuid;
                let all = cuda::Device::all(driver)?;
                let current = cuda::Device::current(driver)?.as_ref().map(uuid);
                let at = current.and_then(|current| all.iter().position(|d| uuid(d) == current));
                return Ok(Device::Cuda { ordinal: Some(at.unwrap_or(0) as u32) });
            }
            Err(error) if named.is_some() => return Err(error),
            Err(_) => {}
        }
    }
    Ok(named.unwrap_or(Device::Cpu))
}

pub fn create(creation: Creation) -> ncclResult_t {
    if group::is_open() {
        group::note_alone(|noted| noted.creations.push(creation));
        return ncclSuccess;
    }
    code(creation.run())
}

/// Runs creations at once: the local ranks of one communicator wait for each other.
pub fn run_all(creations: &[Creation]) -> ncclResult_t {
    std::thread::scope(|scope| {
        let threads: Vec<_> = creations
            .iter()
            .map(|creation| {
                std::thread::Builder::new()
                    .name("peerlane-create".into())
                    .spawn_scoped(scope, || creation.run())
                    .map_err(|e| Error::os("starting a thread per rank", &e))
            })
            .collect();
        let mut result = ncclSuccess;
        for thread in threads {
            let outcome = thread.and_then(|thread| {
                thread.join().unwrap_or_else(|_| Err(Error::Internal("a creation panicked".into())))
            });
            result = first_failure(result, code(outcome));
        }
        result
    })
}

/// `ncclGetUniqueId`: the id is peerlane's own, of the same size.
pub unsafe fn unique_id(id: *mut ncclUniqueId) -> ncclResult_t {
    if id.is_null() {
        return fail(ncclInvalidArgument, "ncclGetUniqueId: the id is NULL");
    }
    match UniqueId::new() {
        Ok(made) => {
            // SAFETY: not NULL, 128 bytes, the caller's.
            unsafe { *id = ncclUniqueId { internal: made.as_bytes().map(|b| b as _) } };
            ncclSuccess
        }
        Err(error) => failed(&error),
    }
}

/// `ncclCommInitRank`.
pub unsafe fn init_rank(
    comm: *mut ncclComm_t,
    n: c_int,
    id: ncclUniqueId,
    rank: c_int,
) -> ncclResult_t {
    if comm.is_null() {
        return fail(ncclInvalidArgument, "the place for the communicator is NULL");
    }
    if !(1..=MAX_RANKS as c_int).contains(&n) || !(0..n).contains(&rank) {
        let text = format!(
            "rank {rank} of {n}; without a real NCCL a communicator has 1 to {MAX_RANKS} ranks"
        );
        return fail(ncclInvalidArgument, &text);
    }
    let ready =
        UniqueId::from_bytes(id.internal.map(|b| b as u8)).and_then(|id| Ok((id, device()?)));
    let (id, device) = match ready {
        Ok(ready) => ready,
        Err(error) => return failed(&error),
    };
    let (handle, own) = insert();
    // SAFETY: not NULL, and the caller's.
    unsafe { *comm = handle };
    create(Creation::Init {
        own,
        handle: handle as usize,
        id,
        n: n as usize,
        rank: rank as usize,
        device,
    })
}

/// `ncclCommInitAll`.
pub unsafe fn init_all(comms: *mut ncclComm_t, n: c_int, devices: *const c_int) -> ncclResult_t {
    if comms.is_null() || !(1..=MAX_RANKS as c_int).contains(&n) {
        return fail(ncclInvalidArgument, "ncclCommInitAll: NULL, or not 1 to 16 ranks");
    }
    let ready = UniqueId::new().and_then(|id| Ok((id, device()?)));
    let (id, own_device) = match ready {
        Ok(ready) => ready,
        Err(error) => return failed(&error),
    };
    let mut creations = Vec::with_capacity(n as usize);
    for rank in 0..n as usize {
        // SAFETY: `devices` is NULL or has as many elements as there are ranks.
        let number = if devices.is_null() { rank as c_int } else { unsafe { *devices.add(rank) } };
        let device = match own_device {
            Device::Cpu => Device::Cpu,
            Device::Cuda { .. } => Device::Cuda { ordinal: Some(number.max(0) as u32) },
        };
        let (handle, own) = insert();
        // SAFETY: the caller's array has room for as many.
        unsafe { *comms.add(rank) = handle };
        creations.push(Creation::Init {
            own,
            handle: handle as usize,
            id,
            n: n as usize,
            rank,
            device,
        });
    }
    run_all(&creations)
}
