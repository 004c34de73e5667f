//! The first use of a rank on a GPU, in set-up: its test, and how it tells the others that it has given up.

use super::rank::GpuRank;
use crate::bootstrap::CHANNELS;
use crate::comm::call::Call;
use crate::comm::plans::Plans;
use crate::comm::selftest;
use crate::device::cuda::{memory, DeviceMemory};
use crate::error::{Error, Result};
use crate::launch::{pl_record, PL_REASON_ABORTED};
use crate::types::{DType, Op};

impl GpuRank {
    /// Input and output of the self-test.
    pub fn test_buffers(&self) -> Result<[DeviceMemory; 2]> {
        let bytes = selftest::COUNT * size_of::<f32>();
        let context = self.parts.state.context();
        Ok([DeviceMemory::new(context, bytes)?, DeviceMemory::new(context, bytes)?])
    }

    /// The first use of the lane; see `selftest`. Nothing is allocated or freed on the way: freeing may wait for the whole
    /// GPU, hence for ranks that wait for this one.
    pub fn self_test(
        &self,
        plans: &Plans,
        nonces: &[u64],
        [input, output]: &[DeviceMemory; 2],
    ) -> Result<()> {
        let stream = self.parts.state.stream();
        // Every channel has flags, words and an epoch of its own, and so has to prove itself.
        let tested = (0..CHANNELS).try_for_each(|channel| {
            selftest::run(plans, self.rank, nonces, channel, |values, result, index| {
                input.write(stream, 0, bytemuck::cast_slice(values))?;
                output.write(stream, 0, bytemuck::cast_slice(result))?;
                let call = Call {
                    input: input.ptr() as *const _,
                    output: output.ptr() as *mut _,
                    count: values.len(),
                    dtype: DType::F32,
                    op: Op::Sum,
                    norm: None,
                    other: None,
                };
                self.enqueue(&call, plans, index, stream.as_ref(), Some(channel))?;
                stream.synchronize()?;
                if let Some(error) = self.set_up_error() {
                    return Err(error);
                }
                output.read(stream, 0, bytemuck::cast_slice_mut(result))
            })
        });
        if let Err(error) = &tested {
            self.abandon(error);
        }
        tested
    }

    /// Others may be waiting for steps that this rank will not make, and its own kernel for theirs.
    pub(super) fn abandon(&self, error: &Error) {
        self.tell_peers();
        self.fault.raise(error.clone());
        let _ = self.parts.state.stream().synchronize();
    }

    /// Tells the kernels of all ranks within reach that this one has given up, as its own kernel would.
    fn tell_peers(&self) {
        let record = pl_record {
            reason: PL_REASON_ABORTED,
            rank: self.rank as u32,
            peer: self.rank as u32,
            phase: 0,
            step: 0,
            bytes: 0,
            dtype: 0,
            op: 0,
            count: 0,
            valid: 1,
        };
        // SAFETY: plain integers without padding: `cuda/wait.cuh` asserts it.
        let bytes: [u8; size_of::<pl_record>()] = unsafe { std::mem::transmute(record) };
        let valid = std::mem::offset_of!(pl_record, valid);
        let stream = self.parts.state.stream().as_ref();
        let Ok(entered) = self.parts.state.context().enter() else { return };
        for peer in self.peers().iter().flatten() {
            let at = peer.ptr() + (self.rank * bytes.len()) as u64;
            // SAFETY: this rank's record in the peer's slab, which is mapped; validity last.
            let _ = unsafe {
                memory::write(&entered, at, &bytes[..valid], stream).and_then(|()| {
                    memory::write(&entered, at + valid as u64, &bytes[valid..], stream)
                })
            };
        }
    }
}
