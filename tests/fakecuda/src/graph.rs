//! Graphs and their replays.

use crate::capture::with_node;
use crate::entry::{entry, lock};
use crate::errors::{put, INVALID_ARGUMENT, INVALID_RESOURCE_HANDLE};
use crate::kernel::Launch;
use crate::stream::{enqueue, resolve, Marker, Work};
use crate::table::{fresh, Table};
use crate::user_object::References;
use cudarc::driver::sys::CUDA_KERNEL_NODE_PARAMS;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_ulonglong;
use std::sync::{Arc, Mutex};

#[derive(Clone)]
pub struct Node {
    pub handle: Arc<NodeHandle>,
    /// The stream it was captured in; replays run one lane per stream.
    pub lane: usize,
    pub after: BTreeSet<usize>,
    pub task: Task,
}

/// A node's number. Unlike all other handles it comes back once the node is gone, to the next new one: with the real driver
/// a node of another graph may have the address of one that was.
pub struct NodeHandle(pub usize);

static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());

impl NodeHandle {
    pub fn next() -> Arc<Self> {
        let free = lock(&FREE).pop();
        Arc::new(NodeHandle(free.unwrap_or_else(fresh)))
    }
}

impl Drop for NodeHandle {
    fn drop(&mut self) {
        lock(&FREE).push(self.0);
    }
}

#[derive(Clone)]
pub enum Task {
    Kernel(Launch),
    Other(Work),
}

impl Task {
    pub fn run(&self) {
        match self {
            Task::Kernel(launch) => launch.run(),
            Task::Other(work) => work(),
        }
    }

    fn kernel(&self) -> Option<&Launch> {
        match self {
            Task::Kernel(launch) => Some(launch),
            Task::Other(_) => None,
        }
    }
}

/// A node, to a test: 0 for what is no kernel, 1 for a kernel, 2 for one of the library's; whether it was launched
/// programmatically; whether it lets its dependents start early; how many nodes it comes after; its blocks, threads of
/// each, and blocks of a cluster.
pub type Seen = [u32; 7];

impl Node {
    fn seen(&self) -> Seen {
        let deps = self.after.len() as u32;
        match self.task.kernel() {
            None => [0, 0, 0, deps, 0, 0, 0],
            Some(kernel) => {
                let kind = if kernel.is_ours() { 2 } else { 1 };
                let (blocks, threads) = (kernel.blocks, kernel.threads);
                let (early, cluster) =
                    (kernel.attributes.programmatic.into(), kernel.attributes.cluster);
                [kind, early, kernel.dependents(), deps, blocks, threads, cluster]
            }
        }
    }
}

thread_local! {
    static LAST: RefCell<Vec<Seen>> = const { RefCell::new(Vec::new()) };
}

/// The nodes of the graph that this thread has last made launchable, in the order of their capture.
pub fn last() -> Vec<Seen> {
    LAST.with_borrow(Clone::clone)
}

/// What would be wrong data or a deadlock on a GPU, in words. The library's kernels alone keep to it.
fn hazard(nodes: &[Node]) -> Option<&'static str> {
    for (index, node) in nodes.iter().enumerate() {
        let Some(kernel) = node.task.kernel() else { continue };
        let before: Vec<&Node> = node.after.iter().map(|before| &nodes[*before]).collect();
        let lets_start = |node: &&Node| node.task.kernel().is_some_and(|k| k.dependents() != 0);
        if kernel.attributes.programmatic && kernel.is_ours() {
            if !kernel.waits_inside() {
                return Some("a programmatic launch of code that cannot wait");
            }
            if before.len() != 1 || !before.iter().all(lets_start) {
                return Some(
                    "a programmatic launch behind what does not wait for what is before it",
                );
            }
        }
        if kernel.attributes.programmatic && !kernel.is_ours() && before.iter().any(lets_start) {
            return Some("a foreign kernel may start before ours is done");
        }
        let mut behind = nodes.iter().filter(|node| node.after.contains(&index));
        let early = |node: &Node| {
            node.task.kernel().is_some_and(|k| k.attributes.programmatic && k.is_ours())
        };
        if kernel.dependents() != 0 && !behind.any(early) {
            return Some("a kernel lets others start early, and there is none of ours");
        }
    }
    None
}

#[derive(Default)]
pub struct Graph {
    nodes: Mutex<Vec<Node>>,
    pub references: Mutex<References>,
}

impl Graph {
    pub fn fill(&self, nodes: Vec<Node>) {
        *lock(&self.nodes) = nodes;
    }
}

/// Does something with a node of a graph whose capture has ended; `None` if there is no such node.
fn with_done<T>(handle: usize, work: impl FnOnce(&mut Node) -> T) -> Option<T> {
    for graph in GRAPHS.all() {
        let mut nodes = lock(&graph.nodes);
        if let Some(node) = nodes.iter_mut().find(|node| node.handle.0 == handle) {
            return Some(work(node));
        }
    }
    None
}

struct Exec {
    nodes: Vec<Node>,
    /// Replays of one executable run one after the other.
    running: Mutex<()>,
    /// Given up when the executable is destroyed and no replay is in flight.
    _references: References,
}

pub static GRAPHS: Table<Graph> = Table::new();
static EXECS: Table<Exec> = Table::new();

pub fn live() -> [usize; 2] {
    [GRAPHS.len(), EXECS.len()]
}

pub fn destroy(graph: usize) -> Result<(), u32> {
    GRAPHS.remove(graph).map(|_| ())
}

impl Exec {
    fn run(&self) {
        let _one = lock(&self.running);
        let mut lanes: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, node) in self.nodes.iter().enumerate() {
            lanes.entry(node.lane).or_default().push(index);
        }
        let done: Vec<Arc<Marker>> = self.nodes.iter().map(|_| Marker::new()).collect();
        let run_lane = |lane: &[usize]| {
            for index in lane {
                let node = &self.nodes[*index];
                node.after.iter().for_each(|before| done[*before].wait());
                node.task.run();
                done[*index].set();
            }
        };
        std::thread::scope(|scope| {
            let mut lanes = lanes.values();
            let first = lanes.next();
            for lane in lanes {
                scope.spawn(|| run_lane(lane));
            }
            if let Some(lane) = first {
                run_lane(lane);
            }
        });
    }
}

entry! {
    fn cuGraphInstantiateWithFlags(exec: *mut usize, graph: usize, _flags: c_ulonglong) {
        let graph = GRAPHS.get(graph)?;
        let nodes = lock(&graph.nodes).clone();
        if let Some(hazard) = hazard(&nodes) {
            eprintln!("fakecuda: {hazard}");
            return Err(INVALID_ARGUMENT);
        }
        LAST.set(nodes.iter().map(Node::seen).collect());
        let references = lock(&graph.references).clone();
        put(exec, EXECS.insert(Exec { nodes, running: Mutex::new(()), _references: references }))
    }
    fn cuGraphLaunch(exec: usize, stream: usize) {
        let exec = EXECS.get(exec)?;
        enqueue(&*resolve(stream)?, Arc::new(move || exec.run()))
    }
    fn cuGraphKernelNodeSetParams_v2(node: usize, params: *const CUDA_KERNEL_NODE_PARAMS) {
        let params = params.as_ref().ok_or(INVALID_ARGUMENT)?;
        let set = |node: &mut Node| match &mut node.task {
            // SAFETY: the caller's parameters are what the driver API asks for.
            Task::Kernel(launch) => unsafe { launch.set(params) },
            Task::Other(_) => Err(INVALID_ARGUMENT),
        };
        with_node(node, set).or_else(|| with_done(node, set)).unwrap_or(Err(INVALID_RESOURCE_HANDLE))
    }
    fn cuGraphUpload(exec: usize, stream: usize) {
        EXECS.get(exec)?;
        resolve(stream).map(|_| ())
    }
    fn cuGraphExecDestroy(exec: usize) {
        EXECS.remove(exec).map(|_| ())
    }
    fn cuGraphDestroy(graph: usize) {
        destroy(graph)
    }
}
