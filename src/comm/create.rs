//! Creation: one rank, or several ranks of one process at once.

use super::communicator::{Communicator, Inner};
use super::config::{Agreed, Config};
use super::described::Look;
use super::engine::{self, Engine};
use super::stats::Counters;
use crate::bootstrap::{Mesh, Owner, UniqueId, CHANNELS};
use crate::error::{Error, Result};
use crate::log::log;
use crate::plan::DeviceKind;
use crate::types::MAX_RANKS;
use std::sync::{Arc, OnceLock};

/// What creates one rank.
#[derive(Debug, Clone)]
pub struct Creation {
    /// The communicator to join.
    pub id: UniqueId,
    /// Number of ranks.
    pub n: usize,
    /// This rank.
    pub rank: usize,
    /// How.
    pub config: Config,
}

/// Creates ranks that live in this process together, each on a thread of its own, since each waits for the others.
/// Results in the order of `creations`. A thread that cannot be started fails all of them at once.
pub fn create_all(creations: &[Creation]) -> Result<Vec<Result<Communicator>>> {
    // No rank begins before all have a thread: it would wait for the missing ones until the set-up deadline.
    let gate = OnceLock::new();
    std::thread::scope(|scope| {
        let mut threads = Vec::with_capacity(creations.len());
        let mut refused = None;
        for creation in creations {
            let run = || match *gate.wait() {
                true => creation.run(),
                false => Err(Error::Internal("another rank has no thread".into())),
            };
            let name = format!("peerlane-create-{}", creation.rank);
            match std::thread::Builder::new().name(name).spawn_scoped(scope, run) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    refused = Some(Error::os("starting a thread per rank", &error));
                    break;
                }
            }
        }
        let _ = gate.set(refused.is_none());
        let panicked = |_| Err(Error::Internal("a rank panicked in set-up".into()));
        let created: Vec<_> =
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect();
        refused.map_or(Ok(created), Err)
    })
}

impl Creation {
    /// Creates this rank; waits for the others.
    pub fn run(&self) -> Result<Communicator> {
        Communicator::create(&self.id, self.n, self.rank, &self.config)
    }
}

impl Communicator {
    /// Joins the communicator `id` as `rank` of `n`; returns once all ranks have, or fails on all with the same error.
    pub fn create(id: &UniqueId, n: usize, rank: usize, config: &Config) -> Result<Self> {
        check_rank(n, rank)?;
        let mut mesh = Mesh::connect(id, n, rank, config.setup_deadline)?;

        let look = Look::new(config, rank);
        let place = look.as_ref().map(Look::place).map_err(Clone::clone);
        let places = mesh.all_gather("describe the box", place)?;
        let look = look?;
        mesh.settle(look.placement(config));
        let seen = look.locate(&places);
        let all = mesh.all_gather("agree on the configuration", config.settle(n, seen.as_ref()))?;
        Agreed::compare(&all)?;
        let (mut plans, engine, fault) = engine::set_up(&mut mesh, all[rank].clone(), config)?;
        if let Some(seen) = seen.filter(|_| all[rank].device_kind() == DeviceKind::Gpu) {
            // All ranks hold the same description and the same islands, so all come to the same end here.
            plans.follow(seen.model(plans.islands())?);
        }

        let raised = Arc::clone(&fault);
        let on_failure = move |error: Error| {
            // First end the waits, then speak: standard error may be a pipe that nobody empties.
            raised.raise(error.clone());
            log!(Warn, "rank {rank} of {n}: {error}");
        };
        let on_goodbye: Box<dyn Fn(usize, [u64; CHANNELS]) -> Option<Error> + Send> = match &engine
        {
            Engine::Cpu(cpu) => {
                let departures = Arc::clone(&cpu.departures);
                Box::new(move |peer, steps| {
                    let missed = departures.leave(peer, steps[0]);
                    missed.then_some(Error::RankLeft { rank: peer as u32 })
                })
            }
            // The host does not know which step a GPU is at; its kernels do.
            #[cfg(feature = "cuda")]
            Engine::Cuda(gpu) => {
                let state = Arc::clone(gpu.state());
                Box::new(move |peer, steps| {
                    state.left(peer, steps);
                    None
                })
            }
        };
        let watch = mesh.watch(Box::new(on_failure), on_goodbye, engine.look())?;
        let inner = Inner {
            rank,
            size: n,
            plans,
            counters: Counters::default(),
            engine,
            fault,
            watch,
            id: *id.as_bytes(),
            owner: Owner::current(),
        };
        log!(
            Info,
            "rank {rank} of {n}: {}, islands {}, tree {} ({:016x})",
            inner.device(),
            inner.plans.islands(),
            inner.plans.tree(),
            inner.plans.tree().hash64()
        );
        if let Some(report) = inner.engine.report().filter(|_| rank == 0) {
            log!(Info, "{report}");
        }
        Ok(Communicator { inner: Arc::new(inner) })
    }

    /// All `n` ranks as members of this process, in order; each is meant for a thread of its own, or for a group. On GPUs
    /// all of them share the one that `config` names.
    pub fn create_local(n: usize, config: &Config) -> Result<Vec<Self>> {
        check_rank(n, 0)?;
        #[cfg(feature = "cuda")]
        let config =
            &Config { device: super::gpu::settle_ordinal(config.device)?, ..config.clone() };
        let id = UniqueId::in_dir(config.run_dir.as_deref())?;
        let creations: Vec<_> =
            (0..n).map(|rank| Creation { id, n, rank, config: config.clone() }).collect();
        create_all(&creations)?.into_iter().collect()
    }
}

fn check_rank(n: usize, rank: usize) -> Result<()> {
    if n == 0 || n > MAX_RANKS {
        return Err(Error::InvalidArgument(format!(
            "a communicator has 1 to {MAX_RANKS} ranks, not {n}"
        )));
    }
    if rank >= n {
        return Err(Error::InvalidArgument(format!(
            "rank {rank} of {n}: ranks are 0 to {}",
            n - 1
        )));
    }
    Ok(())
}
