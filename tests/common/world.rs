//! Ranks as threads over plain heap slabs: what a communicator sets up, with nothing else around it.

use super::oracle;
use peerlane::device::cpu::{all_reduce, partial_bytes};
use peerlane::launch::*;
use peerlane::{DType, Op, Protocol};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Makes the table of a rank: (n, rank, pull).
pub type Builder = fn(usize, usize, bool) -> pl_table;

/// Packs of the largest message these slabs carry.
pub const MAX_PACKS: usize = 2400;
pub const CHUNK_PACKS: u32 = 100;

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u64; 8]);

/// Memory with a stable address and 64-byte alignment.
pub struct Block(Vec<Line>);

impl Block {
    pub fn new(bytes: usize, fill: u64) -> Self {
        Block(vec![Line([fill; 8]); bytes.div_ceil(64).max(1)])
    }
    pub fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: a Line is 64 bytes of integers.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * 64) }
    }
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 64) }
    }
}

pub struct World {
    pub n: usize,
    pub proto: Protocol,
    pub tables: Vec<pl_table>,
    pub geo: pl_geometry,
    /// The region of `flagged` in a world that starts with `ll`.
    flagged: pl_geometry,
    slabs: Vec<Block>,
    states: Vec<pl_state>,
    channels: Vec<pl_channel>,
    partials: Vec<Block>,
    pub deadline_ns: u64,
    pub check: bool,
    /// Of all ranks' calls; a test that wants them to differ changes the arguments.
    pub signature: u64,
}

/// One all-reduce, as every rank makes it.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub dtype: DType,
    pub op: Op,
    pub count: usize,
    pub in_place: bool,
    /// Elements by which the buffers are off a 16-byte boundary.
    pub shift: usize,
    pub seed: u64,
}

static LAUNCH: AtomicU64 = AtomicU64::new(1);

/// What a thread needs to run a rank: addresses only. The world outlives the threads (they are scoped).
#[derive(Clone, Copy)]
pub struct Rank {
    pub args: pl_args,
}
// SAFETY: the addresses point into the world, whose memory the kernels share by design, through atomics.
unsafe impl Send for Rank {}

impl World {
    pub fn new(n: usize, proto: Protocol, pull: bool, build: Builder) -> Self {
        Self::starting_at(n, proto, pull, build, 1)
    }

    pub fn starting_at(n: usize, proto: Protocol, pull: bool, build: Builder, epoch: u64) -> Self {
        let tables: Vec<_> = (0..n).map(|r| build(n, r, pull)).collect();
        let slot_bytes = MAX_PACKS as u64 * 32 * if proto == Protocol::Ll { 2 } else { 1 };
        let slots = tables[0].slots as u64;
        let flag_chunks = (MAX_PACKS as u32).div_ceil(CHUNK_PACKS);
        let half_bytes = slots * slot_bytes;
        let flags_half_bytes = tables[0].flag_slots as u64 * flag_chunks as u64 * 64;
        let control = (16 * size_of::<pl_record>() + 32 * size_of::<pl_call>()) as u64;
        let control = control.div_ceil(64) * 64;
        let geo = pl_geometry {
            records: 0,
            calls: 16 * size_of::<pl_record>() as u64,
            flags: control,
            flags_half_bytes,
            data: control + 2 * flags_half_bytes,
            half_bytes,
            slot_bytes,
            flag_chunks,
            ll: control + 2 * flags_half_bytes,
            ll_half_bytes: if proto == Protocol::Ll { half_bytes } else { 0 },
            rotation: 1,
        };
        let ll_end = geo.data + 2 * half_bytes;
        let flagged = pl_geometry {
            data: ll_end,
            half_bytes: slots * MAX_PACKS as u64 * 32,
            slot_bytes: MAX_PACKS as u64 * 32,
            ..geo
        };
        let room = if proto == Protocol::Ll { 2 * flagged.half_bytes } else { 0 };
        let bytes = (ll_end + room) as usize;
        let slab = || {
            let mut b = Block::new(bytes, 0);
            if proto == Protocol::Sentinel {
                b.bytes_mut()[geo.data as usize..].fill(0xff);
            }
            b
        };
        // SAFETY: plain integers.
        let state = unsafe { std::mem::zeroed::<pl_state>() };
        let channel = pl_channel::idle_at(epoch);
        World {
            n,
            proto,
            tables,
            geo,
            flagged,
            slabs: (0..n).map(|_| slab()).collect(),
            states: vec![state; n],
            channels: vec![channel; n],
            partials: (0..n).map(|_| Block::new(MAX_PACKS * 32, 0)).collect(),
            deadline_ns: 20_000_000_000,
            check: false,
            signature: 0,
        }
    }

    pub fn state(&self, rank: usize) -> pl_state {
        self.states[rank]
    }
    pub fn channel(&self, rank: usize) -> pl_channel {
        self.channels[rank]
    }
    /// What a rank's host does to end the waits of a step that is running.
    pub fn raise(&self, rank: usize, reason: u32) {
        let word = &raw const self.states[rank].abort;
        // SAFETY: the word is shared with the kernel, hence atomic, and lives as long as the world.
        let word = unsafe { AtomicU32::from_ptr(word.cast_mut()) };
        word.store(reason, Ordering::Release);
    }
    /// A world of `ll` that goes on with `flagged` in the same slabs, or back.
    pub fn switch_protocol(&mut self) {
        self.proto = match self.proto {
            Protocol::Ll => Protocol::Flagged,
            _ => Protocol::Ll,
        };
        std::mem::swap(&mut self.geo, &mut self.flagged);
    }
    /// All ranks go on at this epoch.
    pub fn jump_to(&mut self, epoch: u64) {
        self.channels.iter_mut().for_each(|c| *c = pl_channel::idle_at(epoch));
    }
    pub fn abort(&mut self, rank: usize, reason: u32) {
        self.states[rank].abort = reason;
    }
    /// Bytes of the data region of a rank's slab, one half.
    pub fn half(&mut self, rank: usize, half: usize) -> &mut [u8] {
        let at = (self.geo.data + half as u64 * self.geo.half_bytes) as usize;
        let len = self.geo.half_bytes as usize;
        &mut self.slabs[rank].bytes_mut()[at..at + len]
    }
    /// The record that `of` has left in `at`'s slab.
    pub fn record(&self, at: usize, of: usize) -> pl_record {
        let offset = self.geo.records as usize + of * size_of::<pl_record>();
        // SAFETY: the slab holds 16 records there.
        unsafe { self.slabs[at].bytes().as_ptr().add(offset).cast::<pl_record>().read() }
    }

    pub fn rank(&self, rank: usize, call: &Call, input: u64, output: u64) -> Rank {
        let mut base = [0; 16];
        for (b, slab) in base.iter_mut().zip(&self.slabs) {
            *b = slab.address();
        }
        assert!(partial_bytes(call.dtype, call.count as u64) <= MAX_PACKS as u64 * 32);
        Rank {
            args: pl_args {
                table: self.tables[rank],
                step: pl_step {
                    n: self.n as u32,
                    rank: rank as u32,
                    geo: self.geo,
                    base,
                    state: &self.states[rank] as *const pl_state as *mut pl_state,
                    channel: &self.channels[rank] as *const pl_channel as *mut pl_channel,
                    report: std::ptr::null_mut(),
                    input: input as *const _,
                    output: output as *mut _,
                    partial: self.partials[rank].address() as *mut _,
                    count: call.count as u64,
                    deadline_ns: self.deadline_ns,
                    launch: LAUNCH.fetch_add(1, Ordering::Relaxed),
                    call: call.seed,
                    signature: self.signature,
                    dtype: call.dtype as u32,
                    op: call.op as u32,
                    proto: self.proto as u32,
                    algo: 0,
                    chunk_packs: CHUNK_PACKS,
                    check: self.check as u32,
                    yield_: 1,
                    host_staged: 0,
                    dependents: 0,
                    rows: 0,
                    width: 0,
                    residual: std::ptr::null(),
                    gamma: std::ptr::null(),
                    residual_out: std::ptr::null_mut(),
                    eps: 0.0,
                    weight_bias: 0.0,
                    parts: 0,
                    input_part: 0,
                    output_part: 0,
                    squares: std::ptr::null_mut(),
                    squares_half_bytes: 0,
                    block_units: 0,
                    row_units: 0,
                    row_magic: 0,
                    cluster: 0,
                    seen_shift: 0,
                    sent: std::ptr::null_mut(),
                },
            },
        }
    }

    /// All ranks make all calls; panics at the first wrong bit.
    pub fn run(&self, calls: &[Call]) {
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..self.n)
                .map(|r| scope.spawn(move || calls.iter().for_each(|c| self.one(r, c))))
                .collect();
            for thread in all {
                thread.join().unwrap();
            }
        });
        for r in 0..self.n {
            assert_eq!(self.states[r].abort, 0);
        }
    }

    fn one(&self, rank: usize, call: &Call) {
        let mut buffers = Buffers::new(rank, call);
        buffers.run(self, rank, call);
        buffers.verify(self.n, rank, call);
    }
}

/// The buffers of one call of one rank, with guard bytes around the output.
pub struct Buffers {
    input: Block,
    output: Block,
    at: usize,
    len: usize,
}

const GUARD: u64 = 0xA5A5_A5A5_A5A5_A5A5;

impl Buffers {
    pub fn new(rank: usize, call: &Call) -> Self {
        let size = call.dtype.size();
        let (at, len) = (64 + call.shift * size, call.count * size);
        let mut b = Buffers {
            input: Block::new(at + len + 64, GUARD),
            output: Block::new(at + len + 64, GUARD),
            at,
            len,
        };
        let target = if call.in_place { &mut b.output } else { &mut b.input };
        for i in 0..call.count {
            let bits = payload(call, rank, i).to_le_bytes();
            target.bytes_mut()[at + i * size..][..size].copy_from_slice(&bits[..size]);
        }
        b
    }

    pub fn kernel_args(&self, world: &World, rank: usize, call: &Call) -> Rank {
        let output = self.output.address() + self.at as u64;
        let input = if call.in_place { output } else { self.input.address() + self.at as u64 };
        world.rank(rank, call, input, output)
    }

    pub fn run(&mut self, world: &World, rank: usize, call: &Call) {
        let r = self.kernel_args(world, rank, call);
        // SAFETY: the world lives, its slabs have the size of its geometry, and the buffers that of the call.
        unsafe { all_reduce(&r.args) }.unwrap();
    }

    pub fn output(&self, call: &Call) -> Vec<u64> {
        let size = call.dtype.size();
        (0..call.count)
            .map(|i| {
                let mut bits = [0; 8];
                bits[..size].copy_from_slice(&self.output.bytes()[self.at + i * size..][..size]);
                u64::from_le_bytes(bits)
            })
            .collect()
    }

    fn verify(&self, n: usize, rank: usize, call: &Call) {
        for (i, got) in self.output(call).into_iter().enumerate() {
            let inputs: Vec<_> = (0..n).map(|r| payload(call, r, i)).collect();
            let want = oracle::reduce(call.dtype, call.op, &inputs);
            assert!(
                got == want,
                "rank {rank} of {n}, element {i}: {got:#x}, must be {want:#x}; {call:?}; {inputs:x?}"
            );
        }
        self.guards_hold(call);
    }

    pub fn guards_hold(&self, call: &Call) {
        let bytes = self.output.bytes();
        let outside = bytes[..self.at].iter().chain(&bytes[self.at + self.len..]);
        assert!(outside.clone().all(|&b| b == GUARD as u8), "wrote outside the output: {call:?}");
    }
}

/// Element i of a rank's input: small integers, and in every fourth place any bits at all (NaN payloads, infinities,
/// subnormals, signed zeros, all ones).
pub fn payload(call: &Call, rank: usize, i: usize) -> u64 {
    let r = mix(call.seed ^ ((rank as u64) << 40) ^ ((i as u64) << 8));
    let bits = match r % 4 {
        0 => match (r >> 8) % 8 {
            0 => 0,
            1 => 1 << (8 * call.dtype.size() - 1), // -0, or the smallest integer
            2 | 3 => u64::MAX,
            4 => (r >> 16) & 0x1ff, // subnormals
            _ => mix(r),
        },
        _ => small(call.dtype, (r >> 8) as i64 % 8),
    };
    bits & (u64::MAX >> (64 - 8 * call.dtype.size()))
}

fn small(dtype: DType, v: i64) -> u64 {
    match dtype {
        DType::F16 => half::f16::from_f64(v as f64).to_bits() as u64,
        DType::BF16 => half::bf16::from_f64(v as f64).to_bits() as u64,
        DType::F32 => (v as f32).to_bits() as u64,
        DType::F64 => (v as f64).to_bits(),
        _ => v as u64,
    }
}

/// splitmix64.
pub fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A call with nothing special about it.
pub const PLAIN: Call =
    Call { dtype: DType::F32, op: Op::Sum, count: 1000, in_place: false, shift: 0, seed: 7 };
