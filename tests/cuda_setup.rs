//! Set-up of communicators on GPUs: what a box cannot do, and calls of the driver that fail on one rank.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/fakecuda.rs"]
mod fakecuda;
#[path = "common/gpu.rs"]
mod gpu;
#[path = "../examples/gpu_smoke/support.rs"]
mod support;

use fakecuda::{in_child, set_fail};
use gpu::{case, config, create, nothing_is_left, on_ranks, KERNELS};
use peerlane::comm::{Communicator, Config};
use peerlane::{Algorithm, DType, Error, Lane, Op};
use support::Rank;

/// All ranks' communicators, or the one error that all of them got.
fn alike(
    outcomes: Vec<Result<Communicator, Error>>,
    what: &str,
) -> Result<Vec<Communicator>, Error> {
    let errors: Vec<_> = outcomes.iter().filter_map(|o| o.as_ref().err().cloned()).collect();
    assert!(
        errors.is_empty() || errors.len() == outcomes.len(),
        "{what}: only some failed: {errors:?}"
    );
    assert!(errors.windows(2).all(|pair| pair[0] == pair[1]), "{what}: {errors:?}");
    outcomes.into_iter().collect()
}

/// One call over the ranks, checked.
fn serves(comms: Vec<Communicator>, ordinal: impl Fn(usize) -> u32 + Sync, what: &str) {
    let n = comms.len();
    let case = case(DType::BF16, Op::Sum, 3001, 8);
    let expected = case.expected(n, &config(n)).unwrap();
    on_ranks(comms, |comm| {
        let rank = Rank::new(&comm, ordinal(comm.rank()), case.bytes()).unwrap();
        assert!(rank.reduce(&case).unwrap() == expected, "{what}");
    });
}

/// Every call of the driver in set-up, its first and a later use, on the first and the last rank: all ranks come to the same
/// end, and nothing stays. Where another lane is left, they end well.
#[test]
fn a_driver_call_that_fails_on_one_rank_fails_or_falls_back_on_all() {
    let name = "a_driver_call_that_fails_on_one_rank_fails_or_falls_back_on_all";
    in_child(name, &[KERNELS, ("FAKECUDA_DEVICES", "2")], || {
        const CALLS: &[&str] = &[
            "cuDeviceGet",
            "cuDeviceGetCount",
            "cuDeviceGetAttribute",
            "cuDeviceGetName",
            "cuDeviceGetUuid",
            "cuDeviceTotalMem",
            "cuDevicePrimaryCtxRetain",
            "cuDeviceCanAccessPeer",
            "cuCtxGetCurrent",
            "cuCtxPushCurrent",
            "cuCtxEnablePeerAccess",
            "cuThreadExchangeStreamCaptureMode",
            "cuModuleLoadData",
            "cuModuleGetFunction",
            "cuFuncLoad",
            "cuFuncGetAttribute",
            "cuStreamCreateWithPriority",
            "cuEventCreate",
            "cuMemAlloc",
            "cuMemHostRegister",
            "cuMemHostGetDevicePointer",
            "cuMemGetAllocationGranularity",
            "cuMemCreate",
            "cuMemAddressReserve",
            "cuMemMap",
            "cuMemSetAccess",
            "cuMemsetD8Async",
            "cuMemcpyHtoDAsync",
            "cuMemcpyDtoHAsync",
            "cuStreamGetCaptureInfo",
            "cuStreamGetId",
            "cuStreamSynchronize",
            "cuLaunchKernelEx",
            "cuEventRecord",
        ];
        let gpu = |rank: usize| rank as u32 % 2;
        let (mut ended_well, mut failed) = (0, 0);
        for lane in [Lane::Auto, Lane::Vmm, Lane::Ipc, Lane::Host] {
            for (i, call) in CALLS.iter().enumerate() {
                // The first use by one rank, and a later one by the other.
                for (nth, rank) in [(1, i % 3), (4, (i + 1) % 3)] {
                    let what = format!("lane {lane}, {call} for the {nth}th time on rank {rank}");
                    set_fail(&format!("{call}:{nth}:{rank}"));
                    let config = Config { lane, ..config(3) };
                    match alike(create(3, &config, gpu), &what) {
                        Ok(comms) => {
                            set_fail("");
                            ended_well += 1;
                            drop(comms);
                        }
                        Err(error) => {
                            failed += 1;
                            let text = error.to_string();
                            let named = matches!(error, Error::Setup { rank: at, .. } if at as usize == rank);
                            assert!(named && text.contains(call), "{what}: {text}");
                        }
                    }
                    set_fail("");
                    nothing_is_left();
                }
            }
        }
        assert!(failed > 60 && ended_well > 40, "{failed} failed, {ended_well} did not");
        serves(alike(create(3, &config(3), gpu), "afterwards").unwrap(), gpu, "afterwards");
        nothing_is_left();
    });
}

#[test]
fn a_lane_that_fails_on_one_rank_is_given_up_by_all_with_the_reason() {
    let name = "a_lane_that_fails_on_one_rank_is_given_up_by_all_with_the_reason";
    in_child(name, &[KERNELS], || {
        for (rules, lane) in [
            ("cuMemCreate:1:1", "lane ipc"),
            ("cuMemCreate:1:1,cuLaunchKernelEx:1:0", "lane host"),
            ("cuLaunchKernelEx:3:2", "lane ipc"),
        ] {
            set_fail(rules);
            let comms = alike(create(3, &config(3), |_| 0), rules).unwrap();
            set_fail("");
            for comm in &comms {
                let text = comm.explain(1024, DType::F32).unwrap();
                assert!(
                    text.contains(lane) && text.contains("lane vmm: set-up failed on rank"),
                    "{text}"
                );
            }
            serves(comms, |_| 0, rules);
            nothing_is_left();
        }
    });
}

#[test]
fn gpus_without_peer_access_go_through_host_memory() {
    let name = "gpus_without_peer_access_go_through_host_memory";
    for holes in ["*", "0-1", "2-0,0-2"] {
        let env = [KERNELS, ("FAKECUDA_DEVICES", "3"), ("FAKECUDA_NO_PEER", holes)];
        in_child(name, &env, || {
            let gpu = |rank: usize| rank as u32;
            let comms = alike(create(3, &config(3), gpu), "holes").unwrap();
            for comm in &comms {
                let text = comm.explain(1024, DType::F32).unwrap();
                assert!(
                    text.contains("lane host") && text.contains("has no peer access to rank"),
                    "{text}"
                );
            }
            serves(comms, gpu, "over host memory");
            // Pinned, it is an error that says so, on all ranks.
            let pinned = Config { lane: Lane::Vmm, ..config(3) };
            let text = alike(create(3, &pinned, gpu), "pinned").unwrap_err().to_string();
            assert!(text.contains("no peer access") && text.contains("PEERLANE_LANE"), "{text}");
            nothing_is_left();
        });
    }
}

#[test]
fn more_gpus_than_one_has_room_for_get_a_schedule_with_fewer_peers() {
    let name = "more_gpus_than_one_has_room_for_get_a_schedule_with_fewer_peers";
    for limit in ["8", "4", "1"] {
        let env = [KERNELS, ("FAKECUDA_DEVICES", "12"), ("FAKECUDA_PEER_LIMIT", limit)];
        in_child(name, &env, || {
            let gpu = |rank: usize| rank as u32;
            let limit = std::env::var("FAKECUDA_PEER_LIMIT").unwrap();
            // Plain allocations, for which the limit holds in the driver too.
            let config = Config { slab_bytes: Some(4 << 20), ..config(12) };
            let comms = alike(create(12, &config, gpu), &limit).unwrap();
            let text = comms[0].explain(1 << 20, DType::BF16).unwrap();
            match limit.as_str() {
                "1" => assert!(text.contains("lane host"), "{text}"),
                _ => {
                    assert!(!text.contains("lane host") && !text.contains("one_shot by"), "{text}")
                }
            }
            serves(comms, gpu, &limit);
            if limit == "8" {
                let pinned =
                    Config { algorithm: Some(Algorithm::OneShot), lane: Lane::Vmm, ..config };
                let text = alike(create(12, &pinned, gpu), "pinned").unwrap_err().to_string();
                assert!(text.contains("more peers per GPU"), "{text}");
            }
            nothing_is_left();
        });
    }
}

#[test]
fn a_mig_slice_is_refused_on_all_ranks_with_the_reason() {
    let name = "a_mig_slice_is_refused_on_all_ranks_with_the_reason";
    in_child(name, &[KERNELS, ("FAKECUDA_MIG", "1")], || {
        let error = alike(create(2, &config(2), |rank| rank as u32), "MIG").unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, Error::Setup { rank: 1, .. }) && text.contains("MIG slice"),
            "{text}"
        );
        nothing_is_left();
    });
}

#[test]
fn a_library_without_kernels_says_so() {
    in_child("a_library_without_kernels_says_so", &[KERNELS], || {
        let config = Config { kernels: Some("/nowhere/kernels.fatbin".into()), ..config(2) };
        let text = alike(create(2, &config, |_| 0), "no file").unwrap_err().to_string();
        assert!(
            text.contains("/nowhere/kernels.fatbin") && text.contains("PEERLANE_KERNELS"),
            "{text}"
        );
    });
}

/// Set-up does nothing that a capture under way, even of the strictest kind, would forbid.
#[test]
fn a_communicator_can_be_made_while_somebody_captures() {
    in_child("a_communicator_can_be_made_while_somebody_captures", &[KERNELS], || {
        use peerlane::device::cuda::{Capture, CaptureMode, Stream};
        let context = support::context(0).unwrap();
        let stream = Stream::new(&context, 0).unwrap();
        let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
        let comms = alike(create(2, &config(2), |_| 0), "in a capture").unwrap();
        drop(comms);
        capture.end().unwrap();
    });
}
