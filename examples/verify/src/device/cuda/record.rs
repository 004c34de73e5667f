//! A pass as one graph, replayed without the host; its time by events, and that of its parts by a clock that the GPU reads.

use super::launch::Stamp;
use super::Cuda;
use crate::device::Recorder;
use crate::stamp::{Kind, Part, Times};
use anyhow::{ensure, Context as _, Result};
use peerlane::device::cuda::{Capture, CaptureMode, Event, Graph, GraphExec, Stream};
use std::sync::Arc;

/// A recording under way.
pub struct Recording {
    /// What each stamp of the pass stands behind, where there are any.
    pub stamps: Option<Vec<(Kind, Part)>>,
    capture: Capture<'static>,
}

/// A pass that was recorded and cannot be replayed yet.
pub struct Captured {
    graph: Graph,
    stamps: Vec<(Kind, Part)>,
}

/// A graph of a pass.
pub struct Recorded {
    exec: GraphExec,
    stamps: Vec<(Kind, Part)>,
}

impl Recorder for Cuda {
    type Captured = Captured;
    type Recorded = Recorded;

    fn record(&mut self, stamps: bool) -> Result<()> {
        ensure!(self.recording.is_none(), "a recording is under way");
        let stream: *const Stream = &*self.stream;
        // SAFETY: the stream is in a box of this rank's, which goes after the recording (fields are dropped in their order)
        // and is never replaced.
        let stream: &'static Stream = unsafe { &*stream };
        let capture = Capture::begin(stream, CaptureMode::ThreadLocal)?;
        self.recording = Some(Recording { stamps: stamps.then(Vec::new), capture });
        if stamps {
            let out = self.scratch.stamps.ptr();
            self.launch(&self.gpu.kernels.stamp, &Stamp { blocks: 1, unused: 0, out })?;
        }
        Ok(())
    }

    fn recorded(&mut self) -> Result<Captured> {
        let recording = self.recording.take().context("nothing is being recorded")?;
        let graph = recording.capture.end()?;
        Ok(Captured { graph, stamps: recording.stamps.unwrap_or_default() })
    }

    /// When no rank of the process captures any more: NCCL's calls in a capture, and captures themselves, do not go with another
    /// thread's instantiating.
    fn ready(&mut self, captured: Vec<Captured>) -> Result<Vec<Recorded>> {
        self.quietly(|| {
            let ready = |Captured { graph, stamps }| {
                let exec = graph.instantiate()?;
                exec.upload(&self.enter()?, self.stream())?;
                self.stream.synchronize()?;
                Ok(Recorded { exec, stamps })
            };
            captured.into_iter().map(ready).collect()
        })
    }

    fn time(&mut self, recorded: &Recorded, times: usize) -> Result<Vec<f64>> {
        let gpu = Arc::clone(&self.gpu);
        let entered = gpu.context.enter()?;
        let events = (0..=times)
            .map(|_| Event::timed(&gpu.context))
            .collect::<peerlane::Result<Vec<_>>>()?;
        events[0].record(&entered, self.stream())?;
        for event in &events[1..] {
            self.replay(recorded)?;
            event.record(&entered, self.stream())?;
        }
        self.stream.synchronize()?;
        let pairs = events.windows(2).skip(1);
        pairs.map(|pair| Ok(f64::from(pair[1].since(&entered, &pair[0])?) / 1e3)).collect()
    }

    /// All ranks have launched theirs when this returns. The driver's queues are finite: a launch that waits for room may hold
    /// what another thread's launch needs, and so must not be two ahead of a rank that its graph waits for.
    fn replay(&mut self, recorded: &Recorded) -> Result<()> {
        recorded.exec.launch(&self.enter()?, self.stream())?;
        self.meet()
    }

    fn meet(&mut self) -> Result<()> {
        self.meeting.wait()
    }

    fn times(&mut self, recorded: &Recorded) -> Result<Times> {
        let bytes = self.read_bytes(&self.scratch.stamps, 8 * (recorded.stamps.len() + 1))?;
        let clock: Vec<u64> =
            bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let mut times = Times::default();
        for (pair, (kind, part)) in clock.windows(2).zip(&recorded.stamps) {
            times.add(*kind, *part, pair[1].saturating_sub(pair[0]) as f64 / 1e9);
        }
        Ok(times)
    }
}
