//! Lanes that lie: what is written over them does not reach its owner. Processes over the stand-in driver, whose memory
//! of other processes can be made a mirror: the writer reads back what it wrote, and the owner never sees it.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

#[path = "common/fakecuda.rs"]
mod fakecuda;
#[path = "common/gpu.rs"]
mod gpu;
#[path = "common/gpu_process.rs"]
mod gpu_process;
#[path = "../examples/gpu_smoke/support.rs"]
mod support;

use fakecuda::in_child;
use gpu::{config, KERNELS};
use gpu_process::{live_as_rank, start, who, Process};
use peerlane::lane::Layout;
use peerlane::Protocol;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const RANKS: usize = 3;

/// Starts ranks, which check a result of their own, and returns what each says of its lanes and of the probe.
fn serve(test: &str, env: &[(&'static str, String)]) -> Vec<(String, String)> {
    let mut ranks = start(test, RANKS, |_| env.to_vec());
    let lanes: Vec<String> = ranks.iter_mut().map(Process::line).collect();
    ranks.iter_mut().for_each(Process::go_on);
    let ends: Vec<String> = ranks
        .iter_mut()
        .map(|rank| {
            assert_eq!(rank.line(), "kept 0");
            rank.line()
        })
        .collect();
    lanes.into_iter().zip(ends).collect()
}

/// Where a mirror begins that spares what comes before the data of the bulk protocol in `channel`.
fn bulk_data(channel: usize) -> (u64, u64) {
    let layout = Layout::new(config(RANKS).slab_bytes.unwrap(), 4).unwrap();
    layout.region(channel, Protocol::Flagged)
}

fn cache(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cache-{name}"));
    let _ = std::fs::remove_dir_all(&dir);
    dir
}

#[test]
fn a_lane_that_mirrors_what_is_written_is_given_up_for_the_next() {
    const NAME: &str = "a_lane_that_mirrors_what_is_written_is_given_up_for_the_next";
    in_child(NAME, &[KERNELS], || {
        if let Some((id, rank, n)) = who() {
            return live_as_rank(&id, rank, n);
        }
        // The control first: without a mirror nothing is wrong.
        for (mirrors, lane, given_up) in [("", "vmm", 0), ("vmm", "ipc", 1), ("vmm,ipc", "host", 2)]
        {
            let start = Instant::now();
            for (lanes, _) in serve(NAME, &[("FAKECUDA_MIRROR", mirrors.into())]) {
                assert!(lanes.contains(&format!("lane {lane}")), "{mirrors}: {lanes}");
                // With the reason on record.
                let reasons = lanes.matches("in stage 'test the lane'").count();
                assert_eq!(reasons, given_up, "{mirrors}: {lanes}");
            }
            // Two seconds a lane, and what processes need to start on a busy box.
            let limit = Duration::from_secs(20 + 2 * given_up as u64);
            assert!(start.elapsed() < limit, "{mirrors}: {:?}", start.elapsed());
        }
    });
}

/// A flag that is there before its data, on a single channel: only the owner can see it, and only there.
#[test]
fn every_channel_is_tested_by_the_owner_of_the_memory() {
    const NAME: &str = "every_channel_is_tested_by_the_owner_of_the_memory";
    in_child(NAME, &[KERNELS], || {
        if let Some((id, rank, n)) = who() {
            return live_as_rank(&id, rank, n);
        }
        for channel in 0..4 {
            let (start, bytes) = bulk_data(channel);
            let mirror = format!("vmm:{start}:{bytes}");
            for (lanes, _) in serve(NAME, &[("FAKECUDA_MIRROR", mirror)]) {
                let found = format!("flagged (push), channel {channel}");
                assert!(lanes.contains("lane ipc"), "{lanes}");
                assert!(lanes.contains("does not deliver") && lanes.contains(&found), "{lanes}");
            }
        }
    });
}

#[test]
fn a_verdict_is_kept_until_somebody_asks_again() {
    const NAME: &str = "a_verdict_is_kept_until_somebody_asks_again";
    in_child(NAME, &[KERNELS], || {
        if let Some((id, rank, n)) = who() {
            return live_as_rank(&id, rank, n);
        }
        let dir = cache(NAME);
        let lanes = |probe: &str, mirror: &str| {
            let env = [
                ("FAKECUDA_MIRROR", mirror.to_owned()),
                ("PROBE", probe.to_owned()),
                ("CACHE", dir.to_str().unwrap().to_owned()),
            ];
            let said = serve(NAME, &env);
            assert!(said.windows(2).all(|pair| pair[0].0 == pair[1].0), "{said:?}");
            said[0].0.clone()
        };
        let first = lanes("auto", "vmm");
        assert!(first.contains("lane ipc") && !first.contains("known"), "{first}");
        // The lane is fine by now, but nobody looks.
        let second = lanes("auto", "");
        assert!(second.contains("lane ipc") && second.contains("known from earlier"), "{second}");
        assert!(second.contains("beyond the deadline"), "the reason is kept: {second}");
        let off = lanes("off", "");
        assert!(off.contains("lane vmm"), "{off}");
        // A damaged file is no verdict.
        let file = std::fs::read_dir(&dir).unwrap().next().unwrap().unwrap().path();
        let good = std::fs::read(&file).unwrap();
        std::fs::write(&file, &good[..good.len() - 1]).unwrap();
        let damaged = lanes("auto", "");
        assert!(damaged.contains("lane vmm"), "{damaged}");
        std::fs::write(&file, &good).unwrap();
        let asked = lanes("always", "");
        assert!(asked.contains("lane vmm"), "{asked}");
        let after = lanes("auto", "");
        assert!(after.contains("lane vmm"), "what was found last is what is kept: {after}");
    });
}

/// A hole that small messages miss: the probe's bulk finds it. Unmeasured (the control) the lane passes.
#[test]
fn the_probe_finds_what_small_messages_miss() {
    const NAME: &str = "the_probe_finds_what_small_messages_miss";
    in_child(NAME, &[KERNELS], || {
        if let Some((id, rank, n)) = who() {
            return live_as_rank(&id, rank, n);
        }
        let (start, _) = bulk_data(0);
        let mirror = format!("vmm:{}:8192", start + 92 * 1024);
        for (probe, lane) in [("off", "lane vmm"), ("always", "lane ipc")] {
            let env = [("FAKECUDA_MIRROR", mirror.clone()), ("PROBE", probe.to_owned())];
            for (lanes, report) in serve(NAME, &env) {
                assert!(lanes.contains(lane), "{probe}: {lanes}");
                let named = lanes.contains("in stage 'probe the lane'") && lanes.contains("rank 1");
                assert_eq!(named, probe == "always", "{lanes}");
                assert_eq!(report.contains("\"lane\":\"ipc\""), probe == "always", "{report}");
            }
        }
    });
}
