//! No value is special to the kernels: every bit pattern of the 16-bit floats in every lane of a pack, and whatever a
//! protocol or an arithmetic could trip over in the wider types, against the naive oracle, bit for bit.

#![allow(clippy::unwrap_used)]

mod common;

use common::oracle::reduce;
use common::tables::{doubling, one_shot, two_shot};
use common::world::{Block, Builder, Call, World, MAX_PACKS, PLAIN};
use peerlane::device::cpu::all_reduce;
use peerlane::{DType, Op, Protocol};

const WAYS: [(Protocol, bool); 4] = [
    (Protocol::Ll, false),
    (Protocol::Sentinel, false),
    (Protocol::Flagged, false),
    (Protocol::Flagged, true),
];
/// Schedules in which values travel as they are, as rounded results, and as fp32 partials.
const SCHEDULES: [(usize, Builder); 3] = [(2, one_shot), (3, two_shot), (4, doubling)];

/// All ranks reduce `count` elements, rank r's element i being `element(r, i)`.
fn sweep(
    world: &World,
    dtype: DType,
    op: Op,
    count: usize,
    element: &(dyn Fn(usize, usize) -> u64 + Sync),
) {
    let size = dtype.size();
    let call = Call { dtype, op, count, ..PLAIN };
    let want: Vec<u64> = (0..count)
        .map(|i| reduce(dtype, op, &(0..world.n).map(|r| element(r, i)).collect::<Vec<_>>()))
        .collect();
    std::thread::scope(|scope| {
        for rank in 0..world.n {
            let (want, call) = (&want, &call);
            scope.spawn(move || {
                let mut input = Block::new(count * size, 0);
                for i in 0..count {
                    let bits = element(rank, i).to_le_bytes();
                    input.bytes_mut()[i * size..][..size].copy_from_slice(&bits[..size]);
                }
                let output = Block::new(count * size, 0);
                let step = world.rank(rank, call, input.address(), output.address());
                // SAFETY: the world lives, its slabs have the size of its geometry, the buffers that of the call.
                unsafe { all_reduce(&step.args) }.unwrap();
                assert_eq!(world.state(rank).abort, 0);
                for (i, want) in want.iter().enumerate() {
                    let mut bits = [0; 8];
                    bits[..size].copy_from_slice(&output.bytes()[i * size..][..size]);
                    let got = u64::from_le_bytes(bits);
                    let inputs: Vec<u64> = (0..world.n).map(|r| element(r, i)).collect();
                    assert!(
                        got == *want,
                        "{dtype} {op} {} of {} ranks, element {i} (lane {}): {inputs:x?} gave {got:#x}, not {want:#x}",
                        world.proto,
                        world.n,
                        i % (16 / size)
                    );
                }
            });
        }
    });
}

const PATTERNS: usize = 1 << 16;
const LANES: usize = 8;
const PIECE: usize = MAX_PACKS * LANES;

/// Pattern of place `at` when every pattern is to meet every lane: place `at` of round `lane` is a rotation by one more.
fn pattern(at: usize, round: usize) -> u64 {
    ((at + round) % PATTERNS) as u64
}

fn every_pattern(dtype: DType) {
    let mut met = vec![0u8; PATTERNS];
    for (n, build) in SCHEDULES {
        for (proto, pull) in WAYS {
            let world = World::new(n, proto, pull, build);
            for round in 0..LANES {
                for start in (0..PATTERNS).step_by(PIECE) {
                    let count = PIECE.min(PATTERNS - start);
                    (0..count)
                        .for_each(|i| met[pattern(start + i, round) as usize] |= 1 << (i % LANES));
                    // One rank has the pattern, the others zero: what comes out is the pattern, or the one NaN.
                    let owner = round % n;
                    sweep(&world, dtype, Op::Sum, count, &|r, i| {
                        if r == owner {
                            pattern(start + i, round)
                        } else {
                            0
                        }
                    });
                    // All ranks have patterns, each another one.
                    let op = Op::ALL[(round + start) % Op::ALL.len()];
                    sweep(&world, dtype, op, count, &|r, i| {
                        pattern((start + i + r * 21_859) * (1 + 2 * r), round)
                    });
                }
            }
        }
    }
    assert!(met.iter().all(|&lanes| lanes == 0xff), "some pattern was never in some lane");
}

#[test]
fn every_f16_in_every_lane() {
    every_pattern(DType::F16);
}

#[test]
fn every_bf16_in_every_lane() {
    every_pattern(DType::BF16);
}

/// Values at the edges of a type, and words that a protocol uses itself.
fn edges(dtype: DType) -> Vec<u64> {
    let words = [
        0,
        u64::MAX,
        0x7fff_7fff_7fff_7fff,
        0x7fff_ffff_7fff_ffff,
        0x0000_0000_ffff_ffff,
        0xffff_ffff_0000_0000,
    ];
    let bits = 8 * dtype.size() as u32;
    let top = 1u64 << (bits - 1);
    let mut all: Vec<u64> = words.to_vec();
    match dtype {
        DType::F32 => all.extend(
            [
                0.0,
                -0.0,
                1.0,
                -1.0,
                f32::MIN_POSITIVE,
                -f32::MIN_POSITIVE,
                f32::MAX,
                f32::MIN,
                f32::INFINITY,
                f32::NEG_INFINITY,
                f32::EPSILON,
                16_777_216.0,
            ]
            .map(|v: f32| u64::from(v.to_bits()))
            .into_iter()
            // Subnormals, the least and the greatest; NaN: quiet, signalling, negative.
            .chain([
                1,
                0x007f_ffff,
                0x8000_0001,
                0x807f_ffff,
                0x7fc0_0000,
                0x7f80_0001,
                0xffc0_0000,
                0xff80_0001,
            ]),
        ),
        DType::F64 => all.extend(
            [
                0.0,
                -0.0,
                1.0,
                -1.0,
                f64::MIN_POSITIVE,
                -f64::MIN_POSITIVE,
                f64::MAX,
                f64::MIN,
                f64::INFINITY,
                f64::NEG_INFINITY,
                f64::EPSILON,
                9_007_199_254_740_992.0,
            ]
            .map(|v: f64| v.to_bits())
            .into_iter()
            .chain([
                1,
                (1 << 52) - 1,
                top | 1,
                top | ((1 << 52) - 1),
                0x7ff8 << 48,
                (0x7ff0 << 48) | 1,
                0xfff8 << 48,
                (0xfff0 << 48) | 1,
            ]),
        ),
        _ => all.extend([1, 2, 3, top, top - 1, top + 1, top >> 1, u64::MAX - 1, u64::MAX / 3]),
    }
    let mask = u64::MAX >> (64 - bits);
    all.iter_mut().for_each(|v| *v &= mask);
    all.sort_unstable();
    all.dedup();
    all
}

/// Every pair of edges in every lane, a third value beside them, over every way that the type may travel.
#[test]
fn every_pair_of_edges_in_every_lane() {
    let wide = DType::ALL.iter().copied().filter(|d| d.size() != 2);
    for dtype in wide {
        let edges = edges(dtype);
        let (m, lanes) = (edges.len(), 16 / dtype.size());
        // One more than a multiple of the lanes, so that going around moves a pair to the next lane.
        let pairs = (m * m).next_multiple_of(lanes) + 1;
        let count = pairs * lanes;
        let at = |r: usize, i: usize| {
            let pair = i % pairs % (m * m);
            edges[[pair / m, pair % m, (pair + i / pairs) % m, pair / 2 % m][r]]
        };
        let mut seen = vec![0u32; m * m];
        (0..count).for_each(|i| seen[i % pairs % (m * m)] |= 1 << (i % lanes));
        assert!(seen.iter().all(|&s| s == u32::MAX >> (32 - lanes)));
        assert!(count * dtype.size() <= MAX_PACKS * 16);
        for (n, build) in SCHEDULES {
            for (proto, pull) in WAYS {
                if proto == Protocol::Sentinel && !dtype.has_sentinel() {
                    continue;
                }
                let world = World::new(n, proto, pull, build);
                for &op in Op::ALL {
                    sweep(&world, dtype, op, count, &at);
                }
            }
        }
    }
}
