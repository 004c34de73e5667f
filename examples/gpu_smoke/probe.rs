//! What the probe says of the GPU at hand, with ranks that share it: no link is measured that way, but the kernel, the
//! clocks and the checks of every word are the real ones.

use crate::check;
use crate::support::{on_ranks, Case, Rank};
use crate::virtual_ranks::config;
use peerlane::comm::{Communicator, Config};
use peerlane::probe::{Access, Scope};
use peerlane::schedule::Islands;
use peerlane::{DType, Error, Lane, Op, ProbeMode};
use std::sync::Barrier;

const CASE: Case = Case { dtype: DType::BF16, op: Op::Sum, count: 57_344, seed: 4 };

pub fn run() {
    for lane in [Lane::Vmm, Lane::Host] {
        for (n, islands) in [(2, "0-1"), (4, "0-1,2-3"), (8, "0-3,4-7")] {
            check(&format!("probe, {n} ranks, islands {islands}, lane {lane}"), || {
                measured(n, islands, lane)
            });
        }
    }
}

fn measured(n: usize, islands: &str, lane: Lane) -> Result<String, String> {
    let text = |e: Error| e.to_string();
    let config = Config {
        lane,
        islands: Some(Islands::parse(n, islands).map_err(text)?),
        probe: ProbeMode::Always,
        cache_dir: None,
        ..config(n)?
    };
    let comms = Communicator::create_local(n, &config).map_err(text)?;
    let report = comms[0].probe().cloned().ok_or("nothing was measured")?;
    println!("{report}\n{}", report.to_json());
    if comms.iter().any(|comm| comm.probe() != Some(&report)) {
        return Err("the ranks' reports differ".into());
    }
    if let Some(rate) = report.rates.iter().find(|rate| rate.worst <= 0.0 || rate.worst.is_nan()) {
        return Err(format!("no rate: {rate:?}"));
    }
    // What the probe left in the slabs is no obstacle to a call.
    let expected = CASE.expected(n, &config).map_err(text)?;
    let together = Barrier::new(n);
    on_ranks(comms, |comm| {
        let rank = Rank::new(comm, 0, CASE.bytes());
        together.wait();
        match rank?.reduce(&CASE)? == expected {
            true => Ok(()),
            false => Err(Error::Internal("wrong data after the probe".into())),
        }
    })
    .map_err(text)?;
    let store = report.rate(Access::Store, Scope::Within, 0, true).map_or(0.0, |r| r.median);
    let hop = report.latency(Scope::Within).unwrap_or(0.0);
    Ok(format!("{:.0} ms, a hop {hop:.0} ns, stores {store:.1} GB/s a rank", report.milliseconds))
}
