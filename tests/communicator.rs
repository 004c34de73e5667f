//! What a communicator promises to its callers, with ranks as threads of this process.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/ranks.rs"]
mod ranks;

use peerlane::comm::{group_end, group_start, Communicator, Config};
use peerlane::device::Stream;
use peerlane::schedule::Islands;
use peerlane::{Algorithm, DType, Direction, Error, Op, Protocol};
use ranks::{config, data, expected, on_ranks, sum, sum_in_place};
use std::ffi::c_void;
use std::time::{Duration, Instant};

#[test]
fn every_rank_gets_the_sum_at_every_size() {
    for n in [1, 2, 3, 5, 8, 16] {
        let comms = Communicator::create_local(n, &config(n)).unwrap();
        on_ranks(comms, |comm| {
            for (call, count) in [0, 1, 3, 4, 255, 3584, 14_336, 300_001].into_iter().enumerate() {
                let mut output = vec![f32::NAN; count];
                sum(&comm, &data(comm.rank(), call, count), &mut output, None).unwrap();
                assert!(output == expected(n, call, count), "n {n}, count {count}");
                let mut both = data(comm.rank(), call + 1, count);
                sum_in_place(&comm, &mut both).unwrap();
                assert!(both == expected(n, call + 1, count), "in place, n {n}, count {count}");
            }
            comm.destroy().unwrap();
        });
    }
}

#[test]
fn a_message_larger_than_the_slab_takes_several_steps() {
    let small = Config { slab_bytes: Some(1 << 20), ..config(3) };
    let count = 1 << 20;
    on_ranks(Communicator::create_local(3, &small).unwrap(), |comm| {
        let mut output = vec![0.0; count];
        sum(&comm, &data(comm.rank(), 1, count), &mut output, None).unwrap();
        assert!(output == expected(3, 1, count));
        let stats = comm.stats();
        assert_eq!((stats.calls, stats.failed, stats.bytes), (1, 0, 4 << 20));
        assert!(stats.steps > 4, "{stats:?}");
    });
}

#[test]
fn a_pinned_choice_is_what_serves() {
    let islands = Islands::parse(4, "0-1,2-3").unwrap();
    for &algorithm in Algorithm::ALL {
        for (protocol, direction) in [
            (Protocol::Ll, Direction::Push),
            (Protocol::Sentinel, Direction::Push),
            (Protocol::Flagged, Direction::Push),
            (Protocol::Flagged, Direction::Pull),
        ] {
            let config = Config {
                islands: Some(islands.clone()),
                algorithm: Some(algorithm),
                protocol: Some(protocol),
                direction: Some(direction),
                ..config(4)
            };
            on_ranks(Communicator::create_local(4, &config).unwrap(), |comm| {
                let mut output = vec![0.0; 1001];
                sum(&comm, &data(comm.rank(), 2, 1001), &mut output, None).unwrap();
                assert!(output == expected(4, 2, 1001), "{algorithm} {protocol} {direction}");
                let stats = comm.stats();
                assert_eq!(stats.by_algorithm[algorithm as usize], 1);
                assert_eq!(stats.by_protocol[protocol as usize], 1);
                let text = comm.explain(4004, DType::F32).unwrap();
                assert!(text.contains(algorithm.name()) && text.contains("((0+1)+(2+3))"));
            });
        }
    }
}

#[test]
fn what_a_pin_cannot_carry_is_refused_and_the_communicator_lives_on() {
    let config = Config { protocol: Some(Protocol::Sentinel), ..config(2) };
    on_ranks(Communicator::create_local(2, &config).unwrap(), |comm| {
        let (input, mut output) = ([1i32; 4], [0i32; 4]);
        // SAFETY: live arrays of four elements.
        let result = unsafe {
            comm.all_reduce(
                input.as_ptr().cast(),
                output.as_mut_ptr().cast::<c_void>(),
                4,
                DType::I32,
                Op::Sum,
                None,
            )
        };
        assert!(matches!(result, Err(Error::Unsupported(_))), "{result:?}");
        let mut output = vec![0.0; 5];
        sum(&comm, &data(comm.rank(), 0, 5), &mut output, None).unwrap();
        assert_eq!(output, expected(2, 0, 5));
    });
}

#[test]
fn one_thread_drives_all_ranks_in_a_group() {
    let n = 3;
    let comms = Communicator::create_local(n, &config(n)).unwrap();
    for call in 0..20 {
        let inputs: Vec<_> = (0..n).map(|r| data(r, call, 1000 + call)).collect();
        let mut outputs = vec![vec![0.0; 1000 + call]; n];
        group_start();
        group_start();
        for r in 0..n {
            sum(&comms[r], &inputs[r], &mut outputs[r], None).unwrap();
        }
        group_end().unwrap();
        assert!(outputs.iter().flatten().all(|v| *v == 0.0), "the inner end starts nothing");
        group_end().unwrap();
        for output in outputs {
            assert!(output == expected(n, call, 1000 + call));
        }
    }
    assert!(matches!(group_end(), Err(Error::InvalidArgument(_))));
}

#[test]
fn two_ranks_of_a_communicator_cannot_share_a_stream_in_a_group() {
    let comms = Communicator::create_local(2, &config(2)).unwrap();
    let streams = [Stream::new().unwrap(), Stream::new().unwrap()];
    let inputs: Vec<_> = (0..2).map(|r| data(r, 0, 100)).collect();
    let mut outputs = vec![vec![7.0; 100]; 2];
    group_start();
    for r in 0..2 {
        sum(&comms[r], &inputs[r], &mut outputs[r], Some(&streams[0])).unwrap();
    }
    let error = group_end().unwrap_err();
    assert!(
        matches!(&error, Error::InvalidArgument(text) if text.contains("same stream")),
        "{error}"
    );
    // Nothing was started: the streams are idle, the outputs untouched, and no call has been counted.
    streams[0].synchronize().unwrap();
    assert!(outputs.iter().flatten().all(|v| *v == 7.0));
    assert!(comms.iter().all(|comm| comm.stats().calls == 0 && comm.error().is_none()));
    // Control: each rank with its own, twice.
    let mut again = vec![vec![7.0; 100]; 2];
    group_start();
    for r in 0..2 {
        sum(&comms[r], &inputs[r], &mut outputs[r], Some(&streams[r])).unwrap();
        sum(&comms[r], &inputs[r], &mut again[r], Some(&streams[r])).unwrap();
    }
    group_end().unwrap();
    for (r, stream) in streams.iter().enumerate() {
        stream.synchronize().unwrap();
        assert!(outputs[r] == expected(2, 0, 100) && again[r] == outputs[r]);
    }
}

#[test]
fn calls_keep_their_order_over_streams_that_are_busy_on_one_rank_only() {
    let n = 2;
    on_ranks(Communicator::create_local(n, &config(n)).unwrap(), |comm| {
        let streams = [Stream::new().unwrap(), Stream::new().unwrap()];
        let inputs: Vec<_> = (0..40).map(|call| data(comm.rank(), call, 500 + call)).collect();
        let mut outputs: Vec<_> = inputs.iter().map(|i| vec![0.0; i.len()]).collect();
        for (call, output) in outputs.iter_mut().enumerate() {
            // The other rank is late with every third call, so this rank's streams are busy at different times.
            if call % 3 == comm.rank() {
                std::thread::sleep(Duration::from_millis(2));
            }
            sum(&comm, &inputs[call], output, Some(&streams[call % 2])).unwrap();
        }
        for stream in &streams {
            stream.synchronize().unwrap();
        }
        for (call, output) in outputs.iter().enumerate() {
            assert!(*output == expected(n, call, 500 + call), "call {call}");
        }
    });
}

#[test]
fn abort_ends_every_wait_with_the_same_error() {
    let start = Instant::now();
    let errors = on_ranks(Communicator::create_local(4, &config(4)).unwrap(), |comm| {
        let mut output = vec![0.0; 100];
        let error = if comm.rank() == 2 {
            std::thread::sleep(Duration::from_millis(100));
            comm.abort();
            sum(&comm, &data(2, 0, 100), &mut output, None).unwrap_err()
        } else {
            let error = sum(&comm, &data(comm.rank(), 0, 100), &mut output, None).unwrap_err();
            assert!(output.iter().all(|v| v.is_nan()), "the output of a failed call is NaN");
            error
        };
        assert_eq!(comm.error(), Some(error.clone()));
        assert_eq!(sum(&comm, &data(0, 0, 1), &mut [0.0], None), Err(error.clone()), "sticky");
        // Nobody leaves before all have seen it.
        std::thread::sleep(Duration::from_millis(200));
        error
    });
    assert_eq!(errors, vec![Error::Aborted { rank: 2 }; 4]);
    assert!(start.elapsed() < config(1).deadline / 3, "not by the deadline");
}

#[test]
fn a_rank_that_never_calls_is_named_at_the_deadline() {
    // Long enough that a busy machine gets rank 2 into its call: else it is the one that is named.
    let config = Config { deadline: Duration::from_secs(2), ..config(3) };
    let errors = on_ranks(Communicator::create_local(3, &config).unwrap(), |comm| {
        if comm.rank() == 1 {
            while comm.error().is_none() {
                std::thread::sleep(Duration::from_millis(10));
            }
            return comm.error().unwrap();
        }
        let mut output = vec![0.0; 3000];
        let error = sum(&comm, &data(comm.rank(), 0, 3000), &mut output, None).unwrap_err();
        std::thread::sleep(Duration::from_millis(300));
        error
    });
    for error in errors {
        assert!(
            matches!(error, Error::Deadline { peer: 1, bytes: 12_000, rank: 0 | 2, .. }),
            "{error}"
        );
    }
}

#[test]
fn ranks_that_call_differently_learn_how_under_check() {
    let config = Config { check: true, deadline: Duration::from_secs(20), ..config(2) };
    let errors = on_ranks(Communicator::create_local(2, &config).unwrap(), |comm| {
        let count = 100 + comm.rank();
        let mut output = vec![0.0; count];
        let error = sum(&comm, &data(comm.rank(), 0, count), &mut output, None).unwrap_err();
        std::thread::sleep(Duration::from_millis(200));
        error
    });
    for error in errors {
        let Error::Mismatch(text) = &error else { panic!("{error}") };
        assert!(text.contains("100") && text.contains("101"), "{text}");
    }
}

#[test]
fn empty_calls_count_under_check() {
    let config = Config { check: true, deadline: Duration::from_secs(20), ..config(2) };
    let results = |skips: [usize; 2]| {
        on_ranks(Communicator::create_local(2, &config).unwrap(), |comm| {
            // The same sizes in another order: only the number of the call tells.
            let mut output = vec![0.0; 100];
            let mut result = Ok(());
            for call in 0..2 {
                let count = if call == skips[comm.rank()] { 0 } else { 100 };
                let input = data(comm.rank(), 0, count);
                result = result.and(sum(&comm, &input, &mut output[..count], None));
            }
            std::thread::sleep(Duration::from_millis(200));
            result
        })
    };
    for result in results([0, 1]) {
        assert!(matches!(result, Err(Error::Mismatch(_))), "{result:?}");
    }
    // Control: the same calls on both.
    assert_eq!(results([0, 0]), [Ok(()), Ok(())]);
}

#[test]
fn ranks_configured_differently_fail_together_and_name_the_one() {
    let id = peerlane::bootstrap::UniqueId::new().unwrap();
    let errors: Vec<Error> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|rank| {
                let mut config = config(3);
                config.check = rank == 1;
                scope.spawn(move || Communicator::create(&id, 3, rank, &config).unwrap_err())
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(errors.iter().all(|e| *e == errors[0]));
    assert!(
        errors[0].to_string().contains("check is false on rank 0 and true on rank 1"),
        "{}",
        errors[0]
    );
}

#[test]
fn a_call_after_a_rank_has_left_fails_at_once_and_names_it() {
    let start = Instant::now();
    let errors = on_ranks(Communicator::create_local(3, &config(3)).unwrap(), |comm| {
        let mut output = vec![0.0; 50];
        sum(&comm, &data(comm.rank(), 0, 50), &mut output, None).unwrap();
        assert_eq!(output, expected(3, 0, 50), "leaving right after a call disturbs nobody");
        match comm.rank() {
            // Leaves while rank 0 already waits and before rank 2 calls.
            1 => {
                std::thread::sleep(Duration::from_millis(100));
                comm.destroy().unwrap();
                return Error::RankLeft { rank: 1 };
            }
            2 => std::thread::sleep(Duration::from_millis(300)),
            _ => {}
        }
        let error = sum(&comm, &data(comm.rank(), 1, 50), &mut output, None).unwrap_err();
        std::thread::sleep(Duration::from_millis(400));
        error
    });
    assert_eq!(errors, vec![Error::RankLeft { rank: 1 }; 3]);
    assert!(start.elapsed() < config(1).deadline / 3, "not by the deadline");
}
