//! The chain of a rank's captured launches: where one kernel of the rank comes right behind another, the second may start
//! while the first still runs (programmatic dependent launch), which hides the time that a launch takes to get going.
//!
//! The first kernel has to let the second one start (`pl_step.dependents`), and which kernel is second shows only when it is
//! captured. So what the first was recorded with is remembered, and its node recorded anew once the second one comes. It then
//! also gets the shape that leaves room for the second (`Shapes::linked`): behind a foreign kernel, and before one, a kernel of
//! ours has all the blocks of its channel.
//! Outside captures nothing is ever programmatic: a kernel that is under way cannot be told.
//!
//! # Why only our own kernel right behind our own, with nothing else between
//!
//! A kernel that was launched programmatically waits, in `dev::after_predecessor`, for the kernel that it depends on, and for
//! that one alone. Buffers are used again from step to step because all that came before a step is complete:
//!
//! - Behind a kernel of ours it is. Each of ours waits for its predecessor before anything else, so one that is complete says
//!   that its predecessor was, and so on down the chain to the first, which was launched as usual and so began when all
//!   before it was complete. The same goes for what the caller put before that: our input, written by a kernel of his.
//! - Behind a foreign kernel it is not. One that lets its successor start before it has waited, or without ever waiting, says
//!   nothing of what came before it, a step of ours included. So a programmatic launch has one dependency, and that is a
//!   node which this rank has recorded from code that waits.
//! - A foreign kernel behind ours must not start early either. On a GPU that ranks share it may take the room that a peer's
//!   kernel needs, which ours waits for. So a kernel lets nobody start until a kernel of ours has been seen behind it; the
//!   last one of a graph never does. (One launched as usual behind a kernel that lets others start waits for all of it. One
//!   that a program has forked off in between by hand, with that attribute, starts early too: no data is wrong for it.)
//!
//! # What the code must be
//!
//! Code that was compiled for an architecture before 9.0 has no instruction to wait with, and on a GPU of 9.0 runs all the
//! same: launched programmatically it would run into its predecessor and give wrong data. So a function must say that its
//! source was compiled for 9.0 or newer, whoever made the fatbin. The driver has that from the machine code itself, which names
//! it beside the GPU it is for (`Virtual SM` in `cuobjdump -elf`), or from the PTX that it compiles; CUB chooses what it
//! launches by the same word. What does not say counts as too old.

use super::shape::{Shape, Shapes};
use crate::bootstrap::CHANNELS;
use crate::device::cuda::{
    memory, CaptureStatus, CapturedGraph, Entered, Function, GraphNode, LaunchShape,
    RecordedKernel, StreamRef, FIRST_CAPABILITY, FIRST_PTX_VERSION,
};
use crate::error::Result;
use crate::launch::*;
use crate::log::log;
use std::collections::HashMap;

/// The parameter of a kernel that begins with `dev::after_predecessor`.
///
/// # Safety
/// It begins with a `pl_step`.
pub(super) unsafe trait BeginsWithStep: Copy {
    /// What it begins with.
    fn beginning(&mut self) -> &mut pl_step {
        // SAFETY: the trait's promise.
        unsafe { &mut *std::ptr::from_mut(self).cast() }
    }
}

/// What the largest parameter takes.
const MOST_BYTES: usize = {
    let mut most = 0;
    let mut at = 0;
    while at < BYTES.len() {
        most = if BYTES[at] > most { BYTES[at] } else { most };
        at += 1;
    }
    most
};
macro_rules! begin_with_step {
    ($($args:ident),*) => {
        $(
            const _: () = assert!(std::mem::offset_of!($args, step) == 0);
            // SAFETY: asserted.
            unsafe impl BeginsWithStep for $args {}
        )*
        const BYTES: &[usize] = &[size_of::<pl_step>(), $(size_of::<$args>()),*];
    };
}
begin_with_step!(pl_args, pl_unrolled_1, pl_unrolled_3, pl_unrolled_7, pl_unrolled_15);
// SAFETY: it is one.
unsafe impl BeginsWithStep for pl_step {}

/// Blocks of a launch, and how many like them a multiprocessor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    pub blocks: u32,
    pub per_sm: u32,
}

/// The GPU, to two kernels of a rank at once: the one that runs and the one that has started early. There are never three of
/// one chain, since a kernel lets the next one start when its own predecessor is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    sm_count: u32,
    sharers: u32,
    /// By channel. None where somebody has said how many blocks a launch has, and so given up room for calls on all channels.
    shares: Option<[u32; CHANNELS]>,
}

impl Room {
    /// On a GPU of `sm_count` multiprocessors that `sharers` ranks use; none where a GPU cannot launch programmatically.
    pub fn new(
        capability: (u32, u32),
        sm_count: u32,
        sharers: u32,
        shares: Option<[u32; CHANNELS]>,
    ) -> Option<Self> {
        (capability >= FIRST_CAPABILITY).then_some(Room { sm_count, sharers, shares })
    }

    /// Whether two kernels fit at once, each on its channel, on every rank that shares the GPU. A kernel that started early
    /// keeps its place until its predecessor is done, which waits for peers' kernels; were these to find no room beside it,
    /// all would wait for ever.
    ///
    /// A pair may take what a launch of its channel may (`share.rs`): then there is room for calls on all channels, whatever
    /// their kernels need. Where blocks are pinned, the pairs of one channel must fit, and that is all.
    pub fn holds(&self, running: (Grid, usize), early: (Grid, usize)) -> bool {
        let ((running, first), (early, second)) = (running, early);
        let pair = u128::from(running.blocks) + u128::from(early.blocks);
        let fewest = running.per_sm.min(early.per_sm);
        match self.shares {
            None => {
                let (all, wide) = (pair * u128::from(self.sharers), u128::from(self.sm_count));
                all <= wide * u128::from(fewest)
            }
            Some(shares) => fewest > 0 && pair <= shares[first].min(shares[second]).into(),
        }
    }
}

/// The last captured launch, if the end of its stream's capture is known to be that.
#[derive(Clone, Copy)]
struct Last {
    capture: u64,
    node: GraphNode,
    /// Beside the node: a fork begins as usual. Its first kernel would be safe too, but would start beside two chains then.
    stream: StreamRef,
    channel: usize,
    /// What it takes as one of a pair, whatever it was recorded with.
    linked: Shape,
    grid: Grid,
    /// Blocks that the same call would take right behind it.
    again: u32,
}

pub(super) struct Chain {
    /// None where nothing may be programmatic.
    room: Option<Room>,
    /// By function and threads of a block, blocks that a multiprocessor holds.
    per_sm: HashMap<(usize, u32), u32>,
    /// Where the present call's stream stands, if it is being captured.
    now: Option<(CapturedGraph, Option<GraphNode>)>,
    last: Option<Last>,
    /// What `last` was recorded with.
    recorded: RecordedKernel,
}

impl Chain {
    pub fn new(room: Option<Room>) -> Self {
        let recorded = RecordedKernel::with_room_for(MOST_BYTES);
        Chain { room, per_sm: HashMap::new(), now: None, last: None, recorded }
    }

    /// Whether `stream` is being captured. To be asked before the launches of a call.
    pub fn look(&mut self, entered: &Entered<'_>, stream: StreamRef) -> Result<CaptureStatus> {
        self.now = None;
        if self.room.is_none() {
            return stream.capture(entered);
        }
        let (status, end) = stream.capture_with_end(entered)?;
        if let CaptureStatus::Active(graph) = status {
            self.now = Some((graph, end));
        }
        Ok(status)
    }

    /// Something else than a kernel was put on the stream by the present call.
    pub fn interrupt(&mut self) {
        self.now = self.now.map(|(graph, _)| (graph, None));
    }

    /// The kernel of ours that a launch on `stream` would come right behind.
    fn before(&self, stream: StreamRef) -> Option<Last> {
        let (graph, end) = self.now?;
        let at_end =
            |last: &Last| (last.capture, Some(last.node), last.stream) == (graph.id, end, stream);
        self.last.filter(at_end)
    }

    fn grid<A: Copy>(&mut self, kernel: &Function<A>, shape: Shape) -> Grid {
        Grid { blocks: shape.blocks, per_sm: self.per_sm(kernel, shape.threads) }
    }

    fn per_sm<A: Copy>(&mut self, kernel: &Function<A>, threads: u32) -> u32 {
        *self.per_sm.entry((kernel.id(), threads)).or_insert_with(|| {
            // What cannot be told has no room.
            kernel.blocks_per_sm(threads, 0).unwrap_or(0)
        })
    }

    /// The last kernel lets the next one start, from now on, and leaves room for it. False if the driver refuses; then there
    /// are no programmatic launches any more: calls must not fail for them.
    fn let_next_start(&mut self, entered: &Entered<'_>, linked: Shape) -> bool {
        self.recorded.set_grid(linked.blocks, linked.threads);
        // SAFETY: what was remembered begins with a `pl_step`: only `Queue::launch` does it.
        let step = unsafe { &mut *self.recorded.params::<pl_step>() };
        (step.dependents, step.chunk_packs) = (1, linked.chunk_packs);
        self.rewrite(entered)
    }

    /// Nobody comes behind the last kernel after all.
    fn let_nobody_start(&mut self, entered: &Entered<'_>) {
        // SAFETY: as in `let_next_start`.
        unsafe { (*self.recorded.params::<pl_step>()).dependents = 0 };
        self.rewrite(entered);
    }

    fn rewrite(&mut self, entered: &Entered<'_>) -> bool {
        // SAFETY: the node is the end of the capture that is under way, or was when the launch behind it was tried; what it
        // runs is loaded as long as the rank, and the parameter is what it was launched with.
        match unsafe { self.recorded.rewrite(entered) } {
            Ok(()) => true,
            Err(error) => {
                log!(Warn, "no programmatic launches any more: {error}");
                self.room = None;
                false
            }
        }
    }
}

/// Where a call's kernels go.
pub(super) struct Queue<'a> {
    pub entered: &'a Entered<'a>,
    pub stream: StreamRef,
    pub channel: usize,
    pub chain: &'a mut Chain,
}

impl Queue<'_> {
    /// Whether a launch of this shape has its place in a chain: right behind a captured kernel of ours, beside which there is room
    /// for it. Beside one that has more blocks only because nothing of ours came before it, there is none; but then those behind
    /// this launch are to find room, so it is as if there were. For kernels with one shape alone; others have two, of which
    /// [`launch`](Self::launch) takes the one that it can.
    pub fn has_a_link<A: Copy>(&mut self, kernel: &Function<A>, shape: Shape) -> bool {
        let (Some(room), Some(last)) = (self.chain.room, self.chain.before(self.stream)) else {
            return false;
        };
        let grid = self.chain.grid(kernel, shape);
        let beside = Grid { blocks: last.grid.blocks.min(last.again), ..last.grid };
        kernel.ptx_version() >= FIRST_PTX_VERSION
            && room.holds((beside, last.channel), (grid, self.channel))
    }

    /// Blocks of so many threads that a multiprocessor holds.
    pub fn per_sm<A: Copy>(&mut self, kernel: &Function<A>, threads: u32) -> u32 {
        self.chain.per_sm(kernel, threads)
    }

    /// Queues a copy on the device, or records it.
    ///
    /// # Safety
    /// As for [`memory::copy`].
    pub unsafe fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.chain.interrupt();
        // SAFETY: the caller's promise.
        unsafe { memory::copy(self.entered, to, from, bytes, self.stream) }
    }

    /// Queues a kernel, or records it, as part of the chain if it can be. Where it can, the shape is `linked`, else `usual`.
    /// Kernels whose `linked` shapes do not fit at once, such as those of large steps, run one after the other.
    ///
    /// # Safety
    /// As for [`Function::launch`], of both shapes; all of the kernel is as `cuda/kernels.cu` has it, which waits for its
    /// predecessor first.
    pub unsafe fn launch<A: BeginsWithStep>(
        &mut self,
        kernel: &Function<A>,
        shapes: Shapes,
        args: &mut A,
    ) -> Result<()> {
        let Queue { entered, stream, channel, chain } = self;
        let (entered, stream, channel) = (*entered, *stream, *channel);
        let mut put = |Shape { blocks, threads, chunk_packs, cluster }, programmatic| {
            args.beginning().chunk_packs = chunk_packs;
            let shape = LaunchShape { blocks, threads, shared_bytes: 0, programmatic, cluster };
            // SAFETY: the caller's promise.
            unsafe { kernel.launch(entered, stream, &shape, args) }.map(|()| shape)
        };
        let room = chain.room.filter(|_| kernel.ptx_version() >= FIRST_PTX_VERSION);
        let (Some(room), Some(_)) = (room, chain.now) else {
            chain.interrupt();
            return put(shapes.usual, false).map(drop);
        };
        let linked = shapes.linked;
        let grid = chain.grid(kernel, linked);
        let fits = |last: &Last| room.holds((last.grid, last.channel), (grid, channel));
        let before = chain.before(stream).filter(fits);
        let programmatic = before.is_some_and(|last| chain.let_next_start(entered, last.linked));
        let launched = put(if programmatic { linked } else { shapes.usual }, programmatic);
        if launched.is_err() && programmatic {
            // Whoever comes next is not ours.
            chain.let_nobody_start(entered);
        }
        chain.last = None;
        let shape = launched?;
        // A capture that cannot be asked says so to the next call, whose business it is.
        chain.now = match stream.capture_with_end(entered) {
            Ok((CaptureStatus::Active(now), end)) => Some((now, end)),
            _ => None,
        };
        // The kernel has taken the place of all that the stream stood at: if that is one node, it is the kernel's.
        if let Some((CapturedGraph { id: capture, .. }, Some(node))) = chain.now {
            if chain.recorded.remember(node, kernel, &shape, args) {
                let again = shapes.again.blocks;
                chain.last = Some(Last { capture, node, stream, channel, linked, grid, again });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::share::{share, CAPTURED, EAGER};
    use super::*;

    fn grid(blocks: u32, per_sm: u32) -> Grid {
        Grid { blocks, per_sm }
    }

    /// Of 132 multiprocessors.
    fn room(sharers: u32) -> Room {
        let shares = [0, 1, 2, 3].map(|channel| share(132, sharers, channel));
        Room { sm_count: 132, sharers, shares: Some(shares) }
    }

    #[test]
    fn gpus_before_hopper_have_no_programmatic_launches() {
        for old in [(7, 5), (8, 0), (8, 9)] {
            assert_eq!(Room::new(old, 132, 1, None), None);
        }
        for new in [(9, 0), (10, 0), (12, 0)] {
            assert!(Room::new(new, 132, 1, None).is_some());
        }
    }

    #[test]
    fn two_kernels_of_every_rank_fit_in_a_channels_share_of_the_gpu() {
        let holds = |sharers, channel, running, early| {
            room(sharers).holds((running, channel), (early, channel))
        };
        assert!(holds(1, CAPTURED, grid(33, 1), grid(33, 4)));
        assert!(!holds(1, CAPTURED, grid(33, 8), grid(34, 8)));
        assert!(holds(1, EAGER, grid(14, 1), grid(19, 4)));
        assert!(!holds(1, EAGER, grid(14, 8), grid(20, 8)));
        assert!(holds(1, 2, grid(8, 1), grid(8, 4)));
        assert!(!holds(1, 3, grid(8, 8), grid(9, 8)));
        assert!(holds(8, CAPTURED, grid(4, 4), grid(4, 4)));
        assert!(!holds(8, CAPTURED, grid(4, 8), grid(5, 8)));
        assert!(!holds(1, CAPTURED, grid(2, 8), grid(1024, 8)), "a norm of many rows");
        assert!(!holds(1, CAPTURED, grid(1, 0), grid(1, 1)), "what cannot be told has no room");
    }

    #[test]
    fn a_pair_of_two_channels_takes_no_more_than_the_smaller_share() {
        let holds = |first, second, blocks| {
            room(1).holds((grid(blocks, 8), first), (grid(blocks, 8), second))
        };
        for (first, second) in [(CAPTURED, 2), (2, CAPTURED)] {
            assert!(holds(first, second, 8) && !holds(first, second, 9));
        }
    }

    #[test]
    fn where_blocks_are_pinned_one_channels_kernels_must_fit() {
        let room = Room { shares: None, ..room(8) };
        let holds = |running, early| room.holds((running, 1), (early, 1));
        assert!(holds(grid(16, 2), grid(17, 2)));
        assert!(!holds(grid(17, 2), grid(17, 2)));
        assert!(!holds(grid(1, 0), grid(1, 1)), "what cannot be told has no room");
    }

    #[test]
    fn no_number_of_blocks_is_taken_for_another() {
        let most = (grid(u32::MAX, 1), 1);
        let room = Room { sm_count: 1, sharers: u32::MAX, shares: Some([u32::MAX; CHANNELS]) };
        assert!(!room.holds(most, most));
        assert!(!Room { shares: None, ..room }.holds(most, most));
    }
}
