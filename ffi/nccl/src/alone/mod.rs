//! Communicators without a real NCCL: the full library by itself, on GPUs or on the CPU.
//!
//! On the CPU buffers are host memory, a `cudaStream_t` is ignored, and a call returns when it is done.
//!
//! | module | what it is |
//! | --- | --- |
//! | `create`, `split` | new communicators |
//! | `handle` | what is asked of a communicator, and its end |
//! | `calls` | the collectives as NCCL declares them |
//! | `collective` | how they are carried out |

mod calls;
mod collective;
mod create;
mod handle;
mod split;

pub use calls::{all_gather, all_reduce, bcast, broadcast, reduce_scatter};
pub use create::{init_all, init_rank, unique_id};
pub use handle::{
    abort, async_error, comm_count, comm_device, comm_rank, destroy, finalize, version,
};
pub use split::split;

use crate::status::{fail, failed};
use crate::types::*;
use collective::Job;
use create::Creation;
use peerlane_core::comm::Communicator;
use peerlane_core::{Error, Result};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

#[cfg(feature = "cuda")]
use peerlane_core::device::cuda::Context;

/// Where a rank is.
enum Place {
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda {
        context: Context,
        ordinal: u32,
    },
}

struct Made {
    comm: Communicator,
    place: Place,
}

/// A communicator of ours; its handle is its address in memory that it owns, so no two that live are alike.
#[derive(Default)]
pub struct Own {
    made: OnceLock<Made>,
}

static OWN: LazyLock<Mutex<HashMap<usize, Arc<Own>>>> = LazyLock::new(Mutex::default);

fn table() -> std::sync::MutexGuard<'static, HashMap<usize, Arc<Own>>> {
    OWN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn insert() -> (ncclComm_t, Arc<Own>) {
    let own = Arc::new(Own::default());
    let handle = Arc::as_ptr(&own) as usize;
    table().insert(handle, Arc::clone(&own));
    (handle as ncclComm_t, own)
}

fn find(comm: ncclComm_t) -> std::result::Result<Arc<Own>, ncclResult_t> {
    let own = table().get(&(comm as usize)).cloned();
    own.ok_or_else(|| {
        fail(ncclInvalidArgument, "the communicator is NULL, destroyed, or another library's")
    })
}

impl Own {
    fn made(&self) -> Result<&Made> {
        self.made.get().ok_or_else(|| {
            Error::InvalidArgument("the communicator is created at the end of its group".into())
        })
    }
}

fn code(result: Result<()>) -> ncclResult_t {
    result.map_or_else(|error| failed(&error), |()| ncclSuccess)
}

/// What a group holds.
#[derive(Default)]
pub struct Noted {
    creations: Vec<Creation>,
    jobs: Vec<(Arc<Own>, Job)>,
}

impl Noted {
    /// Starts all of it.
    pub fn run(self) -> ncclResult_t {
        if !self.creations.is_empty() && !self.jobs.is_empty() {
            return fail(ncclInvalidUsage, "a group holds creations or collectives, not both");
        }
        match self.creations.is_empty() {
            true => code(collective::run(&self.jobs)),
            false => create::run_all(&self.creations),
        }
    }
}
