//! A thin, typed layer over the CUDA driver; nothing outside it calls the driver.
//!
//! | file | what it is |
//! | --- | --- |
//! | `symbols` | the driver's functions, each returning an error value that knows its call |
//! | `driver` | loading, initialising, versions, error texts |
//! | `device` | GPUs: UUID, facts, who can reach whom |
//! | `context` | the primary context, and the guard that gives the caller's back |
//! | `memory` | a rank's own memory; fills and copies |
//! | `vmm`, `ipc`, `host` | the three kinds of peer-visible memory: descriptors, CUDA IPC, pinned host memory |
//! | `peer` | edges between GPUs, opened when used |
//! | `module` | fatbins, kernels, launches |
//! | `stream` | streams, events, capture status |
//! | `graph` | captures, replays, nodes that are recorded again, what a graph keeps alive |
//!
//! Calls that need a current context take [`Entered`], the proof that there is one, so that a launch enters once; types
//! that own something enter for themselves.

mod context;
mod device;
mod driver;
mod graph;
mod host;
mod ipc;
pub mod memory;
mod module;
mod peer;
mod stream;
mod symbols;
mod vmm;

pub use context::{Context, Entered};
pub use device::{peer_matrix, Device, DeviceFacts, Uuid};
pub use driver::{CudaVersion, Driver};
pub use graph::{
    keep_with_graph, Capture, CaptureMode, Graph, GraphExec, RecordedKernel, RelaxedThread,
};
pub use host::{HostMemory, HostPages};
pub use ipc::{kept_until_exit, IpcHandle, IpcMapping, IpcMemory, IPC_HANDLE_BYTES};
pub use memory::DeviceMemory;
pub use module::{Function, LaunchShape, Module, FIRST_CAPABILITY, FIRST_PTX_VERSION};
pub use peer::{open_peer, Edge};
pub use stream::{CaptureStatus, CapturedGraph, Event, GraphNode, Stream, StreamRef};
pub use vmm::VmmMemory;
