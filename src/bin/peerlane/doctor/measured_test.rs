//! Reports written by hand, healthy and sick, on described boxes.

use super::finding::{Finding, Severity};
use super::measured::judge;
use peerlane::probe::{Access, PairRate, ProbeReport, Rate, Scope};
use peerlane::topology::{from_path, islands, Class, Topology};
use std::path::Path;

const BOXES: [&str; 5] = [
    "1-socket-4-gpu-1-switch",
    "1-socket-4-gpu-2-switches",
    "1-socket-16-gpu-4-switches",
    "2-socket-8-gpu-4-switches",
    "2-socket-8-gpu-direct",
];

fn described(name: &str) -> Topology {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/topology/fixtures");
    from_path(&fixtures.join(format!("{name}.xml"))).unwrap()
}

/// What has been published of healthy boxes, as shares of a Gen4 x16 link's 31.5 GB/s: stores 0.84, loads 0.68, and with all
/// GPUs at once what is left of an uplink or of the sockets' link.
fn healthy(topology: &Topology) -> ProbeReport {
    let n = topology.gpus.len();
    let ranks: Vec<usize> = (0..n).collect();
    let islands = islands(topology, &ranks).unwrap().islands.groups().to_vec();
    let link = |gpu: usize| topology.gpus[gpu].link.gb_per_s().unwrap() as f32;
    let usual = |a, b| match topology.class(a, b) {
        Class::X => None,
        Class::Pix => Some(680.0),
        Class::Pxb => Some(1150.0),
        Class::Phb | Class::Node => Some(1080.0),
        Class::Sys => Some(1400.0),
    };
    let pairs = ranks.iter().flat_map(|a| ranks.iter().map(move |b| (*a, *b)));
    let pair = |(a, b): (usize, usize), access, share| PairRate {
        access,
        rank: a as u8,
        memory: b as u8,
        gb_per_s: share * link(a).min(link(b)),
    };
    let of = |access, share| {
        pairs.clone().filter(|(a, b)| a != b).map(move |ab| pair(ab, access, share))
    };
    let rate = |access, scope, fan_out, together, share: f32| Rate {
        access,
        scope,
        fan_out,
        together,
        median: share * link(0),
        worst: 0.95 * share * link(0),
        worst_rank: (n - 1) as u8,
    };
    let mut rates = Vec::new();
    for access in [Access::Store, Access::Load] {
        for scope in [Scope::Within, Scope::Across] {
            if scope == Scope::Across && islands.len() == 1 {
                continue;
            }
            for fan_out in [1, 3] {
                rates.push(rate(access, scope, fan_out, false, 0.7));
                // Four GPUs share an uplink, or the link between sockets.
                let shared = topology.uplink(0) == topology.uplink(1) && n > 4;
                let left = if shared || scope == Scope::Across { 0.2 } else { 0.6 };
                rates.push(rate(access, scope, fan_out, true, left));
            }
        }
    }
    ProbeReport {
        lane: "vmm".into(),
        islands,
        latency_ns: ranks.iter().map(|a| ranks.iter().map(|b| usual(*a, *b)).collect()).collect(),
        rates,
        pairs: of(Access::Store, 0.84).chain(of(Access::Load, 0.68)).collect(),
        bytes: 524_288,
        milliseconds: 50.0,
    }
}

fn found(topology: &Topology, report: &ProbeReport) -> Vec<Finding> {
    judge(topology, &(0..topology.gpus.len()).collect::<Vec<_>>(), report)
}

fn only(topology: &Topology, report: &ProbeReport) -> Finding {
    let mut findings = found(topology, report);
    assert_eq!(findings.len(), 1, "{findings:#?}");
    findings.remove(0)
}

/// Makes the ways of `report` that `which` names, by access, rank and owner of the memory, so many times slower.
fn slower(report: &mut ProbeReport, times: f32, which: impl Fn(Access, u8, u8) -> bool) {
    for pair in report.pairs.iter_mut().filter(|p| which(p.access, p.rank, p.memory)) {
        pair.gb_per_s /= times;
    }
}

#[test]
fn a_healthy_box_raises_no_alarm() {
    for name in BOXES {
        let topology = described(name);
        let report = healthy(&topology);
        assert_eq!(found(&topology, &report), [], "{name}");
        // A busy box, and loads at the slowest that a healthy one has shown.
        let mut busy = report;
        slower(&mut busy, 1.3, |_, _, _| true);
        busy.latency_ns.iter_mut().flatten().flatten().for_each(|ns| *ns *= 2.5);
        assert_eq!(found(&topology, &busy), [], "{name}");
    }
}

#[test]
fn slow_stores_into_one_gpu_are_named_with_figures_and_the_way_round_them() {
    let topology = described("2-socket-8-gpu-direct");
    let mut report = healthy(&topology);
    slower(&mut report, 10.0, |access, a, b| (access, a, b) == (Access::Store, 2, 5));
    let finding = only(&topology, &report);
    assert_eq!((finding.id, finding.severity), ("slow-direction", Severity::Slow));
    for what in [
        "GPU2 (0000:51:00.0) to GPU5 (0000:b1:00.0), SYS",
        "stores 2.6 GB/s, loads 21.4 GB/s",
        "carries 26.5",
        "a flag 1400 ns",
    ] {
        assert!(finding.evidence.contains(what), "{what}: {finding:#?}");
    }
    assert!(finding.what.contains("1 way(s)"), "{finding:#?}");
    assert!(finding.cost.contains("10 times"), "{finding:#?}");
    assert!(finding.fix.contains("PEERLANE_DIRECTION=pull"), "{finding:#?}");
}

#[test]
fn stores_that_are_slow_everywhere_are_one_finding() {
    let topology = described("2-socket-8-gpu-4-switches");
    let mut report = healthy(&topology);
    slower(&mut report, 9.0, |access, _, _| access == Access::Store);
    let finding = only(&topology, &report);
    assert_eq!(finding.id, "slow-direction");
    assert!(finding.what.contains("stores are slow on 56 way(s)"), "{finding:#?}");
}

#[test]
fn slow_loads_cost_nobody_anything() {
    let topology = described("1-socket-4-gpu-1-switch");
    let mut report = healthy(&topology);
    slower(&mut report, 20.0, |access, _, _| access == Access::Load);
    let finding = only(&topology, &report);
    assert_eq!((finding.id, finding.severity), ("slow-direction", Severity::Note));
    assert!(finding.what.starts_with("loads are slow"), "{finding:#?}");
}

#[test]
fn a_driver_that_stages_is_told_from_a_slow_link() {
    // Between GPUs on ports of their own everything is slow, both ways.
    let topology = described("2-socket-8-gpu-direct");
    let mut report = healthy(&topology);
    slower(&mut report, 12.0, |_, a, b| (a / 4) != (b / 4));
    let finding = only(&topology, &report);
    assert_eq!(finding.id, "driver-staging");
    assert!(finding.what.contains("32 of 56 ways"), "{finding:#?}");
    assert!(finding.evidence.contains("SYS: stores 2.2 GB/s, loads 1.8 GB/s"), "{finding:#?}");
    assert!(finding.fix.contains("ForceP2P=0x11"), "{finding:#?}");
    // One card with a bad contact: all its ways, and only its.
    let mut report = healthy(&topology);
    slower(&mut report, 3.5, |_, a, b| a == 3 || b == 3);
    let finding = only(&topology, &report);
    assert_eq!((finding.id, finding.severity), ("slow-link", Severity::Slow));
    assert!(finding.what.contains("14 way(s)"), "{finding:#?}");
    assert!(finding.fix.contains("lspci -vv -s 0000:71:00.0"), "{finding:#?}");
    // Below a switch nothing is staged, however slow.
    let topology = described("1-socket-4-gpu-1-switch");
    let mut report = healthy(&topology);
    slower(&mut report, 12.0, |_, _, _| true);
    assert_eq!(only(&topology, &report).id, "slow-link");
}

#[test]
fn flags_that_are_late_are_a_finding_of_their_own() {
    let topology = described("1-socket-4-gpu-2-switches");
    let mut report = healthy(&topology);
    for (a, b) in [(1, 2), (2, 1)] {
        report.latency_ns[a][b] = Some(14_000.0);
    }
    let finding = only(&topology, &report);
    assert_eq!(finding.id, "slow-flags");
    assert!(finding.evidence.contains("GPU1") && finding.evidence.contains("14000 ns"));
}

#[test]
fn writes_that_collapse_only_together_name_the_slowest_gpu() {
    for (name, preferred) in
        [("1-socket-16-gpu-4-switches", true), ("2-socket-8-gpu-direct", false)]
    {
        let topology = described(name);
        let mut report = healthy(&topology);
        let across = |rate: &&mut Rate| {
            (rate.access, rate.scope, rate.together) == (Access::Store, Scope::Across, true)
        };
        for rate in report.rates.iter_mut().filter(across) {
            (rate.median, rate.worst, rate.worst_rank) = (0.9, 0.5, 2);
        }
        let finding = only(&topology, &report);
        assert_eq!((finding.id, finding.severity), ("collapse", Severity::Slow));
        let address = topology.gpus[2].address.unwrap().to_string();
        assert!(
            finding.evidence.contains(&format!("0.5 GB/s of GPU2 ({address})")),
            "{finding:#?}"
        );
        assert!(finding.evidence.contains("alone 22.1"), "{finding:#?}");
        assert_eq!(finding.fix.starts_with("none needed"), preferred, "{name}: {finding:#?}");
    }
}

#[test]
fn what_cannot_be_compared_is_not_judged() {
    // Host memory is no link between GPUs.
    let topology = described("2-socket-8-gpu-direct");
    let mut report = healthy(&topology);
    slower(&mut report, 50.0, |_, _, _| true);
    report.lane = "host".into();
    assert_eq!(found(&topology, &report), []);
    // Links of which nothing is known carry who knows what.
    let mut topology = topology;
    let mut report = healthy(&topology);
    topology.gpus.iter_mut().for_each(|gpu| gpu.link = Default::default());
    slower(&mut report, 50.0, |_, _, _| true);
    assert_eq!(found(&topology, &report), []);
    // Fewer ranks than GPUs, in another order, two of them on one GPU.
    let topology = described("2-socket-8-gpu-direct");
    let mut report = healthy(&described("1-socket-4-gpu-1-switch"));
    assert_eq!(judge(&topology, &[5, 0, 0, 3], &report), []);
    assert_eq!(judge(&topology, &[5, 0], &report), [], "another number of ranks");
    slower(&mut report, 9.0, |access, a, _| access == Access::Store && a == 0);
    let findings = judge(&topology, &[5, 0, 0, 3], &report);
    assert!(findings[0].evidence.contains("from GPU5 (0000:b1:00.0)"), "{findings:#?}");
}
