//! The fused add + RMSNorm by itself: data, a naive reference for every bit, an fp64 oracle, and calls in every aliasing form.

// Each test binary that includes this uses its own share of it.
#![allow(dead_code)]

use half::{bf16, f16};
use peerlane::comm::{AddRmsNorm, Communicator};
use peerlane::device::Stream;
use peerlane::schedule::Tree;
use peerlane::{DType, Error};

/// A call, as every rank makes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    pub rows: usize,
    pub width: usize,
    pub dtype: DType,
    pub eps: f32,
    pub weight_bias: f32,
    pub seed: u64,
}

/// Which output lies over which input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Apart,
    NormedOverInput,
    ResidualInPlace,
    BothInPlace,
    ResidualOverInput,
}
pub const FORMS: [Form; 5] = [
    Form::Apart,
    Form::NormedOverInput,
    Form::ResidualInPlace,
    Form::BothInPlace,
    Form::ResidualOverInput,
];

/// Bits of what a call leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outputs {
    pub normed: Vec<u16>,
    pub residual: Vec<u16>,
}

fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Case {
    pub fn count(&self) -> usize {
        self.rows * self.width
    }

    pub fn up(&self, bits: u16) -> f32 {
        match self.dtype {
            DType::F16 => f16::from_bits(bits).to_f32(),
            _ => bf16::from_bits(bits).to_f32(),
        }
    }

    /// Rounded to nearest; every NaN is the one NaN.
    pub fn down(&self, value: f32) -> u16 {
        match self.dtype {
            _ if value.is_nan() => 0x7fff,
            DType::F16 => f16::from_f32(value).to_bits(),
            _ => bf16::from_f32(value).to_bits(),
        }
    }

    /// Values of several magnitudes, whose sums and squares depend on the order. Every fifth row is odd in its own way:
    /// zeros, a NaN that sentinel must not send as it is, an infinity, subnormals.
    fn element(&self, what: u64, i: usize) -> u16 {
        let h = mix(self.seed ^ what << 40 ^ i as u64);
        let (row, column) = (i / self.width, i % self.width);
        let value = ((h >> 8) % 4093) as f32 - 2046.0;
        let scale = [1e-3, 0.02, 0.37, 1.0][(h >> 30) as usize % 4];
        match row % 10 {
            4 if what < 20 => 0,
            6 if column == 3 => u16::MAX,
            7 if column == 5 => self.down(f32::INFINITY),
            9 => (h & 0x807f) as u16,
            _ => self.down(value * scale * 0.01),
        }
    }

    pub fn input(&self, rank: usize) -> Vec<u16> {
        (0..self.count()).map(|i| self.element(rank as u64, i)).collect()
    }
    pub fn residual(&self) -> Vec<u16> {
        (0..self.count()).map(|i| self.element(20, i)).collect()
    }
    pub fn gamma(&self) -> Vec<u16> {
        (0..self.width)
            .map(|i| self.down(0.5 + (mix(self.seed ^ i as u64) % 100) as f32 / 64.0))
            .collect()
    }

    /// The sum over the ranks along `tree`, rounded once.
    pub fn sums(&self, tree: &Tree) -> Vec<u16> {
        fn sum(tree: &Tree, of: &dyn Fn(u8) -> f32) -> f32 {
            match tree {
                Tree::Leaf(rank) => of(*rank),
                Tree::Sum(a, b) => sum(a, of) + sum(b, of),
            }
        }
        let inputs: Vec<_> = (0..tree.leaves().len()).map(|rank| self.input(rank)).collect();
        (0..self.count())
            .map(|i| self.down(sum(tree, &|rank| self.up(inputs[usize::from(rank)][i]))))
            .collect()
    }

    /// What `normed` and `residual_out` must be, bit for bit, the squares of a row being summed by `sum_squares`.
    pub fn expected_with(&self, tree: &Tree, sum_squares: fn(&[f32]) -> f32) -> Outputs {
        let (sums, old, gamma) = (self.sums(tree), self.residual(), self.gamma());
        let residual: Vec<u16> =
            sums.iter().zip(&old).map(|(&s, &x)| self.down(self.up(s) + self.up(x))).collect();
        let mut normed = Vec::with_capacity(residual.len());
        for row in residual.chunks(self.width) {
            let values: Vec<f32> = row.iter().map(|&r| self.up(r)).collect();
            let squares: Vec<f32> = values.iter().map(|v| v * v).collect();
            let mean = sum_squares(&squares) / self.width as f32;
            let scale = 1.0 / (mean + self.eps).sqrt();
            normed.extend(
                values
                    .iter()
                    .zip(&gamma)
                    .map(|(v, &g)| self.down((v * scale) * (self.up(g) + self.weight_bias))),
            );
        }
        Outputs { normed, residual }
    }

    pub fn expected(&self, tree: &Tree) -> Outputs {
        self.expected_with(tree, over_lanes)
    }
}

/// The documented order, as written: packs of 8 as a tree; lane l of 256 adds packs l, l + 256, ...; a tree over 32 lanes
/// at distances 16 to 1; a tree over the eight groups at distances 4 to 1.
pub fn over_lanes(squares: &[f32]) -> f32 {
    fn halves(values: &[f32]) -> f32 {
        // Neighbours in memory are combined last: distance n/2 first.
        if let [one] = values {
            return *one;
        }
        let (low, high) = values.split_at(values.len() / 2);
        halves(&low.iter().zip(high).map(|(a, b)| a + b).collect::<Vec<_>>())
    }
    fn neighbours(values: &[f32]) -> f32 {
        match values {
            [one] => *one,
            _ => neighbours(&values.chunks(2).map(|pair| pair[0] + pair[1]).collect::<Vec<_>>()),
        }
    }
    let mut lanes = [0f32; 256];
    for (pack, eight) in squares.chunks(8).enumerate() {
        lanes[pack % 256] += neighbours(eight);
    }
    halves(&lanes.chunks(32).map(halves).collect::<Vec<_>>())
}

/// One after another: the control.
pub fn in_turn(squares: &[f32]) -> f32 {
    squares.iter().sum()
}

/// What is wrong with `normed` by fp64, given the `residual` that the norm is taken of: more than one rounding of the last
/// step. Rows that hold no number are left out.
pub fn beyond_one_rounding(case: &Case, outputs: &Outputs) -> Option<String> {
    let gamma = case.gamma();
    let rows = outputs.residual.chunks(case.width).zip(outputs.normed.chunks(case.width));
    for (row, (residual, normed)) in rows.enumerate() {
        let values: Vec<f64> = residual.iter().map(|&r| case.up(r).into()).collect();
        if values.iter().any(|v| !v.is_finite()) {
            continue;
        }
        let mean = values.iter().map(|v| v * v).sum::<f64>() / case.width as f64;
        let scale = 1.0 / (mean + f64::from(case.eps)).sqrt();
        for (i, (&value, &got)) in values.iter().zip(normed).enumerate() {
            let bias = f64::from(case.weight_bias);
            let exact = value * scale * (f64::from(case.up(gamma[i])) + bias);
            // Spacing of the type at `exact`: 11 or 8 bits, and of the subnormals below.
            let (bits, least) = if case.dtype == DType::F16 { (11, -24) } else { (8, -133) };
            let exponent = if exact == 0.0 { least } else { exact.abs().log2().floor() as i32 };
            let spacing = 2f64.powi((exponent + 1 - bits).max(least));
            let off = (f64::from(case.up(got)) - exact).abs() / spacing;
            if off > 0.502 {
                return Some(format!("{case:?} row {row} column {i}: {off} spacings off"));
            }
        }
    }
    None
}

/// Guarded host memory of one rank's call.
pub struct Buffers {
    words: Vec<u16>,
    form: Form,
    case: Case,
}

const GUARD: u16 = 0xa5a5;
const MARGIN: usize = 24;

impl Buffers {
    pub fn new(case: Case, form: Form, rank: usize) -> Self {
        let part = case.count() + MARGIN;
        let mut buffers =
            Buffers { words: vec![GUARD; 4 * part + case.width + 2 * MARGIN], form, case };
        let parts = [case.input(rank), case.residual(), case.gamma()];
        for (index, data) in [0, 1, 4].into_iter().zip(parts) {
            let at = buffers.at(index);
            buffers.words[at..at + data.len()].copy_from_slice(&data);
        }
        buffers
    }

    /// Input, residual, two outputs, gamma.
    fn at(&self, index: usize) -> usize {
        MARGIN + index * (self.case.count() + MARGIN)
    }

    fn normed_at(&self) -> usize {
        self.at(match self.form {
            Form::NormedOverInput | Form::BothInPlace => 0,
            _ => 2,
        })
    }

    fn residual_at(&self) -> usize {
        self.at(match self.form {
            Form::ResidualInPlace | Form::BothInPlace => 1,
            Form::ResidualOverInput => 0,
            _ => 3,
        })
    }

    pub fn arguments(&mut self, fused: bool) -> AddRmsNorm {
        let (normed, residual_out) = (self.normed_at(), self.residual_at());
        let offsets = [self.at(0), self.at(1), self.at(4)];
        let base = self.words.as_mut_ptr();
        let [input, residual, gamma] = offsets.map(|at| base.wrapping_add(at).cast_const().cast());
        AddRmsNorm {
            input,
            residual,
            gamma,
            normed: base.wrapping_add(normed).cast(),
            residual_out: base.wrapping_add(residual_out).cast(),
            rows: self.case.rows,
            width: self.case.width,
            dtype: self.case.dtype,
            eps: self.case.eps,
            weight_bias: self.case.weight_bias,
            fused,
        }
    }

    pub fn call(
        &mut self,
        comm: &Communicator,
        fused: bool,
        stream: Option<&Stream>,
    ) -> Result<(), Error> {
        let arguments = self.arguments(fused);
        // SAFETY: parts of one allocation that lives through the call; who names a stream synchronises before it goes.
        unsafe { comm.all_reduce_add_rms_norm(&arguments, stream) }
    }

    pub fn outputs(&self) -> Outputs {
        let part = |at: usize| self.words[at..at + self.case.count()].to_vec();
        Outputs { normed: part(self.normed_at()), residual: part(self.residual_at()) }
    }

    /// What was written outside of the outputs.
    pub fn stray_write(&self, rank: usize) -> Option<usize> {
        let fresh = Buffers::new(self.case, self.form, rank);
        let outputs = [self.normed_at(), self.residual_at()];
        (0..self.words.len()).find(|&i| {
            let written = outputs.iter().any(|&at| (at..at + self.case.count()).contains(&i));
            !written && self.words[i] != fresh.words[i]
        })
    }
}

/// Makes a call on its own buffers and compares with `expected`.
pub fn call_and_compare(
    comm: &Communicator,
    case: Case,
    form: Form,
    fused: bool,
    expected: &Outputs,
) -> Result<(), String> {
    let mut buffers = Buffers::new(case, form, comm.rank());
    let said = format!("rank {}, {case:?} {form:?} fused {fused}", comm.rank());
    buffers.call(comm, fused, None).map_err(|e| format!("{said}: {e}"))?;
    let got = buffers.outputs();
    for (name, got, want) in [
        ("residual_out", &got.residual, &expected.residual),
        ("normed", &got.normed, &expected.normed),
    ] {
        if let Some(i) = (0..got.len()).find(|&i| got[i] != want[i]) {
            let (row, column) = (i / case.width, i % case.width);
            return Err(format!(
                "{said}: {name} row {row} column {column} is {:#x}, not {:#x}",
                got[i], want[i]
            ));
        }
    }
    match buffers.stray_write(comm.rank()) {
        Some(at) => Err(format!("{said}: word {at} was written")),
        None => Ok(()),
    }
}
