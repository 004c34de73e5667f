//! Unix sockets and other descriptors to wait for: making them, waiting with a deadline, credentials. Everything is close-on-exec, non-blocking
//! and free of SIGPIPE.

use super::fork::Fd;
use crate::error::{Error, Result};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// The moment `span` from now; a span beyond what the clock can hold is a century.
pub(super) fn after(span: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(span).unwrap_or(now + Duration::from_secs(100 * 365 * 86400))
}

pub(super) fn retry<T: PartialOrd + From<i8>>(mut call: impl FnMut() -> T) -> io::Result<T> {
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

pub(super) fn owned(fd: RawFd) -> OwnedFd {
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
pub(super) fn peer_uid(fd: &Fd) -> io::Result<u32> {
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
