//! Captures: what a stream would have done becomes nodes of a graph; events carry a capture from stream to stream.

use crate::entry::{entry, lock};
use crate::errors::{
    put, ATTEMPT_TO_TERMINATE_A_CAPTURE_FROM_ANOTHER_THREAD, CAPTURE_WAS_NOT_BEGUN_IN_THIS_STREAM,
    CAPTURING_STREAM_HAS_UNJOINED_WORK, DEPENDENCY_ON_UNCAPTURED_WORK_IN_ANOTHER_STREAM,
    DEVICE_NOT_READY, INVALID_ARGUMENT, INVALID_RESOURCE_HANDLE,
    OPERATION_FAILED_DUE_TO_A_PREVIOUS_ERROR_DURING_CAPTURE,
    OPERATION_NOT_PERMITTED_ON_AN_EVENT_LAST_RECORDED_IN_A_CAPTURING_STREAM,
    OPERATION_NOT_PERMITTED_WHEN_STREAM_IS_CAPTURING, OPERATION_WOULD_MERGE_TWO_CAPTURES,
};
use crate::graph::Task;
use crate::graph::{self, Node, NodeHandle, GRAPHS};
use crate::stream::{enqueue, resolve, Marker, Stream};
use crate::table::{fresh, Table};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_uint;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use std::time::Instant;

const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

pub struct Capture {
    pub id: u64,
    /// Handle of the graph that it fills.
    pub graph: usize,
    mode: u32,
    thread: ThreadId,
    origin: usize,
    state: Mutex<Recording>,
}

#[derive(Default)]
struct Recording {
    invalid: bool,
    nodes: Vec<Node>,
    /// By stream: what its next node comes after.
    frontier: BTreeMap<usize, BTreeSet<usize>>,
    streams: Vec<Arc<Stream>>,
    /// By stream: what `Capture::end` has handed out, until the stream is asked again.
    handed: BTreeMap<usize, (Vec<usize>, Vec<EdgeData>)>,
}

/// As in `CUgraphEdgeData`: two ports, the type, reserved bytes.
pub type EdgeData = [u8; 8];

/// Captures under way.
static ACTIVE: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

pub fn status(capture: Option<&Capture>) -> u32 {
    match capture {
        None => 0,
        Some(capture) if capture.is_invalid() => 2,
        Some(_) => 1,
    }
}

/// Refuses a call that could disturb a capture, by the modes of the captures and of this thread.
pub fn forbid_in_capture() -> Result<(), u32> {
    let me = std::thread::current().id();
    let mode = MODE.get();
    if mode == RELAXED {
        return Ok(());
    }
    let disturbed = lock(&ACTIVE).iter().find_map(|capture| {
        let mine = capture.thread == me && capture.mode != RELAXED;
        (mine || (mode == GLOBAL && capture.mode == GLOBAL)).then(|| capture.clone())
    });
    match disturbed {
        Some(capture) => {
            capture.invalidate();
            Err(OPERATION_NOT_PERMITTED_WHEN_STREAM_IS_CAPTURING)
        }
        None => Ok(()),
    }
}

impl Capture {
    pub fn invalidate(&self) {
        lock(&self.state).invalid = true;
    }

    /// A stream of the capture is gone; with the one it began in, the capture ends.
    pub fn lose(&self, stream: &Stream) {
        self.invalidate();
        if stream.id == self.origin {
            self.finish(&mut lock(&self.state));
            // The graph is this capture's alone until it is handed out.
            let _ = graph::destroy(self.graph);
        }
    }

    /// Lets all its streams run again.
    fn finish(&self, state: &mut Recording) {
        for stream in std::mem::take(&mut state.streams) {
            *lock(&stream.capture) = None;
        }
        lock(&ACTIVE).retain(|active| active.id != self.id);
    }

    pub fn is_invalid(&self) -> bool {
        lock(&self.state).invalid
    }

    pub fn record(&self, stream: &Stream, task: Task) -> Result<(), u32> {
        let mut state = lock(&self.state);
        if state.invalid {
            return Err(OPERATION_FAILED_DUE_TO_A_PREVIOUS_ERROR_DURING_CAPTURE);
        }
        let after = state.frontier.remove(&stream.id).unwrap_or_default();
        let index = state.nodes.len();
        state.nodes.push(Node { handle: NodeHandle::next(), lane: stream.id, after, task });
        state.frontier.insert(stream.id, BTreeSet::from([index]));
        Ok(())
    }

    /// What the next node of `stream` comes after: nodes, data of the edges, how many.
    pub fn end(&self, stream: &Stream) -> (*const usize, *const EdgeData, usize) {
        let mut state = lock(&self.state);
        let nodes: Vec<usize> = state
            .frontier
            .get(&stream.id)
            .into_iter()
            .flatten()
            .map(|&index| state.nodes[index].handle.0)
            .collect();
        let edges = vec![[0, 0, crate::config::config().edge_type, 0, 0, 0, 0, 0]; nodes.len()];
        state.handed.insert(stream.id, (nodes, edges));
        let (nodes, edges) = &state.handed[&stream.id];
        (nodes.as_ptr(), edges.as_ptr(), nodes.len())
    }

    /// Lets `stream` go on after `nodes`, joining the capture if it has not yet.
    fn join(self: &Arc<Self>, stream: &Arc<Stream>, nodes: &BTreeSet<usize>) {
        let mut state = lock(&self.state);
        state.frontier.entry(stream.id).or_default().extend(nodes);
        let mut current = lock(&stream.capture);
        if current.is_none() {
            *current = Some(self.clone());
            state.streams.push(stream.clone());
        }
    }

    /// Whether every node comes before the end of the stream that the capture began in.
    fn is_joined(&self, state: &Recording) -> bool {
        let mut reached = BTreeSet::new();
        let mut open: Vec<usize> =
            state.frontier.get(&self.origin).into_iter().flatten().copied().collect();
        while let Some(node) = open.pop() {
            if reached.insert(node) {
                open.extend(&state.nodes[node].after);
            }
        }
        reached.len() == state.nodes.len()
    }
}

/// Does something with a node that a capture under way has recorded; `None` if there is no such node.
pub fn with_node<T>(handle: usize, work: impl FnOnce(&mut Node) -> T) -> Option<T> {
    let captures = lock(&ACTIVE).clone();
    for capture in captures {
        let mut state = lock(&capture.state);
        if let Some(node) = state.nodes.iter_mut().find(|node| node.handle.0 == handle) {
            return Some(work(node));
        }
    }
    None
}

enum Recorded {
    Never,
    /// In a stream that runs; the time is taken there.
    Running(Arc<Marker>, Arc<Mutex<Option<Instant>>>),
    Captured(Arc<Capture>, BTreeSet<usize>),
}

struct Event {
    timed: bool,
    recorded: Mutex<Recorded>,
}

static EVENTS: Table<Event> = Table::new();

pub fn live_events() -> usize {
    EVENTS.len()
}

/// The mark to wait for; `None` if the event was never recorded, which counts as done.
fn marker(event: &Event) -> Result<Option<Arc<Marker>>, u32> {
    match &*lock(&event.recorded) {
        Recorded::Never => Ok(None),
        Recorded::Running(marker, _) => Ok(Some(marker.clone())),
        Recorded::Captured(..) => {
            Err(OPERATION_NOT_PERMITTED_ON_AN_EVENT_LAST_RECORDED_IN_A_CAPTURING_STREAM)
        }
    }
}

fn time(handle: usize) -> Result<Instant, u32> {
    let event = EVENTS.get(handle)?;
    if !event.timed {
        return Err(INVALID_RESOURCE_HANDLE);
    }
    let recorded = lock(&event.recorded);
    match &*recorded {
        Recorded::Running(_, at) => lock(at).ok_or(DEVICE_NOT_READY),
        _ => Err(INVALID_RESOURCE_HANDLE),
    }
}

entry! {
    fn cuStreamBeginCapture_v2(stream: usize, mode: u32) {
        // The legacy default stream cannot be captured.
        if mode > RELAXED || stream < 2 {
            return Err(if stream < 2 { OPERATION_NOT_PERMITTED_WHEN_STREAM_IS_CAPTURING } else { INVALID_ARGUMENT });
        }
        let stream = resolve(stream)?;
        let mut current = lock(&stream.capture);
        if current.is_some() {
            return Err(crate::errors::OPERATION_NOT_PERMITTED);
        }
        let capture = Arc::new(Capture {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            graph: fresh(),
            mode,
            thread: std::thread::current().id(),
            origin: stream.id,
            state: Mutex::new(Recording { streams: vec![stream.clone()], ..Recording::default() }),
        });
        GRAPHS.insert_at(capture.graph, Arc::default());
        *current = Some(capture.clone());
        lock(&ACTIVE).push(capture);
        Ok(())
    }
    fn cuStreamEndCapture(stream: usize, graph: *mut usize) {
        let stream = resolve(stream)?;
        let capture = stream.capturing().ok_or(crate::errors::INVALID_ARGUMENT)?;
        if capture.origin != stream.id {
            capture.invalidate();
            return Err(CAPTURE_WAS_NOT_BEGUN_IN_THIS_STREAM);
        }
        if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
            return Err(ATTEMPT_TO_TERMINATE_A_CAPTURE_FROM_ANOTHER_THREAD);
        }
        let mut state = lock(&capture.state);
        capture.finish(&mut state);
        let refused = if state.invalid {
            Some(OPERATION_FAILED_DUE_TO_A_PREVIOUS_ERROR_DURING_CAPTURE)
        } else if !capture.is_joined(&state) {
            Some(CAPTURING_STREAM_HAS_UNJOINED_WORK)
        } else {
            None
        };
        // An event that outlives the capture cannot bring anybody into it any more.
        state.invalid = true;
        if let Some(code) = refused {
            graph::destroy(capture.graph)?;
            put(graph, 0)?;
            return Err(code);
        }
        GRAPHS.get(capture.graph)?.fill(std::mem::take(&mut state.nodes));
        put(graph, capture.graph)
    }
    fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) {
        if mode.is_null() || *mode > RELAXED {
            return Err(INVALID_ARGUMENT);
        }
        *mode = MODE.replace(*mode);
        Ok(())
    }
    fn cuEventCreate(event: *mut usize, flags: c_uint) {
        crate::context::current()?;
        let timed = flags & 2 == 0;
        put(event, EVENTS.insert(Event { timed, recorded: Mutex::new(Recorded::Never) }))
    }
    fn cuEventDestroy_v2(event: usize) {
        EVENTS.remove(event).map(|_| ())
    }
    fn cuEventRecord(event: usize, stream: usize) {
        let (event, stream) = (EVENTS.get(event)?, resolve(stream)?);
        let recorded = match stream.capturing() {
            Some(capture) => {
                if capture.is_invalid() {
                    return Err(OPERATION_FAILED_DUE_TO_A_PREVIOUS_ERROR_DURING_CAPTURE);
                }
                let at = lock(&capture.state).frontier.get(&stream.id).cloned().unwrap_or_default();
                Recorded::Captured(capture, at)
            }
            None => {
                let at = Arc::new(Mutex::new(None));
                let clock = at.clone();
                let done = stream.submit(Arc::new(move || *lock(&clock) = Some(Instant::now())))?;
                Recorded::Running(done, at)
            }
        };
        *lock(&event.recorded) = recorded;
        Ok(())
    }
    fn cuStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) {
        let (event, stream) = (EVENTS.get(event)?, resolve(stream)?);
        let recorded = lock(&event.recorded);
        match (&*recorded, stream.capturing()) {
            (Recorded::Never, _) => Ok(()),
            (Recorded::Running(..), Some(capture)) => {
                capture.invalidate();
                Err(DEPENDENCY_ON_UNCAPTURED_WORK_IN_ANOTHER_STREAM)
            }
            (Recorded::Running(marker, _), None) => {
                let marker = marker.clone();
                enqueue(&stream, Arc::new(move || marker.wait()))
            }
            (Recorded::Captured(from, _), _) if from.is_invalid() => {
                Err(OPERATION_NOT_PERMITTED_ON_AN_EVENT_LAST_RECORDED_IN_A_CAPTURING_STREAM)
            }
            (Recorded::Captured(from, _), Some(other)) if from.id != other.id => {
                from.invalidate();
                other.invalidate();
                Err(OPERATION_WOULD_MERGE_TWO_CAPTURES)
            }
            (Recorded::Captured(from, nodes), _) => {
                from.join(&stream, nodes);
                Ok(())
            }
        }
    }
    fn cuEventQuery(event: usize) {
        let done = marker(&*EVENTS.get(event)?)?.is_none_or(|marker| marker.is_set());
        if done { Ok(()) } else { Err(DEVICE_NOT_READY) }
    }
    fn cuEventSynchronize(event: usize) {
        if let Some(marker) = marker(&*EVENTS.get(event)?)? {
            marker.wait();
        }
        Ok(())
    }
    fn cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize) {
        put(milliseconds, time(end)?.saturating_duration_since(time(start)?).as_secs_f32() * 1e3)
    }
}
