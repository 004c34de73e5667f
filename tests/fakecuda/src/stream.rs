//! Streams: one thread each, so that kernels that wait for one another really run together. Default streams too.

use crate::capture::{self, Capture, EdgeData};
use crate::context::current;
use crate::entry::{entry, lock};
use crate::errors::{
    put, CONTEXT_IS_DESTROYED, DEVICE_NOT_READY, INVALID_ARGUMENT,
    OPERATION_NOT_PERMITTED_WHEN_STREAM_IS_CAPTURING,
    OPERATION_WOULD_MAKE_THE_LEGACY_STREAM_DEPEND_ON_A_CAPTURING_BLOCKING_STREAM,
};
use crate::graph::Task;
use crate::table::{fresh, Table};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_int, c_uint};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// What a stream does: run at once, or kept for replays.
pub type Work = Arc<dyn Fn() + Send + Sync>;

/// A point in a stream that others wait for.
pub struct Marker(Mutex<bool>, Condvar);

impl Marker {
    pub fn new() -> Arc<Self> {
        Arc::new(Marker(Mutex::new(false), Condvar::new()))
    }

    pub fn set(&self) {
        *lock(&self.0) = true;
        self.1.notify_all();
    }

    pub fn is_set(&self) -> bool {
        *lock(&self.0)
    }

    pub fn wait(&self) {
        let mut done = lock(&self.0);
        while !*done {
            done = self.1.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

pub struct Stream {
    pub id: usize,
    pub gpu: usize,
    /// Waits for, and holds up, the legacy default stream.
    blocking: bool,
    legacy: bool,
    queue: Mutex<Queue>,
    ready: Condvar,
    pub capture: Mutex<Option<Arc<Capture>>>,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    /// Set by the last work that was queued, once it is done.
    tail: Option<Arc<Marker>>,
    closed: bool,
}

static STREAMS: Table<Stream> = Table::new();
/// The legacy stream of each GPU.
static LEGACY: Mutex<BTreeMap<usize, Arc<Stream>>> = Mutex::new(BTreeMap::new());
/// Every thread's own default streams.
static PER_THREAD: Mutex<Vec<Arc<Stream>>> = Mutex::new(Vec::new());
/// Held while work is queued, so that what the legacy stream waits for is one consistent moment.
static ORDER: Mutex<()> = Mutex::new(());

thread_local! {
    static MINE: RefCell<BTreeMap<usize, Arc<Stream>>> = const { RefCell::new(BTreeMap::new()) };
}

pub fn live() -> usize {
    STREAMS.len()
}

impl Stream {
    fn start(gpu: usize, blocking: bool, legacy: bool) -> Arc<Self> {
        let stream = Arc::new(Stream {
            id: fresh(),
            gpu,
            blocking,
            legacy,
            queue: Mutex::default(),
            ready: Condvar::new(),
            capture: Mutex::new(None),
        });
        let worker = stream.clone();
        std::thread::spawn(move || worker.run());
        stream
    }

    fn run(&self) {
        loop {
            let mut queue = lock(&self.queue);
            let work = loop {
                match queue.work.pop_front() {
                    Some(work) => break work,
                    None if queue.closed => return,
                    None => queue = self.ready.wait(queue).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(queue);
            work();
        }
    }

    fn push(&self, work: Work) -> Arc<Marker> {
        let done = Marker::new();
        let mut queue = lock(&self.queue);
        queue.work.push_back(work);
        let set = done.clone();
        queue.work.push_back(Arc::new(move || set.set()));
        queue.tail = Some(done.clone());
        self.ready.notify_one();
        done
    }

    /// The end of what is queued; `None` if all is done.
    pub fn tail(&self) -> Option<Arc<Marker>> {
        lock(&self.queue).tail.clone().filter(|tail| !tail.is_set())
    }

    /// Queues work behind what the default stream's rules put before it.
    pub fn submit(&self, work: Work) -> Result<Arc<Marker>, u32> {
        let _order = lock(&ORDER);
        let before: Vec<Arc<Marker>> = if self.legacy {
            let blocking: Vec<_> =
                on_gpu(self.gpu).into_iter().filter(|stream| stream.blocking).collect();
            if let Some(capture) = blocking.iter().find_map(|s| lock(&s.capture).clone()) {
                capture.invalidate();
                return Err(
                    OPERATION_WOULD_MAKE_THE_LEGACY_STREAM_DEPEND_ON_A_CAPTURING_BLOCKING_STREAM,
                );
            }
            blocking.iter().filter_map(|stream| stream.tail()).collect()
        } else if self.blocking {
            lock(&LEGACY).get(&self.gpu).and_then(|legacy| legacy.tail()).into_iter().collect()
        } else {
            Vec::new()
        };
        if before.is_empty() {
            return Ok(self.push(work));
        }
        Ok(self.push(Arc::new(move || {
            before.iter().for_each(|marker| marker.wait());
            work();
        })))
    }

    pub fn capturing(&self) -> Option<Arc<Capture>> {
        lock(&self.capture).clone()
    }
}

fn on_gpu(gpu: usize) -> Vec<Arc<Stream>> {
    let mut streams = STREAMS.all();
    streams.extend(lock(&PER_THREAD).iter().cloned());
    streams.extend(lock(&LEGACY).values().cloned());
    streams.retain(|stream| stream.gpu == gpu);
    streams
}

/// The stream behind a handle: one of the default streams of the current context, or somebody's own.
pub fn resolve(handle: usize) -> Result<Arc<Stream>, u32> {
    match handle {
        0 | 1 => {
            let gpu = current()?;
            Ok(lock(&LEGACY).entry(gpu).or_insert_with(|| Stream::start(gpu, false, true)).clone())
        }
        2 => {
            let gpu = current()?;
            Ok(MINE.with_borrow_mut(|mine| {
                let start = || {
                    let stream = Stream::start(gpu, true, false);
                    lock(&PER_THREAD).push(stream.clone());
                    stream
                };
                mine.entry(gpu).or_insert_with(start).clone()
            }))
        }
        handle => {
            current()?;
            STREAMS.get(handle).map_err(|_| CONTEXT_IS_DESTROYED)
        }
    }
}

/// Queues work, or records it where the stream is being captured.
pub fn enqueue(stream: &Stream, work: Work) -> Result<(), u32> {
    enqueue_task(stream, Task::Other(work))
}

pub fn enqueue_task(stream: &Stream, task: Task) -> Result<(), u32> {
    match (stream.capturing(), task) {
        (Some(capture), task) => capture.record(stream, task),
        (None, Task::Other(work)) => stream.submit(work).map(|_| ()),
        (None, kernel) => stream.submit(Arc::new(move || kernel.run())).map(|_| ()),
    }
}

/// The capture of a stream, if it is not over or invalid, and the status of the stream.
fn ask(stream: &Stream) -> Result<(u32, Option<Arc<Capture>>), u32> {
    let capture = stream.capturing();
    if capture.is_none() && stream.legacy {
        let blocked = on_gpu(stream.gpu).iter().any(|s| s.blocking && s.capturing().is_some());
        if blocked {
            return Err(
                OPERATION_WOULD_MAKE_THE_LEGACY_STREAM_DEPEND_ON_A_CAPTURING_BLOCKING_STREAM,
            );
        }
    }
    let status = capture::status(capture.as_deref());
    Ok((status, capture.filter(|capture| !capture.is_invalid())))
}

pub fn synchronize(stream: &Stream) -> Result<(), u32> {
    if let Some(capture) = stream.capturing() {
        capture.invalidate();
        return Err(OPERATION_NOT_PERMITTED_WHEN_STREAM_IS_CAPTURING);
    }
    stream.submit(Arc::new(|| ()))?.wait();
    Ok(())
}

pub fn synchronize_device(gpu: usize) -> Result<(), u32> {
    on_gpu(gpu).iter().filter_map(|stream| stream.tail()).for_each(|tail| tail.wait());
    Ok(())
}

fn create(out: *mut usize, flags: c_uint) -> Result<(), u32> {
    if flags > 1 {
        return Err(INVALID_ARGUMENT);
    }
    let stream = Stream::start(current()?, flags == 0, false);
    STREAMS.insert_at(stream.id, stream.clone());
    // SAFETY: the caller's pointer, at the driver API's word.
    unsafe { put(out, stream.id) }
}

entry! {
    fn cuStreamCreate(stream: *mut usize, flags: c_uint) {
        create(stream, flags)
    }
    fn cuStreamCreateWithPriority(stream: *mut usize, flags: c_uint, _priority: c_int) {
        create(stream, flags)
    }
    fn cuStreamDestroy_v2(stream: usize) {
        current()?;
        let stream = STREAMS.remove(stream)?;
        if let Some(capture) = stream.capturing() {
            capture.lose(&stream);
        }
        lock(&stream.queue).closed = true;
        stream.ready.notify_one();
        Ok(())
    }
    fn cuStreamSynchronize(stream: usize) {
        synchronize(&*resolve(stream)?)
    }
    fn cuStreamQuery(stream: usize) {
        let stream = resolve(stream)?;
        if let Some(capture) = stream.capturing() {
            capture.invalidate();
            return Err(OPERATION_NOT_PERMITTED_WHEN_STREAM_IS_CAPTURING);
        }
        if stream.tail().is_some() { Err(DEVICE_NOT_READY) } else { Ok(()) }
    }
    fn cuStreamGetCaptureInfo_v2(
        stream: usize,
        status: *mut u32,
        id: *mut u64,
        graph: *mut usize,
        dependencies: *mut usize,
        count: *mut usize,
    ) {
        let (now, capture) = ask(&*resolve(stream)?)?;
        put(status, now)?;
        if let Some(capture) = capture {
            for (out, value) in [(graph, capture.graph), (dependencies, 0), (count, 0)] {
                if !out.is_null() {
                    put(out, value)?;
                }
            }
            if !id.is_null() {
                put(id, capture.id)?;
            }
        }
        Ok(())
    }
    fn cuStreamGetCaptureInfo_v3(
        stream: usize,
        status: *mut u32,
        id: *mut u64,
        graph: *mut usize,
        dependencies: *mut *const usize,
        edges: *mut *const EdgeData,
        count: *mut usize,
    ) {
        let stream = resolve(stream)?;
        let (now, capture) = ask(&stream)?;
        put(status, now)?;
        if let Some(capture) = capture {
            let (nodes, data, number) = capture.end(&stream);
            put(graph, capture.graph)?;
            put(id, capture.id)?;
            put(dependencies, nodes)?;
            put(edges, data)?;
            put(count, number)?;
        }
        Ok(())
    }
    fn cuStreamGetId(stream: usize, id: *mut u64) {
        put(id, resolve(stream)?.id as u64)
    }
    fn cuStreamIsCapturing(stream: usize, status: *mut u32) {
        put(status, capture::status(resolve(stream)?.capturing().as_deref()))
    }
}
