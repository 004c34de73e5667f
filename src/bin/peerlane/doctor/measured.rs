//! Rules about what the probe has measured: a pure function of the described box and the report.
//!
//! Healthy pairs have been published at 81 to 85 % of a link's rate for stores and 51 to 81 % for loads, sick ones at a tenth
//! and below; the bounds below lie between, so that neither a busy box nor a slow clock raises an alarm.

use super::finding::{Finding, Severity};
use peerlane::plan::{Fabric, NOMINAL};
use peerlane::probe::{Access, ProbeReport, Rate, Scope};
use peerlane::topology::{Class, Topology};

/// Below this share of what its links carry, a pair is slow.
const SLOW: f64 = 0.4;
/// Below this share in every way, between GPUs that no switch joins, the driver stages.
const STAGED: f64 = 0.25;
/// Below this share of what is left to each when all send at once, writes collapse: 2.7 of 37 GB/s and 7 of 52 were measured.
const COLLAPSED: f64 = 0.25;
/// A flag that takes so many times its nominal latency is late, if it is late by
const LATE: f64 = 4.0;
/// so many nanoseconds.
const LATE_NS: f64 = 4000.0;
/// What makes the driver let GPUs on ports of their own reach each other directly.
pub const DIRECT_ACCESS: &str = "load nvidia with NVreg_RegistryDwords=\"ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1\"";

/// Findings about the ranks of `report`, of which rank `r` ran on GPU `gpu_of[r]`. On the host-staged lane no link between
/// GPUs has been measured, and there are none.
pub fn judge(topology: &Topology, gpu_of: &[usize], report: &ProbeReport) -> Vec<Finding> {
    if report.lane == "host" || report.latency_ns.len() != gpu_of.len() {
        return Vec::new();
    }
    let judge = Judge { topology, gpu_of, report, fabric: Fabric::new(topology, gpu_of, &NOMINAL) };
    let ways = judge.ways();
    let staged = |way: &Way| way.staged();
    let (staged, others): (Vec<Way>, Vec<Way>) = ways.into_iter().partition(staged);
    let mut findings = Vec::new();
    findings.extend(judge.staging(&staged));
    let of = |kind: Kind| others.iter().filter(|w| w.kind() == kind).collect::<Vec<_>>();
    findings.extend(judge.links(&of(Kind::Both)));
    findings.extend(judge.direction(Access::Store, &of(Kind::Stores)));
    findings.extend(judge.direction(Access::Load, &of(Kind::Loads)));
    findings.extend(judge.flags(&of(Kind::Flag)));
    findings.extend([Access::Store, Access::Load].into_iter().find_map(|a| judge.collapse(a)));
    findings
}

struct Judge<'a> {
    topology: &'a Topology,
    gpu_of: &'a [usize],
    report: &'a ProbeReport,
    fabric: Fabric,
}

/// From one rank's GPU to another's.
struct Way {
    from: usize,
    to: usize,
    class: Class,
    /// GB/s of what is narrowest between them, and which that is; none where a link is not described.
    carries: Option<(f64, String)>,
    /// GB/s of `from` storing, and of `to` loading: the same bytes over the same links.
    store: Option<f64>,
    load: Option<f64>,
    /// Nanoseconds of a flag, and what is usual.
    flag: Option<f64>,
    usual: f64,
    /// Whether the way back is below [`STAGED`] too, in stores and loads.
    back_is_staged: bool,
}

/// What is wrong with a way.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Nothing,
    Both,
    Stores,
    Loads,
    Flag,
}

impl Way {
    fn share(&self, rate: Option<f64>) -> Option<f64> {
        Some(rate? / self.carries.as_ref()?.0)
    }

    fn below(&self, rate: Option<f64>, bound: f64) -> bool {
        self.share(rate).is_some_and(|share| share < bound)
    }

    fn late(&self) -> bool {
        self.flag.is_some_and(|ns| ns > LATE * self.usual && ns > self.usual + LATE_NS)
    }

    /// In system memory everything is slow: both ways, stores and loads, or the flag.
    fn staged(&self) -> bool {
        let slow = self.below(self.store, STAGED) && self.below(self.load, STAGED);
        let no_switch = matches!(self.class, Class::Phb | Class::Node | Class::Sys);
        no_switch && slow && (self.back_is_staged || self.late())
    }

    fn kind(&self) -> Kind {
        match (self.below(self.store, SLOW), self.below(self.load, SLOW)) {
            (true, true) => Kind::Both,
            (true, false) => Kind::Stores,
            (false, true) => Kind::Loads,
            (false, false) if self.late() => Kind::Flag,
            (false, false) => Kind::Nothing,
        }
    }

    /// How many times longer the bytes take than they need.
    fn times(&self, rate: Option<f64>) -> f64 {
        self.share(rate).map_or(0.0, |share| 1.0 / share.max(1e-3))
    }
}

impl Judge<'_> {
    /// Every way between two ranks on different GPUs.
    fn ways(&self) -> Vec<Way> {
        let n = self.gpu_of.len();
        let pairs = (0..n).flat_map(|a| (0..n).map(move |b| (a, b)));
        let pairs = pairs.filter(|(a, b)| self.gpu_of[*a] != self.gpu_of[*b]);
        pairs.map(|(from, to)| self.way(from, to)).collect()
    }

    fn way(&self, from: usize, to: usize) -> Way {
        let rate = |access, rank, memory| self.report.pair(access, rank, memory).map(f64::from);
        let (hop, carries) = (self.fabric.hops[from][to], self.carries(from, to));
        let low = |rate: Option<f64>| {
            rate.zip(carries.as_ref()).is_some_and(|(rate, (gb, _))| rate < STAGED * gb)
        };
        Way {
            from,
            to,
            class: hop.class,
            store: rate(Access::Store, from, to),
            load: rate(Access::Load, to, from),
            flag: self.report.latency_ns[from].get(to).copied().flatten().map(f64::from),
            usual: 1e3 * hop.latency_us,
            back_is_staged: low(rate(Access::Store, to, from)) && low(rate(Access::Load, from, to)),
            carries,
        }
    }

    /// GB/s of the narrowest thing between two ranks.
    fn carries(&self, from: usize, to: usize) -> Option<(f64, String)> {
        let seats = [&self.fabric.seats[from], &self.fabric.seats[to]];
        let mut narrowest: Option<(f64, String)> = None;
        let mut add = |gb: f64, what: String| {
            if narrowest.as_ref().is_none_or(|(least, _)| gb < *least) {
                narrowest = Some((gb, what));
            }
        };
        for seat in seats {
            let gpu = &self.topology.gpus[seat.gpu];
            let own = gpu.link.gb_per_s()?;
            // A slot of an older generation than the card says so in its port.
            let port = gpu.parent.and_then(|p| self.topology.bridges[p].link.best);
            let gb = port.map_or(own, |port| own.min(port.gb_per_s)) * NOMINAL.efficiency;
            add(gb, format!("the link of {}", self.name(seat.gpu)));
        }
        if seats[0].uplink != seats[1].uplink {
            for uplink in seats.iter().filter_map(|seat| seat.uplink) {
                add(self.fabric.uplinks[uplink], "an uplink".into());
            }
        }
        if seats[0].side != seats[1].side {
            add(self.fabric.sockets, "the link between sockets".into());
        }
        narrowest
    }

    fn name(&self, gpu: usize) -> String {
        match self.topology.gpus[gpu].address {
            Some(address) => format!("GPU{gpu} ({address})"),
            None => format!("GPU{gpu}"),
        }
    }

    fn ends(&self, way: &Way) -> String {
        format!("{} to {}", self.name(self.gpu_of[way.from]), self.name(self.gpu_of[way.to]))
    }

    /// Everything that was measured on a way, and what should have been.
    fn evidence(&self, way: &Way) -> String {
        let mut text = format!("measured from {}, {}:", self.ends(way), way.class);
        let gb = |rate: Option<f64>| rate.map_or("?".into(), |gb| format!("{gb:.1}"));
        text.push_str(&format!(" stores {} GB/s, loads {} GB/s", gb(way.store), gb(way.load)));
        if let Some((gb, what)) = &way.carries {
            text.push_str(&format!(", and {what} carries {gb:.1}"));
        }
        if let Some(ns) = way.flag {
            text.push_str(&format!("; a flag {ns:.0} ns, usual are {:.0}", way.usual));
        }
        text
    }

    fn staging(&self, staged: &[Way]) -> Option<Finding> {
        let worst = staged.iter().min_by(|a, b| by(a.store, b.store))?;
        Some(Finding {
            id: "driver-staging",
            severity: Severity::Slow,
            what: format!(
                "the driver stages {} of {} ways between GPUs in system memory",
                staged.len(),
                self.ways().len()
            ),
            evidence: self.evidence(worst),
            cost: format!(
                "bytes take {:.0} times as long as the links need; 114 KB took 242 us instead of 17 on such a box",
                worst.times(worst.store)
            ),
            fix: DIRECT_ACCESS.into(),
        })
    }

    fn links(&self, slow: &[&Way]) -> Option<Finding> {
        let worst = slow.iter().min_by(|a, b| by(a.store, b.store))?;
        let address = |rank: usize| self.topology.gpus[self.gpu_of[rank]].address;
        let look = address(self.common_end(slow).unwrap_or(worst.from));
        Some(Finding {
            id: "slow-link",
            severity: Severity::Slow,
            what: format!("{} way(s) between GPUs are slower than their links, in stores and loads", slow.len()),
            evidence: self.evidence(worst),
            cost: format!("bytes take {:.1} times as long as the links need", worst.times(worst.store)),
            fix: format!(
                "look at the link under load (`lspci -vv -s {}`, LnkSta against LnkCap), reseat the card, switch off redirects that this page names; measure again on an idle box",
                look.map_or("ADDRESS".into(), |a| a.to_string())
            ),
        })
    }

    /// The rank that all of these ways begin or end at.
    fn common_end(&self, ways: &[&Way]) -> Option<usize> {
        let all = |rank: &usize| ways.iter().all(|w| w.from == *rank || w.to == *rank);
        (0..self.gpu_of.len()).find(all).filter(|_| ways.len() > 1)
    }

    fn direction(&self, access: Access, slow: &[&Way]) -> Option<Finding> {
        let rate = |way: &Way| if access == Access::Store { way.store } else { way.load };
        let worst = slow.iter().min_by(|a, b| by(rate(a), rate(b)))?;
        let stores = access == Access::Store;
        Some(Finding {
            id: "slow-direction",
            severity: if stores { Severity::Slow } else { Severity::Note },
            what: format!(
                "{} are slow on {} way(s) between GPUs whose {} are not",
                if stores { "stores" } else { "loads" },
                slow.len(),
                if stores { "loads" } else { "stores" }
            ),
            evidence: self.evidence(worst),
            cost: match stores {
                true => format!("what peerlane stores takes {:.0} times as long as the links need", worst.times(rate(worst))),
                false => "none as long as nobody loads from peers: peerlane stores, unless it is told to pull".into(),
            },
            fix: match stores {
                true => "let the readers load: PEERLANE_PROTO=flagged PEERLANE_DIRECTION=pull on all ranks".into(),
                false => "leave PEERLANE_DIRECTION unset, or push".into(),
            },
        })
    }

    fn flags(&self, late: &[&Way]) -> Option<Finding> {
        let worst = late.iter().max_by(|a, b| by(a.flag, b.flag))?;
        Some(Finding {
            id: "slow-flags",
            severity: Severity::Slow,
            what: format!("words travel slowly on {} way(s) between GPUs, though bytes do not", late.len()),
            evidence: self.evidence(worst),
            cost: "every phase of every call waits as long, whatever its size".into(),
            fix: "boot with pcie_aspm=off, keep the GPUs awake (`nvidia-smi -pm 1`), and measure again on an idle box".into(),
        })
    }

    /// The measurement with all ranks at once that is farthest below what its links leave to each.
    fn collapse(&self, access: Access) -> Option<Finding> {
        let rates = self.report.rates.iter().filter(|r| r.access == access && r.together);
        let collapsed = rates.filter_map(|together| {
            let alone = self.report.rate(access, together.scope, together.fan_out, false)?;
            let seat = self.fabric.seats.get(usize::from(together.worst_rank))?;
            self.topology.gpus[seat.gpu].link.gb_per_s()?;
            let left = self.left(together);
            // What is slow alone too is another finding's matter.
            let share = f64::from(together.worst) / left.min(f64::from(alone.worst));
            (share < COLLAPSED).then_some((together, alone, left, share))
        });
        let (together, alone, left, share) = collapsed.min_by(|a, b| a.3.total_cmp(&b.3))?;
        let gpu = self.gpu_of[usize::from(together.worst_rank)];
        let what = if access == Access::Store { "stores" } else { "loads" };
        let preferred = self.fabric.collapse_prone;
        Some(Finding {
            id: "collapse",
            severity: Severity::Slow,
            what: format!("{what} collapse when all GPUs send at once"),
            evidence: format!(
                "measured with all GPUs at once, each to {} GPU(s) {}: {:.1} GB/s of {}, {:.1} in the middle; alone {:.1}, and its links leave {left:.1} to each",
                together.fan_out,
                match together.scope {
                    Scope::Within => "of its island",
                    Scope::Across => "of other islands",
                },
                together.worst,
                self.name(gpu),
                together.median,
                alone.median,
            ),
            cost: format!("schedules that fan out take up to {:.0} times as long as their bytes need", 1.0 / share.max(1e-3)),
            fix: match preferred {
                true => "none needed: pairwise and staged, which open one stream per GPU, are preferred here; do not pin another PEERLANE_ALGO".into(),
                false => "PEERLANE_ALGO=pairwise on all ranks (staged from about 512 KB on), which open one stream per GPU".into(),
            },
        })
    }

    /// GB/s that the links leave to the slowest rank of `rate` if all send at once, and nothing stays below an uplink or on a
    /// side.
    fn left(&self, rate: &Rate) -> f64 {
        let rank = usize::from(rate.worst_rank);
        let seat = &self.fabric.seats[rank];
        let mut left = seat.link * NOMINAL.share(rate.fan_out.into());
        let others = |same: &dyn Fn(usize) -> bool| {
            (0..self.gpu_of.len()).filter(|r| same(*r)).count().max(1) as f64
        };
        if let Some(uplink) = seat.uplink {
            let sharing = others(&|r| self.fabric.seats[r].uplink == Some(uplink));
            left = left.min(self.fabric.uplinks[uplink] / sharing);
        }
        let sides = self.fabric.seats.iter().any(|s| s.side != seat.side);
        if sides && rate.scope == Scope::Across {
            let sharing = others(&|r| self.fabric.seats[r].side == seat.side);
            left = left.min(self.fabric.sockets / sharing);
        }
        left
    }
}

/// An order in which what was not measured comes first.
fn by(a: Option<f64>, b: Option<f64>) -> std::cmp::Ordering {
    a.unwrap_or(0.0).total_cmp(&b.unwrap_or(0.0))
}
