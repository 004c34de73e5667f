//! Open MPI's all-reduce beside ours: drives `benches/rivals/mpi.c` under mpirun.
//!
//! A comparison counts only against a rival at its best, and no one setting of Open MPI is best everywhere (its
//! single-copy mechanism is a system call per message, which some kernels make slow and others fast). So every set of
//! [`SETTINGS`] is started, each row is measured with each, and the fastest counts. Ranks that wait for an order sleep.

use super::orders::Call;
use super::parent::{ending, spawn_tied, wait_briefly};
use super::rows::RivalResult;
use anyhow::{anyhow, bail, ensure, Context, Result};
use serde::Deserialize;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{channel, Receiver};
use std::time::Duration;

/// What to install where something is missing.
const INSTALL: &str =
    "on Debian and Ubuntu: apt-get install openmpi-bin libopenmpi-dev, then `make`";

/// Open MPI as it comes, and tuned for small messages in shared memory: copied through the shared segment at once instead
/// of announced first and fetched by a system call. Version 5 calls the transport `sm`, version 4 `vader`; each ignores
/// the other's name.
const SETTINGS: [&[(&str, &str)]; 2] = [
    &[],
    &[
        ("btl_vader_single_copy_mechanism", "none"),
        ("btl_vader_eager_limit", "131072"),
        ("btl_sm_single_copy_mechanism", "none"),
        ("btl_sm_eager_limit", "131072"),
    ],
];

/// A row may take this long, and this many times what ours took; the driver is lost otherwise.
const PATIENCE: Duration = Duration::from_secs(600);
const SLOWER: u32 = 100;

/// How a row is measured; the same numbers as ours.
pub struct Plan {
    pub iters: u32,
    pub batches: u32,
    pub warmup: u32,
    pub checks: u32,
    pub seed: u64,
    pub data: u64,
    /// How long our own batches took together.
    pub ours: Duration,
}

#[derive(Deserialize)]
struct Greeting {
    name: String,
    version: String,
    ranks: usize,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Reply {
    Measured {
        time_us: f64,
        wrong: u64,
    },
    /// MPI has no such type or operation.
    None {
        #[serde(rename = "none")]
        _what: String,
    },
}

struct Job {
    mpirun: Child,
    /// `None` once it has been told to end.
    orders: Option<ChildStdin>,
    replies: Receiver<String>,
}

/// The running rival.
pub struct Mpi {
    jobs: Vec<Job>,
    name: String,
    version: String,
}

impl Mpi {
    /// Starts the driver over `ranks` processes, once for each set of settings.
    pub fn start(driver: Option<&Path>, ranks: usize) -> Result<Self> {
        let driver = match driver {
            Some(path) => path.to_owned(),
            None => find_driver()?,
        };
        ensure!(
            driver.is_file(),
            "--rival mpi: there is no driver {}; {INSTALL}",
            driver.display()
        );
        let mut mpi = Mpi { jobs: Vec::new(), name: String::new(), version: String::new() };
        // The second only once the first runs: two mpiruns that begin together may both find Open MPI's session directory
        // missing, and the one whose mkdir comes second gives up.
        for settings in SETTINGS {
            let mut job = Job::start(&driver, ranks, settings)?;
            let line = job.reply(PATIENCE)?;
            let greeting: Greeting = serde_json::from_str(&line)
                .with_context(|| format!("--rival mpi: not the driver's greeting: {line:?}"))?;
            ensure!(
                greeting.ranks == ranks,
                "--rival mpi: mpirun started {} ranks instead of {ranks}; is the driver linked to another MPI than mpirun's?",
                greeting.ranks
            );
            mpi.name = greeting.name;
            mpi.version = greeting.version;
            mpi.jobs.push(job);
        }
        Ok(mpi)
    }

    /// Name and version.
    pub fn title(&self) -> String {
        format!("{} {}", self.name, self.version)
    }

    /// Measures and checks `call`; `None` if MPI has no such type or operation.
    pub fn measure(&mut self, call: &Call, plan: &Plan) -> Result<Option<RivalResult>> {
        let order = format!(
            "{} {} {} {} {} {} {} {} {}\n",
            call.dtype,
            call.op,
            call.count,
            plan.iters,
            plan.batches,
            plan.warmup,
            plan.checks,
            plan.seed,
            plan.data
        );
        let mut best: Option<RivalResult> = None;
        let mut total = 0;
        for job in &mut self.jobs {
            job.order(&order)?;
            let line = job.reply(PATIENCE + plan.ours * SLOWER)?;
            let reply = serde_json::from_str(&line)
                .with_context(|| format!("--rival mpi: not an answer: {line:?}"))?;
            match reply {
                Reply::None { .. } => return Ok(None),
                Reply::Measured { time_us, wrong } => {
                    total += wrong;
                    if best.as_ref().is_none_or(|b| time_us < b.time_us) {
                        let (name, version) = (self.name.clone(), self.version.clone());
                        best = Some(RivalResult { name, version, time_us, wrong: None });
                    }
                }
            }
        }
        Ok(best.map(|b| RivalResult { wrong: (plan.checks > 0).then_some(total), ..b }))
    }

    /// Ends the driver in good order.
    pub fn finish(mut self) -> Result<()> {
        for job in &mut self.jobs {
            job.orders = None;
            let status = job.mpirun.wait().context("--rival mpi: mpirun")?;
            ensure!(status.success(), "--rival mpi: mpirun {}", ending(status));
        }
        Ok(())
    }
}

impl Job {
    fn start(driver: &Path, ranks: usize, settings: &[(&str, &str)]) -> Result<Self> {
        let mut command = Command::new("mpirun");
        command.args(["-n", &ranks.to_string(), "--oversubscribe", "--allow-run-as-root"]);
        // Ranks that share cores must be able to move; bound, two of them can end up on one core.
        command.args(["--bind-to", "none"]);
        for (key, value) in settings {
            command.args(["--mca", key, value]);
        }
        command.arg(driver).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut mpirun = match spawn_tied(&mut command, libc::SIGTERM) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                bail!("--rival mpi: there is no mpirun; {INSTALL}")
            }
            other => other.context("--rival mpi: cannot start mpirun")?,
        };
        let (Some(orders), Some(output)) = (mpirun.stdin.take(), mpirun.stdout.take()) else {
            bail!("mpirun was started without pipes");
        };
        let (tell, replies) = channel();
        std::thread::Builder::new().name("mpi-replies".into()).spawn(move || {
            for line in BufReader::new(output).lines().map_while(|line| line.ok()) {
                if tell.send(line).is_err() {
                    break;
                }
            }
        })?;
        Ok(Job { mpirun, orders: Some(orders), replies })
    }

    fn order(&mut self, line: &str) -> Result<()> {
        let sent = match &mut self.orders {
            Some(orders) => orders.write_all(line.as_bytes()).and_then(|()| orders.flush()).is_ok(),
            None => false,
        };
        if sent {
            Ok(())
        } else {
            Err(self.lost())
        }
    }

    fn reply(&mut self, patience: Duration) -> Result<String> {
        self.replies.recv_timeout(patience).map_err(|_| self.lost())
    }

    fn lost(&mut self) -> anyhow::Error {
        match wait_briefly(&mut self.mpirun) {
            Some(status) => {
                anyhow!("--rival mpi: mpirun {} before the run was over", ending(status))
            }
            None => anyhow!("--rival mpi: the driver does not answer"),
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Ok(None) = self.mpirun.try_wait() {
            // Asked, not killed: mpirun takes its ranks with it only if it can still act.
            // SAFETY: a signal to a child that has not been waited for, so that its id is still its own.
            unsafe { libc::kill(self.mpirun.id() as libc::pid_t, libc::SIGTERM) };
            if wait_briefly(&mut self.mpirun).is_none() {
                let _ = self.mpirun.kill();
                let _ = self.mpirun.wait();
            }
        }
    }
}

/// Beside this tool: in the build folder, or where `make install` puts it.
fn find_driver() -> Result<PathBuf> {
    let tool = std::env::current_exe().context("cannot find this program's own file")?;
    let folder = tool.parent().unwrap_or(Path::new("."));
    let places = ["../rivals/peerlane-rival-mpi", "../libexec/peerlane/peerlane-rival-mpi"];
    let found = places.iter().map(|place| folder.join(place)).find(|path| path.is_file());
    found.with_context(|| {
        format!("--rival mpi: there is no driver {}; {INSTALL}", folder.join(places[0]).display())
    })
}
