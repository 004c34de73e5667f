//! What a rank's kernels and its host share: the sticky word and the channels in device memory, and a page of host memory
//! through which both speak without a call of the driver. Graphs that captured a call keep it alive, with the kernels and what
//! has been adopted: a replay after destroy finds the sticky word and touches nothing else.

use super::kernels::Kernels;
use crate::bootstrap::{Steps, CHANNELS};
use crate::device::cuda::{memory, Context, DeviceMemory, HostMemory, RelaxedThread, Stream};
use crate::error::Result;
use crate::lane::HostSlab;
use crate::launch::*;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Distance of the channels, and of the reports: words that different kernels write share no cache line.
const STRIDE: usize = 128;
const CHANNELS_AT: usize = 256;
const DEVICE_BYTES: usize = CHANNELS_AT + CHANNELS * STRIDE;
/// In the host's page: the numbers 0, 1, 2, ..., of which one is copied over the sticky word.
const REASONS_AT: usize = 2048;
const HOST_BYTES: usize = 4096;

const _: () = assert!(
    size_of::<pl_state>() <= CHANNELS_AT
        && size_of::<pl_channel>() <= STRIDE
        && size_of::<pl_report>() <= STRIDE
        && CHANNELS * STRIDE <= REASONS_AT
);

pub(crate) struct DeviceState {
    memory: DeviceMemory,
    page: HostMemory<HostSlab>,
    /// Never captured, never the caller's.
    stream: Stream,
    /// What graphs launch must stay loaded.
    pub kernels: Arc<Kernels>,
    /// See [`adopt`](Self::adopt).
    adopted: Mutex<Vec<DeviceMemory>>,
}

impl DeviceState {
    /// Keeps memory as long as itself: what a captured call reads or writes before it has seen the sticky word.
    pub fn adopt(&self, memory: impl IntoIterator<Item = DeviceMemory>) {
        self.adopted.lock().unwrap_or_else(PoisonError::into_inner).extend(memory);
    }

    pub fn new(context: &Context, kernels: Arc<Kernels>, node: Option<u32>) -> Result<Self> {
        let stream = Stream::new(context, 0)?;
        let page = HostMemory::new(context, HOST_BYTES, node)?;
        for reason in 0..=PL_REASON_LEFT {
            // SAFETY: inside the page, which nobody else knows yet.
            unsafe {
                page.host_ptr()
                    .as_ptr()
                    .add(REASONS_AT)
                    .cast::<u32>()
                    .add(reason as usize)
                    .write(reason)
            };
        }
        let memory = DeviceMemory::new(context, DEVICE_BYTES)?;
        let mut image = vec![0u8; DEVICE_BYTES];
        for channel in 0..CHANNELS {
            // Steps are counted from 1. The other fields are 0.
            let at = CHANNELS_AT + channel * STRIDE + std::mem::offset_of!(pl_channel, turn);
            image[at..at + 8].copy_from_slice(&pl_channel::idle_at(1).turn.to_ne_bytes());
        }
        memory.write(&stream, 0, &image)?;
        Ok(DeviceState { memory, page, stream, kernels, adopted: Mutex::default() })
    }

    pub fn context(&self) -> &Context {
        self.memory.context()
    }

    /// For work of the library's own.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Device address of the sticky state.
    pub fn state(&self) -> *mut pl_state {
        self.memory.ptr() as *mut pl_state
    }

    /// Device address of a channel.
    pub fn channel(&self, channel: usize) -> *mut pl_channel {
        (self.memory.ptr() + (CHANNELS_AT + channel * STRIDE) as u64) as *mut pl_channel
    }

    /// Device address of a channel's report.
    pub fn report(&self, channel: usize) -> *mut pl_report {
        (self.page.device_ptr() + (channel * STRIDE) as u64) as *mut pl_report
    }

    fn host_report(&self, channel: usize) -> *mut pl_report {
        // SAFETY: inside the page: the constant assertion above.
        unsafe { self.page.host_ptr().as_ptr().add(channel * STRIDE).cast() }
    }

    fn word32(&self, channel: usize, field: impl Fn(*mut pl_report) -> *mut u32) -> &AtomicU32 {
        // SAFETY: an aligned word of the page, which lives as long as `self` and is accessed only as a whole word.
        unsafe { AtomicU32::from_ptr(field(self.host_report(channel))) }
    }

    fn word64(&self, channel: usize, field: impl Fn(*mut pl_report) -> *mut u64) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(field(self.host_report(channel))) }
    }

    fn abort_word(&self, channel: usize) -> &AtomicU32 {
        // SAFETY: the address of a field.
        self.word32(channel, |report| unsafe { &raw mut (*report).abort })
    }

    /// Ends every wait, and makes every later launch fill its output and return. Never waits.
    pub fn abort(&self, reason: u32) {
        let (set, unset) = (Ordering::Release, Ordering::Relaxed);
        let mut first = false;
        for channel in 0..CHANNELS {
            let word = self.abort_word(channel);
            first |= word.compare_exchange(PL_REASON_NONE, reason, set, unset).is_ok();
        }
        if first {
            // A kernel that waits looks at the page; the word in its own memory is for launches to come. If it cannot be
            // written the device is beyond reach, and its kernels are gone as well.
            let _ = self.set_sticky(reason);
        }
    }

    fn set_sticky(&self, reason: u32) -> Result<()> {
        let entered = self.context().enter()?;
        let _relaxed = RelaxedThread::new(&entered)?;
        let from = self.page.device_ptr() + (REASONS_AT + 4 * reason as usize) as u64;
        // SAFETY: both words live as long as `self`, whose stream is drained before they go.
        unsafe { memory::copy(&entered, self.memory.ptr(), from, 4, self.stream.as_ref()) }
    }

    /// Whether the host has ended it.
    pub fn aborted(&self) -> bool {
        self.abort_word(0).load(Ordering::Acquire) != PL_REASON_NONE
    }

    /// Makes every launch after this call return at once.
    pub fn close(&self) -> Result<()> {
        self.abort(PL_REASON_CLOSED);
        let entered = self.context().enter()?;
        let _relaxed = RelaxedThread::new(&entered)?;
        self.stream.synchronize()
    }

    /// Rank `rank` has left without the steps from `steps` on: waits of those end.
    pub fn left(&self, rank: usize, steps: Steps) {
        for (channel, step) in steps.into_iter().enumerate() {
            let step = step.max(1);
            // SAFETY: the address of a field, twice.
            let (left, leaver) = unsafe {
                (
                    self.word64(channel, |report| &raw mut (*report).left),
                    self.word32(channel, |report| &raw mut (*report).leaver),
                )
            };
            let before = left.load(Ordering::Relaxed);
            if before == 0 || step < before {
                leaver.store(rank as u32, Ordering::Relaxed);
                left.store(step, Ordering::Release);
            }
        }
    }

    /// What a kernel said when it gave up, if one has.
    pub fn record(&self) -> Option<pl_record> {
        (0..CHANNELS).find_map(|channel| {
            // SAFETY: the address of a field.
            let valid = self.word64(channel, |report| unsafe { &raw mut (*report).record.valid });
            // SAFETY: `valid` comes after the rest and the record is written once.
            (valid.load(Ordering::Acquire) == 1).then(|| unsafe {
                (&raw const (*self.host_report(channel)).record).read_volatile()
            })
        })
    }

    /// The channels as they are on the device now: the epoch of each one's next step, and whether a step is running.
    pub fn channels(&self) -> Result<(Steps, bool)> {
        let entered = self.context().enter()?;
        let _relaxed = RelaxedThread::new(&entered)?;
        let mut image = [0u8; CHANNELS * STRIDE];
        self.memory.read(&self.stream, CHANNELS_AT, &mut image)?;
        let word = |channel: usize| {
            let at = channel * STRIDE + std::mem::offset_of!(pl_channel, turn);
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&image[at..at + 8]);
            pl_channel { turn: u64::from_ne_bytes(bytes), entered: 0, rearming: 0 }
        };
        let steps = std::array::from_fn(|channel| word(channel).epoch());
        Ok((steps, (0..CHANNELS).any(|channel| word(channel).launch() != 0)))
    }
}

impl Drop for DeviceState {
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
    }
}
