//! Streams, events and capture status. Nothing here synchronises with the legacy default stream by itself, so set-up work
//! cannot disturb, or be refused by, a capture that another thread has under way.

use super::context::{Context, Entered};
use super::driver::code;
use super::symbols::Failure;
use crate::error::Result;
use cudarc::driver::sys;
use std::ffi::c_void;

/// A stream as the caller gave it: his own, or one of the two default streams. It is borrowed, never destroyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamRef(usize);

impl StreamRef {
    /// The legacy default stream, which waits for and holds up every blocking stream of the context. Null means this too.
    pub const LEGACY: StreamRef = StreamRef(1);
    /// The calling thread's own default stream.
    pub const PER_THREAD: StreamRef = StreamRef(2);

    /// A `CUstream` or `cudaStream_t` as a pointer.
    pub fn from_raw(stream: *mut c_void) -> Self {
        StreamRef(stream as usize)
    }

    /// As the driver takes it.
    pub fn as_raw(self) -> *mut c_void {
        self.0 as *mut c_void
    }

    pub(super) fn raw(self) -> sys::CUstream {
        self.0 as sys::CUstream
    }

    /// Waits until all work queued so far is done. Refused on a stream that is being captured.
    pub fn synchronize(self, entered: &Entered<'_>) -> Result<()> {
        // SAFETY: the caller's stream.
        Ok(unsafe { entered.symbols().cuStreamSynchronize(self.raw()) }?)
    }

    /// Whether all work queued so far is done.
    pub fn is_idle(self, entered: &Entered<'_>) -> Result<bool> {
        // SAFETY: the caller's stream.
        ready(unsafe { entered.symbols().cuStreamQuery(self.raw()) })
    }

    /// The stream's number, which no other stream of the process ever has, unlike its handle; `None` where the driver is
    /// older than CUDA 12.0 and cannot tell.
    pub fn id(self, entered: &Entered<'_>) -> Result<Option<u64>> {
        let mut id = 0;
        // SAFETY: the caller's stream; writes one number.
        let known = unsafe { entered.symbols().cuStreamGetId(self.raw(), &mut id) };
        Ok(known.transpose()?.map(|()| id))
    }

    /// Lets later work of this stream wait for `event`.
    pub fn wait(self, entered: &Entered<'_>, event: &Event) -> Result<()> {
        // SAFETY: the event lives; one that is destroyed later is kept by the driver until the wait is done.
        Ok(unsafe { entered.symbols().cuStreamWaitEvent(self.raw(), event.raw, 0) }?)
    }

    /// Whether the stream is being captured, and into which graph.
    pub fn capture(self, entered: &Entered<'_>) -> Result<CaptureStatus> {
        let (mut status, mut id, mut graph) = (0u32, 0u64, std::ptr::null_mut());
        // SAFETY: the three results have the types the call writes (the status is a C enum); the others may be null.
        unsafe {
            entered.symbols().cuStreamGetCaptureInfo_v2(
                self.raw(),
                &mut status,
                &mut id,
                &mut graph,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        }?;
        Ok(CaptureStatus::new(status, id, graph))
    }

    /// The same, and of a stream that is being captured its end: the one node that its next node will come after, if it is one
    /// and the next node will wait for all of it. Drivers before CUDA 12.3, which know no other edges, do not say.
    pub fn capture_with_end(
        self,
        entered: &Entered<'_>,
    ) -> Result<(CaptureStatus, Option<GraphNode>)> {
        let (mut status, mut id, mut graph) = (0u32, 0, std::ptr::null_mut());
        let (mut nodes, mut edges, mut count) = (std::ptr::null(), std::ptr::null(), 0);
        // SAFETY: the results have the types the call writes; the status is a C enum, of which the number alone is looked at.
        let asked = unsafe {
            entered.symbols().cuStreamGetCaptureInfo_v3(
                self.raw(),
                (&raw mut status).cast(),
                &mut id,
                &mut graph,
                &mut nodes,
                &mut edges,
                &mut count,
            )
        };
        let Some(asked) = asked else { return Ok((self.capture(entered)?, None)) };
        asked?;
        let status = CaptureStatus::new(status, id, graph);
        if !matches!(status, CaptureStatus::Active(_)) || count != 1 || nodes.is_null() {
            return Ok((status, None));
        }
        // SAFETY: as many nodes as counted, which the driver keeps until the stream's next call; for each its edge's data, or
        // nothing at all where none has any.
        let (node, plain) =
            unsafe { (*nodes, edges.is_null() || *edges.cast::<[u8; EDGE_BYTES]>() == PLAIN) };
        Ok((status, plain.then_some(GraphNode { raw: node })))
    }
}

const EDGE_BYTES: usize = size_of::<sys::CUgraphEdgeData>();
/// Data of an edge whose end waits for all of its beginning.
const PLAIN: [u8; EDGE_BYTES] = [0; EDGE_BYTES];

/// What a stream is doing with respect to capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureStatus {
    /// Work runs.
    None,
    /// Work is recorded.
    Active(CapturedGraph),
    /// Work was being recorded until something made that impossible; the capture must be ended.
    Invalidated,
}

impl CaptureStatus {
    fn new(status: u32, id: u64, graph: sys::CUgraph) -> Self {
        use sys::CUstreamCaptureStatus as S;
        if status == S::CU_STREAM_CAPTURE_STATUS_NONE as u32 {
            CaptureStatus::None
        } else if status == S::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32 {
            CaptureStatus::Active(CapturedGraph { id, raw: graph })
        } else {
            CaptureStatus::Invalidated
        }
    }
}

/// A graph that is being recorded. It belongs to whoever began the capture and is valid until the capture ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapturedGraph {
    /// The capture's number, unique in the process.
    pub id: u64,
    pub(super) raw: sys::CUgraph,
}

/// A node of a graph that is being recorded. It is as short-lived as a [`CapturedGraph`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphNode {
    pub(super) raw: sys::CUgraphNode,
}

/// A stream of this library's own, which never synchronises with the legacy default stream.
#[derive(Debug)]
pub struct Stream {
    context: Context,
    raw: sys::CUstream,
}

// SAFETY: the driver synchronises calls on a stream inside.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream; a lower `priority` number goes first, 0 is the default.
    pub fn new(context: &Context, priority: i32) -> Result<Self> {
        let entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle, destroyed once by drop.
        unsafe { entered.symbols().cuStreamCreateWithPriority(&mut raw, flags, priority) }?;
        Ok(Stream { context: context.clone(), raw })
    }

    /// Its context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// For the calls that take any stream.
    pub fn as_ref(&self) -> StreamRef {
        StreamRef(self.raw as usize)
    }

    /// Waits until all work queued so far is done.
    pub fn synchronize(&self) -> Result<()> {
        self.as_ref().synchronize(&self.context.enter()?)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(entered) = self.context.enter() {
            // Work still queued goes on; the driver frees the stream after it.
            // SAFETY: created once, destroyed once.
            let _ = unsafe { entered.symbols().cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A point in a stream that others can wait for.
#[derive(Debug)]
pub struct Event {
    context: Context,
    raw: sys::CUevent,
}

// SAFETY: the driver synchronises calls on an event inside.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event for ordering only, the cheap kind.
    pub fn new(context: &Context) -> Result<Self> {
        Self::with_flags(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
    }

    /// An event that also takes the time.
    pub fn timed(context: &Context) -> Result<Self> {
        Self::with_flags(context, sys::CUevent_flags::CU_EVENT_DEFAULT as u32)
    }

    fn with_flags(context: &Context, flags: u32) -> Result<Self> {
        let entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed once by drop.
        unsafe { entered.symbols().cuEventCreate(&mut raw, flags) }?;
        Ok(Event { context: context.clone(), raw })
    }

    /// Marks the present end of `stream`.
    pub fn record(&self, entered: &Entered<'_>, stream: StreamRef) -> Result<()> {
        // SAFETY: both live.
        Ok(unsafe { entered.symbols().cuEventRecord(self.raw, stream.raw()) }?)
    }

    /// Whether everything before the mark is done.
    pub fn is_done(&self, entered: &Entered<'_>) -> Result<bool> {
        // SAFETY: the event lives.
        ready(unsafe { entered.symbols().cuEventQuery(self.raw) })
    }

    /// Waits until everything before the mark is done.
    pub fn synchronize(&self, entered: &Entered<'_>) -> Result<()> {
        // SAFETY: the event lives.
        Ok(unsafe { entered.symbols().cuEventSynchronize(self.raw) }?)
    }

    /// Milliseconds from `earlier` to this one; both must be timed and done.
    pub fn since(&self, entered: &Entered<'_>, earlier: &Event) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: writes one float.
        unsafe { entered.symbols().cuEventElapsedTime(&mut milliseconds, earlier.raw, self.raw) }?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(entered) = self.context.enter() {
            // SAFETY: created once, destroyed once.
            let _ = unsafe { entered.symbols().cuEventDestroy_v2(self.raw) };
        }
    }
}

fn ready(result: std::result::Result<(), Failure>) -> Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(Failure { code: code::NOT_READY, .. }) => Ok(false),
        Err(failure) => Err(failure.into()),
    }
}
