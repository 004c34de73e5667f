//! The rendezvous as every rank but 0 sees it.

use super::fork::Fd;
use super::link::Link;
use super::mesh::Peer;
use super::rendezvous::{check_user, Met, LINKS, RENDEZVOUS};
use super::run_dir::{effective_uid, unlink, RunDir};
use super::socket::{after, connect, explain, own_pidfd};
use super::vote::{hear, setup};
use super::wire::{Hello, Message, Preamble, Process, PROTOCOL};
use super::UniqueId;
use crate::error::{Error, Result};
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a socket may refuse connections before its listener counts as dead. Rank 0 lets it appear in the directory a
/// few microseconds before it listens.
const REFUSED: Duration = Duration::from_secs(1);
/// How long the listener of a dead rank 0 may take to close.
const LISTENER_CLOSES: Duration = Duration::from_millis(500);

enum Attempt {
    Admitted(Peer),
    /// There is no socket.
    Absent,
    /// It had no time for us, or closed on us before it said anything.
    Later(String),
    /// The name is there and nobody listens.
    Refused,
}

/// Comes to rank 0, as often as it takes until the deadline, and waits for the others to come.
pub(super) fn join(id: &UniqueId, n: usize, rank: usize, deadline: Duration) -> Result<Met> {
    check_user(id)?;
    let until = after(deadline);
    // Rank 0 may have started one deadline after this rank, and then has its own.
    let patience = after(deadline.saturating_mul(2));
    let hello = Hello::new(n, rank)?;
    let mut seen = false;
    let mut refused_since = None;
    let mut pause = Duration::from_micros(500);
    let (mut rank_0, socket) = loop {
        let mut why = format!("the run directory {} does not exist", id.run_dir().display());
        if let Some(dir) = RunDir::open(id.run_dir())? {
            let socket = dir.socket(&id.socket_name());
            let over = |how: &str| {
                let reason = format!("{how} {}: rank 0 died, or had failed", socket.display());
                Err(setup(0, RENDEZVOUS, reason + " before; make a new unique id"))
            };
            match attempt(&socket, id, &hello, until)? {
                Attempt::Admitted(peer) => break (peer, socket),
                // It cannot have been removed after a success, which takes this rank.
                Attempt::Absent if seen => return over("somebody removed the socket"),
                Attempt::Absent => why = format!("there is no socket {}", socket.display()),
                Attempt::Later(reason) => {
                    (seen, refused_since) = (true, None);
                    why = reason;
                }
                Attempt::Refused => {
                    seen = true;
                    if refused_since.get_or_insert_with(Instant::now).elapsed() >= REFUSED {
                        remove_dead(&socket);
                        return over("nobody listens at");
                    }
                    why = "nobody listens at its socket".into();
                }
            }
        }
        if Instant::now() >= until {
            let reason =
                format!("it admitted rank {rank} to no rendezvous within {deadline:?}: {why}");
            return Err(setup(0, RENDEZVOUS, reason));
        }
        std::thread::sleep(pause.min(until.saturating_duration_since(Instant::now())));
        pause = (pause * 2).min(Duration::from_millis(20));
    };
    let outcome = be_introduced(&mut rank_0, n, rank, patience);
    if matches!(&outcome, Err(Error::Setup { rank: 0, .. })) {
        remove_dead(&socket);
    }
    let mut met = outcome?;
    met.peers[0] = Some(rank_0);
    Ok(met)
}

/// One connection to rank 0, up to its admission. Errors are final.
fn attempt(socket: &Path, id: &UniqueId, hello: &Hello, until: Instant) -> Result<Attempt> {
    let link = match connect(socket) {
        Ok(fd) => Link::new(fd),
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Attempt::Absent),
        Err(e) if e.kind() == ErrorKind::ConnectionRefused => return Ok(Attempt::Refused),
        Err(e) if e.kind() == ErrorKind::WouldBlock => {
            return Ok(Attempt::Later("its queue of connections is full".into()))
        }
        Err(e) => {
            let error = explain(format!("connect({})", socket.display()), &e);
            return Err(setup(hello.rank as usize, RENDEZVOUS, error.to_string()));
        }
    };
    let uid = link.peer_uid().map_err(|e| Error::os("getsockopt(SO_PEERCRED)", &e))?;
    if uid != effective_uid() {
        // Before the token is sent: whoever planted this socket must not learn it.
        let reason = format!("the socket {} belongs to uid {uid}", socket.display());
        return Err(setup(0, RENDEZVOUS, reason));
    }
    let pidfd = own_pidfd();
    let fds: Vec<_> = pidfd.iter().map(AsFd::as_fd).collect();
    let opening = Preamble { protocol: PROTOCOL, rank: hello.rank }.encode(id.token());
    if link.send_bytes(&opening).is_err()
        || link.send(&Message::Hello(hello.clone()), &fds, until).is_err()
    {
        return Ok(Attempt::Later("it closed the connection at once".into()));
    }
    let mut rank_0 = Peer { link, pidfd: None };
    match hear(&mut rank_0, RENDEZVOUS, until) {
        Ok((Message::Admitted, _)) => Ok(Attempt::Admitted(rank_0)),
        Ok((Message::Verdict { outcome: Err(error), .. }, _)) => Err(error),
        Ok((other, _)) => Err(Error::Internal(format!("rank 0 answered a hello with {other:?}"))),
        Err(_) if Instant::now() >= until => Ok(Attempt::Later("it did not answer".into())),
        Err(_) => Ok(Attempt::Later(
            "it closed the connection before it admitted this rank (is the token another one, or \
             has set-up failed there?)"
                .into(),
        )),
    }
}

/// Takes in the other ranks' processes and the sockets to them. All of rank 0's messages are read even when a
/// descriptor is lost on the way, so that the vote after it finds the link empty.
fn be_introduced(rank_0: &mut Peer, n: usize, rank: usize, until: Instant) -> Result<Met> {
    let mut outcome = Ok(());
    let mut pidfds: Vec<Option<OwnedFd>> = (0..n).map(|_| None).collect();
    let members: Vec<Process> = match hear(rank_0, RENDEZVOUS, until)? {
        (Message::Welcome { members, pidfds: named }, fds) if members.len() == n => {
            match fds {
                Ok(fds) => {
                    for (other, fd) in named.iter().zip(fds) {
                        if let Some(slot) = pidfds.get_mut(*other as usize) {
                            *slot = Some(fd);
                        }
                    }
                }
                Err(error) => outcome = Err(error),
            }
            members
        }
        (Message::Verdict { outcome: Err(error), .. }, _) => return Err(error),
        (other, _) => return Err(unexpected(&other)),
    };
    let mut links: Vec<Option<OwnedFd>> = (0..n).map(|_| None).collect();
    for _ in 2..n {
        match hear(rank_0, LINKS, until)? {
            (Message::Peer { rank: other, outcome: Ok(()) }, Ok(mut fds))
                if (other as usize) < n && fds.len() == 1 =>
            {
                links[other as usize] = fds.pop();
            }
            (Message::Peer { outcome: Err(error), .. }, _) | (Message::Peer { .. }, Err(error)) => {
                outcome = outcome.and(Err(error));
            }
            (other, _) => return Err(unexpected(&other)),
        }
    }
    rank_0.pidfd = pidfds[0].take().map(Fd::from);
    let peers: Vec<Option<Peer>> = links
        .into_iter()
        .zip(pidfds)
        .map(|(link, pidfd)| {
            link.map(|link| Peer { link: Link::new(link.into()), pidfd: pidfd.map(Fd::from) })
        })
        .collect();
    let lost = (1..n).find(|&other| other != rank && peers[other].is_none());
    if let (Ok(()), Some(other)) = (&outcome, lost) {
        outcome = Err(Error::Internal(format!("rank 0 sent no socket to rank {other}")));
    }
    Ok(Met { peers, members, outcome })
}

fn unexpected(message: &Message) -> Error {
    Error::Internal(format!("rank 0 sent {message:?} while it introduced the ranks"))
}

/// Removes the socket of a rank 0 that died. Whether it did is asked of the kernel: only a socket that refuses
/// connections is removed. A dying process closes its descriptors one after the other, so the listener may outlive
/// the connection whose end told of the death by a moment.
fn remove_dead(socket: &Path) {
    let until = after(LISTENER_CLOSES);
    while std::fs::symlink_metadata(socket).is_ok_and(|m| m.file_type().is_socket()) {
        if connect(socket).is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused) {
            return unlink(socket);
        }
        if Instant::now() >= until {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
