//! What the probe found.

use serde::{Deserialize, Serialize};
use std::fmt;

/// How memory of another rank is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Access {
    /// By stores into its slab (push).
    Store,
    /// By loads from its slab (pull).
    Load,
}

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Scope {
    /// Of ranks of the same island.
    Within,
    /// Of ranks of other islands.
    Across,
}

/// How fast ranks are at stores or loads of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// Stores or loads.
    pub access: Access,
    /// Within the island or across.
    pub scope: Scope,
    /// To or from how many ranks at once; the largest stands for all there are, where islands differ in size.
    pub fan_out: u8,
    /// Whether all ranks did so at the same time, or each alone.
    pub together: bool,
    /// Gigabytes (10^9) per second of payload that a rank moved, the median over the ranks.
    pub median: f32,
    /// The same of the slowest rank.
    pub worst: f32,
    /// Which rank that is.
    pub worst_rank: u8,
}

/// How fast one rank stores into the slab of another, or loads from it, while nobody else does anything.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PairRate {
    /// Stores or loads.
    pub access: Access,
    /// Who stores or loads.
    pub rank: u8,
    /// Whose memory it is.
    pub memory: u8,
    /// Gigabytes (10^9) per second of payload.
    pub gb_per_s: f32,
}

/// What the lane between the ranks of a communicator does, as measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbeReport {
    /// `vmm`, `ipc`, `host`, or `cpu` for memory shared between threads or processes.
    pub lane: String,
    /// The ranks of each island.
    pub islands: Vec<Vec<u8>>,
    /// `latency_ns[a][b]`: nanoseconds that a word takes from rank `a` to rank `b` and into a poll there, half of a round
    /// trip, so `[b][a]` is the same. None on the diagonal and where no schedule has an edge.
    pub latency_ns: Vec<Vec<Option<f32>>>,
    /// Stores and loads, alone and together.
    pub rates: Vec<Rate>,
    /// Pairs by themselves: every edge with [`ProbeMode::Pairs`](crate::ProbeMode), else one peer per rank and scope.
    pub pairs: Vec<PairRate>,
    /// Bytes that a rank moved to or from each peer in one round.
    pub bytes: u64,
    /// Milliseconds that it took to measure all this.
    pub milliseconds: f32,
}

impl ProbeReport {
    /// Median latency over the pairs of `scope`, in nanoseconds.
    pub fn latency(&self, scope: Scope) -> Option<f32> {
        let island = |rank: usize| self.islands.iter().position(|i| i.contains(&(rank as u8)));
        let pairs = self.latency_ns.iter().enumerate().flat_map(|(a, row)| {
            row.iter().enumerate().filter_map(move |(b, ns)| ns.map(|ns| (a, b, ns)))
        });
        let wanted = |a, b| (island(a) == island(b)) == (scope == Scope::Within);
        median(
            &mut pairs.filter(|&(a, b, _)| a < b && wanted(a, b)).map(|p| p.2).collect::<Vec<_>>(),
        )
    }

    /// The rate of that kind; with `fan_out` 0 the one to or from all ranks of `scope`.
    pub fn rate(&self, access: Access, scope: Scope, fan_out: u8, together: bool) -> Option<&Rate> {
        let mut same = self
            .rates
            .iter()
            .filter(|r| r.access == access && r.scope == scope && r.together == together);
        match fan_out {
            0 => same.max_by_key(|r| r.fan_out),
            _ => same.find(|r| r.fan_out == fan_out),
        }
    }

    /// How fast `rank` alone stores into the slab of `memory`, or loads from it.
    pub fn pair(&self, access: Access, rank: usize, memory: usize) -> Option<f32> {
        let pair = |p: &&PairRate| {
            (p.access, usize::from(p.rank), usize::from(p.memory)) == (access, rank, memory)
        };
        self.pairs.iter().find(pair).map(|p| p.gb_per_s)
    }

    /// The report as one line of JSON. Numbers have at most three digits after the point.
    pub fn to_json(&self) -> String {
        let join = |items: Vec<String>| format!("[{}]", items.join(","));
        let islands = self
            .islands
            .iter()
            .map(|island| join(island.iter().map(u8::to_string).collect()))
            .collect();
        let row = |row: &Vec<Option<f32>>| {
            join(row.iter().map(|ns| ns.map_or("null".to_owned(), number)).collect())
        };
        let rate = |r: &Rate| {
            format!(
                r#"{{"access":"{}","scope":"{}","fan_out":{},"together":{},"gb_per_s":{},"worst_gb_per_s":{},"worst_rank":{}}}"#,
                r.access,
                r.scope,
                r.fan_out,
                r.together,
                number(r.median),
                number(r.worst),
                r.worst_rank
            )
        };
        let pair = |p: &PairRate| {
            format!(
                r#"{{"access":"{}","rank":{},"memory":{},"gb_per_s":{}}}"#,
                p.access,
                p.rank,
                p.memory,
                number(p.gb_per_s)
            )
        };
        format!(
            r#"{{"lane":"{}","islands":{},"latency_ns":{},"rates":{},"pairs":{},"bytes":{},"milliseconds":{}}}"#,
            self.lane,
            join(islands),
            join(self.latency_ns.iter().map(row).collect()),
            join(self.rates.iter().map(rate).collect()),
            join(self.pairs.iter().map(pair).collect()),
            self.bytes,
            number(self.milliseconds)
        )
    }
}

/// As JSON takes it: it knows no infinity and no NaN.
fn number(value: f32) -> String {
    if value.is_finite() {
        format!("{value:.3}")
    } else {
        "null".into()
    }
}

/// The middle one, the lower of two.
pub(crate) fn median(values: &mut [f32]) -> Option<f32> {
    values.sort_by(f32::total_cmp);
    values.get(values.len().checked_sub(1)? / 2).copied()
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Access::Store => "store",
            Access::Load => "load",
        })
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Scope::Within => "within",
            Scope::Across => "across",
        })
    }
}

/// For people: a line per kind.
impl fmt::Display for ProbeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lane {}, measured in {:.0} ms", self.lane, self.milliseconds)?;
        for scope in [Scope::Within, Scope::Across] {
            if let Some(ns) = self.latency(scope) {
                write!(f, "\n  a flag {scope} islands takes {ns:.0} ns")?;
            }
        }
        for r in &self.rates {
            let how = if r.together { "all ranks at once" } else { "each rank alone" };
            write!(
                f,
                "\n  {} {} islands, fan-out {}, {how}: {:.2} GB/s a rank, slowest {:.2} (rank {})",
                r.access, r.scope, r.fan_out, r.median, r.worst, r.worst_rank
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn report() -> ProbeReport {
        let rate = |fan_out, together, median| Rate {
            access: Access::Store,
            scope: Scope::Within,
            fan_out,
            together,
            median,
            worst: median / 2.0,
            worst_rank: 1,
        };
        ProbeReport {
            lane: "vmm".into(),
            islands: vec![vec![0, 1], vec![2]],
            latency_ns: vec![
                vec![None, Some(700.0), Some(1100.0)],
                vec![Some(700.0), None, Some(1300.0)],
                vec![Some(1100.0), Some(1300.0), None],
            ],
            rates: vec![rate(1, false, 44.0), rate(1, true, 25.5)],
            pairs: vec![PairRate { access: Access::Load, rank: 1, memory: 0, gb_per_s: 42.5 }],
            bytes: 262_144,
            milliseconds: 12.0,
        }
    }

    #[test]
    fn the_constants_are_found_by_what_they_are_of() {
        let report = report();
        assert_eq!(report.latency(Scope::Within), Some(700.0));
        assert_eq!(report.latency(Scope::Across), Some(1100.0));
        let rate = |fan_out, together| {
            report.rate(Access::Store, Scope::Within, fan_out, together).map(|r| r.median)
        };
        assert_eq!((rate(1, false), rate(0, true), rate(3, true)), (Some(44.0), Some(25.5), None));
        assert_eq!(report.rate(Access::Load, Scope::Within, 1, true), None);
        assert_eq!(report.pair(Access::Load, 1, 0), Some(42.5));
        assert_eq!(report.pair(Access::Load, 0, 1), None);
    }

    #[test]
    fn the_json_is_what_it_should_be() {
        let mut report = report();
        report.rates.truncate(1);
        report.latency_ns.truncate(1);
        report.rates[0].worst = f32::NAN;
        assert_eq!(
            report.to_json(),
            concat!(
                r#"{"lane":"vmm","islands":[[0,1],[2]],"latency_ns":[[null,700.000,1100.000]],"#,
                r#""rates":[{"access":"store","scope":"within","fan_out":1,"together":false,"gb_per_s":44.000,"#,
                r#""worst_gb_per_s":null,"worst_rank":1}],"#,
                r#""pairs":[{"access":"load","rank":1,"memory":0,"gb_per_s":42.500}],"bytes":262144,"milliseconds":12.000}"#
            )
        );
        assert!(report.to_string().contains("store within islands, fan-out 1, each rank alone"));
    }
}
