//! A rank's side on its GPU: a stream of its own, buffers there, and their images on the host.

use super::norm::Rows;
use crate::bench::buffer::{compare, Buffer};
use crate::bench::orders::Call;
use crate::bench::payload::Payload;
use anyhow::{ensure, Result};
use peerlane::device::cuda::{Context, Device, DeviceMemory, Driver, Stream};

/// A rank without its communicator, which is the library's under test.
pub struct GpuRank {
    /// Its number in the communicator.
    pub number: usize,
    pub context: Context,
    pub stream: Stream,
    input: DeviceMemory,
    output: DeviceMemory,
    /// What a foreign kernel copies the input from; as large as the input once it is needed.
    source: DeviceMemory,
    /// One element, for barriers.
    word: DeviceMemory,
    host_input: Buffer,
    host_output: Buffer,
    /// What the fused operation takes and gives besides.
    norm: Option<NormMemory>,
}

struct NormMemory {
    residual: DeviceMemory,
    residual_out: DeviceMemory,
    gamma: DeviceMemory,
    host: Buffer,
}

/// Device addresses of what the fused operation takes and gives besides input and output.
pub struct NormOperands {
    pub residual: u64,
    pub gamma: u64,
    pub residual_out: u64,
}

/// The smallest allocation.
const PACK: usize = 16;

impl GpuRank {
    /// Rank `number` on the GPU with this number in this process.
    pub fn new(number: usize, ordinal: u32) -> Result<Self> {
        let context = Context::retain(&Device::by_ordinal(Driver::load()?, ordinal)?)?;
        let memory = || DeviceMemory::new(&context, PACK);
        let stream = Stream::new(&context, 0)?;
        let word = memory()?;
        // The barrier reduces it: a checker of memory would report that nobody has written it.
        word.write(&stream, 0, &[0; PACK])?;
        Ok(GpuRank {
            number,
            stream,
            input: memory()?,
            output: memory()?,
            source: memory()?,
            word,
            host_input: Buffer::default(),
            host_output: Buffer::default(),
            norm: None,
            context,
        })
    }

    /// Makes room for `call`. Freeing device memory waits for the whole GPU, so no rank may have work under way.
    pub fn make_room(&mut self, call: &Call, between: bool) -> Result<()> {
        if !self.host_input.fits(call.bytes()) {
            self.host_input.resize(call.bytes())?;
            self.host_output.resize(call.bytes())?;
        }
        let bytes = self.host_input.all().len();
        let context = &self.context;
        let grow = |memory: &mut DeviceMemory| {
            if memory.bytes() < bytes {
                *memory = DeviceMemory::new(context, bytes)?;
            }
            Ok::<(), peerlane::Error>(())
        };
        grow(&mut self.input)?;
        grow(&mut self.output)?;
        if between {
            grow(&mut self.source)?;
        }
        Ok(())
    }

    /// Brings this rank's numbers to the GPU, and poison where the result will be and behind both. With `between` the foreign
    /// kernel's source too, and zeroes for the result that the first of them reads.
    pub fn load(&mut self, payload: &Payload, between: bool) -> Result<()> {
        self.host_input.poison();
        self.host_output.poison();
        payload.fill(self.number, self.host_input.message());
        self.input.write(&self.stream, 0, self.host_input.all())?;
        if between {
            self.source.write(&self.stream, 0, self.host_input.all())?;
            self.host_output.message().fill(0);
        }
        self.output.write(&self.stream, 0, self.host_output.all())?;
        Ok(())
    }

    /// Fetches what a call has left and counts its wrong elements.
    pub fn compare(&mut self, call: &Call, payload: &Payload) -> Result<u64> {
        self.input.read(&self.stream, 0, self.host_input.all())?;
        self.output.read(&self.stream, 0, self.host_output.all())?;
        compare(self.number, call, payload, &mut self.host_input, &mut self.host_output)
    }

    /// Device addresses of the call's input and output.
    pub fn operands(&self, call: &Call) -> (u64, u64) {
        let input = self.input.ptr();
        (input, if call.in_place { input } else { self.output.ptr() })
    }

    /// Device address of what the input is made from.
    pub fn source(&self) -> u64 {
        self.source.ptr()
    }

    /// Makes room for the fused operation's rows of `width` elements, after [`make_room`](Self::make_room).
    pub fn make_room_for_rows(&mut self, call: &Call, width: usize) -> Result<()> {
        let bytes = self.host_input.all().len();
        let weights = width * call.dtype.size();
        let fits = |norm: &NormMemory| {
            norm.host.fits(call.bytes())
                && norm.residual.bytes() >= bytes
                && norm.gamma.bytes() >= weights
        };
        if !self.norm.as_ref().is_some_and(fits) {
            let mut host = Buffer::default();
            host.resize(call.bytes())?;
            self.norm = Some(NormMemory {
                residual: DeviceMemory::new(&self.context, bytes)?,
                residual_out: DeviceMemory::new(&self.context, bytes)?,
                gamma: DeviceMemory::new(&self.context, weights.max(PACK))?,
                host,
            });
        }
        Ok(())
    }

    /// Brings residual and weights to the GPU, and poison where the new residual will be.
    pub fn load_rows(&mut self, call: &Call, rows: &Rows) -> Result<()> {
        let Some(norm) = &mut self.norm else { return Ok(()) };
        norm.host.poison();
        norm.residual_out.write(&self.stream, 0, norm.host.all())?;
        norm.host.message().copy_from_slice(&rows.residual_bytes(call.dtype, call.count));
        norm.residual.write(&self.stream, 0, norm.host.all())?;
        norm.gamma.write(&self.stream, 0, &rows.gamma_bytes(call.dtype))?;
        Ok(())
    }

    /// Fetches what a fused call has left and counts its wrong elements.
    pub fn compare_rows(&mut self, call: &Call, payload: &Payload, rows: &Rows) -> Result<u64> {
        let Some(norm) = &mut self.norm else { return Ok(0) };
        let (normed, sums) = match call.in_place {
            true => (&self.input, &norm.residual),
            false => (&self.output, &norm.residual_out),
        };
        normed.read(&self.stream, 0, self.host_output.all())?;
        sums.read(&self.stream, 0, norm.host.all())?;
        for (name, buffer) in [("normed rows", &self.host_output), ("residual", &norm.host)] {
            ensure!(
                buffer.guard_intact(),
                "a fused call of {} bytes wrote beyond the end of its {name}",
                call.bytes()
            );
        }
        Ok(rows.wrong(call, payload, self.host_output.message(), norm.host.message()))
    }

    /// Device addresses for the fused operation; in place the new residual lies over the old one.
    pub fn norm_operands(&self, call: &Call) -> NormOperands {
        let of = |memory: fn(&NormMemory) -> &DeviceMemory| {
            self.norm.as_ref().map_or(0, |norm| memory(norm).ptr())
        };
        let residual = of(|norm| &norm.residual);
        NormOperands {
            residual,
            gamma: of(|norm| &norm.gamma),
            residual_out: if call.in_place { residual } else { of(|norm| &norm.residual_out) },
        }
    }

    /// Device address of the barrier's element.
    pub fn word(&self) -> u64 {
        self.word.ptr()
    }
}
