//! What a program does around an all-reduce on a GPU: buffers, a stream, data, and the CPU device's result to compare with.

// The library's tests include this file too, and each uses its own share of it.
#![allow(dead_code)]

use peerlane::comm::{Communicator, Config};
use peerlane::device::cuda::{Context, Device, DeviceMemory, Driver, Stream};
use peerlane::{DType, Error, Op};

/// A rank with buffers of its own.
pub struct Rank<'a> {
    pub comm: &'a Communicator,
    pub context: Context,
    pub stream: Stream,
    input: DeviceMemory,
    output: DeviceMemory,
}

/// Elements and what to do with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub dtype: DType,
    pub op: Op,
    pub count: usize,
    pub seed: u64,
}

impl Case {
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// What rank `rank` brings. Floats have fractions, so that a sum in another order would have other bits.
    pub fn data(&self, rank: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.bytes());
        let mut z = self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (rank as u64) << 48;
        for _ in 0..self.count {
            // SplitMix64 (Steele, Lea, Flood 2014).
            z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut x = z;
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^= x >> 31;
            let real = (x % 4001) as f64 / 512.0 - 3.9;
            match self.dtype {
                DType::F16 => bytes.extend(half::f16::from_f64(real).to_le_bytes()),
                DType::BF16 => bytes.extend(half::bf16::from_f64(real).to_le_bytes()),
                DType::F32 => bytes.extend((real as f32).to_le_bytes()),
                DType::F64 => bytes.extend(real.to_le_bytes()),
                other => bytes.extend(&x.to_le_bytes()[..other.size()]),
            }
        }
        bytes
    }

    /// Every rank's result on the CPU device: one, since all have the same bits.
    pub fn expected(&self, n: usize, config: &Config) -> Result<Vec<u8>, Error> {
        let config = Config {
            device: peerlane::Device::Cpu,
            lane: peerlane::Lane::Auto,
            algorithm: None,
            protocol: None,
            direction: None,
            blocks: None,
            threads: None,
            ..config.clone()
        };
        let mut results: Vec<Vec<u8>> = Vec::new();
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

    fn on_cpu(&self, comm: &Communicator) -> Result<Vec<u8>, Error> {
        let mut data = aligned(&self.data(comm.rank()));
        let at = data.as_mut_ptr();
        // SAFETY: in place, in one buffer that is aligned for any type and lives through the call.
        unsafe { comm.all_reduce(at.cast(), at.cast(), self.count, self.dtype, self.op, None) }?;
        Ok(bytemuck::cast_slice(&data)[..self.bytes()].to_vec())
    }
}

fn aligned(bytes: &[u8]) -> Vec<u64> {
    let mut words = vec![0u64; bytes.len().div_ceil(8)];
    bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes.len()].copy_from_slice(bytes);
    words
}

/// Runs `work` on a thread per rank; the first error, and the rank it is of. Communicators go when all ranks are done.
pub fn on_ranks(
    comms: Vec<Communicator>,
    work: impl Fn(&Communicator) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    let outcomes: Vec<Result<(), Error>> = std::thread::scope(|scope| {
        let work = &work;
        let ranks: Vec<_> = comms.iter().map(|comm| scope.spawn(move || work(comm))).collect();
        let joined = ranks.into_iter().map(|rank| rank.join());
        joined
            .map(|r| r.unwrap_or_else(|_| Err(Error::Internal("a rank panicked".into()))))
            .collect()
    });
    outcomes.into_iter().collect()
}

/// How many GPUs there are.
pub fn gpus() -> Result<usize, String> {
    let all = Driver::load().and_then(Device::all).map_err(|e| e.to_string())?;
    Ok(all.len())
}

/// The GPU with this number.
pub fn context(ordinal: u32) -> Result<Context, Error> {
    Context::retain(&Device::by_ordinal(Driver::load()?, ordinal)?)
}

impl<'a> Rank<'a> {
    /// Buffers of `bytes` bytes on GPU `ordinal`.
    pub fn new(comm: &'a Communicator, ordinal: u32, bytes: usize) -> Result<Self, Error> {
        let context = context(ordinal)?;
        Ok(Rank {
            comm,
            stream: Stream::new(&context, 0)?,
            input: DeviceMemory::new(&context, bytes.max(16))?,
            output: DeviceMemory::new(&context, bytes.max(16))?,
            context,
        })
    }

    /// Puts this rank's data in place, and rubbish where the result will be.
    pub fn fill(&self, case: &Case) -> Result<(), Error> {
        self.input.write(&self.stream, 0, &case.data(self.comm.rank()))?;
        self.output.write(&self.stream, 0, &vec![0x5a; case.bytes()])
    }

    /// Makes the call on this rank's stream, or into its capture.
    pub fn call(&self, case: &Case, channel: Option<usize>) -> Result<(), Error> {
        self.call_on(&self.stream, case, channel)
    }

    /// Makes the call on another stream.
    pub fn call_on(
        &self,
        stream: &Stream,
        case: &Case,
        channel: Option<usize>,
    ) -> Result<(), Error> {
        // SAFETY: the stream lives, and the buffers are kept until it is synchronised.
        unsafe { self.raw(stream.as_ref().as_raw(), case, channel) }
    }

    /// Makes the call on one of the default streams: null, 1 or 2.
    pub fn call_raw(&self, stream: *mut std::ffi::c_void, case: &Case) -> Result<(), Error> {
        // SAFETY: the default streams are always there.
        unsafe { self.raw(stream, case, None) }
    }

    /// # Safety
    /// `stream` lives, and is synchronised before the buffers go.
    unsafe fn raw(
        &self,
        stream: *mut std::ffi::c_void,
        case: &Case,
        channel: Option<usize>,
    ) -> Result<(), Error> {
        let (input, output) = (self.input.ptr() as *const _, self.output.ptr() as *mut _);
        // SAFETY: both buffers are device memory of at least `count` elements.
        unsafe {
            self.comm
                .all_reduce_cuda(input, output, case.count, case.dtype, case.op, stream, channel)
        }
    }

    /// The result, once the stream has finished.
    pub fn result(&self, case: &Case) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; case.bytes()];
        self.output.read(&self.stream, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Where input and output are on the GPU.
    pub fn pointers(&self) -> (u64, u64) {
        (self.input.ptr(), self.output.ptr())
    }

    /// Input and output, for what outlives the communicator.
    pub fn into_buffers(self) -> (DeviceMemory, DeviceMemory) {
        (self.input, self.output)
    }

    /// Fills, calls and fetches.
    pub fn reduce(&self, case: &Case) -> Result<Vec<u8>, Error> {
        self.fill(case)?;
        self.call(case, None)?;
        self.stream.synchronize()?;
        match self.comm.error() {
            Some(error) => Err(error),
            None => self.result(case),
        }
    }
}
