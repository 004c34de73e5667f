//! What `explain` says, as data and as text.

use crate::described;
use anyhow::{Context, Result};
use peerlane::plan::{Line, Model, NOMINAL};
use peerlane::schedule::{self, Islands, Tree};
use peerlane::topology::{Class, Topology};
use peerlane::{Algorithm, DType};
use serde::Serialize;
use std::collections::BTreeMap;

/// All that is said.
#[derive(Serialize)]
pub struct Report {
    source: String,
    notes: Vec<String>,
    ranks: Vec<Rank>,
    matrix: Vec<Vec<Class>>,
    islands: String,
    islands_because: String,
    tree: String,
    tree_hash: String,
    topology_hash: String,
    bytes: usize,
    dtype: &'static str,
    collapse_prone: bool,
    links_assumed: bool,
    chosen: Candidate,
    others: Vec<Candidate>,
    without_schedule: Vec<&'static str>,
}

#[derive(Serialize)]
struct Rank {
    rank: usize,
    gpu: usize,
    address: Option<String>,
    node: Option<u32>,
    cpus: String,
}

#[derive(Serialize)]
struct Candidate {
    algorithm: &'static str,
    protocol: &'static str,
    time_us: f64,
    launch_us: f64,
    bound_by: String,
    may_collapse: bool,
    phases: Vec<Phase>,
    /// Why it is not chosen; empty for the one that is.
    lost_because: String,
}

#[derive(Serialize)]
struct Phase {
    latency_us: f64,
    farthest: Class,
    transfer_us: f64,
    carrier: String,
    /// Bytes on the wire by class, over all ranks.
    bytes: BTreeMap<&'static str, u64>,
}

impl Report {
    pub fn new(
        topology: &Topology,
        gpu_of: &[usize],
        islands: &Islands,
        reason: &str,
        model: &Model,
        bytes: usize,
        dtype: DType,
    ) -> Result<Self> {
        let winner = model.choose(bytes, dtype, |_| true).context("no schedule can carry this")?;
        let others = model
            .candidates(bytes, dtype)
            .into_iter()
            .filter(|line| line.choice.algorithm != winner.choice.algorithm)
            .map(|line| candidate(line, bytes, lost(line, winner, bytes)));
        let tree = Tree::new(islands);
        let all = 0..topology.gpus.len();
        Ok(Report {
            source: topology.source.clone(),
            notes: topology.notes.clone(),
            ranks: gpu_of
                .iter()
                .enumerate()
                .map(|(rank, gpu)| seat(topology, rank, *gpu))
                .collect(),
            matrix: all
                .clone()
                .map(|a| all.clone().map(|b| topology.class(a, b)).collect())
                .collect(),
            islands: islands.to_string(),
            islands_because: reason.to_owned(),
            tree: tree.to_string(),
            tree_hash: format!("{:016x}", tree.hash64()),
            topology_hash: format!("{:016x}", topology.hash64(gpu_of)),
            bytes,
            dtype: dtype.name(),
            collapse_prone: model.fabric.collapse_prone,
            links_assumed: model.fabric.links_assumed,
            others: others.collect(),
            chosen: candidate(winner, bytes, String::new()),
            without_schedule: Algorithm::ALL
                .iter()
                .filter(|a| !schedule::exists(**a, islands))
                .map(|a| a.name())
                .collect(),
        })
    }

    /// The same for people.
    pub fn text(&self, topology: &Topology, gpu_of: &[usize]) -> String {
        let mut text = format!(
            "{}\n{}\n{}\n",
            self.source,
            described::draw(topology, gpu_of),
            topology.matrix()
        );
        for note in &self.notes {
            text.push_str(&format!("note: {note}\n"));
        }
        text.push_str(&self.placement());
        text.push_str(&format!("islands {}: {}\n", self.islands, self.islands_because));
        text.push_str(&format!("summed as {} ({})\n\n", self.tree, self.tree_hash));
        let c = &self.chosen;
        text.push_str(&format!(
            "{} bytes of {} over {} rank(s): {} with {}, {:.1} us, bound by {}\n",
            self.bytes,
            self.dtype,
            self.ranks.len(),
            c.algorithm,
            c.protocol,
            c.time_us,
            c.bound_by
        ));
        text.push_str(&format!("  launch, reading and writing {:.1} us\n", c.launch_us));
        for (number, phase) in c.phases.iter().enumerate() {
            text.push_str(&format!(
                "  phase {number}: {:.2} us to {}",
                phase.latency_us, phase.farthest
            ));
            if phase.transfer_us > 0.0 {
                text.push_str(&format!(" + {:.2} us on {}", phase.transfer_us, phase.carrier));
            }
            let bytes: Vec<String> =
                phase.bytes.iter().map(|(class, bytes)| format!("{bytes} bytes {class}")).collect();
            text.push_str(&format!("; {}\n", bytes.join(", ")));
        }
        for other in &self.others {
            text.push_str(&format!(
                "{:>8.1} us  {:<12} {:<8} {}\n",
                other.time_us, other.algorithm, other.protocol, other.lost_because
            ));
        }
        for name in &self.without_schedule {
            text.push_str(&format!("            {name:<12} has no schedule for these islands\n"));
        }
        if self.collapse_prone {
            text.push_str("Several GPUs share an uplink and others hang on two or more other root complexes: stores that fan out may collapse to\na tenth here. Only a measurement can tell, so schedules with one stream per GPU are preferred.\n");
        }
        if self.links_assumed {
            text.push_str("The description has no link rates: Gen4 x16 is assumed.\n");
        }
        text.push_str(
            "Predicted from published figures, not measured; `peerlane bench` measures.\n",
        );
        text
    }
}

impl Report {
    /// Where the ranks' threads and host memory belong: near their GPUs.
    fn placement(&self) -> String {
        let mut places: Vec<(&str, Vec<String>)> = Vec::new();
        for rank in self.ranks.iter().filter(|rank| !rank.cpus.is_empty()) {
            let number = rank.rank.to_string();
            match places.iter_mut().find(|(cpus, _)| *cpus == rank.cpus) {
                Some((_, ranks)) => ranks.push(number),
                None => places.push((&rank.cpus, vec![number])),
            }
        }
        let line = |(cpus, ranks): &(&str, Vec<String>)| {
            format!("near CPUs {cpus}: rank {}\n", ranks.join(", "))
        };
        places.iter().map(line).collect()
    }
}

fn seat(topology: &Topology, rank: usize, gpu: usize) -> Rank {
    let it = &topology.gpus[gpu];
    let of_node = topology.nodes.iter().find(|n| Some(n.id) == it.node).map(|n| n.cpus.clone());
    let cpus = Some(it.cpus.clone()).filter(|c| !c.is_empty()).or(of_node).unwrap_or_default();
    Rank { rank, gpu, address: it.address.map(|a| a.to_string()), node: it.node, cpus }
}

fn candidate(line: &Line, bytes: usize, lost_because: String) -> Candidate {
    let phases = line.phases.iter().map(|phase| Phase {
        latency_us: phase.latency_us,
        farthest: phase.farthest,
        transfer_us: phase.us_per_byte * bytes as f64,
        carrier: phase.carrier.to_string(),
        bytes: Class::ALL
            .into_iter()
            .map(|class| {
                (class.name(), (phase.bytes[class as usize] * bytes as f64).round() as u64)
            })
            .filter(|(_, bytes)| *bytes > 0)
            .collect(),
    });
    Candidate {
        algorithm: line.choice.algorithm.name(),
        protocol: line.choice.protocol.name(),
        time_us: line.us(bytes),
        launch_us: NOMINAL.launch_us,
        bound_by: line.bound(bytes).to_string(),
        may_collapse: line.may_collapse(),
        phases: phases.collect(),
        lost_because,
    }
}

/// Where `line` loses time to `winner`.
fn lost(line: &Line, winner: &Line, bytes: usize) -> String {
    let latency = line.fixed_us - winner.fixed_us;
    let transfer = (line.us_per_byte - winner.us_per_byte) * bytes as f64;
    let mut why = Vec::new();
    if latency.abs() >= 0.05 {
        why.push(format!("{latency:+.1} us of latency"));
    }
    if transfer.abs() >= 0.05 {
        let slowest = line.phases.iter().max_by(|a, b| a.us_per_byte.total_cmp(&b.us_per_byte));
        let carrier = slowest
            .filter(|_| transfer > 0.0)
            .map_or(String::new(), |p| format!(" on {}", p.carrier));
        why.push(format!("{transfer:+.1} us of bytes{carrier}"));
    }
    if line.may_collapse() && line.us(bytes) < winner.us(bytes) * 1.02 {
        why.push("passed over because it may collapse further than was measured".into());
    } else if why.is_empty() || line.us(bytes) <= winner.us(bytes) {
        why.push(format!(
            "within 2 %, and {} phases against {}",
            line.phases.len(),
            winner.phases.len()
        ));
    }
    why.join(", ")
}
