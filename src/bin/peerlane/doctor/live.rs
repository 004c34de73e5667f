//! `doctor --live`: a communicator with a rank on every GPU, made for the sake of its probe, and what follows from it.

use super::facts::Facts;
use super::finding::{Finding, Severity};
use super::measured;
use peerlane::env::Env;
use peerlane::probe::ProbeReport;
use peerlane::topology::Address;
use serde_json::value::RawValue;
use std::path::Path;

/// Findings of the tree that a measurement confirms or refutes.
const POSSIBLE: [&str; 2] = ["staging-possible", "collapse-possible"];

/// What came of it.
pub enum Live {
    /// There is nothing to measure, and why.
    Nothing(String),
    /// GPUs are there, but they could not be measured.
    Failed { why: String, fix: &'static str },
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Measured(Measured),
}

/// What the communicator said.
pub struct Measured {
    /// The address of each rank's GPU.
    pub addresses: Vec<String>,
    pub report: ProbeReport,
    /// Why other lanes were left.
    pub lane_notes: Vec<String>,
    /// GPUs that have no rank.
    pub left_out: usize,
}

impl Live {
    /// Measures the GPUs that the driver shows, over what `variables` ask for. `root` describes the box where that is not `/`.
    pub fn measure(facts: &Facts, variables: &Env, root: Option<&Path>) -> Self {
        if let Some(error) = facts.driver.as_ref().map(|d| &d.error).filter(|e| !e.is_empty()) {
            return match facts.topology.gpus.is_empty() {
                true => {
                    Live::Nothing(format!("this box shows no NVIDIA GPU, and no driver ({error})"))
                }
                // The finding no-cuda says what to do.
                false => Live::Failed { why: error.clone(), fix: "see no-cuda" },
            };
        }
        match facts.driver.as_ref().map(|d| d.gpus.len()) {
            Some(0) => Live::Nothing("the driver shows no GPU".into()),
            Some(1) => Live::Nothing("the driver shows one GPU, and links join two".into()),
            _ => gpus::measure(facts, variables, root),
        }
    }

    /// The figures as JSON.
    pub fn json(&self) -> Option<Box<RawValue>> {
        match self {
            Live::Measured(measured) => RawValue::from_string(measured.report.to_json()).ok(),
            _ => None,
        }
    }

    /// Puts what was measured in the place of what was possible.
    pub fn revise(&self, facts: &Facts, findings: &mut Vec<Finding>) {
        match self {
            Live::Nothing(why) => findings.push(Finding {
                id: "not-measured",
                severity: Severity::Note,
                what: "nothing was measured: there are no links between GPUs here".into(),
                evidence: why.clone(),
                cost: "none".into(),
                fix: "none; `peerlane bench --device cpu` measures ranks of the CPU".into(),
            }),
            Live::Failed { why, fix } => findings.push(Finding {
                id: "not-measured",
                severity: Severity::Wrong,
                what: "the GPUs could not be measured: no communicator could be made over them"
                    .into(),
                evidence: why.clone(),
                cost: "peerlane cannot serve these GPUs together".into(),
                fix: (*fix).into(),
            }),
            Live::Measured(measured) => measured.revise(facts, findings),
        }
    }
}

impl Measured {
    fn revise(&self, facts: &Facts, findings: &mut Vec<Finding>) {
        findings.extend(self.lane(facts));
        let topology = &facts.topology;
        let place = |address: &String| topology.at(Address::parse(address)?);
        let gpu_of =
            self.addresses.iter().map(|a| place(a).ok_or(a)).collect::<Result<Vec<_>, _>>();
        match gpu_of {
            Ok(gpu_of) => {
                if self.report.lane != "host" {
                    findings.retain(|finding| !POSSIBLE.contains(&finding.id));
                }
                findings.extend(measured::judge(topology, &gpu_of, &self.report));
            }
            Err(address) => findings.push(Finding {
                id: "not-judged",
                severity: Severity::Note,
                what: "what was measured cannot be compared with what the links carry".into(),
                evidence: format!(
                    "the driver has a GPU at {address}, and {} does not",
                    topology.source
                ),
                cost: "a slow pair would go unnoticed here; the figures stand below".into(),
                fix: "show this process the box's /sys, or name a copy of it with --root".into(),
            }),
        }
        if self.left_out > 0 {
            findings.push(Finding {
                id: "not-all-measured",
                severity: Severity::Note,
                what: format!("{} GPU(s) were left out", self.left_out),
                evidence: format!("{} ranks were made", self.addresses.len()),
                cost: "what is wrong with them would go unnoticed".into(),
                fix: "name others in CUDA_VISIBLE_DEVICES and measure again; MIG slices cannot take part".into(),
            });
        }
    }

    /// A lane that the driver offers and that did not deliver.
    fn lane(&self, facts: &Facts) -> Option<Finding> {
        let claimed = facts.driver.as_ref().is_some_and(|d| {
            d.peer_access.iter().flatten().all(|reaches| *reaches) && !d.peer_access.is_empty()
        });
        let evidence = self.lane_notes.iter().find(|note| note.starts_with("lane "))?.clone();
        let staged = self.report.lane == "host";
        if staged && !claimed {
            return None;
        }
        Some(match staged {
            true => Finding {
                id: "lane-broken",
                severity: Severity::Wrong,
                what: "the driver says that GPUs reach each other's memory, and they do not".into(),
                evidence: format!("measured: {evidence}"),
                cost: "peerlane stages messages in host memory; programs that trust the driver hang or get wrong data".into(),
                fix: "boot with iommu=pt, switch off access control on bridges, on virtual machines pass the GPUs through with peer-to-peer; or load a driver that supports it".into(),
            },
            false => Finding {
                id: "lane-second-best",
                severity: Severity::Note,
                what: format!("GPUs reach each other's memory over {} alone", self.report.lane),
                evidence: format!("measured: {evidence}"),
                cost: "none in speed; memory of a rank that is killed stays until its peers end".into(),
                fix: "none needed; in containers, share the namespaces that the error names".into(),
            },
        })
    }

    /// The figures, for people.
    pub fn text(&self) -> String {
        let mut text = format!("\nMeasured: {}\n", self.report);
        let gpus: Vec<String> =
            self.addresses.iter().enumerate().map(|(rank, a)| format!("{rank} = {a}")).collect();
        text.push_str(&format!("  ranks: {}\n", gpus.join(", ")));
        text
    }
}

/// A build that knows no GPU.
#[cfg(not(feature = "cuda"))]
mod gpus {
    use super::{Env, Facts, Live};
    use std::path::Path;

    pub fn measure(facts: &Facts, _variables: &Env, _root: Option<&Path>) -> Live {
        match facts.topology.gpus.len() {
            0 => Live::Nothing("this box shows no NVIDIA GPU".into()),
            count => Live::Failed {
                why: format!("{count} GPU(s) are there, but this peerlane was built without CUDA"),
                fix: "build it with `make`, which takes nvcc, or with the features cli and cuda",
            },
        }
    }
}

#[cfg(feature = "cuda")]
mod gpus {
    use super::{Env, Facts, Live, Measured};
    use anyhow::{bail, Result};
    use peerlane::bootstrap::UniqueId;
    use peerlane::comm::{create_all, Communicator, Config, Creation};
    use peerlane::types::MAX_RANKS;
    use peerlane::{Device, ProbeMode};
    use std::path::{Path, PathBuf};
    use std::sync::mpsc::{sync_channel, RecvTimeoutError};
    use std::time::Duration;

    /// Until set-up gives up, unless `PEERLANE_SETUP_DEADLINE` says otherwise.
    const DEADLINE: Duration = Duration::from_secs(60);
    /// How much later a driver that answers no more is given up.
    const GRACE: Duration = Duration::from_secs(10);

    pub fn measure(facts: &Facts, variables: &Env, root: Option<&Path>) -> Live {
        let failed = |why: String| {
            Live::Failed {
            why,
            fix: "peerlane's own words name the rank and the stage; look at the findings above, then at `dmesg` (Xid, IOMMU, AER)",
        }
        };
        let Some(driver) = &facts.driver else { return failed("no driver was asked".into()) };
        let whole = driver.gpus.iter().enumerate().filter(|(_, gpu)| !gpu.mig);
        let seats: Vec<(u32, String)> =
            whole.map(|(at, gpu)| (at as u32, gpu.address.clone())).take(MAX_RANKS).collect();
        if seats.len() < 2 {
            return Live::Nothing(
                "fewer than two whole GPUs; MIG slices have no peer access".into(),
            );
        }
        let left_out = driver.gpus.len() - seats.len();
        let limit = variables.setup_deadline.unwrap_or(DEADLINE);
        let root = root.filter(|root| root.is_dir()).map(Path::to_path_buf);
        // A driver that hangs can be left, not stopped: the thread ends with the process.
        let (send, receive) = sync_channel(1);
        let variables = variables.clone();
        let ordinals: Vec<u32> = seats.iter().map(|(ordinal, _)| *ordinal).collect();
        let began = std::thread::Builder::new().name("peerlane-live".into()).spawn(move || {
            let _ = send.send(probe(&ordinals, &variables, limit, root));
        });
        if let Err(error) = began {
            return failed(format!("no thread for the measurement: {error}"));
        }
        match receive.recv_timeout(limit.saturating_add(GRACE)) {
            Ok(Ok((report, lane_notes))) => Live::Measured(Measured {
                addresses: seats.into_iter().map(|(_, address)| address).collect(),
                report,
                lane_notes,
                left_out,
            }),
            Ok(Err(error)) => failed(format!("{error:#}")),
            Err(RecvTimeoutError::Timeout) => failed(format!(
                "the driver does not answer any more: no end after {:.0} s",
                (limit + GRACE).as_secs_f64()
            )),
            Err(RecvTimeoutError::Disconnected) => {
                failed("the measurement ended without a word".into())
            }
        }
    }

    fn probe(
        ordinals: &[u32],
        variables: &Env,
        limit: Duration,
        root: Option<PathBuf>,
    ) -> Result<(peerlane::probe::ProbeReport, Vec<String>)> {
        let n = ordinals.len();
        let config = Config {
            probe: ProbeMode::Pairs,
            // What is found is said, not kept: a box that is being mended changes without a boot.
            cache_dir: None,
            setup_deadline: limit,
            deadline: limit,
            ..Config::from_vars(n, variables)?
        };
        let config = Config { topology: root.or(config.topology.clone()), ..config };
        let id = UniqueId::in_dir(config.run_dir.as_deref())?;
        let creations: Vec<Creation> = ordinals
            .iter()
            .enumerate()
            .map(|(rank, ordinal)| {
                let device = Device::Cuda { ordinal: Some(*ordinal) };
                Creation { id, n, rank, config: Config { device, ..config.clone() } }
            })
            .collect();
        let comms = create_all(&creations)?.into_iter().collect::<peerlane::Result<Vec<_>>>()?;
        let found = comms
            .first()
            .and_then(|comm| Some((comm.probe()?.clone(), comm.lane_notes().to_vec())));
        // Together: one that waits for the others to close its memory would wait in vain for one whose turn comes after.
        std::thread::scope(|scope| {
            comms.into_iter().for_each(|comm: Communicator| {
                scope.spawn(move || drop(comm));
            });
        });
        match found {
            Some(found) => Ok(found),
            None => bail!("no GPU reaches another one, so nothing was measured"),
        }
    }
}
