//! A rank's side on its GPU: a stream of its own, buffers there, and their images on the host.

use crate::bench::buffer::{compare, Buffer};
use crate::bench::orders::Call;
use crate::bench::payload::Payload;
use anyhow::Result;
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
}

/// The smallest allocation.
const PACK: usize = 16;

impl GpuRank {
    /// Rank `number` on the GPU with this number in this process.
    pub fn new(number: usize, ordinal: u32) -> Result<Self> {
        let context = Context::retain(&Device::by_ordinal(Driver::load()?, ordinal)?)?;
        let memory = || DeviceMemory::new(&context, PACK);
        Ok(GpuRank {
            number,
            stream: Stream::new(&context, 0)?,
            input: memory()?,
            output: memory()?,
            source: memory()?,
            word: memory()?,
            host_input: Buffer::default(),
            host_output: Buffer::default(),
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

    /// Device address of the barrier's element.
    pub fn word(&self) -> u64 {
        self.word.ptr()
    }
}
