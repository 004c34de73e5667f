//! All-reduce, residual add and RMSNorm on a GPU: buffers, data, and the CPU device's result to compare with.

// The library's tests include this file too, and each uses its own share of it.
#![allow(dead_code)]

use crate::support::{context, Case};
use peerlane::comm::{AddRmsNorm, Communicator, Config};
use peerlane::device::cuda::{Context, DeviceMemory, Stream};
use peerlane::{DType, Error, Op};

/// A call, as every rank makes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rows {
    pub rows: usize,
    pub width: usize,
    pub dtype: DType,
    pub seed: u64,
}

/// Which output lies over which input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Apart,
    BothInPlace,
    ResidualOverInput,
}

const EPS: f32 = 1e-6;
const WEIGHT_BIAS: f32 = 1.0;
/// In place of a rank, for what is the same on all of them.
const RESIDUAL: usize = 100;
const GAMMA: usize = 101;

/// The seed of rows of the values that arithmetic treats in its own way.
pub const SPECIAL: u64 = u64::MAX;

/// Of a 16-bit float, as bits.
struct Specials {
    one: u16,
    infinity: u16,
    /// A signalling one, with a payload.
    nan: u16,
    largest: u16,
    /// Half of the last digit of `largest`: their sum is a tie, and rounds to infinity.
    half_a_digit: u16,
    largest_subnormal: u16,
}

const SIGN: u16 = 0x8000;
/// The NaN of all bits, two of which are a word that no slot may have as data.
const ALL_BITS: u16 = 0xffff;

impl Specials {
    fn of(dtype: DType) -> Self {
        match dtype {
            DType::BF16 => Specials {
                one: 0x3f80,
                infinity: 0x7f80,
                nan: 0x7f81,
                largest: 0x7f7f,
                half_a_digit: 0x7b00,
                largest_subnormal: 0x007f,
            },
            _ => Specials {
                one: 0x3c00,
                infinity: 0x7c00,
                nan: 0x7c01,
                largest: 0x7bff,
                half_a_digit: 0x4c00,
                largest_subnormal: 0x03ff,
            },
        }
    }

    /// What the first rank, the second one and the residual bring to a column; the other ranks bring -0. Each kind of row can
    /// be told by its norm: one with a NaN or an infinity has no other.
    fn column(&self, row: usize, column: usize) -> [u16; 3] {
        let Specials { one, infinity, nan, largest, half_a_digit, largest_subnormal } = *self;
        let all = match row % 3 {
            0 => [
                [ALL_BITS, ALL_BITS, one],
                [ALL_BITS, ALL_BITS, ALL_BITS],
                [nan, one, one],
                [one, nan | SIGN, one],
                [one, one, nan],
                [infinity, one, one],
                [infinity, infinity | SIGN, one],
                [infinity | SIGN, one, infinity],
            ],
            1 => [
                [largest, half_a_digit, 0],
                [largest | SIGN, half_a_digit | SIGN, 0],
                [largest, 0, half_a_digit],
                [largest, half_a_digit - 1, SIGN],
                [largest, largest, largest | SIGN],
                [largest, largest | SIGN, SIGN],
                [one, one, one],
                [SIGN, SIGN, SIGN],
            ],
            _ => [
                [1, 1, 1],
                [1, 1 | SIGN, SIGN],
                [largest_subnormal, 1, SIGN],
                [largest_subnormal | SIGN, 0, 1],
                [SIGN, SIGN, SIGN],
                [0, SIGN, SIGN],
                [SIGN, SIGN, 0],
                [largest_subnormal + 1, 1 | SIGN, 0],
            ],
        };
        all[column % all.len()]
    }

    /// Mostly 1, so that the kinds above are seen.
    fn gamma(&self, column: usize) -> u16 {
        let some = [self.nan, ALL_BITS, self.infinity, 1, SIGN, self.largest];
        // By another period than theirs.
        some.get(column % 37).copied().unwrap_or(self.one)
    }
}

impl Rows {
    pub fn bytes(&self) -> usize {
        self.rows * self.width * self.dtype.size()
    }

    fn data(&self, of: usize, count: usize) -> Vec<u8> {
        Case { dtype: self.dtype, op: Op::Sum, count, seed: self.seed }.data(of)
    }

    /// Input, residual and gamma of a rank.
    fn operands(&self, rank: usize) -> [Vec<u8>; 3] {
        let count = self.rows * self.width;
        if self.seed == SPECIAL {
            return self.special_operands(rank);
        }
        [self.data(rank, count), self.data(RESIDUAL, count), self.data(GAMMA, self.width)]
    }

    fn special_operands(&self, rank: usize) -> [Vec<u8>; 3] {
        let specials = Specials::of(self.dtype);
        let element = |at: usize| specials.column(at / self.width, at % self.width);
        let all = || (0..self.rows * self.width).map(element);
        let bytes =
            |words: &mut dyn Iterator<Item = u16>| words.flat_map(u16::to_le_bytes).collect();
        [
            bytes(&mut all().map(|[first, second, _]| match rank {
                0 => first,
                1 => second,
                _ => SIGN,
            })),
            bytes(&mut all().map(|[.., residual]| residual)),
            bytes(&mut (0..self.width).map(|column| specials.gamma(column))),
        ]
    }

    fn arguments(&self, [input, residual, gamma, normed, residual_out]: [u64; 5]) -> AddRmsNorm {
        AddRmsNorm {
            input: input as *const _,
            residual: residual as *const _,
            gamma: gamma as *const _,
            normed: normed as *mut _,
            residual_out: residual_out as *mut _,
            rows: self.rows,
            width: self.width,
            dtype: self.dtype,
            eps: EPS,
            weight_bias: WEIGHT_BIAS,
            fused: true,
        }
    }

    /// `normed` and `residual_out` of every rank on the CPU device, whose kernels are compiled from the same source.
    pub fn expected(&self, n: usize, config: &Config) -> Result<[Vec<u8>; 2], Error> {
        let config = Config {
            device: peerlane::Device::Cpu,
            lane: peerlane::Lane::Auto,
            slab_bytes: None,
            algorithm: None,
            protocol: None,
            direction: None,
            blocks: None,
            threads: None,
            ..config.clone()
        };
        let mut results = Vec::new();
        std::thread::scope(|scope| {
            let ranks: Vec<_> = Communicator::create_local(n, &config)?
                .into_iter()
                .map(|comm| scope.spawn(move || self.on_cpu(&comm)))
                .collect();
            for rank in ranks {
                let joined =
                    rank.join().unwrap_or_else(|_| Err(Error::Internal("a rank panicked".into())));
                results.push(joined?);
            }
            Ok::<(), Error>(())
        })?;
        Ok(results.swap_remove(0))
    }

    fn on_cpu(&self, comm: &Communicator) -> Result<[Vec<u8>; 2], Error> {
        let mut parts = self.operands(comm.rank()).map(|bytes| {
            let mut words = vec![0u64; bytes.len().div_ceil(8)];
            bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes.len()].copy_from_slice(&bytes);
            words
        });
        let [input, residual, gamma] = parts.each_mut().map(|words| words.as_mut_ptr() as u64);
        let arguments = self.arguments([input, residual, gamma, input, residual]);
        // SAFETY: both outputs over their inputs, in buffers that live through the call.
        unsafe { comm.all_reduce_add_rms_norm(&arguments, None) }?;
        let bytes = |words: &[u64]| bytemuck::cast_slice(words)[..self.bytes()].to_vec();
        Ok([bytes(&parts[0]), bytes(&parts[1])])
    }
}

/// A rank with buffers of its own.
pub struct RowsRank<'a> {
    pub comm: &'a Communicator,
    pub context: Context,
    pub stream: Stream,
    /// Input, residual, gamma, two outputs.
    buffers: Vec<DeviceMemory>,
}

impl<'a> RowsRank<'a> {
    /// Buffers for calls of up to `bytes` bytes on GPU `ordinal`.
    pub fn new(comm: &'a Communicator, ordinal: u32, bytes: usize) -> Result<Self, Error> {
        let context = context(ordinal)?;
        let buffers = (0..5).map(|_| DeviceMemory::new(&context, bytes.max(16)));
        Ok(RowsRank {
            comm,
            stream: Stream::new(&context, 0)?,
            buffers: buffers.collect::<Result<_, _>>()?,
            context,
        })
    }

    fn outputs(&self, form: Form) -> [usize; 2] {
        match form {
            Form::Apart => [3, 4],
            Form::BothInPlace => [0, 1],
            Form::ResidualOverInput => [3, 0],
        }
    }

    /// Puts this rank's data in place, and rubbish where the results will be.
    pub fn fill(&self, call: &Rows) -> Result<(), Error> {
        for (buffer, bytes) in self.buffers.iter().zip(call.operands(self.comm.rank())) {
            buffer.write(&self.stream, 0, &bytes)?;
        }
        for buffer in &self.buffers[3..] {
            buffer.write(&self.stream, 0, &vec![0x5a; call.bytes()])?;
        }
        Ok(())
    }

    /// Makes the call on this rank's stream, or into its capture.
    pub fn call(&self, call: &Rows, form: Form, fused: bool) -> Result<(), Error> {
        let at = |i: usize| self.buffers[i].ptr();
        let [normed, residual_out] = self.outputs(form).map(at);
        let arguments =
            AddRmsNorm { fused, ..call.arguments([at(0), at(1), at(2), normed, residual_out]) };
        // SAFETY: device memory as long as the call says, kept until the stream is synchronised.
        unsafe {
            self.comm.all_reduce_add_rms_norm_cuda(&arguments, self.stream.as_ref().as_raw(), None)
        }
    }

    /// `normed` and `residual_out`, once the stream has finished.
    pub fn results(&self, call: &Rows, form: Form) -> Result<[Vec<u8>; 2], Error> {
        let mut results = [vec![0; call.bytes()], vec![0; call.bytes()]];
        for (result, buffer) in results.iter_mut().zip(self.outputs(form)) {
            self.buffers[buffer].read(&self.stream, 0, result)?;
        }
        Ok(results)
    }

    /// The buffers, for what outlives the communicator.
    pub fn into_buffers(self) -> Vec<DeviceMemory> {
        self.buffers
    }
}

/// Where results differ, in words.
pub fn differs(
    got: &[Vec<u8>; 2],
    expected: &[Vec<u8>; 2],
    call: &Rows,
    how: &str,
) -> Result<(), Error> {
    for (name, (got, expected)) in ["normed", "residual_out"].iter().zip(got.iter().zip(expected)) {
        if let Some(byte) = got.iter().zip(expected).position(|(a, b)| a != b) {
            let element = byte / call.dtype.size();
            return Err(Error::Internal(format!(
                "{call:?}, {how}: {name} row {} column {} differs from the CPU's",
                element / call.width,
                element % call.width
            )));
        }
    }
    Ok(())
}
