//! Graphs: captures of our own streams, replays, and what a graph under capture, anybody's, keeps alive.

use super::context::{Context, Entered};
use super::module::{Function, LaunchShape};
use super::stream::{CapturedGraph, GraphNode, Stream, StreamRef};
use crate::error::{Error, Result};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::mpsc::{channel, Sender};
use std::sync::OnceLock;

/// How far a capture forbids calls that could disturb it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureMode {
    /// In every thread of the process.
    Global,
    /// In the capturing thread.
    ThreadLocal,
    /// Nowhere.
    Relaxed,
}

impl CaptureMode {
    fn raw(self) -> sys::CUstreamCaptureMode {
        match self {
            CaptureMode::Global => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => {
                sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            }
            CaptureMode::Relaxed => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
        }
    }
}

/// While it lives, this thread may allocate and load although somebody's capture is under way: for set-up work that has
/// nothing to do with what is being captured.
#[derive(Debug)]
pub struct RelaxedThread<'a> {
    entered: &'a Entered<'a>,
    before: sys::CUstreamCaptureMode,
}

impl<'a> RelaxedThread<'a> {
    /// Relaxes this thread.
    pub fn new(entered: &'a Entered<'a>) -> Result<Self> {
        let mut mode = CaptureMode::Relaxed.raw();
        // SAFETY: swaps one enum, for a value that the driver was given before or its default.
        unsafe { entered.symbols().cuThreadExchangeStreamCaptureMode(&mut mode) }?;
        Ok(RelaxedThread { entered, before: mode })
    }
}

impl Drop for RelaxedThread<'_> {
    fn drop(&mut self) {
        // SAFETY: swaps one enum, back to what it was.
        let _ =
            unsafe { self.entered.symbols().cuThreadExchangeStreamCaptureMode(&mut self.before) };
    }
}

/// A capture of one of our own streams. Dropped without [`end`](Self::end), what was recorded is thrown away.
#[derive(Debug)]
pub struct Capture<'s> {
    stream: Option<&'s Stream>,
}

impl<'s> Capture<'s> {
    /// Records from now on what is put on `stream`. To be ended by the same thread, unless relaxed.
    pub fn begin(stream: &'s Stream, mode: CaptureMode) -> Result<Self> {
        let entered = stream.context().enter()?;
        // SAFETY: the stream lives.
        unsafe { entered.symbols().cuStreamBeginCapture_v2(stream.as_ref().raw(), mode.raw()) }?;
        Ok(Capture { stream: Some(stream) })
    }

    /// Ends the capture.
    pub fn end(mut self) -> Result<Graph> {
        match self.stream.take() {
            Some(stream) => Self::finish(stream),
            None => Err(Error::Internal("a capture was ended twice".into())),
        }
    }

    fn finish(stream: &Stream) -> Result<Graph> {
        let context = stream.context();
        let entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed once by `Graph`'s drop.
        unsafe { entered.symbols().cuStreamEndCapture(stream.as_ref().raw(), &mut raw) }?;
        Ok(Graph { context: context.clone(), raw })
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            let _ = Self::finish(stream);
        }
    }
}

/// What was captured.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    raw: sys::CUgraph,
}

// SAFETY: not shared (no Sync): the driver does not synchronise calls on one graph.
unsafe impl Send for Graph {}

impl Graph {
    /// Makes it launchable. The graph itself may be dropped afterwards.
    pub fn instantiate(&self) -> Result<GraphExec> {
        let entered = self.context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed once by drop.
        unsafe { entered.symbols().cuGraphInstantiateWithFlags(&mut raw, self.raw, 0) }?;
        Ok(GraphExec { context: self.context.clone(), raw })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(entered) = self.context.enter() {
            // SAFETY: made once, destroyed once.
            let _ = unsafe { entered.symbols().cuGraphDestroy(self.raw) };
        }
    }
}

/// A graph that can be launched, again and again.
#[derive(Debug)]
pub struct GraphExec {
    context: Context,
    raw: sys::CUgraphExec,
}

// SAFETY: not shared (no Sync): the driver does not synchronise calls on one graph.
unsafe impl Send for GraphExec {}

impl GraphExec {
    /// Brings it to the device ahead of its first launch, which does so otherwise: for ranks that share a device, whose first
    /// launches come while others' kernels already wait for them. Does nothing where the driver cannot.
    pub fn upload(&self, entered: &Entered<'_>, stream: StreamRef) -> Result<()> {
        // SAFETY: both live.
        Ok(unsafe { entered.symbols().cuGraphUpload(self.raw, stream.raw()) }.unwrap_or(Ok(()))?)
    }

    /// Queues one replay; replays of one graph run one after the other.
    pub fn launch(&self, entered: &Entered<'_>, stream: StreamRef) -> Result<()> {
        // SAFETY: both live; what the nodes refer to is kept alive by whoever recorded them.
        Ok(unsafe { entered.symbols().cuGraphLaunch(self.raw, stream.raw()) }?)
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        if let Ok(entered) = self.context.enter() {
            // SAFETY: made once, destroyed once.
            let _ = unsafe { entered.symbols().cuGraphExecDestroy(self.raw) };
        }
    }
}

/// A kernel that was recorded into a graph, and all that the driver wants to hear again when the node's parameter or its grid is
/// to be another one. Remembering allocates nothing.
#[derive(Debug)]
pub struct RecordedKernel {
    node: sys::CUgraphNode,
    function: sys::CUfunction,
    shape: LaunchShape,
    /// The parameter; in units that are aligned for any struct.
    params: Box<[MaybeUninit<u128>]>,
}

// SAFETY: handles and bytes, which are looked at by the driver alone and in `rewrite` alone.
unsafe impl Send for RecordedKernel {}

impl RecordedKernel {
    /// Nothing yet, with room for a parameter of `bytes` bytes.
    pub fn with_room_for(bytes: usize) -> Self {
        let units = bytes.div_ceil(size_of::<u128>());
        RecordedKernel {
            node: std::ptr::null_mut(),
            function: std::ptr::null_mut(),
            shape: LaunchShape::plain(0, 0),
            params: vec![MaybeUninit::uninit(); units].into(),
        }
    }

    /// Takes in what `node` was recorded with. False, with nothing remembered, where there is no room for the parameter.
    pub fn remember<A: Copy>(
        &mut self,
        node: GraphNode,
        kernel: &Function<A>,
        shape: &LaunchShape,
        params: &A,
    ) -> bool {
        if size_of::<A>() > size_of_val::<[_]>(&self.params) {
            self.node = std::ptr::null_mut();
            return false;
        }
        // SAFETY: there is room; bytes without a value stay without one.
        unsafe { std::ptr::from_ref(params).copy_to_nonoverlapping(self.params(), 1) };
        (self.node, self.function, self.shape) = (node.raw, kernel.raw(), *shape);
        true
    }

    /// Where the parameter is that [`rewrite`](Self::rewrite) hands over.
    pub fn params<A>(&mut self) -> *mut A {
        self.params.as_mut_ptr().cast()
    }

    /// How many blocks of how many threads [`rewrite`](Self::rewrite) makes of it.
    pub fn set_grid(&mut self, blocks: u32, threads: u32) {
        (self.shape.blocks, self.shape.threads) = (blocks, threads);
    }

    /// Gives the node the grid and the parameter as they are now. The node keeps its attributes and its edges.
    ///
    /// # Safety
    /// The node's capture is under way and its function's module is loaded. For the parameter as for
    /// [`Function::launch`].
    pub unsafe fn rewrite(&mut self, entered: &Entered<'_>) -> Result<()> {
        if self.node.is_null() {
            return Err(Error::Internal("no kernel is remembered".into()));
        }
        let mut params = [self.params::<c_void>()];
        let node = sys::CUDA_KERNEL_NODE_PARAMS {
            func: self.function,
            gridDimX: self.shape.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shape.shared_bytes,
            kernelParams: params.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            // Not looked at where there is a function.
            ctx: std::ptr::null_mut(),
        };
        // SAFETY: the caller's promise; the parameter is as large as the function's and is copied during the call.
        Ok(unsafe { entered.symbols().cuGraphKernelNodeSetParams_v2(self.node, &node) }?)
    }
}

type Kept = Box<dyn std::any::Any + Send>;

/// Keeps `value` until the graph, every executable made from it and every replay in flight are gone. Then it is dropped on
/// a thread of this library's own: the driver runs the notice itself on a thread that must not call the driver, and
/// dropping device state is driver calls.
pub fn keep_with_graph<T: Send + 'static>(
    entered: &Entered<'_>,
    graph: CapturedGraph,
    value: T,
) -> Result<()> {
    reaper()?;
    let symbols = entered.symbols();
    let kept: *mut Kept = Box::into_raw(Box::new(Box::new(value) as Kept));
    let mut object = std::ptr::null_mut();
    let flags = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
    // SAFETY: `let_go` takes back exactly this pointer, once, when the last reference goes.
    let created =
        unsafe { symbols.cuUserObjectCreate(&mut object, kept.cast(), Some(let_go), 1, flags) };
    if let Err(failure) = created {
        // SAFETY: the driver did not take it.
        drop(unsafe { Box::from_raw(kept) });
        return Err(failure.into());
    }
    let flags = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32;
    // SAFETY: the capture is under way, so the graph lives; our one reference moves to it.
    let retained = unsafe { symbols.cuGraphRetainUserObject(graph.raw, object, 1, flags) };
    if let Err(failure) = retained {
        // SAFETY: the reference is still ours; giving it up lets the value go.
        let _ = unsafe { symbols.cuUserObjectRelease(object, 1) };
        return Err(failure.into());
    }
    Ok(())
}

/// The driver's notice that nothing refers to the value any more.
unsafe extern "C" fn let_go(kept: *mut c_void) {
    // SAFETY: the pointer that `keep_with_graph` gave, which the driver hands back once.
    let kept = *unsafe { Box::from_raw(kept.cast::<Kept>()) };
    match reaper() {
        // A thread that has ended means that the process is ending: then the value may as well stay.
        Ok(reaper) => {
            if let Err(unsent) = reaper.send(kept) {
                std::mem::forget(unsent.0);
            }
        }
        Err(_) => std::mem::forget(kept),
    }
}

/// The thread on which values are dropped; started before anything can depend on it.
fn reaper() -> Result<&'static Sender<Kept>> {
    static REAPER: OnceLock<Sender<Kept>> = OnceLock::new();
    if let Some(sender) = REAPER.get() {
        return Ok(sender);
    }
    let (sender, receiver) = channel::<Kept>();
    std::thread::Builder::new()
        .name("peerlane-reaper".into())
        // Where two threads race to be first, the loser's sender goes and its thread ends at once.
        .spawn(move || receiver.into_iter().for_each(drop))
        .map_err(|e| Error::os("starting the thread peerlane-reaper", &e))?;
    Ok(REAPER.get_or_init(|| sender))
}
