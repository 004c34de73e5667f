//! Every schedule that exists, for 1 to 16 ranks, over every protocol, gives the bits of the tree.
//!
//! Ranks are threads over real slabs with the real layout. All schedules and protocols of one rank count run one after
//! another on one channel, as in a communicator, so a schedule that leaves a slot in a state that the next one trips over
//! fails here.

#![allow(clippy::unwrap_used)]

mod common;

use common::partitions::{islands, shuffled};
use half::bf16;
use peerlane::device::cpu::{all_reduce, partial_bytes};
use peerlane::lane::{longest_piece, step_packs, HostSlab, Layout};
use peerlane::launch::{pl_args, pl_channel, pl_geometry, pl_state, pl_table};
use peerlane::schedule::{build, check, exists, Islands, Tree};
use peerlane::{Algorithm, DType, Direction, Op, Protocol};

/// Large enough for the bulk protocol to rotate over more than two buffers.
const SLAB: u64 = 8 << 20;
const WAYS: [(Protocol, Direction); 4] = [
    (Protocol::Ll, Direction::Push),
    (Protocol::Sentinel, Direction::Push),
    (Protocol::Flagged, Direction::Push),
    (Protocol::Flagged, Direction::Pull),
];

/// A step that all ranks run: the tables of one schedule, over one protocol, on one message.
struct Step {
    name: String,
    tables: Vec<pl_table>,
    tree: Tree,
    protocol: Protocol,
    geometry: pl_geometry,
    dtype: DType,
    op: Op,
    count: usize,
    seed: usize,
}

/// Element `i` of `rank`: values whose fp32 sums depend on the order, so that another tree gives other bits.
fn element(rank: usize, seed: usize, i: usize) -> f32 {
    let h = (rank * 7919 + seed * 104_729 + i * 31).wrapping_mul(0x9e37_79b1) >> 7;
    ((h % 4093) as f32 - 2046.0) * [1e-3, 1.0, 37.7, 1e4][h % 4]
}

fn bits(dtype: DType, v: f32) -> u32 {
    match dtype {
        DType::BF16 => bf16::from_f32(v).to_bits().into(),
        DType::I32 => v as i32 as u32,
        _ => v.to_bits(),
    }
}

/// The oracle: one element, along the tree, rounded once.
fn reduced(step: &Step, n: usize, i: usize) -> u32 {
    fn float(tree: &Tree, op: Op, leaf: &dyn Fn(u8) -> f32) -> f32 {
        match tree {
            Tree::Leaf(rank) => leaf(*rank),
            Tree::Sum(a, b) => {
                let (a, b) = (float(a, op, leaf), float(b, op, leaf));
                match op {
                    Op::Max => a.max(b),
                    Op::Min => a.min(b),
                    _ => a + b,
                }
            }
        }
    }
    let of = |rank: u8| bits(step.dtype, element(rank.into(), step.seed, i));
    if step.dtype == DType::I32 {
        return (0..n).fold(0, |sum, rank| sum.wrapping_add(of(rank as u8)));
    }
    let value = |rank: u8| match step.dtype {
        DType::BF16 => bf16::from_bits(of(rank) as u16).to_f32(),
        _ => f32::from_bits(of(rank)),
    };
    let sum = float(&step.tree, step.op, &value);
    bits(step.dtype, if step.op == Op::Avg { sum / n as f32 } else { sum })
}

fn partitions_of(n: usize) -> Vec<Islands> {
    let in_order: Vec<usize> = (0..n).collect();
    let mixed = shuffled(n, n as u64);
    let mut sizes = vec![vec![n]];
    if n >= 2 {
        sizes.push(vec![n.div_ceil(2), n / 2]);
        sizes.push(vec![1, n - 1]);
    }
    if n >= 4 {
        sizes.push(vec![n - 3, 1, 2]);
        sizes.push(vec![n / 4, n / 4, n / 4, n - 3 * (n / 4)]);
    }
    let mut all: Vec<Islands> = sizes.iter().map(|s| islands(s, &in_order)).collect();
    all.extend(sizes.iter().skip(1).map(|s| islands(s, &mixed)));
    all.dedup();
    all
}

/// Everything there is for `n` ranks.
fn steps(n: usize, layout: &Layout) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for islands in partitions_of(n) {
        let tree = Tree::new(&islands);
        for &algorithm in Algorithm::ALL {
            if !exists(algorithm, &islands) {
                continue;
            }
            let schedule = build(algorithm, &islands).unwrap();
            for (protocol, direction) in WAYS {
                let tables = schedule.tables(direction).unwrap();
                check(&tables, &tree).unwrap();
                let geometry = layout.geometry(0, protocol, &tables[0]);
                // Fewer elements than ranks, an odd number, an even one.
                for count in [n / 2 + 1, 509, 1024] {
                    let k = steps.len();
                    // There are 12 steps per schedule: without the second term each way would see one type only.
                    let (dtype, op) = match (k + k / 12) % 7 {
                        0 if protocol != Protocol::Sentinel => (DType::I32, Op::Sum),
                        1 => (DType::F32, Op::Avg),
                        2 => (DType::F32, Op::Sum),
                        3 => (DType::BF16, Op::Max),
                        4 => (DType::BF16, Op::Avg),
                        5 => (DType::F32, Op::Min),
                        _ => (DType::BF16, Op::Sum),
                    };
                    let most = step_packs(&geometry, &tables[0], dtype, protocol);
                    let count = count.min(most as usize * 16 / dtype.size());
                    steps.push(Step {
                        name: format!(
                            "n {n}, islands {islands}, {algorithm} {protocol} {direction}, {count} of {dtype} {op}"
                        ),
                        tables: tables.clone(),
                        tree: tree.clone(),
                        protocol,
                        geometry,
                        dtype,
                        op,
                        count,
                        seed: k,
                    });
                }
            }
        }
    }
    steps
}

/// Runs all steps as `rank`. Returns what went wrong first.
fn run(rank: usize, bases: &[u64], steps: &[Step]) -> Result<(), String> {
    let n = bases.len();
    // SAFETY: plain integers and raw pointers, for which zero is a value.
    let (mut args, mut state): (Box<pl_args>, pl_state) =
        unsafe { (Box::new(std::mem::zeroed()), std::mem::zeroed()) };
    let mut channel = pl_channel::idle_at(1);
    let mut partial = vec![0u128; 1 << 14];
    for (k, step) in steps.iter().enumerate() {
        let size = step.dtype.size();
        let mut input: Vec<u8> = Vec::new();
        for i in 0..step.count {
            let word = bits(step.dtype, element(rank, step.seed, i)).to_le_bytes();
            input.extend_from_slice(&word[..size]);
        }
        let mut output = vec![0xaau8; input.len()];
        let in_place = k % 3 == 0;
        assert!(partial_bytes(step.dtype, step.count as u64) <= 16 * partial.len() as u64);
        args.table = step.tables[rank];
        (args.step.n, args.step.rank) = (n as u32, rank as u32);
        args.step.geo = step.geometry;
        args.step.base[..n].copy_from_slice(bases);
        args.step.state = &mut state;
        args.step.channel = &mut channel;
        args.step.output = if in_place { &mut input } else { &mut output }.as_mut_ptr().cast();
        args.step.input = if in_place { args.step.output } else { input.as_mut_ptr().cast() };
        args.step.partial = partial.as_mut_ptr().cast();
        args.step.count = step.count as u64;
        args.step.deadline_ns = 60_000_000_000;
        args.step.launch = k as u64 + 1;
        args.step.call = k as u64;
        args.step.dtype = step.dtype as u32;
        args.step.op = step.op as u32;
        args.step.proto = step.protocol as u32;
        args.step.yield_ = 1;
        let packs = (step.count * size).div_ceil(16) as u64;
        let least = longest_piece(&args.table, packs).div_ceil(step.geometry.flag_chunks.into());
        args.step.chunk_packs = (1 + k as u64 % 40).max(least) as u32;
        // SAFETY: a checked table over slabs that outlive the threads, and buffers as long as the count says.
        unsafe { all_reduce(&args) }.map_err(|e| format!("{}: {e}", step.name))?;
        if state.abort != 0 {
            return Err(format!("{}: rank {rank} gave up, {:?}", step.name, state.record));
        }
        let got = if in_place { &input } else { &output };
        for (i, element) in got.chunks(size).enumerate() {
            let mut word = [0; 4];
            word[..size].copy_from_slice(element);
            let (got, want) = (u32::from_le_bytes(word), reduced(step, n, i));
            if got != want {
                return Err(format!(
                    "{}: rank {rank}, element {i}: {got:#x}, not {want:#x}",
                    step.name
                ));
            }
        }
    }
    Ok(())
}

#[test]
fn every_schedule_and_protocol_gives_the_bits_of_the_tree() {
    let layout = Layout::new(SLAB, 1).unwrap().with_rotation();
    let mut total = 0;
    for n in 1..=16 {
        let steps = steps(n, &layout);
        total += steps.len();
        let slabs: Vec<HostSlab> = (0..n)
            .map(|_| {
                let mut slab = HostSlab::create(layout.bytes() as usize).unwrap();
                let (at, bytes) = layout.region(0, Protocol::Sentinel);
                slab.arm(at, bytes).unwrap();
                slab
            })
            .collect();
        let bases: Vec<u64> = slabs.iter().map(|s| s.mapping().base().as_ptr() as u64).collect();
        let results: Vec<Result<(), String>> = std::thread::scope(|scope| {
            let (bases, steps) = (&bases, &steps);
            let ranks: Vec<_> =
                (0..n).map(|rank| scope.spawn(move || run(rank, bases, steps))).collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        });
        for result in results {
            result.unwrap();
        }
    }
    println!("{total} steps");
    assert!(total > 4000, "{total} steps is not every schedule");
}

/// The control: an oracle that sums in rank order must disagree somewhere, or the data would not show a wrong tree.
#[test]
fn the_data_tells_trees_apart() {
    let layout = Layout::new(SLAB, 1).unwrap().with_rotation();
    let step = steps(8, &layout).into_iter().find(|s| s.dtype == DType::F32 && s.op == Op::Sum);
    let step = step.unwrap();
    let differs = (0..step.count).filter(|&i| {
        let flat: f32 = (0..8).map(|r| element(r, step.seed, i)).sum();
        flat.to_bits() != reduced(&step, 8, i)
    });
    assert!(differs.count() > step.count / 10);
}
