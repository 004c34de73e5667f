//! Ranks on GPUs as processes of their own, over the stand-in driver.
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

use fakecuda::{in_child, live};
use gpu::KERNELS;
use gpu_process::{live_as_rank, start, who, Process};
use std::time::{Duration, Instant};

#[test]
fn eight_processes_create_capture_replay_and_leave_over_every_lane() {
    const NAME: &str = "eight_processes_create_capture_replay_and_leave_over_every_lane";
    in_child(NAME, &[KERNELS], || {
        if let Some((id, rank, n)) = who() {
            return live_as_rank(&id, rank, n);
        }
        for lane in ["vmm", "ipc", "host"] {
            let mut ranks = start(NAME, 8, |_| vec![("LANE", lane.into())]);
            for rank in &mut ranks {
                let line = rank.line();
                assert!(line.contains(&format!("lane {lane}")), "{line}");
            }
            ranks.iter_mut().for_each(Process::go_on);
            for rank in &mut ranks {
                assert_eq!(rank.line(), "kept 0", "{lane}");
                assert!(rank.child.wait().unwrap().success(), "{lane}");
            }
        }
    });
}

#[test]
fn survivors_of_a_kill_in_the_middle_of_replays_learn_who_died() {
    const NAME: &str = "survivors_of_a_kill_in_the_middle_of_replays_learn_who_died";
    in_child(NAME, &[KERNELS], || {
        if let Some((id, rank, n)) = who() {
            return live_as_rank(&id, rank, n);
        }
        for (lane, killed) in [("vmm", 3), ("ipc", 0), ("host", 7)] {
            let mut ranks =
                start(NAME, 8, |_| vec![("LANE", lane.into()), ("UNTIL_DEATH", "1".into())]);
            for rank in &mut ranks {
                let line = rank.line();
                assert!(line.contains("lane"), "{line}");
            }
            std::thread::sleep(Duration::from_millis(100));
            ranks[killed].child.kill().unwrap();
            let start = Instant::now();
            for (r, rank) in ranks.iter_mut().enumerate().filter(|(r, _)| *r != killed) {
                assert_eq!(rank.line(), format!("rank {killed} died"), "{lane}, rank {r}");
            }
            let elapsed = start.elapsed();
            assert!(elapsed < Duration::from_secs(10), "{lane}: {elapsed:?}");
            for (r, rank) in ranks.iter_mut().enumerate().filter(|(r, _)| *r != killed) {
                let line = rank.line();
                assert_eq!(line, "kept 0", "{lane}, rank {r}");
                assert!(rank.child.wait().unwrap().success(), "{lane}, rank {r}");
            }
        }
    });
}

/// A handle that only one rank cannot open: all go over host memory, none is left behind.
#[test]
fn a_handle_that_one_process_cannot_open_moves_all_to_host_memory() {
    const NAME: &str = "a_handle_that_one_process_cannot_open_moves_all_to_host_memory";
    in_child(NAME, &[KERNELS, ("FAKECUDA_NO_VMM", "1")], || {
        if let Some((id, rank, n)) = who() {
            return live_as_rank(&id, rank, n);
        }
        // The code that boxes without peer access give.
        let mut ranks =
            start(NAME, 3, |_| vec![("FAKECUDA_FAIL", "cuIpcOpenMemHandle:1:2:101".into())]);
        for rank in &mut ranks {
            let line = rank.line();
            assert!(line.contains("lane host"), "{line}");
        }
        ranks.iter_mut().for_each(Process::go_on);
        for rank in &mut ranks {
            assert_eq!(rank.line(), "kept 0");
        }
    });
}

/// Memory that cannot be exported is an error value on all ranks, which go on over host memory.
#[test]
fn a_handle_that_one_process_cannot_make_moves_all_to_host_memory() {
    const NAME: &str = "a_handle_that_one_process_cannot_make_moves_all_to_host_memory";
    in_child(NAME, &[KERNELS, ("FAKECUDA_NO_VMM", "1")], || {
        if let Some((id, rank, n)) = who() {
            return live_as_rank(&id, rank, n);
        }
        let mut ranks =
            start(NAME, 3, |_| vec![("FAKECUDA_FAIL", "cuIpcGetMemHandle:1:1:1".into())]);
        for rank in &mut ranks {
            let line = rank.line();
            assert!(line.contains("lane host") && line.contains("cuIpcGetMemHandle"), "{line}");
        }
        ranks.iter_mut().for_each(Process::go_on);
        for rank in &mut ranks {
            assert_eq!(rank.line(), "kept 0");
        }
    });
}

/// Every process sees its own GPU as the first, by number, by UUID or in another order: a GPU is its UUID.
#[test]
fn processes_that_see_different_gpus_as_the_first_find_each_other() {
    const NAME: &str = "processes_that_see_different_gpus_as_the_first_find_each_other";
    in_child(NAME, &[KERNELS, ("FAKECUDA_DEVICES", "4")], || {
        if let Some((id, rank, n)) = who() {
            return live_as_rank(&id, rank, n);
        }
        let reordered = ["0,1,2,3", "1,0,3,2", "GPU-fa6ecd02,3,0,1", "3,GPU-fa6ecd00-0000,1,2"];
        // The driver opens nothing of a GPU that the process does not see.
        let alone = ["0", "GPU-fa6ecd01", "2", "3"];
        for (lane, visible, used) in
            [("vmm", reordered, "vmm"), ("ipc", reordered, "ipc"), ("auto", alone, "host")]
        {
            let env = |rank: usize| {
                vec![("LANE", lane.into()), ("CUDA_VISIBLE_DEVICES", visible[rank].into())]
            };
            let mut ranks = start(NAME, 4, env);
            for rank in &mut ranks {
                let line = rank.line();
                assert!(line.contains(&format!("lane {used}")), "{line}");
            }
            ranks.iter_mut().for_each(Process::go_on);
            for rank in &mut ranks {
                assert_eq!(rank.line(), "kept 0");
            }
        }
        assert_eq!(live(), [0; 13]);
    });
}

/// A process that dies at each call of set-up it makes to the driver: the others fail alike, and soon.
#[test]
fn a_process_that_dies_in_set_up_is_named_by_all() {
    const NAME: &str = "a_process_that_dies_in_set_up_is_named_by_all";
    in_child(NAME, &[KERNELS], || {
        if let Some((id, rank, n)) = who() {
            return live_as_rank(&id, rank, n);
        }
        for call in
            ["cuMemAlloc", "cuMemCreate", "cuMemImportFromShareableHandle", "cuLaunchKernelEx"]
        {
            // Held up in this call, where it is then killed.
            let delay = format!("{call}:1:1:60000");
            let log =
                std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("set-up-{call}"));
            let _ = std::fs::remove_file(&log);
            let env = |rank: usize| {
                let log = (rank == 1).then(|| ("FAKECUDA_LOG", log.to_str().unwrap().to_owned()));
                log.into_iter().chain([("FAKECUDA_DELAY", delay.clone())]).collect()
            };
            let mut ranks = start(NAME, 3, env);
            // The log has a line for every call that has returned; when it grows no more, the process is in the delay.
            let lines = || std::fs::read_to_string(&log).map_or(0, |text| text.lines().count());
            let mut last = (0, Instant::now());
            while last.0 == 0 || last.1.elapsed() < Duration::from_millis(700) {
                std::thread::sleep(Duration::from_millis(20));
                if lines() != last.0 {
                    last = (lines(), Instant::now());
                }
            }
            ranks[1].child.kill().unwrap();
            let start = Instant::now();
            let said: Vec<_> = [0, 2].map(|r| ranks[r].line()).into();
            assert!(said[0] == said[1] && said[0].contains("rank 1"), "{call}: {said:?}");
            assert!(start.elapsed() < Duration::from_secs(10), "{call}: {:?}", start.elapsed());
        }
    });
}
