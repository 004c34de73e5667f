//! The ranks of a communicator in set-up, each with a socket to every other.

use super::fork::{Fd, Owner};
use super::host::host;
use super::join::join;
use super::link::Link;
use super::rendezvous;
use super::socket::{after, eventfd, explain, notify, readable, wait};
use super::vote::{pass_on, preside, receive_passed, setup, take_part, Contribution};
use super::watch::{start, Watch};
use super::wire::{decode, encode, Message, Process, Steps, MAX_CONTRIBUTION, MAX_FDS};
use super::UniqueId;
use crate::error::{Error, Result};
use crate::placement::Placement;
use crate::thread::without_signals;
use crate::types::MAX_RANKS;
use serde::de::DeserializeOwned;
use serde::Serialize;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// What a rank holds of another.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) link: Link,
    /// Of the other's process; none if that is this process, or where the system offers none.
    pub(super) pidfd: Option<Fd>,
}

impl Peer {
    pub(super) fn poll_set(&self) -> Vec<libc::pollfd> {
        let pidfd = self.pidfd.as_ref().map(|fd| readable(fd.as_raw_fd()));
        std::iter::once(readable(self.link.raw())).chain(pidfd).collect()
    }

    /// Whether its process has ended, as far as the system lets us know without the socket.
    pub(super) fn has_exited(&self) -> bool {
        self.exits_before(Instant::now())
    }

    pub(super) fn exits_before(&self, until: Instant) -> bool {
        self.pidfd
            .as_ref()
            .is_some_and(|fd| wait(&mut [readable(fd.as_raw_fd())], Some(until)).unwrap_or(false))
    }
}

/// One rank's place among the ranks that set up a communicator.
///
/// Set-up is a sequence of named stages; every rank calls the same ones in the same order. A stage succeeds on all ranks
/// or fails on all with the same [`Error::Setup`], which names the rank and the stage; after a failure every further
/// call returns that error again. A rank that drops its mesh tells the others.
#[derive(Debug)]
pub struct Mesh {
    rank: usize,
    deadline: Duration,
    /// When the ranks were together.
    begun: Instant,
    /// By rank; none at this rank, and where a socket failed to arrive (then set-up fails).
    peers: Vec<Option<Peer>>,
    members: Vec<Process>,
    stage: &'static str,
    failed: Option<Error>,
    owner: Owner,
    /// Where threads of this rank belong.
    placement: Placement,
}

impl Mesh {
    /// Meets the other ranks of the communicator that `id` names, as `rank` of `n`.
    ///
    /// Rank 0 listens on a socket in the id's run directory and the others come. Admitted is who runs as the same
    /// user and knows the id's token; anybody else is turned away without disturbing the rest. When all are in, every
    /// rank has a socket to, and a pidfd of, every other, and the socket is gone from the directory.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an impossible `n` or `rank`, or an id or run directory of another user. Otherwise
    /// [`Error::Setup`]: a rank that did not come within `deadline`, came twice, came with another `n` or another version
    /// of this library, died, or ran out of descriptors is named on all ranks that came.
    pub fn connect(id: &UniqueId, n: usize, rank: usize, deadline: Duration) -> Result<Self> {
        if !(1..=MAX_RANKS).contains(&n) {
            return Err(Error::InvalidArgument(format!(
                "{n} ranks; a communicator has 1 to {MAX_RANKS}"
            )));
        }
        if rank >= n {
            return Err(Error::InvalidArgument(format!(
                "rank {rank} of {n}; ranks are numbered from 0 to {}",
                n - 1
            )));
        }
        let met = match (n, rank) {
            (1, _) => rendezvous::alone()?,
            (_, 0) => host(id, n, deadline)?,
            _ => join(id, n, rank, deadline)?,
        };
        let mut mesh = Mesh {
            rank,
            deadline,
            begun: Instant::now(),
            peers: met.peers,
            members: met.members,
            stage: rendezvous::LINKS,
            failed: None,
            owner: Owner::current(),
            placement: Placement::default(),
        };
        mesh.vote(rendezvous::LINKS, met.outcome)?;
        Ok(mesh)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.peers.len()
    }

    /// Whether `rank` lives in this process, so that plain pointers can be shared with it.
    pub fn same_process(&self, rank: usize) -> bool {
        self.members.get(rank).is_some_and(|p| *p == self.members[self.rank])
    }

    /// Every rank contributes a value, and all get all values in order of rank; or one fails, and all get its error.
    ///
    /// A value may take 1 MiB when encoded.
    ///
    /// # Errors
    /// [`Error::Setup`] with `stage` and the first rank, in order, that brought an error or died; see [`Mesh`].
    pub fn all_gather<T: Serialize + DeserializeOwned>(
        &mut self,
        stage: &'static str,
        mine: Result<T>,
    ) -> Result<Vec<T>> {
        let mine = mine.and_then(|value| encode(&value)).and_then(|bytes| match bytes.len() {
            0..=MAX_CONTRIBUTION => Ok(Contribution { bytes, fds: Vec::new() }),
            long => Err(Error::Internal(format!(
                "a contribution of {long} bytes; at most {MAX_CONTRIBUTION} are allowed"
            ))),
        });
        let (all, _) = self.round(stage, mine)?;
        let values = all.iter().map(|bytes| decode(bytes)).collect::<Result<Vec<T>>>();
        // All ranks run the same version and decode the same bytes, so all come to the same end here.
        values.map_err(|error| self.fail(error))
    }

    /// Ends a stage: succeeds if it succeeded on every rank, and fails on all otherwise.
    ///
    /// # Errors
    /// As [`Mesh::all_gather`].
    pub fn vote(&mut self, stage: &'static str, mine: Result<()>) -> Result<()> {
        self.all_gather(stage, mine).map(drop)
    }

    /// Every rank contributes up to 64 descriptors, and all get duplicates of all, by rank; this rank's own entry holds
    /// what it brought. They are close-on-exec. Ends in a vote, so either all ranks hold everything or all fail.
    ///
    /// # Errors
    /// As [`Mesh::all_gather`]; also when the descriptors do not fit a rank's limit on open files.
    pub fn exchange_fds(
        &mut self,
        stage: &'static str,
        mine: Result<Vec<OwnedFd>>,
    ) -> Result<Vec<Vec<OwnedFd>>> {
        let mine = mine.and_then(|fds| match fds.len() {
            0..=MAX_FDS => Ok(Contribution { bytes: encode(&(fds.len() as u32))?, fds }),
            many => Err(Error::Internal(format!(
                "{many} descriptors in one exchange; at most {MAX_FDS} are allowed"
            ))),
        });
        let (counts, contributions) = self.round(stage, mine)?;
        let rank = self.rank;
        let until = self.patience();
        let received = match &mut self.peers[0] {
            // This is rank 0, and it has them all.
            None => pass_on(&self.peers, &contributions, until)
                .map(|()| contributions.into_iter().map(|c| c.fds).collect()),
            Some(rank_0) => counts
                .iter()
                .map(|bytes| decode(bytes))
                .collect::<Result<Vec<u32>>>()
                .and_then(|counts| receive_passed(rank_0, stage, rank, &counts, until))
                .map(|mut all| {
                    all[rank] = contributions.into_iter().flat_map(|c| c.fds).collect();
                    all
                }),
        };
        let (outcome, received) = match received {
            Ok(all) => (Ok(()), all),
            Err(error) => (Err(error), Vec::new()),
        };
        self.vote(stage, outcome)?;
        Ok(received)
    }

    /// Keeps threads that this rank starts from now on to `placement`.
    pub(crate) fn settle(&mut self, placement: Placement) {
        self.placement = placement;
    }

    /// Where this rank belongs.
    #[cfg(feature = "cuda")]
    pub(crate) fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Does `work` while a thread looks out for ranks that end meanwhile, and calls `on_end` with the first. Work that
    /// waits for the other ranks, and that `on_end` can stop, so ends when they do and not at its deadline. What the end
    /// means for set-up is for the next vote to say.
    ///
    /// It begins with a vote: a rank that cannot look out (it has no descriptor left, say) does not do its part of the
    /// work either, and the others would wait for that until the deadline.
    ///
    /// # Errors
    /// [`Error::Setup`] on all ranks, before any has begun `work`, if one cannot have its thread.
    pub fn guard<T>(
        &mut self,
        stage: &'static str,
        on_end: impl Fn(Error) + Send,
        work: impl FnOnce(&mut Mesh) -> T,
    ) -> Result<T> {
        let mut ranks = Vec::new();
        let mut fds = Vec::new();
        for (rank, peer) in self.peers.iter().enumerate() {
            let Some(peer) = peer else { continue };
            // A message that waits to be read (a vote) is no end.
            let socket = libc::pollfd { fd: peer.link.raw(), events: libc::POLLRDHUP, revents: 0 };
            let pidfd = peer.pidfd.as_ref().map(|fd| readable(fd.as_raw_fd()));
            for fd in std::iter::once(socket).chain(pidfd) {
                fds.push(fd);
                ranks.push(rank);
            }
        }
        let stop = match eventfd().map_err(|e| explain("eventfd", &e)) {
            Ok(stop) => stop,
            Err(error) => return self.vote(stage, Err(error.clone())).and(Err(error)),
        };
        let placement = &self.placement.clone();
        std::thread::scope(|scope| {
            let stop = &stop;
            // The peers' descriptors stay open: `work` has the mesh only on loan.
            let look_out = move || {
                placement.keep_thread();
                fds.push(readable(stop.as_raw_fd()));
                let last = fds.len() - 1;
                if wait(&mut fds, None).is_ok() && fds[last].revents == 0 {
                    let ended = fds.iter().position(|fd| fd.revents != 0);
                    if let Some(rank) = ended.and_then(|i| ranks.get(i)) {
                        on_end(Error::RankDied { rank: *rank as u32 });
                    }
                }
            };
            // Also when the work unwinds: the scope waits for the thread.
            let _ending = Notify(stop);
            let builder = std::thread::Builder::new().name("peerlane-guard".into());
            let begun = without_signals(|| builder.spawn_scoped(scope, look_out))
                .map_err(|e| Error::os("pthread_create", &e));
            self.vote(stage, begun.map(drop))?;
            Ok(work(self))
        })
    }

    /// Ends set-up and starts the thread that notices deaths and carries errors.
    ///
    /// `on_failure` is called at most once, on that thread, with the first error that reaches this rank from outside:
    /// [`Error::RankDied`], or what another rank passed to [`Watch::tell`]. It is not called after this rank's own
    /// [`Watch::tell`] or [`Watch::goodbye`].
    ///
    /// `look`, if there is one, is called on that thread every tenth of a second until there is an error; what it returns
    /// becomes the error of all ranks, and `on_failure` gets it.
    ///
    /// `on_goodbye` is called on that thread with each rank that says goodbye and the first steps it has not finished; what
    /// it returns is taken as that rank's error. It must not call the watch.
    ///
    /// # Errors
    /// [`Error::Setup`] on all ranks if one cannot start its thread.
    pub fn watch(
        mut self,
        on_failure: Box<dyn Fn(Error) + Send>,
        on_goodbye: Box<dyn Fn(usize, Steps) -> Option<Error> + Send>,
        look: Option<Box<dyn Fn() -> Option<Error> + Send>>,
    ) -> Result<Watch> {
        const STAGE: &str = "watch";
        let placement = std::mem::take(&mut self.placement);
        match start(self.rank, placement, on_failure, on_goodbye, look) {
            Ok(starting) => {
                self.vote(STAGE, Ok(()))?;
                let peers = std::mem::take(&mut self.peers);
                Ok(starting.go(peers, std::mem::take(&mut self.members)))
            }
            Err(error) => match self.vote(STAGE, Err(error.clone())) {
                Err(verdict) => Err(verdict),
                Ok(()) => Err(error),
            },
        }
    }

    /// How long this rank waits for what comes next: rank 0 as long as its deadline, the others twice as long.
    fn patience(&self) -> Instant {
        let span = self.deadline.saturating_mul(if self.rank == 0 { 1 } else { 2 });
        let spent = self.begun.elapsed();
        after(span.saturating_sub(spent))
    }

    /// One round: every rank's bytes in order of rank, and the contributions whose descriptors this rank holds: all on
    /// rank 0, its own elsewhere.
    fn round(
        &mut self,
        stage: &'static str,
        mine: Result<Contribution>,
    ) -> Result<(Vec<Vec<u8>>, Vec<Contribution>)> {
        if !self.owner.is_current() {
            return Err(Error::Unsupported(
                "set-up of a communicator in a forked child; create it after the fork".into(),
            ));
        }
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.stage = stage;
        let until = self.patience();
        let outcome = match &mut self.peers[0] {
            None => preside(&mut self.peers, stage, mine, until, self.deadline)
                .map(|all| (all.iter().map(|c| c.bytes.clone()).collect(), all)),
            Some(rank_0) => take_part(rank_0, stage, mine.as_ref().map_err(Error::clone), until)
                .map(|all| (all, mine.into_iter().collect())),
        };
        outcome.map_err(|error| self.fail(error))
    }

    fn fail(&mut self, error: Error) -> Error {
        self.failed.get_or_insert(error).clone()
    }
}

struct Notify<'a>(&'a Fd);

impl Drop for Notify<'_> {
    fn drop(&mut self) {
        notify(self.0);
    }
}

impl Drop for Mesh {
    /// The others would take the end of file for a death.
    fn drop(&mut self) {
        if !self.owner.is_current() {
            return;
        }
        let error = self.failed.take().unwrap_or_else(|| {
            setup(self.rank, self.stage, "it left set-up after this stage".to_owned())
        });
        for peer in self.peers.iter().flatten() {
            let _ = peer.link.send(&Message::Failed(error.clone()), &[], Instant::now());
        }
    }
}
