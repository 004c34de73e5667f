//! Calls that are on their way together: on several streams, in a group, or both.

use super::buffer::{compare, Buffer};
use super::orders::Burst;
use super::rank::Rank;
use anyhow::Result;
use peerlane::comm::{group_end, group_start};
use peerlane::device::Stream;

impl Rank {
    /// Makes the calls with fresh data each, waits for all, and counts wrong elements.
    pub(super) fn burst(&mut self, burst: &Burst, busy: &mut dyn FnMut()) -> Result<u64> {
        let mut work = Vec::with_capacity(burst.calls.len());
        for call in &burst.calls {
            let payload = self.next_data(call);
            let (mut input, mut output) = (Buffer::default(), Buffer::default());
            input.resize(call.bytes())?;
            output.resize(call.bytes())?;
            payload.fill(self.comm.rank(), input.message());
            busy();
            work.push((call, payload, input, output));
        }
        // After the buffers, hence dropped before them: a stream finishes what it holds when it goes.
        let streams =
            (0..burst.streams).map(|_| Stream::new()).collect::<peerlane::Result<Vec<_>>>()?;
        if burst.group {
            group_start();
        }
        let mut outcome = Ok(());
        for (number, (call, _, input, output)) in work.iter_mut().enumerate() {
            let from = input.message().as_mut_ptr();
            let to = if call.in_place { from } else { output.message().as_mut_ptr() };
            let stream = streams.get(number % burst.streams.max(1));
            let (from, to) = (from.cast_const().cast(), to.cast());
            // SAFETY: each call has buffers of its own with room for `count` elements. They and the streams stay until the
            // streams are done: nothing returns between here and the wait below, and the streams are dropped first.
            let made =
                unsafe { self.comm.all_reduce(from, to, call.count, call.dtype, call.op, stream) };
            outcome = outcome.and(made);
            busy();
        }
        if burst.group {
            outcome = outcome.and(group_end());
        }
        for stream in &streams {
            outcome = outcome.and(stream.synchronize());
            busy();
        }
        // What failed on a stream is the communicator's error.
        outcome.and(self.comm.error().map_or(Ok(()), Err))?;
        let mut wrong = 0;
        for (call, payload, input, output) in &mut work {
            wrong += compare(self.comm.rank(), call, payload, input, output)?;
            busy();
        }
        Ok(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::super::orders::Call;
    use super::*;
    use peerlane::comm::{Communicator, Config};
    use peerlane::env::Env;
    use peerlane::{DType, Op};

    /// Wrong elements of a burst over two ranks that draw their data from these seeds.
    fn wrong(seeds: [u64; 2], streams: usize, group: bool) -> u64 {
        let dir = std::env::temp_dir().join(format!("peerlane-burst-{}", std::process::id()));
        let config =
            Config { run_dir: Some(dir.clone()), ..Config::from_vars(2, &Env::default()).unwrap() };
        let call = |count, in_place| Call { count, dtype: DType::F32, op: Op::Sum, in_place };
        let calls = vec![call(1000, false), call(0, false), call(5, true), call(300_000, true)];
        let burst = Burst { calls, streams, group };
        let ranks = Communicator::create_local(2, &config).unwrap();
        let threads: Vec<_> = ranks
            .into_iter()
            .zip(seeds)
            .map(|(comm, seed)| {
                let burst = burst.clone();
                std::thread::spawn(move || Rank::new(comm, seed).burst(&burst, &mut || ()).unwrap())
            })
            .collect();
        let wrong = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        let _ = std::fs::remove_dir_all(dir);
        wrong
    }

    #[test]
    fn bursts_are_right_and_a_rank_with_other_data_is_seen() {
        for (streams, group) in [(0, true), (3, false), (2, true)] {
            assert_eq!(wrong([7, 7], streams, group), 0, "{streams} streams, group {group}");
        }
        assert!(wrong([7, 8], 2, false) > 300_000);
    }
}
