//! Graphs and their replays.

use crate::entry::{entry, lock};
use crate::errors::put;
use crate::stream::{enqueue, resolve, Marker, Work};
use crate::table::Table;
use crate::user_object::References;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_ulonglong;
use std::sync::{Arc, Mutex};

#[derive(Clone)]
pub struct Node {
    /// The stream it was captured in; replays run one lane per stream.
    pub lane: usize,
    pub after: BTreeSet<usize>,
    pub work: Work,
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
                (node.work)();
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
        let references = lock(&graph.references).clone();
        put(exec, EXECS.insert(Exec { nodes, running: Mutex::new(()), _references: references }))
    }
    fn cuGraphLaunch(exec: usize, stream: usize) {
        let exec = EXECS.get(exec)?;
        enqueue(&*resolve(stream)?, Arc::new(move || exec.run()))
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
