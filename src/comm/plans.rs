//! Tables and geometry of every schedule in use, ready to launch.

use super::call::{Call, Other};
use super::config::Agreed;
use crate::error::{Error, Result};
use crate::lane::{step_packs, step_rows, Layout};
#[cfg(feature = "cuda")]
use crate::launch::PL_MAX_RANKS;
use crate::launch::{pl_geometry, pl_table, PL_DST_PARTIAL};
use crate::plan::{choose, host_staged_protocol, Choice, DeviceKind, Model};
use crate::schedule::{self, Goal, Islands, Tree};
use crate::types::{Algorithm, DType, Direction, Protocol, PACK_BYTES};
#[cfg(feature = "cuda")]
use std::collections::BTreeSet;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// One way to serve a call: a checked table and where its slots lie in channel 0.
pub(crate) struct Plan {
    pub choice: Choice,
    /// Its number among all plans of any goal, the direction and the protocol aside; what `PEERLANE_CHECK` compares.
    pub code: u32,
    pub table: Box<pl_table>,
    pub geometry: pl_geometry,
    /// Whether the table keeps partial sums between phases, and so needs scratch.
    pub partials: bool,
}

impl Plan {
    /// Most elements of one step of an all-reduce, whole packs.
    pub fn most_elements(&self, dtype: DType) -> u64 {
        let packs = step_packs(&self.geometry, &self.table, dtype, self.choice.protocol);
        packs * (PACK_BYTES / dtype.size()) as u64
    }

    /// Elements of each step of `call` but the last: whole packs, or in the fused form whole rows. The same on all ranks.
    pub fn step_elements(&self, call: &Call) -> Result<u64> {
        let Choice { algorithm, protocol, direction } = self.choice;
        if let Some(Other { parts: Some(_), .. }) = call.other {
            // What fits of a tile whose pieces are the parts.
            let per_pack = (PACK_BYTES / call.dtype.size()) as u64;
            let packs = self.most_elements(call.dtype) / per_pack / u64::from(self.table.pieces);
            return match packs * per_pack {
                0 => Err(Error::Internal(format!("{:?} has no room for one pack", self.choice))),
                elements => Ok(elements),
            };
        }
        let Some((_, width)) = call.rows() else {
            return match self.most_elements(call.dtype) {
                0 => Err(Error::Internal(format!("{:?} has no room for one pack", self.choice))),
                elements => Ok(elements),
            };
        };
        let row_packs = width / (PACK_BYTES / call.dtype.size()) as u64;
        match step_rows(&self.geometry, &self.table, call.dtype, protocol, row_packs) {
            0 => Err(Error::Unsupported(format!(
                "a row of {width} {} does not fit the slab by {algorithm} {protocol} {direction}, which holds {} elements; make \
                 the slab larger (PEERLANE_SLAB) or take the unfused form, which cuts rows",
                call.dtype,
                self.most_elements(call.dtype)
            ))),
            rows => Ok(rows * width),
        }
    }
}

fn keeps_partials(table: &pl_table) -> bool {
    // Whatever reads a partial sum does so after a fold of this rank has kept it: the checker proves that.
    let phases = &table.phase[..usize::from(table.phases)];
    let kept = |f: usize| u32::from(table.fold[f].dst) == PL_DST_PARTIAL;
    phases.iter().any(|p| (p.fold0.into()..usize::from(p.fold0 + p.folds)).any(kept))
}

/// Every plan of a communicator, and the rule that picks one. All ranks build the same and pick alike.
pub(crate) struct Plans {
    islands: Islands,
    tree: Tree,
    agreed: Agreed,
    plans: Vec<Plan>,
    /// What chooses where the box is described.
    model: Option<Model>,
    /// Whether slabs are host memory that GPUs write.
    host_staged: bool,
    rank: usize,
    layout: Layout,
    /// Those of other collectives, made when they are first called for.
    others: Mutex<HashMap<(Goal, bool, Direction), Arc<Plan>>>,
}

impl Plans {
    /// Builds the schedules that `admit`s their tables of all ranks, proves them, and keeps rank `rank`'s.
    pub fn new(
        agreed: Agreed,
        rank: usize,
        layout: &Layout,
        admit: impl Fn(&[pl_table]) -> bool,
    ) -> Result<Self> {
        let islands = agreed.islands()?;
        let tree = Tree::new(&islands);
        let mut plans = Vec::new();
        for &algorithm in Algorithm::ALL {
            if !schedule::exists(algorithm, &islands) {
                continue;
            }
            let schedule = schedule::build(algorithm, &islands)?;
            for &direction in Direction::ALL {
                let tables = schedule.tables(direction)?;
                if !admit(&tables) {
                    continue;
                }
                schedule::check(&tables, &tree)
                    .map_err(|v| Error::Internal(format!("{algorithm} ({direction}): {v}")))?;
                for &protocol in Protocol::ALL {
                    if direction == Direction::Pull && protocol != Protocol::Flagged {
                        continue;
                    }
                    plans.push(Plan {
                        choice: Choice { algorithm, protocol, direction },
                        code: algorithm as u32,
                        geometry: layout.geometry(0, protocol, &tables[rank]),
                        partials: keeps_partials(&tables[rank]),
                        table: Box::new(tables[rank]),
                    });
                }
            }
        }
        if plans.is_empty()
            || agreed.algorithm.is_some_and(|a| plans.iter().all(|p| p.choice.algorithm != a))
        {
            return Err(Error::Unsupported(format!(
                "{} needs more peers per GPU than there is room for; leave the choice open, or take the host-staged lane",
                agreed.algorithm.map_or("every algorithm", Algorithm::name)
            )));
        }
        let (layout, others) = (*layout, Mutex::default());
        let host_staged = false;
        Ok(Plans { islands, tree, agreed, plans, model: None, host_staged, rank, layout, others })
    }

    /// For slabs in host memory that GPUs write.
    #[cfg(feature = "cuda")]
    pub fn host_staged(mut self) -> Self {
        self.host_staged = true;
        self
    }

    /// The plan of another collective than an all-reduce, all in one piece or in parts; by `flagged`, the one protocol that can
    /// raise a flag without data. The same on all ranks.
    pub fn other(&self, goal: Goal, in_parts: bool) -> Result<Arc<Plan>> {
        let Agreed { direction, .. } = self.agreed;
        // Where a GPU has too few peer connections for all others, no all-reduce joins them all either.
        if self.plans.iter().all(|p| p.choice.algorithm != Algorithm::OneShot) {
            return Err(Error::Unsupported(format!(
                "{goal}: it needs more peers per GPU than there is room for; take the host-staged lane"
            )));
        }
        let direction = direction.unwrap_or(match self.agreed.device_kind() {
            DeviceKind::Cpu => Direction::Pull,
            DeviceKind::Gpu => Direction::Push,
        });
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = others.get(&(goal, in_parts, direction)) {
            return Ok(Arc::clone(plan));
        }
        let schedule = schedule::build_goal(goal, in_parts, &self.islands)?;
        let tables = schedule.tables(direction)?;
        schedule::check_goal(&tables, &self.tree, goal)
            .map_err(|v| Error::Internal(format!("{goal} ({direction}): {v}")))?;
        let table = &tables[self.rank];
        let plan = Arc::new(Plan {
            choice: Choice {
                algorithm: schedule.algorithm,
                protocol: Protocol::Flagged,
                direction,
            },
            code: match goal {
                Goal::AllReduce => schedule.algorithm as u32,
                Goal::AllGather => 16,
                Goal::ReduceScatter => 17,
                Goal::Broadcast { root } => 32 + u32::from(root) * 2 + u32::from(in_parts),
            },
            geometry: self.layout.geometry(0, Protocol::Flagged, table),
            partials: false,
            table: Box::new(*table),
        });
        others.insert((goal, in_parts, direction), Arc::clone(&plan));
        Ok(plan)
    }

    /// Chooses by this model from now on; all ranks must do the same.
    pub fn follow(&mut self, model: Option<Model>) {
        self.model = model;
    }

    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    pub fn islands(&self) -> &Islands {
        &self.islands
    }

    /// What all ranks have agreed on.
    pub fn agreed(&self) -> &Agreed {
        &self.agreed
    }

    /// What serves a call of `bytes` bytes: the rule's choice, with the pins of the configuration in its place.
    pub fn choose(&self, bytes: usize, dtype: DType) -> Result<Choice> {
        let Agreed { algorithm, protocol, direction, .. } = self.agreed;
        let built = |a: Algorithm| self.plans.iter().any(|p| p.choice.algorithm == a);
        let modelled = self.model.as_ref().and_then(|m| m.choose(bytes, dtype, built));
        let mut free = match modelled {
            Some(line) => line.choice,
            None => choose(self.agreed.device_kind(), &self.islands, bytes, dtype),
        };
        if self.host_staged && free.algorithm != Algorithm::Staged {
            free.protocol = host_staged_protocol(bytes, dtype);
        }
        let algorithm = algorithm.unwrap_or_else(|| {
            // Not built: it has more peers than the GPU has room for. Any other gives the same bits.
            let other = || Algorithm::ALL.iter().copied().rev().find(|&a| built(a));
            Some(free.algorithm).filter(|&a| built(a)).or_else(other).unwrap_or(free.algorithm)
        });
        let protocol = protocol.unwrap_or(if direction == Some(Direction::Pull) {
            Protocol::Flagged
        } else {
            free.protocol
        });
        if protocol == Protocol::Sentinel && !dtype.has_sentinel() {
            return Err(Error::Unsupported(format!(
                "the sentinel protocol cannot carry {dtype} (all-ones is a value of it); pin ll or flagged, or leave the choice open"
            )));
        }
        let direction = match protocol {
            Protocol::Flagged => direction.unwrap_or(free.direction),
            Protocol::Ll | Protocol::Sentinel => Direction::Push,
        };
        Ok(Choice { algorithm, protocol, direction })
    }

    /// The plan of a choice.
    pub fn get(&self, choice: Choice) -> Result<&Plan> {
        self.index(choice).map(|i| &self.plans[i])
    }

    /// Where the plan of a choice stands in [`all`](Self::all).
    pub fn index(&self, choice: Choice) -> Result<usize> {
        let at = self.plans.iter().position(|p| p.choice == choice);
        at.ok_or_else(|| Error::Internal(format!("no plan for {choice:?}")))
    }

    /// Every plan.
    pub fn all(&self) -> &[Plan] {
        &self.plans
    }

    /// The ranks whose slabs some plan of this rank touches. An edge has two ends: whoever is in here has this rank in there.
    #[cfg(feature = "cuda")]
    pub fn edges(&self) -> BTreeSet<usize> {
        self.plans.iter().flat_map(|plan| edges(&plan.table)).collect()
    }
}

/// The peers of a table: who is sent to, and from whom something comes.
#[cfg(feature = "cuda")]
pub(crate) fn edges(table: &pl_table) -> BTreeSet<usize> {
    let phases = &table.phase[..usize::from(table.phases)];
    let sends =
        phases.iter().map(|p| usize::from(p.send0) + usize::from(p.sends)).max().unwrap_or(0);
    let folds =
        phases.iter().map(|p| usize::from(p.fold0) + usize::from(p.folds)).max().unwrap_or(0);
    let items = table.fold[..folds].iter().map(|f| usize::from(f.item0) + usize::from(f.items));
    let items = items.max().unwrap_or(0);
    let to = table.send[..sends].iter().map(|send| usize::from(send.peer));
    let from = table.item[..items].iter().map(|item| usize::from(item.from));
    to.chain(from.filter(|&from| from < PL_MAX_RANKS as usize)).collect()
}
