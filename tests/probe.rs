//! The probe: what the lane does is measured when somebody asks, on all ranks alike.
#![allow(missing_docs, clippy::unwrap_used)]

use peerlane::comm::{Communicator, Config};
use peerlane::env::Env;
use peerlane::probe::{Access, ProbeReport, Scope};
use peerlane::schedule::Islands;
use peerlane::{DType, Op, ProbeMode};

fn config(n: usize, probe: ProbeMode) -> Config {
    Config { probe, ..Config::from_vars(n, &Env::default()).unwrap() }
}

/// Every rank's report, after a call that shows that the slabs are as they were.
fn reports(n: usize, config: &Config) -> Vec<Option<ProbeReport>> {
    let ranks = Communicator::create_local(n, config).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .iter()
            .map(|comm| {
                scope.spawn(move || {
                    for count in [5, 300_000] {
                        let mut data = vec![comm.rank() as i32 + 1; count];
                        let at = data.as_mut_ptr().cast();
                        // SAFETY: in place, alive until the call returns.
                        unsafe { comm.all_reduce(at, at, count, DType::I32, Op::Sum, None) }
                            .unwrap();
                        assert!(data.iter().all(|v| *v == (1..=n as i32).sum::<i32>()));
                    }
                    comm.probe().cloned()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_probe_measures_every_pair_and_every_kind_alike_on_all_ranks() {
    for (n, islands) in [(2, "0-1"), (4, "0-1,2-3"), (5, "0-2,3-4")] {
        let islands = Islands::parse(n, islands).unwrap();
        let config = Config { islands: Some(islands.clone()), ..config(n, ProbeMode::Always) };
        let all = reports(n, &config);
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{n}");
        let report = all[0].clone().unwrap();
        assert_eq!((report.lane.as_str(), &report.islands), ("cpu", &islands.groups().to_vec()));
        for (a, row) in report.latency_ns.iter().enumerate() {
            for (b, ns) in row.iter().enumerate() {
                assert_eq!(ns.is_some_and(|ns| ns > 0.0), a != b, "{n}: {a} to {b}: {ns:?}");
                assert_eq!(*ns, report.latency_ns[b][a]);
            }
        }
        assert!(!report.rates.is_empty());
        for rate in &report.rates {
            assert!(rate.median >= rate.worst && rate.worst > 0.0, "{rate:?}");
        }
        for access in [Access::Store, Access::Load] {
            for together in [false, true] {
                assert!(report.rate(access, Scope::Within, 1, together).is_some(), "{n}");
                let across = report.rate(access, Scope::Across, 0, together);
                assert_eq!(across.is_some(), islands.groups().len() > 1, "{n}");
            }
        }
        println!("{n} ranks: {report}");
    }
}

#[test]
fn every_edge_is_measured_by_itself_if_asked_for() {
    let islands = Islands::parse(4, "0-1,2-3").unwrap();
    let config = Config { islands: Some(islands), ..config(4, ProbeMode::Pairs) };
    let all = reports(4, &config);
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
    let report = all[0].clone().unwrap();
    for access in [Access::Store, Access::Load] {
        for (a, b) in (0..4).flat_map(|a| (0..4).map(move |b| (a, b))) {
            assert_eq!(report.pair(access, a, b).is_some_and(|rate| rate > 0.0), a != b, "{a} {b}");
        }
    }
    assert_eq!(report.pairs.len(), 2 * 4 * 3);
    assert!(!report.rates.is_empty());
}

#[test]
fn nobody_pays_for_a_probe_that_was_not_asked_for() {
    for probe in [ProbeMode::Auto, ProbeMode::Off] {
        assert_eq!(reports(2, &config(2, probe)), [None, None]);
    }
    // With nobody to reach there is nothing to measure.
    assert_eq!(reports(1, &config(1, ProbeMode::Always)), [None]);
}

#[test]
fn ranks_that_differ_on_the_probe_are_told() {
    let id = peerlane::bootstrap::UniqueId::new().unwrap();
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let create = |(rank, probe)| {
            let id = &id;
            scope.spawn(move || Communicator::create(id, 2, rank, &config(2, probe)).map(drop))
        };
        let ranks = [(0, ProbeMode::Auto), (1, ProbeMode::Always)].map(create);
        ranks.map(|rank| rank.join().unwrap()).into()
    });
    for outcome in outcomes {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("probe is Auto on rank 0 and Always on rank 1"), "{text}");
    }
}
