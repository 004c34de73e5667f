//! The shapes of captured launches: all blocks of the channel behind a foreign kernel and before one, half of them in a chain, so
//! that two kernels of every rank fit the channel's share of the GPU at once.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/fakecuda.rs"]
mod fakecuda;
#[path = "common/gpu.rs"]
mod gpu;
#[path = "common/graphs.rs"]
mod graphs;
#[path = "../examples/gpu_smoke/rows.rs"]
mod rows;
#[path = "../examples/gpu_smoke/support.rs"]
mod support;

use fakecuda::{graph, in_child, Node};
use gpu::{case, config, on_ranks, KERNELS};
use graphs::{
    capture, capture_on, foreign, is_chain, is_marked, launch_foreign, replayed, replays_to,
};
use peerlane::comm::{Communicator, Config};
use peerlane::env::Env;
use peerlane::{Algorithm, DType, Lane, Op, Protocol};
use rows::{Form, Rows, RowsRank};
use support::{Case, Rank};

/// Ranks of one GPU of 132 multiprocessors: each has 33 for its captured calls.
const N: usize = 2;
const SHARE: u32 = 33;
/// 56 KiB, or 3584 packs: 28 blocks of 128 threads have one for each, and so do 14 of 256, which fit twice.
const MIDDLE: Case = case(DType::BF16, Op::Sum, 28672, 3);
const USUAL: (u32, u32) = (28, 128);
const LINKED: (u32, u32) = (14, 256);
/// The same for a kernel that walks a table.
const ODD: Case = case(DType::BF16, Op::Sum, 28671, 4);

fn settled(protocol: Protocol) -> Config {
    Config {
        algorithm: Some(Algorithm::OneShot),
        protocol: Some(protocol),
        slab_bytes: Some(32 << 20),
        ..config(N)
    }
}

fn shapes(nodes: &[Node]) -> Vec<(u32, u32)> {
    nodes.iter().map(|node| node.shape).collect()
}

/// What may run at once: a kernel, and the one behind it if that starts early.
fn most_at_once(nodes: &[Node]) -> u32 {
    let pairs = nodes.windows(2).filter(|pair| pair[1].early);
    let pairs = pairs.map(|pair| pair[0].shape.0 + pair[1].shape.0);
    pairs.chain(nodes.iter().filter(|node| node.ours).map(|node| node.shape.0)).max().unwrap()
}

#[test]
fn a_call_behind_a_foreign_kernel_has_all_blocks_and_a_chain_half_of_them() {
    let name = "a_call_behind_a_foreign_kernel_has_all_blocks_and_a_chain_half_of_them";
    in_child(name, &[KERNELS], || {
        for protocol in [Protocol::Ll, Protocol::Sentinel] {
            for case in [MIDDLE, ODD] {
                let config = settled(protocol);
                let bits = case.expected(N, &config).unwrap();
                on_ranks(Communicator::create_local(N, &config).unwrap(), |comm| {
                    let rank = Rank::new(&comm, 0, case.bytes()).unwrap();
                    let other = foreign(&rank);
                    let between = || launch_foreign(&rank, &other, false);
                    let call = || rank.call(&case, None).unwrap();
                    let made = |calls: [usize; 3]| {
                        let exec = capture(&rank, || {
                            for calls in calls {
                                between();
                                (0..calls).for_each(|_| call());
                            }
                            between();
                        });
                        let nodes = graph();
                        assert!(most_at_once(&nodes) <= SHARE, "{nodes:?}");
                        let mut foreign = nodes.split(|node| !node.ours);
                        assert_eq!(foreign.next(), Some([].as_slice()));
                        for (count, chain) in calls.into_iter().zip(foreign) {
                            let shape = if count == 1 { USUAL } else { LINKED };
                            assert_eq!(shapes(chain), vec![shape; count], "{protocol} {case:?}");
                            let early = chain.iter().filter(|node| node.early).count();
                            let lets = chain.iter().filter(|node| node.lets).count();
                            assert_eq!((early, lets), (count - 1, count - 1), "{nodes:?}");
                        }
                        assert!(replayed(&rank, &exec, &case) == bits, "{protocol} {case:?}");
                    };
                    made([1, 1, 1]);
                    made([2, 1, 3]);
                    assert!(rank.reduce(&case).unwrap() == bits, "eager");
                });
            }
        }
    });
}

/// What one rank has between its calls is nothing to the others: they cut a message alike all the same.
#[test]
fn ranks_whose_calls_have_different_neighbours_understand_each_other() {
    let name = "ranks_whose_calls_have_different_neighbours_understand_each_other";
    in_child(name, &[KERNELS], || {
        for protocol in [Protocol::Ll, Protocol::Sentinel, Protocol::Flagged] {
            for case in [MIDDLE, ODD] {
                let config = settled(protocol);
                let bits = case.expected(N, &config).unwrap();
                on_ranks(Communicator::create_local(N, &config).unwrap(), |comm| {
                    let rank = Rank::new(&comm, 0, case.bytes()).unwrap();
                    let other = foreign(&rank);
                    let exec = capture(&rank, || {
                        for _ in 0..4 {
                            if comm.rank() == 0 {
                                launch_foreign(&rank, &other, false);
                            }
                            rank.call(&case, None).unwrap();
                        }
                    });
                    let nodes = graph();
                    let mut ours = nodes.iter().filter(|node| node.ours);
                    // A flag stands for a chunk, whose size follows from the shape.
                    let alike = comm.rank() == 0 || protocol == Protocol::Flagged;
                    let shape = if alike { USUAL } else { LINKED };
                    assert!(ours.all(|node| node.shape == shape), "{protocol} {nodes:?}");
                    for _ in 0..3 {
                        assert!(replayed(&rank, &exec, &case) == bits, "{protocol} {case:?}");
                        assert_eq!(comm.error(), None);
                    }
                });
            }
        }
    });
}

#[test]
fn a_channel_has_its_own_share() {
    in_child("a_channel_has_its_own_share", &[KERNELS], || {
        let config = settled(Protocol::Sentinel);
        let bits = MIDDLE.expected(N, &config).unwrap();
        on_ranks(Communicator::create_local(N, &config).unwrap(), |comm| {
            let rank = Rank::new(&comm, 0, MIDDLE.bytes()).unwrap();
            for (channel, share, usual, linked) in [
                (Some(0), 16, (14, 256), (7, 512)),
                (Some(1), SHARE, USUAL, LINKED),
                // Not even the largest blocks make half of it do.
                (Some(2), 8, (7, 512), (7, 512)),
                (Some(3), 8, (7, 512), (7, 512)),
            ] {
                for count in [1, 3] {
                    let call = || rank.call(&MIDDLE, channel).unwrap();
                    let exec = capture(&rank, || (0..count).for_each(|_| call()));
                    let nodes = graph();
                    assert!(most_at_once(&nodes) <= share, "{nodes:?}");
                    let chained = count > 1 && usual != linked;
                    assert_eq!(shapes(&nodes), vec![if chained { linked } else { usual }; count]);
                    assert_eq!(is_chain(&nodes, count), count == 1 || chained, "{nodes:?}");
                    assert!(chained || !nodes.iter().any(is_marked), "{nodes:?}");
                    assert!(replayed(&rank, &exec, &MIDDLE) == bits);
                }
            }
        });
    });
}

#[test]
fn a_small_call_behind_a_large_one_is_chained_if_both_fit() {
    in_child("a_small_call_behind_a_large_one_is_chained_if_both_fit", &[KERNELS], || {
        let config = settled(Protocol::Sentinel);
        on_ranks(Communicator::create_local(N, &config).unwrap(), |comm| {
            // 30 blocks of the largest, of which no half would be enough.
            let large = case(DType::BF16, Op::Sum, 30 * 512 * 8, 1);
            let rank = Rank::new(&comm, 0, large.bytes()).unwrap();
            for (packs, small, chained) in [(384, (3, 128), true), (385, (4, 128), false)] {
                let few = case(DType::BF16, Op::Sum, packs * 8, 2);
                capture(&rank, || {
                    rank.call(&large, None).unwrap();
                    rank.call(&few, None).unwrap();
                });
                let nodes = graph();
                assert_eq!(shapes(&nodes), [(30, 512), small]);
                assert_eq!(is_chain(&nodes, 2), chained, "{nodes:?}");
            }
        });
    });
}

/// What a rank's GPU is or its environment says, its lane, how many blocks are pinned, and then the blocks of two rows and of a
/// cluster.
type Cluster = (&'static str, &'static str, Lane, Option<u32>, (u32, u32));
const CLUSTERS: [Cluster; 7] = [
    ("FAKECUDA_CAPABILITY", "9.0", Lane::Auto, Some(16), (14, 7)),
    ("FAKECUDA_CAPABILITY", "12.0", Lane::Auto, Some(16), (14, 7)),
    ("FAKECUDA_CAPABILITY", "9.0", Lane::Auto, None, (14, 0)), // no room beside the other rank's calls
    ("FAKECUDA_CAPABILITY", "9.0", Lane::Host, Some(16), (15, 0)), // a block more for fences
    ("FAKECUDA_CAPABILITY", "8.9", Lane::Auto, Some(16), (14, 0)),
    ("FAKECUDA_PTX_VERSION", "80", Lane::Auto, Some(16), (14, 0)),
    ("PEERLANE_CLUSTERS", "0", Lane::Auto, Some(16), (14, 0)),
];

#[test]
fn the_blocks_of_a_row_start_together_where_they_can_and_find_room() {
    let name = "the_blocks_of_a_row_start_together_where_they_can_and_find_room";
    // Not in turn in one process: the stand-in driver plays one box.
    let case = || std::env::var("CLUSTERS_CASE").ok()?.parse::<usize>().ok();
    for (at, (variable, value, ..)) in CLUSTERS.into_iter().enumerate() {
        if case().is_some_and(|case| case != at) {
            continue;
        }
        in_child(name, &[KERNELS, (variable, value), ("CLUSTERS_CASE", &at.to_string())], || {
            let case = std::env::var("CLUSTERS_CASE").unwrap().parse::<usize>().unwrap();
            let (_, _, lane, blocks, expected) = CLUSTERS[case];
            let rows = Rows { rows: 2, width: 7168, dtype: DType::BF16, seed: 1 };
            let look =
                |name: &str| std::env::var(name).ok().filter(|_| name == "PEERLANE_CLUSTERS");
            let vars = Config::from_vars(N, &Env::from_lookup(look).unwrap()).unwrap();
            let config =
                Config { lane, blocks, clusters: vars.clusters, ..settled(Protocol::Sentinel) };
            let bits = rows.expected(N, &config).unwrap();
            on_ranks(Communicator::create_local(N, &config).unwrap(), |comm| {
                let rank = RowsRank::new(&comm, 0, 2 * rows.rows * rows.width).unwrap();
                for calls in [1, 3] {
                    let exec = capture_on(&rank.stream, || {
                        (0..calls).for_each(|_| rank.call(&rows, Form::Apart, true).unwrap());
                    });
                    let seen = graph().into_iter().map(|node| (node.shape.0, node.cluster));
                    assert_eq!(seen.collect::<Vec<_>>(), vec![expected; calls], "{case}");
                    replays_to(&rank, &exec, &rows, &bits);
                }
            });
        });
    }
}

/// They are told how their rows are spread, so the first of a chain keeps the shape that it has by itself.
#[test]
fn fused_calls_of_many_rows_are_a_chain_from_the_second_on() {
    in_child("fused_calls_of_many_rows_are_a_chain_from_the_second_on", &[KERNELS], || {
        let rows = Rows { rows: 16, width: 7168, dtype: DType::BF16, seed: 1 };
        let config = settled(Protocol::Sentinel);
        let bits = rows.expected(N, &config).unwrap();
        on_ranks(Communicator::create_local(N, &config).unwrap(), |comm| {
            let rank = RowsRank::new(&comm, 0, 2 * rows.rows * rows.width).unwrap();
            let calls = || (0..4).for_each(|_| rank.call(&rows, Form::Apart, true).unwrap());
            let exec = capture_on(&rank.stream, calls);
            let nodes = graph();
            assert_eq!(shapes(&nodes), [(32, 480), (16, 448), (16, 448), (16, 448)]);
            assert!(most_at_once(&nodes) <= SHARE && !is_marked(&nodes[0]), "{nodes:?}");
            let [mut second, third, fourth] = [nodes[1], nodes[2], nodes[3]];
            second.after = 0;
            assert!(is_chain(&[second, third, fourth], 3), "{nodes:?}");
            replays_to(&rank, &exec, &rows, &bits);
        });
    });
}

/// Half of the blocks would gain nothing behind a kernel that leaves no room even for that.
#[test]
fn a_fused_call_has_fewer_blocks_only_where_they_make_it_a_link() {
    in_child("a_fused_call_has_fewer_blocks_only_where_they_make_it_a_link", &[KERNELS], || {
        let rows = Rows { rows: 16, width: 7168, dtype: DType::BF16, seed: 1 };
        let large = case(DType::BF16, Op::Sum, 30 * 512 * 8, 1);
        let config = settled(Protocol::Sentinel);
        let bits = rows.expected(N, &config).unwrap();
        on_ranks(Communicator::create_local(N, &config).unwrap(), |comm| {
            let plain = Rank::new(&comm, 0, large.bytes()).unwrap();
            let rank = RowsRank::new(&comm, 0, rows.rows * rows.width * 2).unwrap();
            for (before, first, fused, chained) in [
                (large, (30, 512), [(32, 480), (16, 448), (16, 448)], false),
                (MIDDLE, LINKED, [(16, 448); 3], true),
            ] {
                plain.fill(&before).unwrap();
                let exec = capture_on(&rank.stream, || {
                    plain.call_on(&rank.stream, &before, None).unwrap();
                    (0..3).for_each(|_| rank.call(&rows, Form::Apart, true).unwrap());
                });
                let nodes = graph();
                assert_eq!(shapes(&nodes), [[first].as_slice(), &fused].concat());
                assert!(most_at_once(&nodes) <= SHARE, "{nodes:?}");
                assert_eq!(is_chain(&nodes, 4), chained, "{nodes:?}");
                assert!(nodes[3].early, "the last two are a pair");
                replays_to(&rank, &exec, &rows, &bits);
            }
        });
    });
}

#[test]
fn pinned_blocks_are_kept_to_and_half_of_them_in_a_chain() {
    in_child("pinned_blocks_are_kept_to_and_half_of_them_in_a_chain", &[KERNELS], || {
        let config = Config { blocks: Some(56), ..settled(Protocol::Sentinel) };
        on_ranks(Communicator::create_local(N, &config).unwrap(), |comm| {
            let rank = Rank::new(&comm, 0, 4 * MIDDLE.bytes()).unwrap();
            let double = case(DType::BF16, Op::Sum, 2 * MIDDLE.count, 1);
            for (count, shape) in [(1, (56, 128)), (3, (28, 256))] {
                capture(&rank, || (0..count).for_each(|_| rank.call(&double, None).unwrap()));
                assert!(is_chain(&graph(), count), "{:?}", graph());
                assert_eq!(shapes(&graph()), vec![shape; count]);
            }
        });
    });
}
