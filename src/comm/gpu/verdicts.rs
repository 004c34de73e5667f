//! What is known of the lanes between these GPUs from earlier communicators. Rank 0 reads it and everybody gets what it
//! found, so all ranks try the same lanes in the same order.
//!
//! A lane on record as broken is not tried. A lane on record as good is tested like any other, because the test is cheap and
//! the record may be wrong; only measuring it again is spared.

use super::facts::Facts;
use crate::bootstrap::Mesh;
use crate::comm::config::Config;
use crate::device::cuda::Context;
use crate::error::Result;
use crate::log::log;
use crate::probe::{boot_id, nvidia_driver, Cache, LaneVerdict, ProbeReport, Verdicts};
use crate::schedule::Islands;
use crate::types::{Lane, ProbeMode};
use std::collections::BTreeMap;

pub(super) struct Known {
    verdicts: Verdicts,
    measures: bool,
    /// Of rank 0, where there is a place to keep verdicts.
    cache: Option<Cache>,
}

impl Known {
    pub fn consult(
        mesh: &mut Mesh,
        config: &Config,
        context: &Context,
        facts: &[Facts],
        islands: &Islands,
    ) -> Result<Self> {
        let mode = config.probe;
        let leads = mesh.rank() == 0;
        let dir = config.cache_dir.as_ref().filter(|_| leads && mode != ProbeMode::Off);
        // Without a boot id nobody can tell a stale verdict.
        let cache = dir.zip(boot_id()).map(|(dir, boot)| {
            Cache::new(dir, key(&boot, &context.driver().version().to_string(), facts, islands))
        });
        let mine = cache.as_ref().map(Cache::load).unwrap_or_default();
        let verdicts: Verdicts = mesh.all_gather("consult the verdicts", Ok(mine))?.swap_remove(0);
        let measures = match mode {
            ProbeMode::Off => false,
            ProbeMode::Always | ProbeMode::Pairs => true,
            ProbeMode::Auto => tells(facts),
        };
        let verdicts = if mode == ProbeMode::Auto { verdicts } else { Verdicts::default() };
        Ok(Known { verdicts, measures, cache })
    }

    /// Why `lane` is not worth a try, if it is not. Host memory is always tried: there is nothing else left.
    pub fn broken(&self, lane: Lane) -> Option<&str> {
        self.verdicts.broken(lane.name()).filter(|_| lane != Lane::Host)
    }

    pub fn report(&self, lane: Lane) -> Option<&ProbeReport> {
        self.verdicts.measured(lane.name())
    }

    /// Whether a lane of which there is no report is to be measured.
    pub fn measures(&self) -> bool {
        self.measures
    }

    /// Keeps a verdict for the communicators to come.
    pub fn keep(&mut self, lane: Lane, verdict: LaneVerdict) {
        self.verdicts.set(lane.name(), verdict);
        if let Some(Err(error)) = self.cache.as_ref().map(|cache| cache.store(&self.verdicts)) {
            log!(Info, "what is known of lane {lane} is not kept: {error}");
        }
    }
}

/// Whether there is something to measure: links between GPUs, and kernels that run at the same time.
fn tells(facts: &[Facts]) -> bool {
    let mut processes = BTreeMap::new();
    let alone = facts.iter().all(|f| *processes.entry(f.uuid).or_insert(f.process) == f.process);
    alone && processes.len() > 1
}

/// Everything that a verdict depends on.
fn key(boot: &str, cuda: &str, facts: &[Facts], islands: &Islands) -> String {
    let mut processes = Vec::new();
    let ranks: Vec<String> = facts
        .iter()
        .map(|f| {
            let process = processes.iter().position(|p| *p == f.process).unwrap_or_else(|| {
                processes.push(f.process);
                processes.len() - 1
            });
            format!("{} in process {process}", f.uuid)
        })
        .collect();
    format!(
        "peerlane {}, boot {boot}, driver {} for CUDA {cuda}, islands {islands}, GPUs {}",
        env!("CARGO_PKG_VERSION"),
        nvidia_driver().unwrap_or_else(|| "of unknown version".into()),
        ranks.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::super::facts::tests::facts;
    use super::*;

    #[test]
    fn measuring_takes_several_gpus_and_none_that_processes_share() {
        let one = vec![facts(0, &[]), facts(0, &[])];
        let mut two = vec![facts(0, &[]), facts(1, &[])];
        assert!(!tells(&one) && tells(&two));
        two[1].process = 2;
        assert!(tells(&two));
        let mut shared = vec![facts(0, &[]), facts(1, &[]), facts(1, &[])];
        assert!(tells(&shared));
        shared[2].process = 2;
        assert!(!tells(&shared));
    }

    #[test]
    fn another_boot_driver_gpu_order_or_process_is_another_key() {
        let islands = Islands::single(2).unwrap();
        let both = vec![facts(0, &[]), facts(1, &[])];
        let base = key("boot", "13.0", &both, &islands);
        assert_eq!(base, key("boot", "13.0", &both, &islands));
        let mut other = both.clone();
        other[1].process = 2;
        let swapped = vec![both[1].clone(), both[0].clone()];
        let apart = Islands::parse(2, "0,1").unwrap();
        for key in [
            key("reboot", "13.0", &both, &islands),
            key("boot", "13.1", &both, &islands),
            key("boot", "13.0", &other, &islands),
            key("boot", "13.0", &swapped, &islands),
            key("boot", "13.0", &both, &apart),
        ] {
            assert_ne!(base, key);
        }
    }
}
