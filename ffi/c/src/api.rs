//! Every exported function, in the header's order; `exports.txt` is their list, and a test compares the two.

use crate::arguments::{Out, OutArray, Ranks, Take, Use};
use crate::boundary;
use crate::calls::{self, Buffers, Work};
use crate::group;
use crate::norm::AddRmsNormIn;
use crate::registry::{self, Handle};
use crate::status::{Failure, Outcome, Status};
use crate::structs::{ConfigIn, ConfigOut, StatsOut, TextOut};
use peerlane_core::bootstrap::{UniqueId, UNIQUE_ID_BYTES};
use peerlane_core::comm::{Communicator, Creation};
use peerlane_core::device::Stream;
use peerlane_core::{DType, Op};
use std::ffi::{c_char, c_void};

/// The version of this crate as one number.
const VERSION: u32 = {
    const fn number(text: &str) -> u32 {
        let (bytes, mut value, mut at) = (text.as_bytes(), 0, 0);
        while at < bytes.len() {
            value = value * 10 + (bytes[at] - b'0') as u32;
            at += 1;
        }
        value
    }
    number(env!("CARGO_PKG_VERSION_MAJOR")) * 10000
        + number(env!("CARGO_PKG_VERSION_MINOR")) * 100
        + number(env!("CARGO_PKG_VERSION_PATCH"))
};

exports! {
    /// The library's version.
    fn peerlane_version() -> u32, on_panic(0) { VERSION }

    /// The constant text of a status.
    fn peerlane_status_string(status: i32) -> *const c_char, on_panic(c"".as_ptr()) {
        Status::text(status).as_ptr()
    }

    /// Why this thread's last call failed.
    fn peerlane_last_error() -> *const c_char, on_panic(c"".as_ptr()) { boundary::last_error() }

    /// Makes a new id.
    fn peerlane_get_unique_id(id: Out<[u8; UNIQUE_ID_BYTES]>) {
        id.write(*UniqueId::new()?.as_bytes());
        Ok(())
    }

    /// Sets every field to "not set".
    fn peerlane_config_init(config: ConfigOut, size: usize) {
        // SAFETY: the caller's struct has the size that the caller names.
        unsafe { config.init(size) }
    }

    /// Joins a communicator as one rank.
    fn peerlane_comm_create(comm: Out<Handle>, n: Ranks, id: UniqueId, rank: i32, config: ConfigIn) {
        let n = n.0;
        let rank = rank_of("rank", rank, n)?;
        let config = config.resolve(n)?;
        group::create(Creation { id, n, rank, config }, comm)
    }

    /// Creates all ranks in this process.
    fn peerlane_comm_create_local(comms: OutArray, n: Ranks, config: ConfigIn) {
        let made = Communicator::create_local(n.0, &config.resolve(n.0)?)?;
        let mut handles = Vec::with_capacity(made.len());
        for comm in made {
            match registry::insert(comm) {
                Ok(handle) => handles.push(handle),
                Err(failure) => {
                    handles.into_iter().for_each(|h| drop(registry::remove::<Communicator>(h)));
                    return Err(failure);
                }
            }
        }
        // SAFETY: the caller's array has `n` elements, says the header.
        unsafe { comms.write(handles) };
        Ok(())
    }

    /// Destroys a communicator.
    fn peerlane_comm_destroy(comm: Take<Communicator>) {
        outside_groups("peerlane_comm_destroy")?;
        Ok(registry::remove::<Communicator>(comm.0)?.destroy()?)
    }

    /// Ends every wait of a communicator.
    fn peerlane_comm_abort(comm: Use<Communicator>) {
        comm.0.abort();
        Ok(())
    }

    /// The sticky error.
    fn peerlane_comm_async_error(comm: Use<Communicator>, error: Out<Status>) {
        let sticky = comm.0.error();
        if let Some(sticky) = &sticky {
            boundary::set_last_error(&sticky.to_string());
        }
        error.write(sticky.as_ref().map_or(Status::Success, Status::from));
        Ok(())
    }

    /// The rank.
    fn peerlane_comm_rank(comm: Use<Communicator>, rank: Out<i32>) {
        rank.write(comm.0.rank() as i32);
        Ok(())
    }

    /// The number of ranks.
    fn peerlane_comm_size(comm: Use<Communicator>, size: Out<i32>) {
        size.write(comm.0.size() as i32);
        Ok(())
    }

    /// What a communicator did so far.
    fn peerlane_comm_stats(comm: Use<Communicator>, stats: StatsOut) {
        stats.write(&comm.0.stats());
        Ok(())
    }

    /// How a call would be served.
    fn peerlane_comm_explain(
        comm: Use<Communicator>,
        bytes: usize,
        dtype: DType,
        buffer: TextOut,
        capacity: usize,
        length: Option<Out<usize>>,
    ) {
        buffer.check_capacity(capacity)?;
        let text = comm.0.explain(bytes, dtype)?;
        // SAFETY: the caller's buffer has `capacity` bytes.
        unsafe { buffer.write(&text, capacity) };
        if let Some(length) = length {
            length.write(text.len());
        }
        Ok(())
    }

    /// Writes what is known of the lane.
    fn peerlane_comm_probe(
        comm: Use<Communicator>,
        buffer: TextOut,
        capacity: usize,
        length: Option<Out<usize>>,
    ) {
        buffer.check_capacity(capacity)?;
        let text = comm.0.probe().map(|report| report.to_json()).unwrap_or_default();
        // SAFETY: the caller's buffer has `capacity` bytes.
        unsafe { buffer.write(&text, capacity) };
        if let Some(length) = length {
            length.write(text.len());
        }
        Ok(())
    }

    /// Reduces over all ranks.
    fn peerlane_all_reduce(
        comm: Use<Communicator>,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
        op: Op,
        stream: Handle,
    ) {
        // SAFETY: the header demands buffers of `count` elements until the work is done; what can be seen to be wrong
        // about them is refused in there.
        unsafe {
            calls::start(&comm.0, &Work::AllReduce(Buffers { input, output, count, dtype }, op), stream, -1)
        }
    }

    /// Reduces over all ranks, on a channel.
    fn peerlane_all_reduce_channel(
        comm: Use<Communicator>,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
        op: Op,
        stream: Handle,
        channel: i32,
    ) {
        let buffers = Buffers { input, output, count, dtype };
        // SAFETY: as above.
        unsafe { calls::start(&comm.0, &Work::AllReduce(buffers, op), stream, channel) }
    }

    /// Copies one rank's buffer to all.
    fn peerlane_broadcast(
        comm: Use<Communicator>,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
        root: i32,
        stream: Handle,
        channel: i32,
    ) {
        let root = rank_of("root", root, comm.0.size())?;
        let buffers = Buffers { input, output, count, dtype };
        // SAFETY: as above; the input is the root's alone.
        unsafe { calls::start(&comm.0, &Work::Broadcast(buffers, root), stream, channel) }
    }

    /// Copies every rank's buffer to all.
    fn peerlane_all_gather(
        comm: Use<Communicator>,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
        stream: Handle,
        channel: i32,
    ) {
        let buffers = Buffers { input, output, count, dtype };
        // SAFETY: as above, for an output of `count` elements for every rank.
        unsafe { calls::start(&comm.0, &Work::AllGather(buffers), stream, channel) }
    }

    /// Reduces over all ranks, a part for each.
    fn peerlane_reduce_scatter(
        comm: Use<Communicator>,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
        op: Op,
        stream: Handle,
        channel: i32,
    ) {
        let buffers = Buffers { input, output, count, dtype };
        // SAFETY: as above, for an input of `count` elements for every rank.
        unsafe { calls::start(&comm.0, &Work::ReduceScatter(buffers, op), stream, channel) }
    }

    /// Reduces over all ranks, adds the residual and norms.
    fn peerlane_all_reduce_add_rms_norm(
        comm: Use<Communicator>,
        arguments: AddRmsNormIn,
        stream: Handle,
        channel: i32,
    ) {
        // SAFETY: as above, for the buffers that the struct names.
        unsafe { calls::start(&comm.0, &Work::AddRmsNorm(arguments.0), stream, channel) }
    }

    /// Opens a group.
    fn peerlane_group_start() { group::start() }

    /// Closes a group.
    fn peerlane_group_end() { group::end() }

    /// Makes a stream.
    fn peerlane_stream_create(stream: Out<Handle>) {
        stream.write(registry::insert(Stream::new()?)?);
        Ok(())
    }

    /// Waits for a stream.
    fn peerlane_stream_synchronize(stream: Use<Stream>) { Ok(stream.0.synchronize()?) }

    /// Destroys a stream.
    fn peerlane_stream_destroy(stream: Take<Stream>) {
        outside_groups("peerlane_stream_destroy")?;
        let stream = registry::remove::<Stream>(stream.0)?;
        Ok(stream.synchronize()?)
    }
}

/// A rank's number, from an argument called `name`.
fn rank_of(name: &str, raw: i32, n: usize) -> Outcome<usize> {
    usize::try_from(raw).ok().filter(|&r| r < n).ok_or_else(|| {
        Failure::argument(format!("'{name}' is {raw}; ranks of {n} are 0 to {}", n - 1))
    })
}

/// A group holds calls that name communicators and streams; what they name must be there when the group ends.
fn outside_groups(function: &str) -> Outcome<()> {
    if group::is_open() {
        return Err(Failure::argument(format!(
            "{function} inside an open group; call peerlane_group_end first"
        )));
    }
    Ok(())
}
