//! What a round does, drawn from its seed alone.

use crate::bench::orders::{Burst, Call, Order, Settings};
use fastrand::Rng;
use peerlane::schedule::{exists, Islands};
use peerlane::types::MAX_ISLANDS;
use peerlane::{Algorithm, DType, Direction, Op, Protocol};
use std::fmt;
use std::path::Path;

/// Most bytes of all ranks' messages of one call together: tests run on small machines.
const MOST_BYTES: u64 = 48 << 20;

/// Everything that happens in a round.
#[derive(Clone, Debug)]
pub struct Round {
    pub settings: Settings,
    /// Ranks are threads of this process, or processes.
    pub threads: bool,
    /// How often the communicator is made, used and destroyed.
    pub cycles: usize,
    pub orders: Vec<Order>,
}

/// Limits that the caller sets.
pub struct Limits<'a> {
    pub most_ranks: usize,
    pub deadline: f64,
    pub run_dir: &'a Path,
}

impl Round {
    /// Round number `number` of a run with this seed; the same for the same numbers and limits.
    pub fn draw(seed: u64, number: u64, limits: &Limits) -> peerlane::Result<Self> {
        // A generator for each round, so that one can be drawn without those before it.
        let mut mixer = Rng::with_seed(seed);
        let base = mixer.u64(..);
        let rng = &mut Rng::with_seed(base ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let ranks = rng.usize(1..=limits.most_ranks);
        let islands = islands(rng, ranks)?;
        let known: Vec<_> = Algorithm::ALL.iter().filter(|&&a| exists(a, &islands)).collect();
        let algo = rng.bool().then(|| *known[rng.usize(..known.len())]);
        let proto = rng.bool().then(|| pick(rng, Protocol::ALL));
        let may_pull = !matches!(proto, Some(Protocol::Ll | Protocol::Sentinel));
        let direction = (may_pull && rng.bool()).then(|| pick(rng, Direction::ALL));
        let slab = 1 << rng.u32(20..=24);
        let threads = rng.bool();
        let cycles = if threads && rng.u32(..8) == 0 { rng.usize(5..=20) } else { 1 };
        let orders = if cycles > 1 { 1..=2 } else { 4..=24 };
        let room = Room { ranks, slab, proto };
        let orders = (0..rng.usize(orders)).map(|_| room.order(rng)).collect();
        let settings = Settings {
            ranks,
            islands: Some(islands.to_string()),
            algo,
            proto,
            direction,
            deadline: limits.deadline,
            seed: rng.u64(..),
            slab: Some(slab),
            compare_calls: Some(rng.u32(..4) == 0),
            run_dir: Some(limits.run_dir.to_owned()),
            gpu: None,
        };
        Ok(Round { settings, threads, cycles, orders })
    }

    /// Calls that each rank makes, and bytes that each rank puts into them.
    pub fn calls(&self) -> (u64, u64) {
        let mut total = (0, 0);
        let mut add = |call: &Call, times: u64| {
            total.0 += times;
            total.1 += times * call.bytes() as u64;
        };
        for order in &self.orders {
            match order {
                Order::Check { call, iterations, .. } => add(call, u64::from(*iterations)),
                Order::Burst(burst) => burst.calls.iter().for_each(|call| add(call, 1)),
                Order::Join { .. }
                | Order::Time { .. }
                | Order::JoinNccl { .. }
                | Order::Other(..)
                | Order::Leave => {}
            }
        }
        (total.0 * self.cycles as u64, total.1 * self.cycles as u64)
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = &self.settings;
        let kind = if self.threads { "threads" } else { "processes" };
        let islands = s.islands.as_deref().unwrap_or("default");
        write!(f, "{} {kind}, islands {islands}, slab {} KiB", s.ranks, s.slab.unwrap_or(0) >> 10)?;
        let pins = [
            s.algo.map(Algorithm::name),
            s.proto.map(Protocol::name),
            s.direction.map(Direction::name),
            s.compare_calls.filter(|&on| on).map(|_| "calls compared"),
        ];
        for pin in pins.into_iter().flatten() {
            write!(f, ", {pin}")?;
        }
        let (calls, bytes) = self.calls();
        write!(f, ", {calls} calls of {} KiB together", bytes >> 10)?;
        if self.cycles > 1 {
            write!(f, " over {} communicators", self.cycles)?;
        }
        Ok(())
    }
}

fn pick<T: Copy>(rng: &mut Rng, all: &[T]) -> T {
    all[rng.usize(..all.len())]
}

/// One to four islands; any rank in any of them.
fn islands(rng: &mut Rng, ranks: usize) -> peerlane::Result<Islands> {
    let mut groups = vec![Vec::new(); rng.usize(1..=MAX_ISLANDS)];
    for rank in 0..ranks {
        let island = rng.usize(..groups.len());
        groups[island].push(rank);
    }
    groups.retain(|group| !group.is_empty());
    Islands::new(ranks, groups)
}

/// What limits the calls of a round.
struct Room {
    ranks: usize,
    slab: u64,
    proto: Option<Protocol>,
}

impl Room {
    fn order(&self, rng: &mut Rng) -> Order {
        match rng.u32(..4) {
            0 => {
                let calls = (0..rng.usize(2..=6)).map(|_| self.call(rng)).collect();
                // Without a group, calls that name no stream come one by one, as those of `Check` do.
                let group = rng.bool();
                let streams = rng.usize(usize::from(!group)..=3);
                Order::Burst(Burst { calls, streams, group })
            }
            _ => Order::Check { call: self.call(rng), iterations: rng.u32(1..=4), graph: false },
        }
    }

    fn call(&self, rng: &mut Rng) -> Call {
        // The one combination that is refused: integers and doubles have no word to spare for "not written yet".
        let all = DType::ALL.iter().copied();
        let dtypes: Vec<_> =
            all.filter(|d| self.proto != Some(Protocol::Sentinel) || d.has_sentinel()).collect();
        let dtype = pick(rng, &dtypes);
        let size = dtype.size() as u64;
        let most = MOST_BYTES / self.ranks as u64;
        let count = match rng.u32(..40) {
            0 | 1 => 0,
            2..=9 => rng.u64(1..=40),
            // Several steps, in which the halves alternate.
            10 => rng.u64(1..=(2 * self.slab).min(most)) / size,
            _ => (1 << rng.u32(4..=17)) / size + rng.u64(..64),
        };
        Call { count: count as usize, dtype, op: pick(rng, Op::ALL), in_place: rng.bool() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn limits() -> Limits<'static> {
        Limits { most_ranks: 16, deadline: 30.0, run_dir: Path::new("/nowhere") }
    }

    #[test]
    fn a_round_follows_from_its_seed_and_number() {
        let draw = |seed, number| format!("{:?}", Round::draw(seed, number, &limits()).unwrap());
        assert_eq!(draw(1, 5), draw(1, 5));
        assert_ne!(draw(1, 5), draw(1, 6));
        assert_ne!(draw(1, 5), draw(2, 5));
    }

    #[test]
    fn rounds_reach_everything_and_ask_for_nothing_that_is_refused() {
        let mut seen = BTreeSet::new();
        for number in 0..600 {
            let round = Round::draw(3, number, &limits()).unwrap();
            let s = &round.settings;
            assert!(s.config(0).is_ok(), "{round}");
            seen.insert(format!("ranks {}", s.ranks));
            seen.insert(format!("islands {}", s.islands.as_ref().unwrap().split(',').count()));
            seen.insert(format!("{:?} {:?} {:?}", s.algo, s.proto, s.direction));
            seen.insert(format!("threads {} {}", round.threads, round.cycles > 1));
            for order in &round.orders {
                let calls = match order {
                    Order::Check { call, .. } => vec![*call],
                    Order::Burst(burst) => {
                        seen.insert(format!("streams {} {}", burst.streams, burst.group));
                        burst.calls.clone()
                    }
                    other => panic!("{other:?}"),
                };
                for call in calls {
                    seen.insert(format!("{} {} {}", call.dtype, call.op, call.in_place));
                    seen.insert(format!("empty {}", call.count == 0));
                    seen.insert(format!("beyond {}", call.bytes() as u64 > s.slab.unwrap()));
                }
            }
        }
        let count = |prefix: &str| seen.iter().filter(|s| s.starts_with(prefix)).count();
        let kinds = ["ranks", "islands", "threads", "streams", "empty", "beyond"];
        assert_eq!(kinds.map(count), [16, 4, 3, 7, 2, 2]);
        let pinned: Vec<_> = seen.iter().filter(|s| s.starts_with("Some")).collect();
        for algorithm in Algorithm::ALL {
            let with = pinned.iter().filter(|s| s.contains(&format!("({algorithm:?})"))).count();
            assert!(with >= 6, "{algorithm} with {with} of the protocols and directions");
        }
        let calls = seen.iter().filter(|s| s.ends_with(" true") || s.ends_with(" false")).count();
        assert!(calls > 100, "ten types, five operations, in place or not: {calls}");
    }
}
