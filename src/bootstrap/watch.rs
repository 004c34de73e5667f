//! Liveness: one thread per communicator that notices when a rank dies and carries errors between the ranks.
//!
//! The root cause must win. When rank A dies and rank B gives up because of it and exits, rank C may find A's end
//! of file, B's message and B's end of file in any order. So a rank tells the others what it learned before it acts on
//! it, and the thread reads all messages that have arrived before it takes any end of file for a death.

use super::fork::{Fd, Owner};
use super::mesh::Peer;
use super::socket::{after, eventfd, explain, notify, readable, wait};
use super::wire::{encode, Message, Process, Steps, CHANNELS};
use crate::error::{Error, Result};
use crate::placement::Placement;
use crate::thread::Background;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{sync_channel, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// After a rank's end of file, how long its process may take to be gone entirely. Asked only where the process hosts
/// several ranks, to tell the death of the process from that of one rank.
const UNTIL_GONE: Duration = Duration::from_millis(200);
/// Most bytes of a message: one fits the empty buffer of a socket, so that telling never waits.
const MAX_MESSAGE: usize = 32 << 10;

type OnFailure = Box<dyn Fn(Error) + Send>;
/// Says what follows from a rank's goodbye, with the first steps that it has not finished.
type OnGoodbye = Box<dyn Fn(usize, Steps) -> Option<Error> + Send>;

/// Looks for an error of this rank that only its device knows of.
type Look = Box<dyn Fn() -> Option<Error> + Send>;
/// How often. A kernel that gave up has told the ranks whose slabs it reaches; this is for the others.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What the caller's threads and the watching thread share. The lock is held while a death is being looked into
/// ([`UNTIL_GONE`] at most) and never longer for a peer's sake.
struct Shared {
    rank: usize,
    stop: Fd,
    stopping: AtomicBool,
    gone: Vec<AtomicBool>,
    state: Mutex<State>,
}

struct State {
    peers: Vec<Option<Peer>>,
    /// The ranks that said goodbye.
    left: Vec<bool>,
    /// The first error this rank knows of, from outside or from its own `tell`.
    failed: Option<Error>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_gone(&self, rank: usize) -> bool {
        self.gone.get(rank).is_some_and(|gone| gone.load(Ordering::Acquire))
    }

    fn broadcast(&self, state: &State, message: &Message) {
        for (rank, peer) in state.peers.iter().enumerate() {
            if let (Some(peer), false) = (peer, self.is_gone(rank)) {
                // One that cannot be told has ended, or does not read and is found out by its own silence.
                let _ = peer.link.send(message, &[], Instant::now());
            }
        }
    }

    /// Takes `error` for the communicator's and tells the others, unless there was one before. True if it is the first.
    fn fail(&self, state: &mut State, error: &Error) -> bool {
        if state.failed.is_some() {
            return false;
        }
        let error = bounded(error);
        self.broadcast(state, &Message::Failed(error.clone()));
        state.failed = Some(error);
        true
    }
}

/// The error itself, or the beginning of its text if it is too long to be sent.
fn bounded(error: &Error) -> Error {
    match encode(error) {
        Ok(bytes) if bytes.len() < MAX_MESSAGE / 2 => error.clone(),
        _ => Error::Internal(error.to_string().chars().take(1000).collect()),
    }
}

/// A rank's watch over the others, from [`Mesh::watch`](crate::bootstrap::Mesh::watch) to the goodbye.
///
/// Dropping it says goodbye, unless the thread that drops it is panicking: then the others see a death. In a forked
/// child it does nothing.
pub struct Watch {
    shared: Arc<Shared>,
    thread: Mutex<Option<Background>>,
    owner: Owner,
}

/// A thread that has yet to be told whom to watch. Dropping it ends the thread.
pub(super) struct Starting {
    rank: usize,
    stop: Fd,
    send: SyncSender<(Arc<Shared>, Vec<Process>)>,
    thread: Background,
}

/// Gets hold of everything that can be lacking, so that the ranks can vote on it before set-up ends.
pub(super) fn start(
    rank: usize,
    placement: Placement,
    on_failure: OnFailure,
    on_goodbye: OnGoodbye,
    look: Option<Look>,
) -> Result<Starting> {
    let stop = eventfd().map_err(|e| explain("eventfd", &e))?;
    let (send, receive) = sync_channel::<(Arc<Shared>, Vec<Process>)>(1);
    let work = move || {
        placement.keep_thread();
        if let Ok((shared, members)) = receive.recv() {
            let (on_failure, on_goodbye, look) = (&on_failure, &on_goodbye, &look);
            Watcher { shared: &shared, members: &members, on_failure, on_goodbye, look }.run();
        }
    };
    let thread = Background::spawn("peerlane-watch", work)?;
    Ok(Starting { rank, stop, send, thread })
}

impl Starting {
    pub(super) fn go(self, peers: Vec<Option<Peer>>, members: Vec<Process>) -> Watch {
        let shared = Arc::new(Shared {
            rank: self.rank,
            stop: self.stop,
            stopping: AtomicBool::new(false),
            gone: peers.iter().map(|_| AtomicBool::new(false)).collect(),
            state: Mutex::new(State { left: vec![false; peers.len()], peers, failed: None }),
        });
        // The channel has room and the thread holds its other end, so this cannot fail.
        let _ = self.send.send((shared.clone(), members));
        Watch { shared, thread: Mutex::new(Some(self.thread)), owner: Owner::current() }
    }
}

impl Watch {
    /// Tells all ranks that the communicator has failed with `error`. The first error a rank learns of is its error for
    /// good: if this rank knows one already, nothing is sent. Returns that first error, once the message is in the
    /// sockets, so the process may end right afterwards.
    pub fn tell(&self, error: &Error) -> Error {
        if !self.owner.is_current() {
            return error.clone();
        }
        let mut state = self.shared.state();
        self.shared.fail(&mut state, error);
        state.failed.clone().unwrap_or_else(|| error.clone())
    }

    /// Whether `rank` has said goodbye or is dead: either way it uses nothing of this rank's any more.
    pub fn gone(&self, rank: usize) -> bool {
        self.shared.is_gone(rank)
    }

    /// The first error this rank knows of, whether it came from outside or from [`Watch::tell`].
    pub fn failure(&self) -> Option<Error> {
        self.owner.is_current().then(|| self.shared.state().failed.clone()).flatten()
    }

    /// Tells all ranks that this one is done and has finished all steps before `steps`, ends the thread and closes the
    /// sockets. Doing it again does nothing.
    pub fn goodbye(&self, steps: Steps) {
        self.end(Some(&Message::Goodbye { steps }));
    }

    /// The same, but goes on watching until every rank of `others` is gone too, or `patience` is over: for memory that must
    /// stay while they may use it.
    pub fn goodbye_and_wait(&self, steps: Steps, others: &[usize], patience: Duration) {
        if self.owner.is_current() && !self.shared.stopping.load(Ordering::Acquire) {
            self.shared.broadcast(&self.shared.state(), &Message::Goodbye { steps });
            let until = after(patience);
            while others.iter().any(|&r| !self.gone(r)) && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.end(None);
    }

    fn end(&self, last_words: Option<&Message>) {
        if !self.owner.is_current() || self.shared.stopping.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(message) = last_words {
            self.shared.broadcast(&self.shared.state(), message);
        }
        notify(&self.shared.stop);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // This may be that thread: the callback may hold the last reference to the watch.
            thread.join();
        }
        self.shared.state().peers.clear();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if self.owner.is_current() {
            let goodbye = Message::Goodbye { steps: [0; CHANNELS] };
            self.end((!std::thread::panicking()).then_some(&goodbye));
        }
    }
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("rank", &self.shared.rank).finish_non_exhaustive()
    }
}

struct Watcher<'a> {
    shared: &'a Shared,
    members: &'a [Process],
    on_failure: &'a OnFailure,
    on_goodbye: &'a OnGoodbye,
    look: &'a Option<Look>,
}

impl Watcher<'_> {
    fn run(&self) {
        // What came together with the last words of set-up has been read from the sockets already: no poll tells of it.
        if let (Some(error), false) = (self.look_around(), self.is_stopping()) {
            (self.on_failure)(error);
        }
        loop {
            let mut fds = vec![readable(self.shared.stop.as_raw_fd())];
            for (rank, peer) in self.shared.state().peers.iter().enumerate() {
                if let (Some(peer), false) = (peer, self.shared.is_gone(rank)) {
                    fds.extend(peer.poll_set());
                }
            }
            // What has failed need not be looked at again.
            let look = self.look.as_ref().filter(|_| self.shared.state().failed.is_none());
            let polled = wait(&mut fds, look.map(|_| after(LOOK_EVERY)));
            if fds[0].revents != 0 || self.is_stopping() {
                return;
            }
            let blind = polled.is_err();
            let failure = match polled {
                Ok(true) => self.look_around(),
                Ok(false) => look
                    .and_then(|look| look())
                    .filter(|error| self.shared.fail(&mut self.shared.state(), error)),
                Err(error) => self.shared.fail(&mut self.shared.state(), &error).then_some(error),
            };
            if let (Some(error), false) = (failure, self.is_stopping()) {
                (self.on_failure)(error);
            }
            if blind {
                return;
            }
        }
    }

    fn is_stopping(&self) -> bool {
        self.shared.stopping.load(Ordering::Acquire)
    }

    /// Reads what has arrived. The communicator's error, if this is its first and it came from outside.
    fn look_around(&self) -> Option<Error> {
        let mut guard = self.shared.state();
        let state = &mut *guard;
        let mut said = None;
        let mut dead = Vec::new();
        let mut left_now = Vec::new();
        for (rank, peer) in state.peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            if self.shared.is_gone(rank) {
                continue;
            }
            // Asked before reading: what it said before it ended is then in the socket.
            let ended = peer.has_exited();
            peer.link.fill();
            let left = loop {
                match peer.link.next(MAX_MESSAGE) {
                    Ok(None) => break false,
                    Ok(Some((Message::Goodbye { steps }, _))) => {
                        left_now.push((rank, steps));
                        break true;
                    }
                    Ok(Some((Message::Failed(error), _))) => said = said.or(Some(error)),
                    Ok(Some((other, _))) => {
                        let text = format!("rank {rank} sent {other:?} to the watch");
                        said = said.or(Some(Error::Internal(text)));
                    }
                    Err(error) => {
                        // Nothing after this can be understood, so the rank is as good as dead.
                        said = said.or(Some(error));
                        break true;
                    }
                }
            };
            if left || ended || peer.link.is_over() {
                state.left[rank] = left;
                if !left {
                    dead.push(rank);
                }
                self.shared.gone[rank].store(true, Ordering::Release);
            }
        }
        // Every goodbye is passed on, also behind one that makes an error.
        let mut missed = None;
        for (rank, steps) in left_now {
            missed = missed.or((self.on_goodbye)(rank, steps));
        }
        let error = said.or(missed).or_else(|| {
            dead.first().map(|&rank| Error::RankDied { rank: self.culprit(state, rank) as u32 })
        })?;
        self.shared.fail(state, &error).then_some(error)
    }

    /// The rank to name for the death of `rank`: the lowest of its process if the whole process is gone, so that all
    /// survivors name the same one whichever socket closed first.
    fn culprit(&self, state: &State, rank: usize) -> usize {
        let process = self.members.get(rank);
        let lives_there = |other: &usize| self.members.get(*other) == process;
        let several = (0..self.members.len()).filter(lives_there).count() > 1;
        let peer = state.peers.get(rank).and_then(Option::as_ref);
        if several && peer.is_some_and(|peer| peer.exits_before(after(UNTIL_GONE))) {
            (0..state.left.len()).filter(lives_there).find(|&r| !state.left[r]).unwrap_or(rank)
        } else {
            rank
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::link::Link;
    use super::super::socket::pair;
    use super::*;
    use std::sync::mpsc::{channel, Receiver};

    const SOON: Duration = Duration::from_secs(10);

    /// Rank 1's watch over rank 0, which has said `words` while rank 1 was still in set-up and read them along with the
    /// last message of it. Rank 0's end of the link, and the errors and goodbyes that rank 1 learns of.
    fn after_set_up(words: &[Message]) -> (Link, Watch, Receiver<Error>, Receiver<(usize, Steps)>) {
        let (a, b) = pair().unwrap();
        let (theirs, mut mine) = (Link::new(a.into()), Link::new(b.into()));
        let last = Message::Verdict { stage: "watch".into(), outcome: Ok(Vec::new()) };
        for message in std::iter::once(&last).chain(words) {
            theirs.send(message, &[], after(SOON)).unwrap();
        }
        mine.fill();
        assert_eq!(mine.next(MAX_MESSAGE).unwrap().unwrap().0, last);
        let (send, errors) = channel();
        let (note, goodbyes) = channel();
        let on_goodbye = move |rank, steps| {
            note.send((rank, steps)).unwrap();
            None
        };
        let starting = start(
            1,
            Placement::default(),
            Box::new(move |e| send.send(e).unwrap()),
            Box::new(on_goodbye),
            None,
        )
        .unwrap();
        let members = vec![Process::current().unwrap(); 2];
        let watch = starting.go(vec![Some(Peer { link: mine, pidfd: None }), None], members);
        (theirs, watch, errors, goodbyes)
    }

    #[test]
    fn an_abort_that_came_with_the_last_words_of_set_up_is_seen() {
        let abort = Error::Aborted { rank: 0 };
        let (_theirs, watch, errors, _) = after_set_up(&[Message::Failed(abort.clone())]);
        assert_eq!(errors.recv_timeout(SOON).unwrap(), abort);
        assert_eq!(watch.failure(), Some(abort));
        // Control: without it there is nothing to see.
        let (_theirs, watch, errors, goodbyes) = after_set_up(&[]);
        assert!(errors.recv_timeout(Duration::from_millis(200)).is_err());
        assert!(goodbyes.try_recv().is_err());
        assert_eq!(watch.failure(), None);
    }

    #[test]
    fn a_goodbye_that_came_with_the_last_words_of_set_up_is_seen() {
        let words = [Message::Goodbye { steps: [7; CHANNELS] }];
        let (theirs, watch, errors, goodbyes) = after_set_up(&words);
        drop(theirs);
        assert_eq!(goodbyes.recv_timeout(SOON).unwrap(), (0, [7; CHANNELS]));
        assert!(watch.gone(0));
        assert!(errors.try_recv().is_err());
    }
}
