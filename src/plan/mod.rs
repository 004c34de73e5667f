//! Which schedule and protocol serve which call.
//!
//! | file | what it is |
//! | --- | --- |
//! | `choose` | the rule where no box is described: the CPU device, and GPUs whose place is unknown |
//! | `constants` | what the model reckons with, with sources |
//! | `fabric` | a described box as the model sees it |
//! | `nccl` | from which size on NCCL is faster |
//! | `predict` | the time of every candidate on it, and the choice that follows |

pub mod choose;
pub mod constants;
pub mod fabric;
pub mod nccl;
pub mod predict;

pub use choose::{choose, host_staged_protocol, Choice, DeviceKind};
pub use constants::{Constants, NOMINAL};
pub use fabric::Fabric;
pub use predict::{Line, Model};
