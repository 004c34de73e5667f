//! The rules that tables can break, one variant each.

use crate::error::Error;

/// A rule that the tables break, and where. Phases and slots are numbered from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// There is a table for each of 1 to 16 ranks.
    #[error("{tables} tables: there is one for each of 1 to 16 ranks")]
    RankCount {
        /// How many tables there are.
        tables: usize,
    },
    /// Table i is rank i's.
    #[error("table {index} says that it is rank {rank}'s")]
    RankNumber {
        /// Position of the table.
        index: usize,
        /// What it says.
        rank: u8,
    },
    /// The tree has every rank exactly once as a leaf.
    #[error("the tree {tree} is not over the ranks 0 to {last}")]
    TreeLeaves {
        /// The tree.
        tree: String,
        /// The last rank.
        last: usize,
    },
    /// All ranks agree on what describes the whole schedule.
    #[error("rank {rank} has {field} {value}, rank 0 has {value0}")]
    Disagreement {
        /// Who differs.
        rank: usize,
        /// In what.
        field: String,
        /// Its value.
        value: u16,
        /// Rank 0's value.
        value0: u16,
    },
    /// Every number lies within its array or its range.
    #[error("rank {rank}, {place}: {field} is {value}, allowed are {low} to {high}")]
    OutOfBounds {
        /// Whose table.
        rank: usize,
        /// Where in it.
        place: String,
        /// Which field.
        field: &'static str,
        /// Its value.
        value: usize,
        /// The least allowed.
        low: usize,
        /// The most allowed.
        high: usize,
    },
    /// Cuts start at 0, ascend and end at the denominator.
    #[error("cut {index} of {den} is {value}: cuts start at 0, ascend and end at the denominator")]
    Cuts {
        /// Which cut.
        index: usize,
        /// Its numerator.
        value: u16,
        /// The denominator.
        den: u16,
    },
    /// Nobody sends to itself.
    #[error("rank {rank}, phase {phase}: sends piece {piece} to itself")]
    SendToSelf {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// What.
        piece: u8,
    },
    /// A push lands in the slot whose flag it raises.
    #[error("rank {rank}, phase {phase}: a push names data slot {data} but slot {slot}")]
    PushDataSlot {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// The arrival's slot.
        slot: u8,
        /// The data slot.
        data: u8,
    },
    /// A fold never combines more values than it has pushed.
    #[error("rank {rank}, phase {phase}, fold of piece {piece}: item {item} combines more values than there are")]
    StackUnderflow {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which piece.
        piece: u8,
        /// Which item.
        item: usize,
    },
    /// A fold ends with one value.
    #[error(
        "rank {rank}, phase {phase}, fold of piece {piece}: {left} values are left instead of one"
    )]
    StackLeftover {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which piece.
        piece: u8,
        /// Values left.
        left: usize,
    },
    /// A fold needs at most 5 stack entries: they are registers of the kernel.
    #[error("rank {rank}, phase {phase}, fold of piece {piece}: needs {depth} stack entries, a kernel has 5")]
    StackDepth {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which piece.
        piece: u8,
        /// Entries needed.
        depth: usize,
    },
    /// A fold that only waits combines nothing and takes nothing of the rank's own.
    #[error("rank {rank}, phase {phase}, wait for piece {piece}: item {item} does more than wait")]
    AwaitDoesMore {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which piece.
        piece: u8,
        /// Which item.
        item: usize,
    },
    /// `canonical` is set only on folds whose merges are those of the balanced tree.
    #[error("rank {rank}, phase {phase}, fold of piece {piece}: marked canonical, but its merges are not the balanced tree's")]
    NotCanonical {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which piece.
        piece: u8,
    },
    /// `fan_in` is the most remote items of any fold: kernels hold so many values in flight.
    #[error("rank {rank}: fan_in is {stated}, but its widest fold takes {actual} arrivals")]
    FanIn {
        /// Who.
        rank: usize,
        /// What the table says.
        stated: u8,
        /// What its folds need.
        actual: usize,
    },
    /// A slot has one writer per step.
    #[error("slot {slot} of rank {reader} is written twice: by rank {first} in phase {first_phase} and by rank {second} in phase {second_phase}")]
    TwoWriters {
        /// Whose slot.
        reader: usize,
        /// Which.
        slot: u8,
        /// The first writer.
        first: usize,
        /// When it writes.
        first_phase: usize,
        /// The second writer.
        second: usize,
        /// When it writes.
        second_phase: usize,
    },
    /// With pull a data slot holds one value for the whole step, stored once.
    #[error("rank {rank}, phase {phase}: stores into its data slot {data} again while readers of the first value may still load it")]
    DataSlotReused {
        /// The writer.
        rank: usize,
        /// When it stores again.
        phase: usize,
        /// Its data slot.
        data: u8,
    },
    /// Nobody reads a slot that nobody writes.
    #[error(
        "rank {rank}, phase {phase}, fold of piece {piece}: reads slot {slot}, which nobody writes"
    )]
    Unwritten {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which piece.
        piece: u8,
        /// Which slot.
        slot: u8,
    },
    /// An item says who wrote its slot.
    #[error("rank {rank}, phase {phase}, fold of piece {piece}: expects slot {slot} from rank {expected}, but rank {writer} writes it")]
    WrongWriter {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which piece.
        piece: u8,
        /// Which slot.
        slot: u8,
        /// Whom the item names.
        expected: u8,
        /// Who writes it.
        writer: usize,
    },
    /// A value is folded with values of the same piece.
    #[error("rank {rank}, phase {phase}: the fold of piece {piece} reads slot {slot}, which holds piece {sent}")]
    WrongPiece {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// The fold's piece.
        piece: u8,
        /// Which slot.
        slot: u8,
        /// The piece that is sent there.
        sent: u8,
    },
    /// Writer and reader agree on the type in a slot.
    #[error("rank {rank}, phase {phase}, fold of piece {piece}: slot {slot} is read with wire_f32 {read}, but written with {written}")]
    WrongWire {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which piece.
        piece: u8,
        /// Which slot.
        slot: u8,
        /// As read.
        read: u8,
        /// As written.
        written: u8,
    },
    /// An item names the data slot that its value was stored in.
    #[error("rank {rank}, phase {phase}, fold of piece {piece}: slot {slot} is loaded from data slot {read}, but stored in {written}")]
    WrongDataSlot {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which piece.
        piece: u8,
        /// Which slot.
        slot: u8,
        /// As read.
        read: u8,
        /// As written.
        written: u8,
    },
    /// Whatever is sent is taken: a value left in its slot would meet the next step.
    #[error("rank {reader} never takes piece {piece} from its slot {slot}, which rank {writer} writes in phase {phase}")]
    NeverTaken {
        /// Whose slot.
        reader: usize,
        /// Which.
        slot: u8,
        /// Who writes it.
        writer: usize,
        /// When.
        phase: usize,
        /// What.
        piece: u8,
    },
    /// A slot is taken once: after that it is empty again, and a second read would wait for ever.
    #[error(
        "rank {rank}, phase {phase}, fold of piece {piece}: reads slot {slot} after it was taken"
    )]
    TakenTwice {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which piece.
        piece: u8,
        /// Which slot.
        slot: u8,
    },
    /// What carries no data is only awaited.
    #[error(
        "rank {rank}, phase {phase}, fold of piece {piece}: takes a value from slot {slot}, to which only a flag is sent"
    )]
    TakesNothing {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which piece.
        piece: u8,
        /// Which slot.
        slot: u8,
    },
    /// The waits are no circle.
    #[error("deadlock: rank {rank} waits in phase {phase} for rank {peer} (slot {slot}, piece {piece}), and no rank can go on")]
    Deadlock {
        /// The lowest rank that waits.
        rank: usize,
        /// When.
        phase: usize,
        /// For whom.
        peer: u8,
        /// For which slot.
        slot: u8,
        /// For which piece.
        piece: u8,
    },
    /// A rank's own value exists before it is used.
    #[error("rank {rank}, phase {phase}: uses its {what} of piece {piece} before there is one")]
    Undefined {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which value: partial or result.
        what: &'static str,
        /// Which piece.
        piece: u8,
    },
    /// A partial sum travels in the accumulator type: rounding it would round twice.
    #[error(
        "rank {rank}, phase {phase}: sends its partial sum of piece {piece} in the caller's type"
    )]
    PartialOnNarrowWire {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which piece.
        piece: u8,
    },
    /// A result travels in the caller's type.
    #[error(
        "rank {rank}, phase {phase}: sends its result of piece {piece} in the accumulator type"
    )]
    ResultOnWideWire {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which piece.
        piece: u8,
    },
    /// A rounded value is only copied to the result.
    #[error("rank {rank}, phase {phase}: the fold of piece {piece} sums or keeps a value that was rounded already")]
    RoundedOperand {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which piece.
        piece: u8,
    },
    /// In place the result overwrites the input.
    #[error("rank {rank}, phase {phase}: reads its input of piece {piece} after the result overwrote it (in place)")]
    InputOverwritten {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which piece.
        piece: u8,
    },
    /// A result is written once.
    #[error("rank {rank}, phase {phase}: writes its result of piece {piece} a second time")]
    ResultTwice {
        /// Who.
        rank: usize,
        /// When.
        phase: usize,
        /// Which piece.
        piece: u8,
    },
    /// Two halves suffice: a writer must hear, in the same step, from everybody it writes to.
    #[error("rank {writer} writes to rank {reader}, but a step of piece {piece} alone can end on {writer} before it has heard from {reader}: two steps later it would overwrite what {reader} has not read")]
    Unacknowledged {
        /// Who writes.
        writer: usize,
        /// To whom.
        reader: usize,
        /// Of which piece.
        piece: usize,
    },
    /// Where a result does not need every rank's data, every rank must still hear from all.
    #[error("rank {rank} can finish a step without having heard from rank {peer}: two steps later it, or who has heard from it, would overwrite what {peer} has not read")]
    Unheard {
        /// Who.
        rank: usize,
        /// From whom.
        peer: usize,
    },
    /// A rank has at most the given number of peers.
    #[error("rank {rank} has {peers} peers, allowed are {limit}")]
    Degree {
        /// Who.
        rank: usize,
        /// How many peers it has.
        peers: usize,
        /// How many it may have.
        limit: usize,
    },
    /// Every rank gets a result for every piece.
    #[error("rank {rank} never gets a result of piece {piece}")]
    MissingResult {
        /// Who.
        rank: usize,
        /// Which piece.
        piece: usize,
    },
    /// Every result is the root of the tree over all ranks, in this association.
    #[error("rank {rank}: its result of piece {piece} is {got}, the tree is {tree}")]
    WrongResult {
        /// Who.
        rank: usize,
        /// Which piece.
        piece: usize,
        /// What it computes.
        got: String,
        /// What it should.
        tree: String,
    },
}

impl From<Violation> for Error {
    /// A schedule that breaks a rule is a defect of this library.
    fn from(violation: Violation) -> Self {
        Error::Internal(format!("the schedule was refused: {violation}"))
    }
}
