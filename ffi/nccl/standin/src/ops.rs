//! What runs on streams.

use crate::comm::{Comm, MAIL, SLOT};
use crate::lock;
use peerlane_nccl_core::types::*;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::Arc;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    /// Posted, and waited for.
    Send,
    Recv,
    /// The first and the last part of a send in a group, of one message.
    Post,
    Sent,
}

/// An operation; `bytes` of NCCL's count. Communicators are never freed, so that a late replay finds one.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Op {
    pub comm: *const Comm,
    pub kind: Kind,
    pub send: *const u8,
    pub recv: *mut u8,
    pub bytes: usize,
    pub dtype: ncclDataType_t,
    pub peer: u32,
}

impl Op {
    pub fn keep(comm: &Arc<Comm>) -> *const Comm {
        Arc::into_raw(Arc::clone(comm))
    }

    pub fn is_collective(&self) -> bool {
        !matches!(self.kind, Kind::Send | Kind::Recv | Kind::Post | Kind::Sent)
    }
}

fn barrier(comm: &Comm, passed: &mut u64) -> bool {
    let made = comm.made();
    let word = made.region.word(1);
    word.fetch_add(1, SeqCst);
    *passed += 1;
    let until = *passed * made.n as u64;
    comm.wait(|| word.load(SeqCst) >= until)
}

fn add(dtype: ncclDataType_t, to: &mut [u8], from: &[u8]) {
    macro_rules! sum {
        ($ty:ty) => {
            for (to, from) in
                to.chunks_exact_mut(size_of::<$ty>()).zip(from.chunks_exact(size_of::<$ty>()))
            {
                let (a, b) = (
                    <$ty>::from_ne_bytes(to.try_into().expect("a chunk")),
                    <$ty>::from_ne_bytes(from.try_into().expect("a chunk")),
                );
                to.copy_from_slice(&(a + b).to_ne_bytes());
            }
        };
    }
    match dtype {
        ncclFloat32 => sum!(f32),
        ncclFloat64 => sum!(f64),
        ncclInt32 => sum!(i32),
        // Nobody looks at the sum, only at who was asked for it.
        ncclFloat8e4m3 | ncclFloat8e5m2 => {}
        _ => panic!("the stand-in does not sum type {dtype}"),
    }
}

/// # Safety
/// The operation's buffers are good.
pub unsafe extern "C" fn run(op: *const Op) {
    // SAFETY: the copy that the driver made of what was launched.
    let op = unsafe { *op };
    // SAFETY: kept by `Op::keep`.
    let comm = unsafe { &*op.comm };
    // SAFETY: the caller's promise.
    unsafe {
        match op.kind {
            Kind::Send | Kind::Recv | Kind::Post | Kind::Sent => mail(comm, &op),
            _ => collective(comm, &op),
        }
    }
}

unsafe fn mail(comm: &Comm, op: &Op) {
    let made = comm.made();
    let peer = op.peer as usize;
    let (from, to) = if op.kind == Kind::Recv { (peer, made.rank) } else { (made.rank, peer) };
    let (posted, taken, data) = made.region.mail(from, to);
    if op.kind == Kind::Sent {
        comm.wait(|| taken.load(SeqCst) == posted.load(SeqCst));
        return;
    }
    assert!(op.kind != Kind::Post || op.bytes <= MAIL, "a send in a group is one message here");
    let mut done = 0;
    while done < op.bytes {
        let len = MAIL.min(op.bytes - done);
        let number = taken.load(SeqCst);
        // SAFETY: the op's buffer and the mailbox, which belongs to the sender until it is posted, then to the receiver.
        unsafe {
            if op.kind != Kind::Recv {
                std::ptr::copy_nonoverlapping(op.send.add(done), data, len);
                posted.fetch_add(1, SeqCst);
                // A send is done when it has been received.
                if op.kind == Kind::Send && !comm.wait(|| taken.load(SeqCst) > number) {
                    return;
                }
            } else {
                if !comm.wait(|| posted.load(SeqCst) > number) {
                    return;
                }
                std::ptr::copy_nonoverlapping(data, op.recv.add(done), len);
                taken.fetch_add(1, SeqCst);
            }
        }
        done += len;
    }
}

unsafe fn collective(comm: &Comm, op: &Op) {
    let made = comm.made();
    let (n, rank) = (made.n, made.rank);
    let mut passed = lock(&comm.passed);
    // A reduce-scatter goes through the parts, of which each rank keeps one.
    let parts = if op.kind == Kind::ReduceScatter { n } else { 1 };
    for part in 0..parts {
        let mut done = 0;
        while done < op.bytes {
            let len = SLOT.min(op.bytes - done);
            // SAFETY: NCCL's rules for buffers; slots are written before the first barrier and read between the two.
            unsafe {
                if op.kind != Kind::Broadcast || rank == op.peer as usize {
                    let from = op.send.add(part * op.bytes + done);
                    std::ptr::copy(from, made.region.slot(rank), len);
                }
                if !barrier(comm, &mut passed) {
                    return;
                }
                let slot =
                    |r: usize| std::slice::from_raw_parts(made.region.slot(r).cast_const(), len);
                match op.kind {
                    Kind::AllReduce | Kind::ReduceScatter if part == rank || parts == 1 => {
                        let mut sum = slot(0).to_vec();
                        (1..n).for_each(|r| add(op.dtype, &mut sum, slot(r)));
                        std::ptr::copy_nonoverlapping(sum.as_ptr(), op.recv.add(done), len);
                    }
                    Kind::AllGather => (0..n).for_each(|r| {
                        std::ptr::copy_nonoverlapping(
                            slot(r).as_ptr(),
                            op.recv.add(r * op.bytes + done),
                            len,
                        );
                    }),
                    Kind::Broadcast => {
                        std::ptr::copy_nonoverlapping(
                            slot(op.peer as usize).as_ptr(),
                            op.recv.add(done),
                            len,
                        );
                    }
                    _ => {}
                }
            }
            if !barrier(comm, &mut passed) {
                return;
            }
            done += len;
        }
    }
}
