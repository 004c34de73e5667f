//! Peer memory between processes: what lives how long, shown against the stand-in driver.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/fakecuda.rs"]
mod fakecuda;

use fakecuda::{in_child, live};
use peerlane::device::cuda::*;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};

const BYTES: usize = 2 << 20;

fn device(ordinal: u32) -> Context {
    Context::retain(&Device::by_ordinal(Driver::load().unwrap(), ordinal).unwrap()).unwrap()
}

/// A second process that runs the same test with a socket to this one; it finds itself by [`socket`].
fn second_process(test: &str) -> (Child, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env("PEERLANE_TEST_PEER", "1")
        .env("FAKECUDA_RANK", "1")
        .stdin(OwnedFd::from(theirs))
        .spawn()
        .unwrap();
    (child, ours)
}

/// In the second process: the socket to the first.
fn socket() -> Option<UnixStream> {
    std::env::var_os("PEERLANE_TEST_PEER")?;
    // SAFETY: standard input is the socket, and nobody else reads it.
    Some(UnixStream::from(unsafe { OwnedFd::from_raw_fd(0) }))
}

/// Sends one byte with a descriptor, or receives it.
fn pass(socket: &UnixStream, fd: Option<&OwnedFd>) -> Option<OwnedFd> {
    let mut byte = 0u8;
    let mut part = libc::iovec { iov_base: (&mut byte as *mut u8).cast(), iov_len: 1 };
    let mut control = [0u64; 8];
    // SAFETY: one part, one control message with room for one descriptor, all alive during the call.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as _;
        let header = libc::CMSG_FIRSTHDR(&message);
        match fd {
            Some(fd) => {
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = libc::CMSG_LEN(4) as _;
                libc::CMSG_DATA(header).cast::<i32>().write_unaligned(fd.as_raw_fd());
                assert_eq!(libc::sendmsg(socket.as_raw_fd(), &message, 0), 1);
                None
            }
            None => {
                assert_eq!(libc::recvmsg(socket.as_raw_fd(), &mut message, 0), 1);
                let header = libc::CMSG_FIRSTHDR(&message);
                assert!(!header.is_null(), "no descriptor came");
                let fd = libc::CMSG_DATA(header).cast::<i32>().read_unaligned();
                Some(OwnedFd::from_raw_fd(fd))
            }
        }
    }
}

/// Fills a peer's or one's own slab, or looks at its last byte.
fn fill(context: &Context, stream: &Stream, ptr: u64, value: u8) {
    let entered = context.enter().unwrap();
    // SAFETY: a mapped slab of `BYTES`, waited for.
    unsafe { memory::fill(&entered, ptr, value, BYTES, stream.as_ref()) }.unwrap();
    stream.synchronize().unwrap();
}

fn last(context: &Context, stream: &Stream, ptr: u64) -> u8 {
    let mut byte = [0];
    let entered = context.enter().unwrap();
    // SAFETY: a mapped slab of `BYTES`, waited for.
    unsafe { memory::read(&entered, ptr + BYTES as u64 - 1, &mut byte, stream.as_ref()) }.unwrap();
    byte[0]
}

#[test]
fn memory_shared_by_descriptor_outlives_its_killed_maker() {
    let name = "memory_shared_by_descriptor_outlives_its_killed_maker";
    in_child(name, &[], || {
        if let Some(mut socket) = socket() {
            let context = device(1);
            let stream = Stream::new(&context, 0).unwrap();
            let slab = VmmMemory::new(&context, BYTES).unwrap();
            fill(&context, &stream, slab.ptr(), 0x11);
            pass(&socket, Some(&slab.export().unwrap()));
            // The first process writes; this one sees it.
            let mut go = [0];
            socket.read_exact(&mut go).unwrap();
            socket.write_all(&[last(&context, &stream, slab.ptr())]).unwrap();
            loop {
                std::thread::park();
            }
        }
        let (mut maker, mut socket) =
            second_process("memory_shared_by_descriptor_outlives_its_killed_maker");
        let context = device(0);
        let stream = Stream::new(&context, 0).unwrap();
        let fd = pass(&socket, None).unwrap();
        let slab = VmmMemory::import(&context, fd.as_fd(), BYTES).unwrap().required().unwrap();
        drop(fd);
        assert_eq!(last(&context, &stream, slab.ptr()), 0x11);
        fill(&context, &stream, slab.ptr(), 0x22);
        socket.write_all(&[0]).unwrap();
        let mut seen = [0];
        socket.read_exact(&mut seen).unwrap();
        assert_eq!(seen, [0x22]);
        maker.kill().unwrap();
        maker.wait().unwrap();
        assert_eq!(last(&context, &stream, slab.ptr()), 0x22);
        fill(&context, &stream, slab.ptr(), 0x33);
        assert_eq!(last(&context, &stream, slab.ptr()), 0x33);
        drop(slab);
        assert_eq!(&live()[2..5], [0, 0, 0]);
    });
}

/// Whoever checks a mirror from the writer's side finds nothing wrong; that is why the owner tests a lane. The control is the
/// test before this one.
#[test]
fn a_mirror_satisfies_its_writer_and_not_its_owner() {
    const NAME: &str = "a_mirror_satisfies_its_writer_and_not_its_owner";
    in_child(NAME, &[("FAKECUDA_MIRROR", "vmm")], || {
        let context = device(0);
        let stream = Stream::new(&context, 0).unwrap();
        if let Some(socket) = socket() {
            let fd = pass(&socket, None).unwrap();
            let theirs =
                VmmMemory::import(&context, fd.as_fd(), BYTES).unwrap().required().unwrap();
            assert_eq!(last(&context, &stream, theirs.ptr()), 1);
            fill(&context, &stream, theirs.ptr(), 7);
            assert_eq!(last(&context, &stream, theirs.ptr()), 7, "the writer reads it back");
            pass(&socket, Some(&fd));
            return;
        }
        let mine = VmmMemory::new(&context, BYTES).unwrap();
        fill(&context, &stream, mine.ptr(), 1);
        let (mut child, socket) = second_process(NAME);
        pass(&socket, Some(&mine.export().unwrap()));
        pass(&socket, None);
        assert_eq!(last(&context, &stream, mine.ptr()), 1, "the owner sees none of it");
        assert!(child.wait().unwrap().success());
    });
}

#[test]
fn memory_shared_by_ipc_stays_until_every_importer_is_gone() {
    let name = "memory_shared_by_ipc_stays_until_every_importer_is_gone";
    in_child(name, &[("FAKECUDA_NO_VMM", "1")], || {
        if let Some(mut socket) = socket() {
            let context = device(1);
            let stream = Stream::new(&context, 0).unwrap();
            // For each slab: open it, write, wait for the word to look again, answer what is there.
            for value in [0x51, 0x52, 0x53] {
                let mut bytes = [0; IPC_HANDLE_BYTES];
                socket.read_exact(&mut bytes).unwrap();
                let handle = IpcHandle::from_bytes(bytes);
                let slab = IpcMapping::open(&context, &handle, BYTES).unwrap().required().unwrap();
                fill(&context, &stream, slab.ptr(), value);
                socket.write_all(&[value]).unwrap();
                socket.read_exact(&mut [0]).unwrap();
                socket.write_all(&[last(&context, &stream, slab.ptr())]).unwrap();
                drop(slab);
                assert_eq!(live()[5], 0);
            }
            return;
        }
        let (mut importer, mut socket) =
            second_process("memory_shared_by_ipc_stays_until_every_importer_is_gone");
        let context = device(0);
        let stream = Stream::new(&context, 0).unwrap();
        let mut share = |slab: &IpcMemory, value: u8| {
            let handle = slab.export([1]).unwrap();
            // The exporter itself cannot open it.
            let error = IpcMapping::open(&context, &handle, BYTES).unwrap_err().to_string();
            assert!(error.contains("cuIpcOpenMemHandle_v2"), "{error}");
            socket.write_all(handle.as_bytes()).unwrap();
            socket.read_exact(&mut [0]).unwrap();
            assert_eq!(last(&context, &stream, slab.ptr()), value);
            socket.try_clone().unwrap()
        };
        let look = |socket: &mut UnixStream| {
            let mut seen = [0];
            socket.write_all(&[0]).unwrap();
            socket.read_exact(&mut seen).unwrap();
            seen[0]
        };
        // Said goodbye: freed.
        let slab = IpcMemory::new(&context, BYTES).unwrap();
        let mut peer = share(&slab, 0x51);
        assert_eq!(look(&mut peer), 0x51);
        slab.importer_gone(1);
        drop(slab);
        assert_eq!((live()[1], kept_until_exit()), (0, 0));
        // Has not: kept, and what the importer sees is intact.
        let slab = IpcMemory::new(&context, BYTES).unwrap();
        let mut peer = share(&slab, 0x52);
        drop(slab);
        assert_eq!((live()[1], kept_until_exit()), (1, 1));
        assert_eq!(look(&mut peer), 0x52);
        // The control: a goodbye that is not true lets the memory go under the importer, which then sees nonsense.
        let slab = IpcMemory::new(&context, BYTES).unwrap();
        let mut peer = share(&slab, 0x53);
        slab.importer_gone(1);
        drop(slab);
        assert_eq!(look(&mut peer), 0xdb);
        assert!(importer.wait().unwrap().success());
    });
}

#[test]
fn a_handle_whose_maker_is_dead_is_an_error_that_names_the_call() {
    let name = "a_handle_whose_maker_is_dead_is_an_error_that_names_the_call";
    in_child(name, &[], || {
        if let Some(mut socket) = socket() {
            let slab = IpcMemory::new(&device(1), 1).unwrap();
            socket.write_all(slab.export([0]).unwrap().as_bytes()).unwrap();
            loop {
                std::thread::park();
            }
        }
        let (mut maker, mut socket) =
            second_process("a_handle_whose_maker_is_dead_is_an_error_that_names_the_call");
        let mut bytes = [0; IPC_HANDLE_BYTES];
        socket.read_exact(&mut bytes).unwrap();
        maker.kill().unwrap();
        maker.wait().unwrap();
        let handle = IpcHandle::from_bytes(bytes);
        let error = IpcMapping::open(&device(0), &handle, BYTES).unwrap_err().to_string();
        assert!(
            error.contains("cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_INVALID_HANDLE"),
            "{error}"
        );
        assert_eq!(live()[5], 0);
    });
}

#[test]
fn a_closed_edge_between_processes_is_an_answer() {
    let env = [("FAKECUDA_NO_PEER", "*")];
    in_child("a_closed_edge_between_processes_is_an_answer", &env, || {
        if let Some(mut socket) = socket() {
            let context = device(1);
            let (ipc, vmm) = (IpcMemory::new(&context, 1).unwrap(), VmmMemory::new(&context, 1));
            socket.write_all(ipc.export([0]).unwrap().as_bytes()).unwrap();
            pass(&socket, Some(&vmm.unwrap().export().unwrap()));
            socket.read_exact(&mut [0]).unwrap();
            return;
        }
        let (mut maker, mut socket) =
            second_process("a_closed_edge_between_processes_is_an_answer");
        let mut bytes = [0; IPC_HANDLE_BYTES];
        socket.read_exact(&mut bytes).unwrap();
        let fd = pass(&socket, None).unwrap();
        let context = device(0);
        let ipc = IpcMapping::open(&context, &IpcHandle::from_bytes(bytes), BYTES).unwrap();
        assert!(matches!(ipc, Edge::NoPeerAccess(_)));
        let vmm = VmmMemory::import(&context, fd.as_fd(), BYTES).unwrap();
        assert!(matches!(vmm, Edge::NoPeerAccess(_)));
        assert_eq!(&live()[2..6], [0, 0, 0, 0]);
        // On the same device there is no edge to open.
        let same = VmmMemory::import(&device(1), fd.as_fd(), BYTES).unwrap();
        assert!(matches!(same, Edge::Open(_)));
        socket.write_all(&[0]).unwrap();
        assert!(maker.wait().unwrap().success());
    });
}
