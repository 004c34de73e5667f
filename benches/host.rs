//! What the host does around a collective: building and proving a schedule, making a call, and bringing ranks together.
//! The collectives themselves are measured by `peerlane bench`, where all ranks must make the same number of calls.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use criterion::{criterion_group, criterion_main, BenchmarkId, Criterion};
use peerlane::bootstrap::UniqueId;
use peerlane::comm::{Communicator, Config};
use peerlane::device::Stream;
use peerlane::schedule::{build, check, Islands, Tree};
use peerlane::{Algorithm, DType, Direction, Op, Result};
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// A new communicator builds and proves every schedule that it may use, so this is part of set-up.
fn schedules(c: &mut Criterion) {
    let mut group = c.benchmark_group("build and check a schedule");
    for (algorithm, n, text) in [
        (Algorithm::OneShot, 8, "0-7"),
        (Algorithm::TwoShot, 8, "0-7"),
        (Algorithm::Hierarchical, 8, "0-3,4-7"),
        (Algorithm::Staged, 8, "0-3,4-7"),
        (Algorithm::Pairwise, 16, "0-15"),
        (Algorithm::Staged, 16, "0-3,4-7,8-11,12-15"),
    ] {
        let islands = Islands::parse(n, text).expect("a partition");
        let tree = Tree::new(&islands);
        group.bench_function(BenchmarkId::new(algorithm.name(), text), |b| {
            b.iter(|| {
                let schedule = build(algorithm, black_box(&islands)).expect("a schedule");
                let tables = schedule.tables(Direction::Push).expect("tables");
                check(&tables, &tree).expect("a proof")
            });
        });
    }
    group.finish();
}

/// One rank waits for nobody, so that the time is that of the call itself: on the caller's thread, and queued.
fn calls(c: &mut Criterion) {
    let config = Config::from_env(1).expect("an environment that makes sense");
    let comm = Communicator::create_local(1, &config).expect("a communicator").remove(0);
    let stream = Stream::new().expect("a stream");
    let input = [1f32; 16];
    let mut output = [0f32; 16];
    let mut call = |stream: Option<&Stream>| {
        // SAFETY: both buffers hold 16 elements and outlive the call, or the synchronisation that follows it.
        unsafe {
            comm.all_reduce(
                input.as_ptr().cast(),
                output.as_mut_ptr().cast(),
                16,
                DType::F32,
                Op::Sum,
                stream,
            )
            .expect("an all-reduce");
        }
    };
    let mut group = c.benchmark_group("call");
    group.bench_function("until the result is there", |b| b.iter(|| call(None)));
    group.bench_function("until it is queued", |b| {
        b.iter_custom(|calls| {
            // Few at a time: what is measured is queueing, not a full queue.
            const BURST: u64 = 64;
            let mut queued = Duration::ZERO;
            let mut left = calls;
            while left > 0 {
                let burst = left.min(BURST);
                let start = Instant::now();
                for _ in 0..burst {
                    call(Some(&stream));
                }
                queued += start.elapsed();
                stream.synchronize().expect("an idle stream");
                left -= burst;
            }
            queued
        });
    });
    group.finish();
}

/// From the first rank's arrival until the last one holds a communicator, and the goodbye.
fn bootstrap(c: &mut Criterion) {
    const RANKS: usize = 8;
    let config = Config::from_env(RANKS).expect("an environment that makes sense");
    let mut group = c.benchmark_group("bootstrap");
    group.sample_size(10);
    group.bench_function(BenchmarkId::new("create and destroy, ranks", RANKS), |b| {
        b.iter_custom(|rounds| {
            let mut total = Duration::ZERO;
            for _ in 0..rounds {
                let id = UniqueId::new().expect("an id");
                let start = Barrier::new(RANKS);
                let times: Vec<Duration> = std::thread::scope(|scope| {
                    let ranks: Vec<_> = (0..RANKS)
                        .map(|rank| {
                            let (id, start, config) = (&id, &start, &config);
                            scope.spawn(move || -> Result<Duration> {
                                start.wait();
                                let begin = Instant::now();
                                Communicator::create(id, RANKS, rank, config)?.destroy()?;
                                Ok(begin.elapsed())
                            })
                        })
                        .collect();
                    let joined = ranks.into_iter().map(|rank| rank.join().expect("a rank"));
                    joined.map(|time| time.expect("a communicator")).collect()
                });
                total += times.into_iter().max().unwrap_or_default();
            }
            total
        });
    });
    group.finish();
}

criterion_group!(benches, schedules, calls, bootstrap);
criterion_main!(benches);
