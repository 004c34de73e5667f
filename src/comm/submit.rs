//! How a call reaches its device: at once, behind what its stream holds, or as kernels on a GPU.

use super::call::Call;
use super::collectives::runs;
use super::communicator::Inner;
use super::engine::{CpuEngine, Engine, Queue, Submission};
use super::order::Admission;
use crate::device::Stream;
use crate::error::{Error, Result};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{mpsc, Arc, PoisonError};

impl Inner {
    /// Starts a call, or queues it. With `may_run_here` an idle stream's call runs on this thread before the return.
    ///
    /// # Safety
    /// A stream named in `queue` lives.
    pub(super) unsafe fn submit(
        inner: &Arc<Self>,
        call: Call,
        queue: Queue,
        may_run_here: bool,
    ) -> Result<Submission> {
        inner.counters.calls.fetch_add(1, Relaxed);
        match (&inner.engine, queue) {
            (Engine::Cpu(cpu), Queue::Cpu(stream)) => {
                // SAFETY: the caller's promise.
                Self::submit_cpu(inner, cpu, call, unsafe { stream.as_ref() }, may_run_here)
            }
            (Engine::Cpu(cpu), _) => Self::submit_cpu(inner, cpu, call, None, may_run_here),
            #[cfg(feature = "cuda")]
            (Engine::Cuda(gpu), Queue::Cuda { stream, channel }) => {
                Ok(Submission::Done(inner.launch(gpu, &call, stream, channel)))
            }
            #[cfg(feature = "cuda")]
            (Engine::Cuda(gpu), _) => {
                let stream = crate::device::cuda::StreamRef::LEGACY;
                Ok(Submission::Done(inner.launch(gpu, &call, stream, None)))
            }
        }
    }

    #[cfg(feature = "cuda")]
    fn launch(
        &self,
        gpu: &super::gpu::GpuRank,
        call: &Call,
        stream: crate::device::cuda::StreamRef,
        channel: Option<usize>,
    ) -> Result<()> {
        if let Some(error) = self.error() {
            return Err(error);
        }
        if call.count == 0 {
            return Ok(());
        }
        let (choice, launched) = match call.other {
            None => {
                let choice = self.plans.choose(call.bytes(), call.dtype)?;
                let index = self.plans.index(choice)?;
                (choice, gpu.enqueue(call, &self.plans, index, stream, channel))
            }
            Some(other) => {
                let runs = runs(call, other, &self.plans)?;
                let choice = runs.first().map(|(_, plan)| plan.choice);
                let launched = gpu.enqueue_runs(call, &runs, stream, channel);
                let Some(choice) = choice else { return launched.map(drop) };
                (choice, launched)
            }
        };
        match launched {
            Ok(steps) => {
                self.counters.steps.fetch_add(steps, Relaxed);
                self.counters.served(choice.algorithm, choice.protocol, call.bytes() as u64);
                Ok(())
            }
            Err(error) => {
                self.counters.failed.fetch_add(1, Relaxed);
                // The others may have launched it, and would wait for this rank.
                self.fail(error.clone());
                Err(error)
            }
        }
    }

    fn submit_cpu(
        inner: &Arc<Self>,
        cpu: &CpuEngine,
        call: Call,
        stream: Option<&Stream>,
        may_run_here: bool,
    ) -> Result<Submission> {
        let mut told = None;
        let admission =
            cpu.order.admit(stream.unwrap_or(&cpu.own_stream), may_run_here, |number| {
                let inner = Arc::clone(inner);
                let (tell, result) = mpsc::sync_channel(1);
                told = Some(result);
                Box::new(move || {
                    let result = match &inner.engine {
                        Engine::Cpu(cpu) => {
                            let turn = cpu.order.wait_for(number);
                            let result = inner.execute(cpu, &call);
                            drop(turn);
                            result
                        }
                        #[cfg(feature = "cuda")]
                        Engine::Cuda(_) => Err(Error::Internal("a call changed its device".into())),
                    };
                    // Nobody listens where the caller named a stream.
                    let _ = tell.send(result);
                })
            })?;
        Ok(match admission {
            Admission::Now(_turn, _claim) => Submission::Done(inner.execute(cpu, &call)),
            Admission::Queued => match told.filter(|_| stream.is_none()) {
                Some(result) => Submission::Waiting(result),
                None => Submission::Queued,
            },
        })
    }

    /// Runs a call whose turn it is.
    fn execute(&self, cpu: &CpuEngine, call: &Call) -> Result<()> {
        self.run(cpu, call).map_err(|error| {
            self.counters.failed.fetch_add(1, Relaxed);
            // A call that was refused before its first step has cost the others nothing yet, but they will wait for it.
            self.fail(error.clone());
            self.fault.get().cloned().unwrap_or(error)
        })
    }

    fn run(&self, cpu: &CpuEngine, call: &Call) -> Result<()> {
        let mut host = cpu.host.lock().unwrap_or_else(PoisonError::into_inner);
        host.count_call();
        if let Some(error) = self.fault.get() {
            call.fill_failed(0);
            return Err(error.clone());
        }
        if call.count == 0 {
            return Ok(());
        }
        let may_step =
            |step| cpu.departures.begin(step).map_err(|rank| Error::RankLeft { rank: rank as u32 });
        let (choice, result) = match call.other {
            None => {
                let choice = self.plans.choose(call.bytes(), call.dtype)?;
                (Some(choice), host.run(call, self.plans.get(choice)?, may_step))
            }
            Some(other) => {
                let runs = runs(call, other, &self.plans)?;
                let choice = runs.first().map(|(_, plan)| plan.choice);
                if let Some((from, to, bytes)) = call.own_copy() {
                    // SAFETY: this rank's input and its place in the output, which do not overlap: `validate` has looked.
                    unsafe { from.cast::<u8>().copy_to(to.cast(), bytes) };
                }
                let all = runs
                    .iter()
                    .try_fold(0, |steps, (run, plan)| Ok(steps + host.run(run, plan, may_step)?));
                if all.is_err() {
                    // One run's failure is the call's; what earlier ones brought is no whole result.
                    call.fill_failed(0);
                }
                (choice, all)
            }
        };
        cpu.departures.end();
        let steps = result?;
        let Some(choice) = choice else { return Ok(()) };
        drop(host);
        self.counters.steps.fetch_add(steps, Relaxed);
        self.counters.served(choice.algorithm, choice.protocol, call.bytes() as u64);
        Ok(())
    }
}
