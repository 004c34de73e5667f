//! One round of set-up: every rank contributes or fails, rank 0 judges, all get the same answer.
//!
//! Why the answer is the same everywhere: it is made in one place. Rank 0 waits for every rank's vote until one has died
//! or its deadline has passed, decides once and tells all. A rank that has voted does nothing else until it hears
//! the verdict, learns of rank 0's death, or has waited twice the deadline (rank 0 may have begun up to one deadline
//! later). Nobody acts on a failure that it has only seen itself.

use super::link::Delivery;
use super::mesh::Peer;
use super::socket::{after, wait};
use super::wire::{Message, MAX_BODY};
use crate::error::{Error, Result};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// What a rank brings to a round.
#[derive(Debug, Default)]
pub(super) struct Contribution {
    pub(super) bytes: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

/// What rank 0 knows of a rank at the end of a round.
#[derive(Debug)]
enum Ballot {
    Cast(Contribution),
    Failed(Error),
    Died,
    /// No vote before the deadline.
    Late,
    /// No vote yet, and no need to wait for it: another rank has died.
    Open,
}

/// The error that a rank's death during set-up gives.
pub(super) fn died(rank: usize, stage: &str) -> Error {
    setup(rank, stage, Error::RankDied { rank: rank as u32 }.to_string())
}

pub(super) fn setup(rank: usize, stage: &str, reason: impl Into<String>) -> Error {
    Error::Setup { rank: rank as u32, stage: stage.to_owned(), reason: reason.into() }
}

/// The round's error, if it failed: of the ranks that failed by themselves the first; only then one that others
/// complain about; only then one that was late (perhaps because it waited for the one that failed).
fn judge(stage: &str, ballots: &[Ballot], deadline: Duration) -> Option<Error> {
    let mut blamed = None;
    for (rank, ballot) in ballots.iter().enumerate() {
        match ballot {
            Ballot::Died => return Some(died(rank, stage)),
            Ballot::Failed(error @ Error::Setup { .. }) => return Some(error.clone()),
            Ballot::Failed(Error::RankDied { rank: other }) if *other as usize != rank => {
                blamed.get_or_insert(died(*other as usize, stage));
            }
            Ballot::Failed(error) => return Some(setup(rank, stage, error.to_string())),
            Ballot::Cast(_) | Ballot::Late | Ballot::Open => {}
        }
    }
    let late: Vec<usize> =
        (0..ballots.len()).filter(|&r| matches!(ballots[r], Ballot::Late)).collect();
    blamed.or_else(|| {
        late.first().map(|&rank| {
            let others = match late.len() {
                1 => String::new(),
                _ => format!(" (nor did ranks {:?})", &late[1..]),
            };
            setup(rank, stage, format!("it did not get here within {deadline:?}{others}"))
        })
    })
}

fn read_vote(peer: &mut Peer, rank: usize, stage: &str) -> Option<Ballot> {
    let delivery = match peer.link.next(MAX_BODY) {
        Ok(None) => return None,
        Ok(Some(delivery)) => delivery,
        Err(error) => return Some(Ballot::Failed(error)),
    };
    Some(match delivery {
        (Message::Vote { stage: theirs, .. }, _) if theirs != stage => {
            Ballot::Failed(Error::Internal(format!(
                "rank {rank} is in stage '{theirs}' while rank 0 is in stage '{stage}'"
            )))
        }
        (Message::Vote { outcome: Ok(bytes), .. }, Ok(fds)) => {
            Ballot::Cast(Contribution { bytes, fds })
        }
        (Message::Vote { outcome: Ok(_), .. }, Err(error)) => {
            // It is this process that cannot take the descriptors, so it is this rank that failed.
            Ballot::Failed(setup(0, stage, error.to_string()))
        }
        (Message::Vote { outcome: Err(error), .. } | Message::Failed(error), _) => {
            Ballot::Failed(error)
        }
        (other, _) => {
            Ballot::Failed(Error::Internal(format!("rank {rank} sent {other:?} instead of a vote")))
        }
    })
}

/// Rank 0's half of a round: collects until `until`, judges, tells all. The contributions are in order of rank.
pub(super) fn preside(
    peers: &mut [Option<Peer>],
    stage: &str,
    mine: Result<Contribution>,
    until: Instant,
    deadline: Duration,
) -> Result<Vec<Contribution>> {
    let mut ballots: Vec<Ballot> = peers.iter().map(|_| Ballot::Open).collect();
    ballots[0] = mine.map_or_else(Ballot::Failed, Ballot::Cast);
    loop {
        let mut open = false;
        let mut dead = false;
        let mut fds = Vec::with_capacity(2 * peers.len());
        for (rank, peer) in peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            // Asked before reading: what it said before it ended is then in the socket.
            let ended = peer.has_exited();
            peer.link.fill();
            if let Ballot::Open = ballots[rank] {
                if let Some(ballot) = read_vote(peer, rank, stage) {
                    ballots[rank] = ballot;
                }
            }
            if matches!(ballots[rank], Ballot::Open | Ballot::Cast(_))
                && (ended || peer.link.is_over())
            {
                ballots[rank] = Ballot::Died;
            }
            match ballots[rank] {
                Ballot::Open => open = true,
                Ballot::Died => dead = true,
                _ => continue,
            }
            fds.extend(peer.poll_set());
        }
        if dead || !open {
            break;
        }
        // Those that have voted are watched too: their death ends the round at once.
        for (peer, ballot) in peers.iter().zip(&ballots) {
            if let (Some(peer), Ballot::Cast(_)) = (peer, ballot) {
                fds.extend(peer.poll_set());
            }
        }
        if !wait(&mut fds, Some(until))? {
            for ballot in ballots.iter_mut().filter(|b| matches!(b, Ballot::Open)) {
                *ballot = Ballot::Late;
            }
            break;
        }
    }
    let outcome = match judge(stage, &ballots, deadline) {
        Some(error) => Err(error),
        None => Ok(ballots
            .into_iter()
            .map(|b| if let Ballot::Cast(c) = b { c } else { Contribution::default() })
            .collect::<Vec<_>>()),
    };
    let verdict = Message::Verdict {
        stage: stage.to_owned(),
        outcome: match &outcome {
            Ok(all) => Ok(all.iter().map(|c| c.bytes.clone()).collect()),
            Err(error) => Err(error.clone()),
        },
    };
    let until = until.max(after(Duration::from_secs(1)));
    for peer in peers.iter().flatten() {
        // A rank that cannot be told has died; the next round or the watch finds that.
        let _ = peer.link.send(&verdict, &[], until);
    }
    outcome
}

/// Waits for what rank 0 says next.
pub(super) fn hear(peer: &mut Peer, stage: &str, until: Instant) -> Result<Delivery> {
    loop {
        let ended = peer.has_exited();
        peer.link.fill();
        if let Some(delivery) = peer.link.next(MAX_BODY)? {
            return match delivery {
                (Message::Failed(error), _) => Err(error),
                other => Ok(other),
            };
        }
        if ended || peer.link.is_over() {
            return Err(died(0, stage));
        }
        if !wait(&mut peer.poll_set(), Some(until))? {
            return Err(setup(0, stage, "it gave no verdict within twice the deadline"));
        }
    }
}

/// Another rank's half of a round: votes and waits for the verdict.
pub(super) fn take_part(
    rank_0: &mut Peer,
    stage: &str,
    mine: Result<&Contribution>,
    until: Instant,
) -> Result<Vec<Vec<u8>>> {
    let (outcome, fds) = match mine {
        Ok(mine) => (Ok(mine.bytes.clone()), mine.fds.iter().map(AsFd::as_fd).collect()),
        Err(error) => (Err(error), Vec::new()),
    };
    let vote = Message::Vote { stage: stage.to_owned(), outcome };
    if let Err(error) = rank_0.link.send(&vote, &fds, until) {
        // A closed socket may still hold the verdict on an earlier death. Otherwise rank 0 lives, and must hear why there
        // is no vote.
        let vote = Message::Vote { stage: stage.to_owned(), outcome: Err(error) };
        let _ = rank_0.link.send(&vote, &[], until);
    }
    match hear(rank_0, stage, until)? {
        (Message::Verdict { outcome: Err(error), .. }, _) => Err(error),
        (Message::Verdict { stage: theirs, outcome: Ok(all) }, _) if theirs == stage => Ok(all),
        (other, _) => Err(Error::Internal(format!(
            "rank 0 sent {other:?} instead of the verdict on stage '{stage}'"
        ))),
    }
}

/// Rank 0 passes on the descriptors of every rank to every other. All are told about each, also where passing failed.
pub(super) fn pass_on(peers: &[Option<Peer>], all: &[Contribution], until: Instant) -> Result<()> {
    let mut outcome = Ok(());
    for (to, peer) in peers.iter().enumerate() {
        let Some(peer) = peer else { continue };
        for (from, contribution) in all.iter().enumerate() {
            if from == to || contribution.fds.is_empty() {
                continue;
            }
            let fds: Vec<_> = contribution.fds.iter().map(AsFd::as_fd).collect();
            let message = |outcome| Message::Handles { from: from as u32, outcome };
            if let Err(error) = peer.link.send(&message(Ok(())), &fds, until) {
                let _ = peer.link.send(&message(Err(error.clone())), &[], until);
                outcome = outcome.and(Err(error));
            }
        }
    }
    outcome
}

/// The other half of [`pass_on`]: `counts[r]` descriptors from every other rank `r`. All messages are taken in even when
/// one brings an error, so that the vote after it finds the socket empty.
pub(super) fn receive_passed(
    rank_0: &mut Peer,
    stage: &str,
    rank: usize,
    counts: &[u32],
    until: Instant,
) -> Result<Vec<Vec<OwnedFd>>> {
    let mut all = Vec::with_capacity(counts.len());
    let mut outcome = Ok(());
    for (from, &count) in counts.iter().enumerate() {
        let mut got = Vec::new();
        if from != rank && count > 0 {
            match hear(rank_0, stage, until)? {
                (Message::Handles { from: theirs, outcome: Ok(()) }, Ok(fds))
                    if theirs as usize == from && fds.len() == count as usize =>
                {
                    got = fds;
                }
                (Message::Handles { outcome: Err(error), .. }, _)
                | (Message::Handles { .. }, Err(error)) => outcome = outcome.and(Err(error)),
                (Message::Verdict { outcome: Err(error), .. }, _) => return Err(error),
                (other, _) => {
                    return Err(Error::Internal(format!(
                        "rank 0 sent {other:?} instead of the descriptors of rank {from}"
                    )))
                }
            }
        }
        all.push(got);
    }
    outcome.map(|()| all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cast() -> Ballot {
        Ballot::Cast(Contribution::default())
    }

    fn own() -> Ballot {
        Ballot::Failed(Error::Device("out of memory".into()))
    }

    fn named(ballots: &[Ballot]) -> Option<u32> {
        judge("s", ballots, Duration::from_secs(1)).map(|error| match error {
            Error::Setup { rank, stage, .. } => {
                assert_eq!(stage, "s");
                rank
            }
            other => panic!("{other}"),
        })
    }

    #[test]
    fn the_first_rank_that_failed_by_itself_is_named() {
        let blames = |rank| Ballot::Failed(Error::RankDied { rank });
        assert_eq!(named(&[cast(), cast()]), None);
        assert_eq!(named(&[cast(), own(), Ballot::Died]), Some(1));
        assert_eq!(named(&[cast(), Ballot::Died, own()]), Some(1));
        // A complaint about a third rank or a late rank is a consequence where there is a cause.
        assert_eq!(named(&[blames(3), cast(), own(), cast()]), Some(2));
        assert_eq!(named(&[Ballot::Late, cast(), own()]), Some(2));
        assert_eq!(named(&[Ballot::Late, blames(2), cast()]), Some(2));
        assert_eq!(named(&[cast(), Ballot::Late, Ballot::Late]), Some(1));
    }

    #[test]
    fn an_error_that_is_already_a_verdict_is_passed_on_as_it_is() {
        let verdict = setup(2, "earlier", "because");
        let ballots = [cast(), Ballot::Failed(verdict.clone()), own()];
        assert_eq!(judge("s", &ballots, Duration::ZERO), Some(verdict));
    }
}
