//! `peerlane doctor`: whether this box will be fast and right, and what to change.
//!
//! | file | what it is |
//! | --- | --- |
//! | `facts` | what is known: the tree, the kernel's and the driver's files, NCCL's variables |
//! | `finding` | a finding, and how bad it is |
//! | `fabric` | rules about links, switches, access control, address translation, memory windows |
//! | `system` | rules about the driver, peer access, CPUs, containers, NCCL's settings |
//! | `capture` | a copy of what the rules read, without what names the machine |
//! | `live`, `measured` | a communicator over the GPUs, and rules about what its probe has measured |
//!
//! What only a measurement can tell (driver staging, a slow direction, collapse) is reported as possible, unless `--live`
//! measures it.

mod capture;
mod fabric;
mod facts;
mod finding;
mod live;
mod measured;
#[cfg(test)]
mod measured_test;
mod system;

use crate::described;
use anyhow::{Context, Result};
use facts::Facts;
use finding::{Finding, Severity};
use live::Live;
use peerlane::env::Env;
use peerlane::topology::Files;
use serde::Serialize;
use serde_json::value::RawValue;
use std::path::PathBuf;
use std::process::ExitCode;

/// Flags of `peerlane doctor`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Run it as root to see access control on bridges: others may read only the first 64 bytes of a device's configuration.
Exit status: 0 nothing to change, 1 something makes it slow, 2 something makes it wrong, unsafe or impossible, or the box
could not be read.")]
pub struct Args {
    /// Look at this copy of a box instead of the one at hand: a directory that stands for /, or a capture
    #[arg(long, value_name = "DIR|FILE")]
    root: Option<PathBuf>,
    /// Write what the findings rest on to FILE.tar, without serial numbers, host names or network addresses
    #[arg(long, value_name = "FILE.tar")]
    capture: Option<PathBuf>,
    /// Measure the links too: makes a communicator over all GPUs of this machine for some seconds; best while they are idle
    #[arg(long)]
    live: bool,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    source: &'a str,
    gpus: usize,
    driver: Option<&'a str>,
    notes: &'a [String],
    findings: &'a [Finding],
    /// What the probe has measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    measured: Option<Box<RawValue>>,
    status: u8,
}

/// Examines; the exit status says how bad it is.
pub fn run(args: &Args) -> Result<ExitCode> {
    match examine(args) {
        Ok(status) => Ok(ExitCode::from(status)),
        Err(error) => {
            crate::complain(&error);
            Ok(ExitCode::from(Severity::Wrong as u8))
        }
    }
}

fn examine(args: &Args) -> Result<u8> {
    let files = match &args.root {
        Some(path) => described::root(path)?,
        None => Files::directory("/"),
    };
    let collect = || Facts::collect(files.clone(), args.root.is_none(), args.live);
    let mut facts = collect()?;
    let live = match args.live {
        true => Some(Live::measure(&facts, &Env::read()?, args.root.as_deref())),
        false => None,
    };
    if matches!(live, Some(Live::Measured(_))) {
        // The links have just had work, so that their generation is what it is under load.
        facts = collect()?;
    }
    if let Some(path) = &args.capture {
        let bytes = capture::archive(&facts)?;
        std::fs::write(path, bytes)
            .with_context(|| format!("--capture: cannot write {}", path.display()))?;
    }
    let mut findings: Vec<Finding> =
        fabric::RULES.iter().chain(system::RULES).flat_map(|rule| rule(&facts)).collect();
    if let Some(live) = &live {
        live.revise(&facts, &mut findings);
    }
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    let status = findings.iter().map(|f| f.severity as u8).max().unwrap_or(0);
    let report = Report {
        source: &facts.topology.source,
        gpus: facts.topology.gpus.len(),
        driver: facts.driver_version.as_deref(),
        notes: &facts.topology.notes,
        findings: &findings,
        measured: live.as_ref().and_then(Live::json),
        status,
    };
    described::say(&match args.json {
        true => serde_json::to_string_pretty(&report)? + "\n",
        false => text(&report, live.as_ref()),
    })?;
    Ok(status)
}

fn text(report: &Report, live: Option<&Live>) -> String {
    let driver = report.driver.map_or("no NVIDIA driver".to_owned(), |v| format!("driver {v}"));
    let mut text = format!("{}: {} NVIDIA GPU(s), {driver}\n", report.source, report.gpus);
    for note in report.notes {
        text.push_str(&format!("note: {note}\n"));
    }
    for finding in report.findings {
        // Words of files stand in there; the terminal is to show them, not to obey them.
        let plain = |text: &str| text.replace(char::is_control, " ");
        text.push_str(&format!(
            "\n{} ({}): {}\n  seen: {}\n  cost: {}\n  fix:  {}\n",
            finding.severity.name(),
            finding.id,
            plain(&finding.what),
            plain(&finding.evidence),
            plain(&finding.cost),
            plain(&finding.fix)
        ));
    }
    if let Some(Live::Measured(measured)) = live {
        text.push_str(&measured.text());
    }
    text.push_str(match (report.status, live) {
        (0, Some(Live::Measured(_))) => "\nNothing to change.\n",
        (0, _) => "\nNothing to change. Staging by the driver, a slow direction and collapsing writes show only when measured\n(--live, on a box with several GPUs).\n",
        (1, _) => "\nThis box will be slower than it could be.\n",
        _ => "\nThis box will not be right, or not run at all, until this is changed.\n",
    });
    text
}
