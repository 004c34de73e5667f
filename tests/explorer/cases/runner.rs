//! Runs a plan in the explorer: memory for its ranks, the arguments of every step, and what came of them.

use super::expected::{element, GAMMA, RESIDUAL};
use super::layout::*;
use super::plan::Plan;
use super::random::Random;
use super::step::{Step, EPS, WEIGHT_BIAS};
use super::unrolled::unrolled;
use super::verdict::{epoch_after, Verdict};
use crate::common::world::mix;
use peerlane::lane::Fan;
use peerlane::launch::*;
use peerlane::{DType, Protocol};

/// Room for a message of `MAX_PACKS` packs, its offset and guard bytes.
const BUFFER: usize = 1024;
pub(super) const GUARD: u8 = 0xa5;
const DEADLINE_NS: u64 = 1_000_000_000;

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

/// Memory that cases are run in, one per thread.
pub struct Runner {
    slabs: Vec<Line>,
    buffers: Vec<Line>,
    partial: Vec<Line>,
    squares: Vec<u64>,
    /// Of `delta`, by rank: what was sent in both regions, then what was seen.
    remembered: Vec<u32>,
    buffer_bytes: usize,
    args: Vec<pl_args>,
    unrolled: Vec<pl_unrolled_7>,
    /// Steps of a rank, of all cases so far, that took the kernels' short path.
    pub short_steps: u64,
    /// Of them, by `delta`.
    pub delta_steps: u64,
    /// Of these, steps of rows, in one phase and in two.
    pub short_rows: [u64; 2],
    /// Those whose blocks are a cluster.
    pub clusters: u64,
}

impl Runner {
    pub fn new() -> Self {
        Runner {
            slabs: vec![Line([0; 64]); 5 * SLAB / 64],
            buffers: Vec::new(),
            partial: vec![Line([0; 64]); 5 * MAX_PACKS as usize * 32 / 64],
            squares: Vec::new(),
            remembered: Vec::new(),
            buffer_bytes: BUFFER,
            args: Vec::new(),
            unrolled: Vec::new(),
            short_steps: 0,
            delta_steps: 0,
            short_rows: [0; 2],
            clusters: 0,
        }
    }

    fn slab(&mut self, rank: usize) -> &mut [u8] {
        // SAFETY: lines are bytes, and there are five slabs of them.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.slabs.as_mut_ptr().cast::<u8>().add(rank * SLAB),
                SLAB,
            )
        }
    }

    pub(super) fn buffer(&mut self, index: usize) -> &mut [u8] {
        // SAFETY: lines are bytes, and `run` has made room for all buffers.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.buffers.as_mut_ptr().cast::<u8>().add(index * self.buffer_bytes),
                self.buffer_bytes,
            )
        }
    }

    /// Runs a plan and compares every bit.
    pub fn run(&mut self, plan: &Plan) -> Verdict {
        let n = plan.n;
        for rank in 0..n {
            let slab = self.slab(rank);
            slab[..DATA as usize].fill(0);
            for &protocol in Protocol::ALL {
                let at = (DATA + 2 * HALF * protocol as u64) as usize;
                // What a flag announces may have any bytes before.
                let fill = [0, 0xff, 0x5a][protocol as usize];
                slab[at..at + 2 * HALF as usize].fill(fill);
            }
            slab[DELTAS as usize..][..4 * HALF as usize].fill(0);
        }
        self.remembered.clear();
        self.remembered.resize(n * 2 * (DELTA_SENT + DELTA_SEEN) / 4, 0);
        // Words in a half for the squares of a step's rows, each of which may have a neighbour that is none.
        let words = plan.steps.iter().map(|s| s.count / 8 + s.count / 8).max().unwrap_or(0);
        self.squares.clear();
        self.squares.resize(2 * n * words, plan.squares);
        for &(rank, offset, value) in &plan.planted {
            self.slab(rank)[offset as usize..][..8].copy_from_slice(&value.to_le_bytes());
        }
        // SAFETY: plain integers and raw pointers, for which zero is a value.
        let (zero, state): (pl_args, pl_state) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let channel = pl_channel::idle_at(plan.epoch);
        let mut states = vec![state; n];
        let mut channels = vec![channel; n];
        let count = plan.steps.len() * n;
        // Of every step and rank: input, output, residual, residual_out, gamma.
        let bytes = |s: &Step| s.elements(n).0.max(s.elements(n).1) * s.dtype.size() + 64;
        let largest = plan.steps.iter().map(bytes).max().unwrap_or(0);
        self.buffer_bytes = largest.next_multiple_of(64).max(BUFFER);
        self.buffers.resize(5 * count * self.buffer_bytes / 64, Line([0; 64]));
        self.args.clear();
        self.args.resize(count, zero);
        self.unrolled.resize(count, pl_unrolled_7::zeroed());
        let mut kernels = Random(mix(plan.seed ^ 0x0a11));
        let inputs: Vec<Vec<Vec<u32>>> = plan
            .steps
            .iter()
            .map(|s| {
                (0..n)
                    .map(|rank| {
                        (0..s.elements(n).0).map(|i| element(s.dtype, rank, s.seed, i)).collect()
                    })
                    .collect()
            })
            .collect();
        for (k, step) in plan.steps.iter().enumerate() {
            let size = step.dtype.size();
            let at = step.shift * size;
            for rank in 0..n {
                let index = 5 * (k * n + rank);
                (index..index + 5).for_each(|i| self.buffer(i).fill(GUARD));
                let input = index + usize::from(step.in_place);
                let (input_shift, output_shift) = step.shifts(rank);
                let own_copy = step.own_copy(rank).filter(|_| !step.in_place);
                for (i, v) in inputs[k][rank].iter().enumerate() {
                    let word = v.to_le_bytes();
                    let places = [Some((input, input_shift)), own_copy.map(|to| (index + 1, to))];
                    for (buffer, shift) in places.into_iter().flatten() {
                        self.buffer(buffer)[at + shift + i * size..][..size]
                            .copy_from_slice(&word[..size]);
                    }
                }
                let residual_out = step.norm.map(|norm| {
                    for (buffer, what, count) in
                        [(index + 2, RESIDUAL, step.count), (index + 4, GAMMA, norm.width)]
                    {
                        for i in 0..count {
                            let bits = element(DType::BF16, what, step.seed, i) as u16;
                            self.buffer(buffer)[at + i * 2..][..2]
                                .copy_from_slice(&bits.to_le_bytes());
                        }
                    }
                    index + if norm.residual_in_place { 2 } else { 3 }
                });
                let mut address = |i| self.buffer(i).as_mut_ptr().wrapping_add(at);
                let (residual, gamma) = (address(index + 2), address(index + 4));
                let residual_out = residual_out.map(&mut address);
                let input = self.buffer(input).as_mut_ptr().wrapping_add(at + input_shift);
                let output = self.buffer(index + 1).as_mut_ptr().wrapping_add(at + output_shift);
                let mut base = [0; 16];
                for (r, b) in base.iter_mut().enumerate().take(n) {
                    *b = self.slab(r).as_ptr() as u64;
                }
                let mut geo = geometry(step.protocol, &step.tables[rank], plan.late_rearms);
                let mut remembered = None;
                if step.delta {
                    geo = delta_geometry(&step.tables[rank], plan.one_delta);
                    let region = ((geo.data - DELTAS) / (2 * HALF)) as usize;
                    let each = 2 * (DELTA_SENT + DELTA_SEEN);
                    let own = self.remembered.as_mut_ptr().cast::<u8>().wrapping_add(rank * each);
                    let seen = own.wrapping_add(2 * DELTA_SENT + region * DELTA_SEEN) as u64;
                    let slab = base[rank] + geo.data;
                    let sent = own.wrapping_add(region * DELTA_SENT);
                    remembered = Some((sent, seen.wrapping_sub(slab)));
                    self.delta_steps += 1;
                }
                if plan.one_half {
                    (geo.half_bytes, geo.flags_half_bytes) = (0, 0);
                    geo.rotation = if step.delta { 0 } else { geo.rotation };
                }
                let partial = self.partial.as_mut_ptr().cast::<u8>();
                let squares = self.squares.as_mut_ptr().wrapping_add(2 * rank * words);
                let args = &mut self.args[k * n + rank];
                args.table = step.tables[rank];
                (args.step.n, args.step.rank) = (n as u32, rank as u32);
                args.step.geo = geo;
                args.step.base = base;
                args.step.state = &mut states[rank];
                args.step.channel = &mut channels[rank];
                args.step.input = input.cast();
                args.step.output = output.cast();
                args.step.partial = partial.wrapping_add(rank * MAX_PACKS as usize * 32).cast();
                args.step.squares = squares.cast();
                args.step.squares_half_bytes = 8 * words as u64;
                args.step.count = step.count as u64;
                args.step.deadline_ns = DEADLINE_NS;
                args.step.launch = k as u64 + 1;
                args.step.call = k as u64;
                args.step.dtype = step.dtype as u32;
                args.step.op = step.op as u32;
                args.step.proto = step.protocol as u32;
                args.step.chunk_packs = step.chunk_packs;
                args.step.check = plan.check.into();
                args.step.host_staged = plan.host_staged.into();
                args.step.parts = step.in_parts.into();
                if let Some((sent, seen_shift)) = remembered {
                    (args.step.sent, args.step.seen_shift) = (sent.cast(), seen_shift);
                }
                [args.step.input_part, args.step.output_part] = step.strides();
                if let (Some(norm), Some(residual_out)) = (step.norm, residual_out) {
                    args.step.rows = (step.count / norm.width) as u64;
                    args.step.width = norm.width as u64;
                    args.step.residual = residual.cast();
                    args.step.gamma = gamma.cast();
                    args.step.residual_out = residual_out.cast();
                    (args.step.eps, args.step.weight_bias) = (EPS, WEIGHT_BIAS);
                }
                let form = unrolled(args, step, (plan.blocks, plan.threads), &mut kernels);
                self.short_steps += u64::from(form.straight);
                if form.straight == 1 && form.step.rows != 0 {
                    self.short_rows[usize::from(form.phases) - 1] += 1;
                    self.clusters += u64::from(form.step.cluster != 0);
                }
                self.unrolled[k * n + rank] = form;
            }
        }
        let mut rank_steps = [0; 16];
        rank_steps[..n].copy_from_slice(&plan.rank_steps);
        let (mirror_from, mirror_to) = plan.mirror.unwrap_or((0, 0));
        let (abort_at, abort_rank) = plan.abort.unwrap_or((0, 0));
        let case = explorer::Case {
            seed: plan.seed,
            n: n as u32,
            steps: plan.steps.len() as u32,
            blocks: plan.blocks,
            threads: plan.threads,
            cpu_shape: plan.cpu_shape.into(),
            control: plan.control,
            host_staged: plan.host_staged.into(),
            drop_at: plan.drop_at,
            mirror_from,
            mirror_to,
            abort_at,
            abort_rank,
            rank_steps,
            arena: self.slabs.as_mut_ptr().cast(),
            slab_log2: SLAB_LOG2,
            args: self.args.as_ptr().cast(),
            unrolled: self.unrolled.as_ptr().cast(),
        };
        // SAFETY: everything that `args` names lives here, is large enough for the counts, and is this thread's own.
        let outcome = unsafe { explorer::run(&case) };
        let records = (0..n)
            .map(|at| {
                // SAFETY: records start each slab, and are plain integers.
                (0..n)
                    .map(|of| unsafe { self.slab(at).as_ptr().cast::<pl_record>().add(of).read() })
                    .collect()
            })
            .collect();
        let finished: Vec<u32> = (0..n)
            .map(|rank| {
                let steps = 0..=plan.steps.len() as u32;
                let epoch = channels[rank].epoch();
                steps.into_iter().find(|&k| epoch_after(plan.epoch, k) == epoch).unwrap_or(0)
            })
            .collect();
        let wrong = self.first_wrong(plan, &inputs, &states, &channels, &finished);
        Verdict { outcome, states, channels, records, finished, wrong }
    }
}
