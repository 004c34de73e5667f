//! A schedule as its builder writes it: readable, and independent of slots and of who moves the data.

use super::Islands;
use crate::types::Algorithm;
use std::fmt;

/// What a schedule is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Goal {
    /// Every rank gets the sum over all.
    #[default]
    AllReduce,
    /// Every rank gets what `root` has. The root's own output is the host's to copy.
    Broadcast {
        /// Whose data it is.
        root: u8,
    },
    /// Every rank gets every rank's part; a piece is a part. The own one is the host's to copy.
    AllGather,
    /// Every rank gets the sum of one part; a piece is a part.
    ReduceScatter,
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Goal::AllReduce => f.write_str("all-reduce"),
            Goal::Broadcast { root } => write!(f, "broadcast from rank {root}"),
            Goal::AllGather => f.write_str("all-gather"),
            Goal::ReduceScatter => f.write_str("reduce-scatter"),
        }
    }
}

/// What every rank does in a collective, phase by phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// What it is for.
    pub goal: Goal,
    /// Which builder made it.
    pub algorithm: Algorithm,
    /// The partition it was made for.
    pub islands: Islands,
    /// Where the message is cut into pieces.
    pub cuts: Cuts,
    /// One per rank; all have the same number of phases.
    pub ranks: Vec<RankSchedule>,
}

/// Boundaries of the pieces as fractions of the message: piece `p` is `[num[p]/den, num[p+1]/den)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cuts {
    /// Numerators, one more than there are pieces; from 0 to `den`.
    pub num: Vec<u16>,
    /// The common denominator.
    pub den: u16,
}

impl Cuts {
    /// `pieces` equal pieces.
    pub fn equal(pieces: u16) -> Self {
        Cuts { num: (0..=pieces).collect(), den: pieces }
    }

    /// Number of pieces.
    pub fn pieces(&self) -> u8 {
        (self.num.len() - 1) as u8
    }
}

/// One rank's part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankSchedule {
    /// In order; in each phase all sends come first, then the folds.
    pub phases: Vec<Phase>,
}

/// Sends, then folds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Phase {
    /// What is sent, in this order.
    pub sends: Vec<Send>,
    /// What is waited for and summed, in this order.
    pub folds: Vec<Fold>,
    /// The type its sends travel in; the same on all ranks.
    pub wire: Wire,
}

/// The type in which values travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wire {
    /// The caller's type.
    #[default]
    Caller,
    /// The accumulator's: f32 for 16-bit floats, else the caller's type.
    Accumulator,
}

/// One piece to one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Send {
    /// To whom.
    pub peer: u8,
    /// Which piece.
    pub piece: u8,
    /// Which of the sender's values of that piece.
    pub src: Source,
}

/// Which of a rank's own values of a piece is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// Its input.
    Input,
    /// The sum it keeps in the accumulator type.
    Partial,
    /// The rounded result.
    Result,
    /// Nothing: the message only says that the sender has begun the step, and so has finished the one before.
    Nothing,
}

/// A sum over values of one piece, or a wait for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fold {
    /// Which piece.
    pub piece: u8,
    /// What becomes of it.
    pub dst: Target,
    /// The operands in postfix order.
    pub items: Vec<Item>,
}

/// What becomes of a fold's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Rounded to the caller's type, into the output.
    Result,
    /// Kept in the accumulator type.
    Partial,
    /// Nothing: the fold only waits until the values are there; a later one takes them.
    Await,
}

/// Push an operand, then combine the top two `merge` times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The operand.
    pub operand: Operand,
    /// Sums to do after pushing it.
    pub merge: u8,
}

/// Where an operand comes from; its piece is the fold's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// What `from` sent in phase `phase`.
    Arrival {
        /// The sender.
        from: u8,
        /// The phase in which it sent it.
        phase: usize,
    },
    /// The rank's own input.
    Input,
    /// The rank's own partial sum.
    Partial,
}

impl Operand {
    /// The input of `leaf` as `me` sees it: its own, or what `leaf` sent in phase `phase`.
    pub(super) fn input_of(leaf: u8, me: u8, phase: usize) -> Self {
        if leaf == me {
            Operand::Input
        } else {
            Operand::Arrival { from: leaf, phase }
        }
    }
}
