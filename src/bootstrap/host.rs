//! Rank 0's side of the rendezvous.

use super::fork::{Fd, Owner};
use super::join::join;
use super::link::Link;
use super::mesh::Peer;
use super::rendezvous::{check_user, Met, RENDEZVOUS};
use super::run_dir::{effective_uid, unlink, RunDir};
use super::socket::{accept, after, explain, listen, own_pidfd, pair, readable, wait};
use super::vote::{died, setup};
use super::wire::{Hello, Message, Preamble, Process, MAX_HELLO, PROTOCOL};
use super::UniqueId;
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long a connection may take to show its token and hello. A rank sends both at once, and one that was too slow may
/// come again.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most connections that have not shown who they are. The oldest makes room: a stranger cannot keep the ranks out.
const MAX_PENDING: usize = 64;
/// After a failure, how long ranks that have yet to come are waited for, to be told the reason. That is as far as the
/// promise of one error for all reaches: a rank that comes later finds no socket and says so at its own deadline.
const GRACE: Duration = Duration::from_secs(1);

/// The socket's name in the directory, removed whatever happens.
struct Name {
    path: PathBuf,
    owner: Owner,
}

impl Drop for Name {
    fn drop(&mut self) {
        if self.owner.is_current() {
            unlink(&self.path);
        }
    }
}

/// A connection that has yet to show who it is.
struct Pending {
    link: Link,
    came: Instant,
    opening: Vec<u8>,
    preamble: Option<Preamble>,
}

/// What to do with a connection after looking at it.
enum Look {
    Wait,
    TurnAway,
    Rank(Box<Hello>, Option<OwnedFd>),
    /// It is one of us, and something about it makes the rendezvous fail.
    Fatal(u32, Error),
}

struct Host<'a> {
    id: &'a UniqueId,
    listener: Fd,
    me: Hello,
    pending: VecDeque<Pending>,
    /// By rank; none at 0 and where nobody has come yet.
    seats: Vec<Option<(Peer, Process)>>,
    /// A descriptor in reserve, so that ranks can be told that there are none left.
    spare: Option<OwnedFd>,
    turned_away: usize,
    /// Why it failed, and until when latecomers are told.
    failed: Option<(Error, Instant)>,
    /// By rank, who has learned of it. Of two that came as the same rank, both are told and one rank is.
    told: Vec<bool>,
}

/// Waits for ranks 1 to n-1 and gives each a link to every other.
pub(super) fn host(id: &UniqueId, n: usize, deadline: Duration) -> Result<Met> {
    check_user(id)?;
    let until = after(deadline);
    let me = Hello::new(n, 0)?;
    let path = RunDir::create(id.run_dir())?.socket(&id.socket_name());
    let listener = match listen(&path) {
        Ok(listener) => listener,
        // Somebody is rank 0 already: that process must learn of this one, so that all ranks fail alike.
        Err(e) if e.raw_os_error() == Some(libc::EADDRINUSE) => return join(id, n, 0, deadline),
        Err(e) => {
            let error = explain(format!("bind({})", path.display()), &e);
            return Err(setup(0, RENDEZVOUS, error.to_string()));
        }
    };
    let name = Name { path, owner: Owner::current() };
    let spare = std::fs::File::open("/dev/null").ok().map(OwnedFd::from);
    let mut host = Host {
        id,
        listener,
        me,
        pending: VecDeque::new(),
        seats: (0..n).map(|_| None).collect(),
        spare,
        turned_away: 0,
        failed: None,
        told: vec![false; n],
    };
    host.receive_ranks(until, deadline)?;
    let Host { seats, me, .. } = host;
    drop(name);

    let members: Vec<Process> = std::iter::once(me.process)
        .chain(seats.iter().flatten().map(|(_, process)| process.clone()))
        .collect();
    let mut peers: Vec<_> = seats.into_iter().map(|seat| seat.map(|(peer, _)| peer)).collect();
    let outcome = introduce(&peers, &members, after(deadline));
    // Only now: the pidfds of ranks in this process were to be passed on, but tell this rank nothing.
    for (rank, peer) in peers.iter_mut().enumerate() {
        if let Some(peer) = peer {
            if members[rank] == members[0] {
                peer.pidfd = None;
            }
        }
    }
    Ok(Met { peers, members, outcome })
}

/// Sends every rank the others' processes and pidfds, and one end of a socket pair for each of them. Everything is
/// attempted even after an error: the ranks count what they get before they vote.
fn introduce(peers: &[Option<Peer>], members: &[Process], until: Instant) -> Result<()> {
    let own = own_pidfd();
    let mut outcome = Ok(());
    for (rank, peer) in peers.iter().enumerate() {
        let Some(peer) = peer else { continue };
        let mut pidfds = Vec::new();
        let mut fds = Vec::new();
        for (other, process) in members.iter().enumerate() {
            let pidfd = match &peers[other] {
                None => own.as_ref().map(AsFd::as_fd),
                Some(other) => other.pidfd.as_ref().map(AsFd::as_fd),
            };
            if let (Some(pidfd), true) = (pidfd, *process != members[rank]) {
                pidfds.push(other as u32);
                fds.push(pidfd);
            }
        }
        let members = members.to_vec();
        if let Err(error) =
            peer.link.send(&Message::Welcome { members: members.clone(), pidfds }, &fds, until)
        {
            outcome = outcome.and(unless_gone(peer, error));
            let bare = Message::Welcome { members, pidfds: Vec::new() };
            let _ = peer.link.send(&bare, &[], until);
        }
    }
    for (high, above) in peers.iter().enumerate() {
        for (low, below) in peers[..high].iter().enumerate() {
            let (Some(above), Some(below)) = (above, below) else { continue };
            let told = match pair() {
                Ok((a, b)) => {
                    hand_over(below, high, &a, until).and(hand_over(above, low, &b, until))
                }
                Err(e) => {
                    let error = explain("socketpair", &e);
                    for (peer, rank) in [(below, high), (above, low)] {
                        let outcome = Err(error.clone());
                        let message = Message::Peer { rank: rank as u32, outcome };
                        let _ = peer.link.send(&message, &[], until);
                    }
                    Err(error)
                }
            };
            outcome = outcome.and(told);
        }
    }
    outcome
}

/// Gives `peer` its socket to `rank`, or the reason why there is none.
fn hand_over(peer: &Peer, rank: usize, end: &OwnedFd, until: Instant) -> Result<()> {
    let message = |outcome| Message::Peer { rank: rank as u32, outcome };
    peer.link.send(&message(Ok(())), &[end.as_fd()], until).or_else(|error| {
        let _ = peer.link.send(&message(Err(error.clone())), &[], until);
        unless_gone(peer, error)
    })
}

/// What a failed send to `peer` says of this rank: nothing if the peer has ended. Whoever collects the votes finds that
/// and names it; a vote of this rank's on its broken pipe would stand before the death.
fn unless_gone(peer: &Peer, error: Error) -> Result<()> {
    match peer.link.has_hung_up() {
        true => Ok(()),
        false => Err(error),
    }
}

impl Host<'_> {
    /// Returns when all ranks have a seat, or with the error that those who came were told.
    fn receive_ranks(&mut self, until: Instant, deadline: Duration) -> Result<()> {
        loop {
            if let Some((error, grace)) = &self.failed {
                if self.told.iter().skip(1).all(|told| *told) || Instant::now() >= *grace {
                    return Err(error.clone());
                }
            } else if self.seats.iter().skip(1).all(Option::is_some) {
                return Ok(());
            } else if Instant::now() >= until {
                let error = self.missing(deadline);
                self.fail(error, Duration::ZERO);
                continue;
            }
            self.turn_away_the_silent();
            let mut fds = vec![readable(self.listener.as_raw_fd())];
            fds.extend(self.pending.iter().map(|p| readable(p.link.raw())));
            for (peer, _) in self.seats.iter().flatten() {
                fds.extend(peer.poll_set());
            }
            wait(&mut fds, Some(self.next_event(until)))?;
            self.accept_all();
            self.look_at_pending();
            self.look_for_deaths();
        }
    }

    fn next_event(&self, until: Instant) -> Instant {
        let silence = self.pending.front().map(|p| p.came + PATIENCE);
        let end = self.failed.as_ref().map_or(until, |(_, grace)| *grace);
        silence.map_or(end, |silence| silence.min(end))
    }

    fn missing(&self, deadline: Duration) -> Error {
        let missing: Vec<usize> =
            (1..self.seats.len()).filter(|&r| self.seats[r].is_none()).collect();
        let strangers = match self.turned_away + self.pending.len() {
            0 => String::new(),
            n => {
                format!("; {n} connections did not show this id's token, so is another id in use?")
            }
        };
        let first = missing.first().copied().unwrap_or(0);
        let reason = format!("ranks {missing:?} did not come within {deadline:?}{strangers}");
        setup(first, RENDEZVOUS, reason)
    }

    /// Notes the failure and tells everyone who has a seat.
    fn fail(&mut self, error: Error, grace: Duration) {
        if self.failed.is_some() {
            return;
        }
        for (seat, told) in self.seats.iter_mut().zip(&mut self.told) {
            if let Some((peer, _)) = seat.take() {
                send_verdict(&peer.link, &error);
                *told = true;
            }
        }
        self.failed = Some((error, after(grace)));
    }

    fn turn_away_the_silent(&mut self) {
        while self.pending.len() > MAX_PENDING
            || self.pending.front().is_some_and(|p| p.came.elapsed() >= PATIENCE)
        {
            self.pending.pop_front();
            self.turned_away += 1;
        }
    }

    fn accept_all(&mut self) {
        loop {
            match accept(&self.listener) {
                Ok(None) => return,
                Ok(Some(fd)) => {
                    let link = Link::new(fd);
                    if link.peer_uid().is_ok_and(|uid| uid == effective_uid()) {
                        let came = Instant::now();
                        let opening = Vec::new();
                        self.pending.push_back(Pending { link, came, opening, preamble: None });
                        self.turn_away_the_silent();
                    } else {
                        self.turned_away += 1;
                    }
                }
                // Out of descriptors. Strangers go first, then the reserve, which is enough to tell the rest one by one.
                Err(_) if self.pending.len() > 1 => {
                    self.pending.pop_front();
                    self.turned_away += 1;
                }
                Err(e) => {
                    let error = explain("accept", &e);
                    self.fail(setup(0, RENDEZVOUS, error.to_string()), GRACE);
                    if self.spare.take().is_none() {
                        return;
                    }
                }
            }
        }
    }

    fn look_at_pending(&mut self) {
        for _ in 0..self.pending.len() {
            let Some(mut pending) = self.pending.pop_front() else { return };
            match self.look(&mut pending) {
                Look::Wait => self.pending.push_back(pending),
                Look::TurnAway => self.turned_away += 1,
                Look::Fatal(rank, error) => self.refuse(&pending.link, rank, error),
                Look::Rank(hello, pidfd) => match self.objection(&hello) {
                    Some(error) => self.refuse(&pending.link, hello.rank, error),
                    None => self.seat(pending.link, *hello, pidfd),
                },
            }
        }
    }

    fn look(&self, pending: &mut Pending) -> Look {
        if pending.preamble.is_none() {
            let mut buffer = [0; Preamble::BYTES];
            let rest = &mut buffer[pending.opening.len()..];
            match pending.link.receive_bytes(rest) {
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Look::Wait,
                Ok(0) | Err(_) => return Look::TurnAway,
                Ok(got) => pending.opening.extend_from_slice(&rest[..got]),
            }
            let Some((opening, _)) = pending.opening.split_first_chunk() else {
                return Look::Wait;
            };
            let Some(preamble) = Preamble::decode(opening, self.id.token()) else {
                return Look::TurnAway;
            };
            if preamble.protocol != PROTOCOL {
                let reason = format!(
                    "it speaks version {} of the bootstrap protocol, rank 0 speaks {PROTOCOL}; use the same peerlane version on all ranks",
                    preamble.protocol
                );
                let error = setup(preamble.rank as usize, RENDEZVOUS, reason);
                return Look::Fatal(preamble.rank, error);
            }
            pending.preamble = Some(preamble);
        }
        pending.link.fill();
        match pending.link.next(MAX_HELLO) {
            Ok(None) if pending.link.is_over() => Look::TurnAway,
            Ok(None) => Look::Wait,
            Ok(Some((Message::Hello(hello), fds)))
                if pending.preamble.is_some_and(|p| p.rank == hello.rank) =>
            {
                match fds {
                    Ok(fds) => Look::Rank(Box::new(hello), fds.into_iter().next()),
                    Err(error) => Look::Fatal(hello.rank, setup(0, RENDEZVOUS, error.to_string())),
                }
            }
            Ok(Some(_)) | Err(_) => Look::TurnAway,
        }
    }

    /// Why a rank that knows the token cannot take part.
    fn objection(&self, hello: &Hello) -> Option<Error> {
        let me = &self.me;
        let rank = hello.rank as usize;
        let pid = hello.process.pid;
        let taken = match self.seats.get(rank) {
            _ if rank == 0 => Some(me.process.pid),
            Some(seat) => seat.as_ref().map(|(_, process)| process.pid),
            None => None,
        };
        let reason = if hello.version != me.version {
            format!("it runs peerlane {}, rank 0 runs {}", hello.version, me.version)
        } else if hello.size != me.size {
            format!("it was given {} ranks, rank 0 was given {}", hello.size, me.size)
        } else if rank >= self.seats.len() {
            format!("there are only {} ranks", me.size)
        } else if [&hello.boot_id, &me.boot_id].iter().all(|id| !id.is_empty())
            && hello.boot_id != me.boot_id
        {
            "it runs on another machine than rank 0 (their boot ids differ); one communicator spans one machine"
                .to_owned()
        } else if let Some(first) = taken {
            format!("two processes came as this rank: pid {first} and pid {pid}")
        } else {
            return None;
        };
        Some(setup(rank, RENDEZVOUS, reason))
    }

    fn refuse(&mut self, link: &Link, rank: u32, error: Error) {
        self.fail(error, GRACE);
        self.tell(link, rank);
    }

    /// Tells a connection of `rank` of the failure, if there is one.
    fn tell(&mut self, link: &Link, rank: u32) {
        let Some((error, _)) = &self.failed else { return };
        send_verdict(link, error);
        // Where the ranks disagree about their number there may be more than seats.
        if let Some(told) = self.told.get_mut(rank as usize) {
            *told = true;
        }
    }

    fn seat(&mut self, link: Link, hello: Hello, pidfd: Option<OwnedFd>) {
        if self.failed.is_some() {
            self.tell(&link, hello.rank);
            return;
        }
        // If it has gone, that is found when its link is looked at.
        let _ = link.send(&Message::Admitted, &[], after(Duration::ZERO));
        let peer = Peer { link, pidfd: pidfd.map(Fd::from) };
        if let Some(seat) = self.seats.get_mut(hello.rank as usize) {
            *seat = Some((peer, hello.process));
        }
    }

    fn look_for_deaths(&mut self) {
        let dead = self.seats.iter_mut().position(|seat| {
            seat.as_mut().is_some_and(|(peer, _)| {
                let ended = peer.has_exited();
                peer.link.fill();
                ended || peer.link.is_over()
            })
        });
        if let Some(rank) = dead {
            self.fail(died(rank, RENDEZVOUS), GRACE);
        }
    }
}

/// The buffer of a new connection has room for it; a rank that has gone needs no verdict.
fn send_verdict(link: &Link, error: &Error) {
    let verdict = Message::Verdict { stage: RENDEZVOUS.to_owned(), outcome: Err(error.clone()) };
    let _ = link.send(&verdict, &[], after(Duration::ZERO));
}
