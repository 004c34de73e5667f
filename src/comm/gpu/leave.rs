//! How a rank on a GPU leaves: its work drained, replays to come ended, the peers' slabs let go, goodbye said.

use super::rank::GpuRank;
use super::slab::Peer;
use crate::bootstrap::{Watch, CHANNELS};
use crate::device::cuda::RelaxedThread;
use crate::error::Error;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a rank that leaves waits for the others to close its slab, where the lane needs that.
const FAREWELL: Duration = Duration::from_secs(2);

impl GpuRank {
    /// Waits for this rank's work, makes replays to come return at once, lets go of the peers' slabs, and says goodbye.
    pub fn close(&self, watch: &Watch) {
        self.drain();
        let state = Arc::clone(&self.parts.state);
        let steps = state.channels().map_or([0; CHANNELS], |(steps, _)| steps);
        // A call that a group still holds finds this.
        self.fault.raise(Error::Closed);
        let _ = state.close();
        if self.lock().captured > 0 {
            // A replay that began just before the word was set.
            self.until_idle(Duration::from_secs(1));
        }
        let peers = std::mem::take(&mut *self.peers());
        let elsewhere = |peer: &Option<Peer>| matches!(peer, Some(Peer::Ipc(_)));
        let importers: Vec<usize> = (0..peers.len()).filter(|&r| elsewhere(&peers[r])).collect();
        // An exporter of IPC memory may free it once we have said goodbye, so the mapping goes before. All else goes after:
        // freeing may wait for the whole GPU, hence for ranks that wait until they know that this one has left.
        let (before, after): (Vec<_>, Vec<_>) = peers.into_iter().partition(elsewhere);
        drop(before);
        if self.parts.slab.waits_for_importers() {
            watch.goodbye_and_wait(steps, &importers, FAREWELL);
            importers
                .iter()
                .filter(|&&r| watch.gone(r))
                .for_each(|&r| self.parts.slab.importer_gone(r));
        } else {
            watch.goodbye(steps);
        }
        drop(after);
    }

    fn drain(&self) {
        let Ok(entered) = self.parts.state.context().enter() else { return };
        if let Ok(_relaxed) = RelaxedThread::new(&entered) {
            for last in self.lock().last.iter().filter(|last| last.made) {
                let _ = last.event.synchronize(&entered);
            }
        }
        if self.lock().captured > 0 && !self.parts.state.aborted() {
            self.until_idle(Duration::from_nanos(self.deadline_ns.load(Ordering::Relaxed)));
        }
    }

    /// Waits until no step runs on any channel, an abort, or `patience`.
    fn until_idle(&self, patience: Duration) {
        let start = Instant::now();
        while let Ok((_, true)) = self.parts.state.channels() {
            if start.elapsed() >= patience || self.kernel_error().is_some() {
                return;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}
