//! Unix sockets: waiting with a deadline, frames, descriptors, credentials. Everything is close-on-exec, non-blocking
//! and free of SIGPIPE.

use super::fork::Fd;
use super::wire::{Message, HEADER, MAX_BODY, MAX_FDS};
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// The moment `span` from now; a span beyond what the clock can hold is a century.
pub(super) fn after(span: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(span).unwrap_or(now + Duration::from_secs(100 * 365 * 86400))
}

fn retry<T: PartialOrd + From<i8>>(mut call: impl FnMut() -> T) -> io::Result<T> {
    loop {
        let got = call();
        if got >= T::from(0) {
            return Ok(got);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

pub(super) fn readable(fd: RawFd) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

/// Waits until one of `fds` is ready (then true) or `until` has passed.
pub(super) fn wait(fds: &mut [libc::pollfd], until: Option<Instant>) -> Result<bool> {
    loop {
        let millis = match until {
            None => -1,
            // Rounded up: a rest below a millisecond must not become a busy loop.
            Some(until) => until
                .saturating_duration_since(Instant::now())
                .as_micros()
                .div_ceil(1000)
                .min(i32::MAX as u128) as i32,
        };
        // SAFETY: `fds` is writable for its length.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, millis) };
        if ready > 0 {
            return Ok(true);
        }
        if ready == 0 {
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(false);
            }
        } else if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return Err(Error::last_os("poll"));
        }
    }
}

fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: called only with a number that a system call has just returned to us, owned by nobody else.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

const STREAM: i32 = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;

fn address(path: &Path) -> io::Result<libc::sockaddr_un> {
    // SAFETY: all-zero is a valid sockaddr_un.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() {
        return Err(io::Error::other("the path is too long for a socket address"));
    }
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, &from) in address.sun_path.iter_mut().zip(bytes) {
        *to = from as libc::c_char;
    }
    Ok(address)
}

fn stream() -> io::Result<Fd> {
    // SAFETY: no pointers.
    retry(|| unsafe { libc::socket(libc::AF_UNIX, STREAM, 0) }).map(|fd| owned(fd).into())
}

/// Binds and listens at `path`, which must not exist.
pub(super) fn listen(path: &Path) -> io::Result<Fd> {
    let address = address(path)?;
    let fd = stream()?;
    // SAFETY: `address` is a sockaddr_un of that size.
    retry(|| unsafe {
        libc::bind(
            fd.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<libc::sockaddr_un>() as libc::socklen_t,
        )
    })?;
    // SAFETY: no pointers.
    retry(|| unsafe { libc::listen(fd.as_raw_fd(), 128) })?;
    Ok(fd)
}

/// Connects to `path`; a full queue of the listener is `WouldBlock`.
pub(super) fn connect(path: &Path) -> io::Result<Fd> {
    let address = address(path)?;
    let fd = stream()?;
    // SAFETY: `address` is a sockaddr_un of that size.
    retry(|| unsafe {
        libc::connect(
            fd.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<libc::sockaddr_un>() as libc::socklen_t,
        )
    })?;
    Ok(fd)
}

/// The next connection; `None` if there is none for now.
pub(super) fn accept(listener: &Fd) -> io::Result<Option<Fd>> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let null = std::ptr::null_mut();
    // SAFETY: null address pointers are allowed.
    match retry(|| unsafe { libc::accept4(listener.as_raw_fd(), null, null.cast(), flags) }) {
        Ok(fd) => Ok(Some(owned(fd).into())),
        Err(e) => match e.raw_os_error() {
            Some(libc::EAGAIN | libc::ECONNABORTED) => Ok(None),
            _ => Err(e),
        },
    }
}

/// Two connected sockets.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [-1; 2];
    // SAFETY: `ends` has room for two descriptors.
    retry(|| unsafe { libc::socketpair(libc::AF_UNIX, STREAM, 0, ends.as_mut_ptr()) })?;
    Ok((owned(ends[0]), owned(ends[1])))
}

/// Effective user of the process at the other end, as the kernel recorded it at `connect` or `listen`.
fn peer_uid(fd: &Fd) -> io::Result<u32> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `credentials` is writable for `length` bytes.
    retry(|| unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &mut length,
        )
    })?;
    Ok(credentials.uid)
}

/// A descriptor of this process that becomes readable when it ends; `None` where the system has no such thing or a
/// sandbox forbids it (then only the end of file tells).
pub(super) fn own_pidfd() -> Option<OwnedFd> {
    // SAFETY: no pointers; the descriptor is close-on-exec by definition.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) };
    (fd >= 0).then(|| owned(fd as RawFd))
}

pub(super) fn eventfd() -> io::Result<Fd> {
    // SAFETY: no pointers.
    retry(|| unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
        .map(|fd| owned(fd).into())
}

/// Makes the eventfd readable.
pub(super) fn notify(event: &Fd) {
    let one = 1_u64;
    // SAFETY: eight readable bytes. It can fail only when the counter is full, and then it is readable already.
    unsafe { libc::write(event.as_raw_fd(), (&raw const one).cast(), 8) };
}

/// How the limit on descriptors stands, for error texts.
pub(super) fn descriptor_limit() -> String {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is writable.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    format!("the limit on open files is {}, raise it with ulimit -n", limit.rlim_cur)
}

/// An error of `call`, with the remedy where descriptors ran out.
pub(super) fn explain(call: impl Into<String>, error: &io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE | libc::ETOOMANYREFS) => {
            Error::System { call: call.into(), detail: format!("{error}; {}", descriptor_limit()) }
        }
        _ => Error::os(call, error),
    }
}

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
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]) as usize
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

    /// Sends a message with descriptors, waiting for room until `until`.
    pub(super) fn send(
        &self,
        message: &Message,
        fds: &[BorrowedFd],
        until: Instant,
    ) -> Result<()> {
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
                    let mut room = [libc::pollfd {
                        fd: self.raw(),
                        events: libc::POLLOUT,
                        revents: 0,
                    }];
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
    use super::*;
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsFd;

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
        a.send(&Message::Goodbye, &[], soon()).unwrap();
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
            seen.push((message != Message::Goodbye, bytes.collect::<Vec<_>>()));
        }
        assert_eq!(seen, [(true, vec![0]), (false, vec![]), (true, vec![1, 2])]);
        assert!(b.is_over());
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

    use super::super::wire::MAX_CONTRIBUTION;

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
        let error = a.send(&Message::Goodbye, &[], soon()).unwrap_err().to_string();
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
