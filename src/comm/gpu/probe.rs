//! The probe's launches on a GPU.

use super::rank::GpuRank;
use crate::comm::probe::{launch_of, result_words, Prober, Shot};
use crate::device::cuda::{DeviceMemory, LaunchShape};
use crate::error::Result;
use crate::launch::PL_PROBE_BLOCKS;

/// Threads of a block, as many as a large call has.
const THREADS: u32 = 256;
/// Two words for the blocks of a launch to line up, then the results of the longest one.
const BARRIER_WORDS: usize = 2;
const WORDS: usize = BARRIER_WORDS + PL_PROBE_BLOCKS as usize * 256;

/// A rank that measures. Its memory is there before anybody waits for anybody: allocating may wait for the whole GPU.
pub(super) struct GpuProber<'a> {
    gpu: &'a GpuRank,
    memory: &'a DeviceMemory,
}

impl GpuRank {
    /// What [`GpuProber`] needs.
    pub(super) fn probe_memory(&self) -> Result<DeviceMemory> {
        DeviceMemory::new(self.state().context(), WORDS * size_of::<u64>())
    }

    pub(super) fn prober<'a>(&'a self, memory: &'a DeviceMemory) -> GpuProber<'a> {
        GpuProber { gpu: self, memory }
    }
}

impl Prober for GpuProber<'_> {
    // In set-up nobody calls yet, so any channel's would do. What is measured is for choosing between schedules, whatever the
    // channel.
    fn blocks(&self) -> u32 {
        self.gpu.most_blocks()
    }

    fn shoot(&mut self, shot: &Shot) -> Result<Vec<u64>> {
        self.launch(shot).inspect_err(|error| self.gpu.abandon(error))
    }
}

impl GpuProber<'_> {
    fn launch(&self, shot: &Shot) -> Result<Vec<u64>> {
        let state = self.gpu.state();
        let stream = state.stream();
        let words = BARRIER_WORDS + result_words(shot);
        self.memory.write(stream, 0, &vec![0; words * size_of::<u64>()])?;
        let barrier = self.memory.ptr();
        let result = barrier + (BARRIER_WORDS * size_of::<u64>()) as u64;
        let step = self.gpu.any_step()?;
        let params = launch_of(shot, self.gpu.layout(), step, result, barrier);
        let shape = LaunchShape::plain(shot.blocks, THREADS);
        let entered = state.context().enter()?;
        // SAFETY: the slabs are mapped at `base`, and the probe keeps to the bulk protocol's data, which nobody uses in
        // set-up; results and barrier are memory of this rank, long enough for the longest launch, until the stream has
        // been synchronised.
        unsafe { state.kernels.probe().launch(&entered, stream.as_ref(), &shape, &params)? };
        let ended = stream.synchronize();
        self.gpu.set_up_error().map_or(ended, Err)?;
        let mut bytes = vec![0u8; result_words(shot) * size_of::<u64>()];
        self.memory.read(stream, BARRIER_WORDS * size_of::<u64>(), &mut bytes)?;
        Ok(bytes
            .chunks_exact(8)
            .map(|word| u64::from_ne_bytes(word.try_into().unwrap_or([0; 8])))
            .collect())
    }
}
