//! Frames with descriptors over a socket.

use super::fork::Fd;
use super::socket::{descriptor_limit, explain, owned, peer_uid, retry, wait};
use super::wire::{Message, HEADER, MAX_BODY, MAX_FDS};
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Instant;

const CONTROL_WORDS: usize = 132;

/// A buffer for control messages, aligned as their header wants it: 253 descriptors, the system's maximum, and a header.
type Control = [u64; CONTROL_WORDS];

fn message_header(io: &mut libc::iovec, control: &mut Control, used: usize) -> libc::msghdr {
    // SAFETY: all-zero is a valid msghdr.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = io;
    header.msg_iovlen = 1;
    if used > 0 {
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = used as _;
    }
    header
}

fn send_some(fd: &Fd, bytes: &[u8], fds: &[BorrowedFd]) -> io::Result<usize> {
    let mut control: Control = [0; CONTROL_WORDS];
    let mut io = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let payload = size_of_val(fds) as u32;
    // SAFETY: pure arithmetic.
    let (space, length) = unsafe { (libc::CMSG_SPACE(payload), libc::CMSG_LEN(payload)) };
    let used = if fds.is_empty() { 0 } else { space as usize };
    let header = message_header(&mut io, &mut control, used);
    if !fds.is_empty() {
        // SAFETY: MAX_FDS descriptors fit `control` (checked by the caller), so the first header and its data lie in it.
        unsafe {
            let first = libc::CMSG_FIRSTHDR(&header);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = length as _;
            let data = libc::CMSG_DATA(first).cast::<RawFd>();
            for (i, fd) in fds.iter().enumerate() {
                data.add(i).write_unaligned(fd.as_raw_fd());
            }
        }
    }
    // SAFETY: `header` points to `io` and `control`, both alive; sendmsg only reads them.
    retry(|| unsafe { libc::sendmsg(fd.as_raw_fd(), &header, libc::MSG_NOSIGNAL) })
        .map(|sent| sent as usize)
}

/// Descriptors that came in one piece.
#[derive(Debug)]
struct Batch {
    fds: Vec<OwnedFd>,
    /// Some did not fit this process.
    truncated: bool,
}

/// Reads up to a buffer's worth with any descriptors; 0 bytes is the end of file.
fn receive_some(fd: &Fd, buffer: &mut [u8]) -> io::Result<(usize, Option<Batch>)> {
    let mut control: Control = [0; CONTROL_WORDS];
    let mut io = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let mut header = message_header(&mut io, &mut control, CONTROL_WORDS * 8);
    let flags = libc::MSG_CMSG_CLOEXEC;
    // SAFETY: `header` points to `io` (which covers `buffer`) and `control`, both alive and writable.
    let got = retry(|| unsafe { libc::recvmsg(fd.as_raw_fd(), &mut header, flags) })?;
    let mut fds = Vec::new();
    // SAFETY: the kernel filled `control`; the CMSG macros walk it within `msg_controllen`. Each number in an SCM_RIGHTS
    // message is a fresh descriptor of this process that nobody else owns.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(&header);
        while let Some(message) = next.as_ref() {
            if message.cmsg_level == libc::SOL_SOCKET && message.cmsg_type == libc::SCM_RIGHTS {
                let bytes = message.cmsg_len - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(message).cast::<RawFd>();
                for i in 0..bytes / size_of::<RawFd>() {
                    fds.push(owned(data.add(i).read_unaligned()));
                }
            }
            next = libc::CMSG_NXTHDR(&header, message);
        }
    }
    let truncated = header.msg_flags & libc::MSG_CTRUNC != 0;
    let batch = (truncated || !fds.is_empty()).then_some(Batch { fds, truncated });
    Ok((got as usize, batch))
}

fn receive_bytes(fd: &Fd, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: `buffer` is writable for its length.
    retry(|| unsafe { libc::recv(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) })
        .map(|got| got as usize)
}

/// A message and the descriptors that came with it, or why they could not be received.
pub(super) type Delivery = (Message, Result<Vec<OwnedFd>>);

/// A socket that carries frames.
#[derive(Debug)]
pub(super) struct Link {
    fd: Fd,
    inbox: Vec<u8>,
    batches: VecDeque<Batch>,
    /// The other end has closed; what came before is still delivered.
    closed: bool,
}

impl Link {
    pub(super) fn new(fd: Fd) -> Self {
        Link { fd, inbox: Vec::new(), batches: VecDeque::new(), closed: false }
    }

    pub(super) fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub(super) fn peer_uid(&self) -> io::Result<u32> {
        peer_uid(&self.fd)
    }

    /// Sends bytes outside of any frame that fit the empty buffer of a new connection.
    pub(super) fn send_bytes(&self, bytes: &[u8]) -> io::Result<()> {
        match send_some(&self.fd, bytes, &[])? {
            sent if sent == bytes.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// Reads bytes outside of any frame and lets the kernel drop descriptors sent along: for peers that have not shown
    /// the token.
    pub(super) fn receive_bytes(&self, buffer: &mut [u8]) -> io::Result<usize> {
        receive_bytes(&self.fd, buffer)
    }

    /// Whether the other end has closed and everything it said has been read.
    pub(super) fn is_over(&self) -> bool {
        self.closed
    }

    /// Takes in what has arrived, at most about a megabyte at a time, without waiting.
    pub(super) fn fill(&mut self) {
        let mut buffer = [0; 16 << 10];
        for _ in 0..64 {
            if self.closed {
                return;
            }
            match receive_some(&self.fd, &mut buffer) {
                Ok((0, _)) => self.closed = true,
                Ok((got, batch)) => {
                    self.inbox.extend_from_slice(&buffer[..got]);
                    self.batches.extend(batch);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                // A peer that closed with our words unread resets the connection.
                Err(_) => self.closed = true,
            }
        }
    }

    /// The next complete message, if there is one. A body above `limit` or garbage is an error, and the link is of no
    /// use afterwards.
    pub(super) fn next(&mut self, limit: usize) -> Result<Option<Delivery>> {
        let Some((header, rest)) = self.inbox.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let number = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
                as usize
        };
        let (length, fds) = (number(0), number(4));
        if length > limit || fds > MAX_FDS {
            return Err(Error::Internal(format!(
                "a bootstrap frame announces {length} bytes and {fds} descriptors; at most {limit} \
                 and {MAX_FDS} are allowed"
            )));
        }
        let Some(body) = rest.get(..length) else {
            return Ok(None);
        };
        let message = Message::decode(body)?;
        self.inbox.drain(..HEADER + length);
        let received = if fds == 0 { Ok(Vec::new()) } else { self.take_batch(fds) };
        Ok(Some((message, received)))
    }

    fn take_batch(&mut self, expected: usize) -> Result<Vec<OwnedFd>> {
        match self.batches.pop_front() {
            Some(batch) if batch.fds.len() == expected && !batch.truncated => Ok(batch.fds),
            batch => Err(Error::System {
                call: "recvmsg(SCM_RIGHTS)".into(),
                detail: format!(
                    "{} of {expected} descriptors arrived; {}",
                    batch.map_or(0, |b| b.fds.len()),
                    descriptor_limit()
                ),
            }),
        }
    }

    /// Whether the other end is closed. There may still be something to read.
    pub(super) fn has_hung_up(&self) -> bool {
        let mut end = [libc::pollfd { fd: self.raw(), events: 0, revents: 0 }];
        let now = Some(Instant::now());
        matches!(wait(&mut end, now), Ok(true))
            && end[0].revents & (libc::POLLHUP | libc::POLLERR) != 0
    }

    /// Sends a message with descriptors, waiting for room until `until`.
    pub(super) fn send(&self, message: &Message, fds: &[BorrowedFd], until: Instant) -> Result<()> {
        let body = message.encode()?;
        if body.len() > MAX_BODY || fds.len() > MAX_FDS {
            return Err(Error::Internal(format!(
                "a bootstrap message of {} bytes and {} descriptors is too large",
                body.len(),
                fds.len()
            )));
        }
        let mut frame = Vec::with_capacity(HEADER + body.len());
        frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
        frame.extend_from_slice(&(fds.len() as u32).to_le_bytes());
        frame.extend_from_slice(&body);
        let mut sent = 0;
        while sent < frame.len() {
            // Descriptors belong to the frame's first byte: the receiver pairs them with frames by order.
            match send_some(&self.fd, &frame[sent..], if sent == 0 { fds } else { &[] }) {
                Ok(more) => sent += more,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    let mut room =
                        [libc::pollfd { fd: self.raw(), events: libc::POLLOUT, revents: 0 }];
                    if !wait(&mut room, Some(until))? {
                        return Err(Error::os("sendmsg", &io::ErrorKind::TimedOut.into()));
                    }
                }
                Err(e) => return Err(explain("sendmsg", &e)),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::socket::{after, pair, readable};
    use super::super::wire::MAX_CONTRIBUTION;
    use super::*;
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsFd;
    use std::time::Duration;

    fn links() -> (Link, Link) {
        let (a, b) = pair().unwrap();
        (Link::new(a.into()), Link::new(b.into()))
    }

    fn soon() -> Instant {
        after(Duration::from_secs(5))
    }

    #[test]
    fn descriptors_stay_with_their_frames() {
        let (a, mut b) = links();
        let files: Vec<File> = (0..3u8)
            .map(|i| {
                // SAFETY: a C string; the result is checked.
                let fd = unsafe { libc::memfd_create(c"t".as_ptr(), libc::MFD_CLOEXEC) };
                assert!(fd >= 0);
                let mut file = File::from(owned(fd));
                file.write_all(&[i]).unwrap();
                file
            })
            .collect();
        a.send(&Message::Peer { rank: 0, outcome: Ok(()) }, &[files[0].as_fd()], soon()).unwrap();
        a.send(&Message::Goodbye { steps: [7; 4] }, &[], soon()).unwrap();
        let two = [files[1].as_fd(), files[2].as_fd()];
        a.send(&Message::Peer { rank: 1, outcome: Ok(()) }, &two, soon()).unwrap();
        drop(a);
        b.fill();
        let mut seen = Vec::new();
        while let Some((message, fds)) = b.next(MAX_BODY).unwrap() {
            let bytes = fds.unwrap().into_iter().map(|fd| {
                let mut file = File::from(fd);
                file.rewind().unwrap();
                let mut byte = [0];
                file.read_exact(&mut byte).unwrap();
                byte[0]
            });
            seen.push((message != (Message::Goodbye { steps: [7; 4] }), bytes.collect::<Vec<_>>()));
        }
        assert_eq!(seen, [(true, vec![0]), (false, vec![]), (true, vec![1, 2])]);
        // Not at once: a process that another test forks meanwhile holds a copy of `a` until its exec.
        while !b.is_over() {
            assert!(wait(&mut [readable(b.raw())], Some(soon())).unwrap(), "the end was not seen");
            b.fill();
        }
    }

    #[test]
    fn a_message_larger_than_the_socket_buffer_arrives_whole() {
        let (a, mut b) = links();
        let sent = Message::Vote { stage: "s".into(), outcome: Ok(vec![5; MAX_CONTRIBUTION]) };
        let copy = sent.clone();
        let sender = std::thread::spawn(move || a.send(&copy, &[], soon()));
        let got = loop {
            b.fill();
            if let Some((message, _)) = b.next(MAX_BODY).unwrap() {
                break message;
            }
            assert!(wait(&mut [readable(b.raw())], Some(soon())).unwrap());
        };
        assert_eq!(got, sent);
        sender.join().unwrap().unwrap();
    }

    #[test]
    fn oversized_and_broken_frames_are_refused_before_they_are_stored() {
        for (frame, said) in [
            ([u32::MAX, 0], "4294967295 bytes"),
            ([0, 65], "65 descriptors"),
            ([1, 0], "cannot be decoded"),
        ] {
            let (a, mut b) = links();
            let mut bytes: Vec<u8> = frame.iter().flat_map(|n| n.to_le_bytes()).collect();
            bytes.push(0xff);
            a.send_bytes(&bytes).unwrap();
            b.fill();
            let error = b.next(MAX_BODY).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn writing_to_a_closed_peer_is_an_error_and_no_signal() {
        let (a, b) = links();
        drop(b);
        let error =
            a.send(&Message::Goodbye { steps: [7; 4] }, &[], soon()).unwrap_err().to_string();
        assert!(error.contains("Broken pipe"), "{error}");
    }

    #[test]
    fn a_peer_that_never_reads_costs_no_more_than_the_deadline() {
        let (a, _b) = links();
        let big = Message::Vote { stage: "s".into(), outcome: Ok(vec![5; MAX_CONTRIBUTION]) };
        let error = a.send(&big, &[], after(Duration::from_millis(50))).unwrap_err();
        assert!(error.to_string().contains("timed out"), "{error}");
    }
}
