//! Tables and geometry of every schedule in use, ready to launch.

use super::config::Agreed;
use crate::error::{Error, Result};
use crate::lane::{step_packs, Layout};
use crate::launch::{pl_geometry, pl_table, PL_DST_PARTIAL};
use crate::plan::{choose, Choice, DeviceKind};
use crate::schedule::{self, Islands, Tree};
use crate::types::{Algorithm, DType, Direction, Protocol, PACK_BYTES};

/// One way to serve a call: a checked table and where its slots lie.
pub(crate) struct Plan {
    pub choice: Choice,
    pub table: Box<pl_table>,
    pub geometry: pl_geometry,
    /// Whether the table keeps partial sums between phases, and so needs scratch.
    pub partials: bool,
}

impl Plan {
    /// Most elements of one step, whole packs.
    pub fn step_elements(&self, dtype: DType) -> u64 {
        let packs = step_packs(&self.geometry, &self.table, dtype, self.choice.protocol);
        packs * (PACK_BYTES / dtype.size()) as u64
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
}

impl Plans {
    /// Builds the schedules, proves their tables, and keeps rank `rank`'s.
    pub fn new(agreed: Agreed, rank: usize, layout: &Layout, channel: usize) -> Result<Self> {
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
                schedule::check(&tables, &tree)
                    .map_err(|v| Error::Internal(format!("{algorithm} ({direction}): {v}")))?;
                for &protocol in Protocol::ALL {
                    if direction == Direction::Pull && protocol != Protocol::Flagged {
                        continue;
                    }
                    plans.push(Plan {
                        choice: Choice { algorithm, protocol, direction },
                        geometry: layout.geometry(channel, protocol, &tables[rank]),
                        partials: keeps_partials(&tables[rank]),
                        table: Box::new(tables[rank]),
                    });
                }
            }
        }
        Ok(Plans { islands, tree, agreed, plans })
    }

    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    pub fn islands(&self) -> &Islands {
        &self.islands
    }

    /// What serves a call of `bytes` bytes: the rule's choice, with the pins of the configuration in its place.
    pub fn choose(&self, bytes: usize, dtype: DType) -> Result<Choice> {
        let Agreed { algorithm, protocol, direction, .. } = self.agreed;
        let free = choose(DeviceKind::Cpu, &self.islands, bytes, dtype);
        let algorithm = algorithm.unwrap_or(free.algorithm);
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
        self.plans
            .iter()
            .find(|p| p.choice == choice)
            .ok_or_else(|| Error::Internal(format!("no plan for {choice:?}")))
    }
}
