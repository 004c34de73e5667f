//! A symbolic run of all ranks: what every value is, who has heard from whom, and whether anybody waits for ever.

use super::super::model::Goal;
use super::super::tree::Tree;
use super::super::view;
use super::shape::is_remote;
use super::Violation;
use crate::launch::*;
use std::collections::HashMap;

/// A node of the expressions met so far; equal expressions have equal numbers. The operands of a sum are unordered, since
/// every operation is commutative; its association is not free.
type Node = usize;

#[derive(Default)]
struct Expressions {
    leaves: usize,
    sums: Vec<(Node, Node)>,
    known: HashMap<(Node, Node), Node>,
}

impl Expressions {
    fn sum(&mut self, a: Node, b: Node) -> Node {
        let key = (a.min(b), a.max(b));
        *self.known.entry(key).or_insert_with(|| {
            self.sums.push(key);
            self.leaves + self.sums.len() - 1
        })
    }

    fn of(&mut self, tree: &Tree) -> Node {
        match tree {
            Tree::Leaf(rank) => *rank as usize,
            Tree::Sum(left, right) => {
                let (a, b) = (self.of(left), self.of(right));
                self.sum(a, b)
            }
        }
    }

    /// The text of a node, cut off where a wrong table makes it endless.
    fn text(&self, node: Node) -> String {
        let mut text = String::new();
        self.write(node, &mut text);
        text
    }

    fn write(&self, node: Node, text: &mut String) {
        const LONGEST: usize = 200;
        if text.len() > LONGEST {
            if !text.ends_with("...") {
                text.push_str("...");
            }
        } else if node < self.leaves {
            text.push_str(&node.to_string());
        } else {
            let (a, b) = self.sums[node - self.leaves];
            text.push('(');
            self.write(a, text);
            text.push('+');
            self.write(b, text);
            text.push(')');
        }
    }
}

/// A value and whether it has been rounded to the caller's type after a sum.
#[derive(Clone, Copy)]
struct Value {
    node: Node,
    rounded: bool,
}

#[derive(Clone, Copy)]
struct Message {
    /// None: it only says that its sender has begun the step.
    value: Option<Value>,
    /// The ranks on whose part in this step, and in this piece, the message depends.
    heard: u16,
    hops: usize,
}

struct Rank {
    phase: usize,
    sent: bool,
    fold: usize,
    partial: Vec<Option<Node>>,
    result: Vec<Option<Node>>,
    /// Per piece, the ranks it has heard from through messages of that piece alone. Piece by piece, because a message
    /// shorter than the number of pieces leaves some of them empty, and nothing is sent for those.
    heard: Vec<u16>,
    hops: usize,
}

struct Run<'t> {
    tables: &'t [pl_table],
    goal: Goal,
    ranks: Vec<Rank>,
    slots: Vec<Vec<Option<Message>>>,
    expressions: Expressions,
}

/// Runs the tables, which have passed `shape` and `wiring`; returns the hops of the longest chain.
pub(super) fn check(tables: &[pl_table], tree: &Tree, goal: Goal) -> Result<usize, Violation> {
    let (n, pieces) = (tables.len(), tables[0].pieces as usize);
    let mut run = Run {
        tables,
        goal,
        ranks: (0..n)
            .map(|r| Rank {
                phase: 0,
                sent: false,
                fold: 0,
                partial: vec![None; pieces],
                result: vec![None; pieces],
                heard: vec![1 << r; pieces],
                hops: 0,
            })
            .collect(),
        slots: vec![vec![None; tables[0].flag_slots as usize]; n],
        expressions: Expressions { leaves: n, ..Default::default() },
    };
    run.finish()?;
    run.halves_are_safe()?;
    run.results_are(tree)?;
    Ok(run.ranks.iter().map(|r| r.hops).max().unwrap_or(0))
}

impl Run<'_> {
    /// Lets every rank go on as far as it can until none can.
    fn finish(&mut self) -> Result<(), Violation> {
        loop {
            let mut moved = false;
            let mut stuck = None;
            for rank in 0..self.ranks.len() {
                loop {
                    match self.advance(rank)? {
                        Step::Moved => moved = true,
                        Step::Finished => break,
                        Step::Waits(violation) => {
                            stuck.get_or_insert(violation);
                            break;
                        }
                    }
                }
            }
            match stuck {
                None => return Ok(()),
                Some(violation) if !moved => return Err(violation),
                Some(_) => {}
            }
        }
    }

    /// All sends of a phase, or one fold.
    fn advance(&mut self, rank: usize) -> Result<Step, Violation> {
        let table = &self.tables[rank];
        let at = self.ranks[rank].phase;
        let Some(phase) = view::phases(table).get(at) else { return Ok(Step::Finished) };
        if !self.ranks[rank].sent {
            for send in view::sends(table, phase) {
                self.send(rank, at, phase, send)?;
            }
            self.ranks[rank].sent = true;
            return Ok(Step::Moved);
        }
        let Some(fold) = view::folds(table, phase).get(self.ranks[rank].fold) else {
            let me = &mut self.ranks[rank];
            (me.phase, me.sent, me.fold) = (at + 1, false, 0);
            return Ok(Step::Moved);
        };
        for item in view::items(table, fold).iter().filter(|i| is_remote(i)) {
            if self.slots[rank][item.slot as usize].is_none() {
                let (peer, slot, piece) = (item.from, item.slot, fold.piece);
                return Ok(Step::Waits(Violation::Deadlock { rank, phase: at, peer, slot, piece }));
            }
        }
        self.fold(rank, at, fold)?;
        self.ranks[rank].fold += 1;
        Ok(Step::Moved)
    }

    fn send(
        &mut self,
        rank: usize,
        at: usize,
        phase: &pl_phase,
        send: &pl_send,
    ) -> Result<(), Violation> {
        let piece = send.piece;
        let value = match u32::from(send.src) {
            PL_SRC_INPUT => Some(self.input(rank, at, piece)?),
            PL_SRC_PARTIAL => Some(self.partial(rank, at, piece)?),
            PL_SRC_NOTHING => None,
            _ => match self.ranks[rank].result[piece as usize] {
                Some(node) => Some(Value { node, rounded: true }),
                None => {
                    return Err(Violation::Undefined { rank, phase: at, what: "result", piece })
                }
            },
        };
        match (u32::from(send.src), phase.wire_f32) {
            (PL_SRC_PARTIAL, 0) => {
                return Err(Violation::PartialOnNarrowWire { rank, phase: at, piece })
            }
            (PL_SRC_RESULT, 1) => {
                return Err(Violation::ResultOnWideWire { rank, phase: at, piece })
            }
            _ => {}
        }
        let me = &self.ranks[rank];
        let message = Message { value, heard: me.heard[piece as usize], hops: me.hops + 1 };
        self.slots[send.peer as usize][send.slot as usize] = Some(message);
        Ok(())
    }

    fn fold(&mut self, rank: usize, at: usize, fold: &pl_fold) -> Result<(), Violation> {
        let piece = fold.piece as usize;
        let items = view::items(&self.tables[rank], fold);
        let waits = u32::from(fold.dst) == PL_DST_AWAIT;
        let mut stack: Vec<Node> = Vec::new();
        let mut rounded = false;
        for item in items {
            let value = match u32::from(item.from) {
                PL_FROM_INPUT => self.input(rank, at, fold.piece)?,
                PL_FROM_PARTIAL => self.partial(rank, at, fold.piece)?,
                _ => {
                    // `advance` has seen that it is there.
                    let Some(message) = self.slots[rank][item.slot as usize] else { continue };
                    let me = &mut self.ranks[rank];
                    me.heard[piece] |= message.heard;
                    me.hops = me.hops.max(message.hops);
                    // `wiring` has seen that what carries nothing is only awaited.
                    let Some(value) = message.value else { continue };
                    value
                }
            };
            rounded |= value.rounded;
            stack.push(value.node);
            for _ in 0..item.merge {
                if let (Some(b), Some(a)) = (stack.pop(), stack.pop()) {
                    stack.push(self.expressions.sum(a, b));
                }
            }
        }
        if waits {
            return Ok(());
        }
        let to_result = u32::from(fold.dst) == PL_DST_RESULT;
        if rounded && !(items.len() == 1 && to_result) {
            return Err(Violation::RoundedOperand { rank, phase: at, piece: fold.piece });
        }
        let me = &mut self.ranks[rank];
        if !to_result {
            me.partial[piece] = stack.pop();
        } else if me.result[piece].is_some() {
            return Err(Violation::ResultTwice { rank, phase: at, piece: fold.piece });
        } else {
            me.result[piece] = stack.pop();
        }
        Ok(())
    }

    fn input(&self, rank: usize, at: usize, piece: u8) -> Result<Value, Violation> {
        let own = match self.goal {
            Goal::AllReduce | Goal::ReduceScatter => true,
            Goal::Broadcast { root } => usize::from(root) == rank,
            Goal::AllGather => usize::from(piece) == rank,
        };
        if !own {
            return Err(Violation::Undefined { rank, phase: at, what: "input", piece });
        }
        match self.ranks[rank].result[piece as usize] {
            None => Ok(Value { node: rank, rounded: false }),
            Some(_) => Err(Violation::InputOverwritten { rank, phase: at, piece }),
        }
    }

    fn partial(&self, rank: usize, at: usize, piece: u8) -> Result<Value, Violation> {
        match self.ranks[rank].partial[piece as usize] {
            Some(node) => Ok(Value { node, rounded: false }),
            None => Err(Violation::Undefined { rank, phase: at, what: "partial", piece }),
        }
    }

    /// A writer overwrites a slot two steps later, in the same half. If in the step between it has heard from the reader,
    /// the reader had begun that step, so it had finished the one before and read the slot. Any piece may be the only
    /// one that is not empty in that step. (The result rule implies the same across different schedules on one channel:
    /// every result needs every rank.)
    fn halves_are_safe(&self) -> Result<(), Violation> {
        if self.goal != Goal::AllReduce {
            return self.everybody_is_heard();
        }
        for (writer, table) in self.tables.iter().enumerate() {
            for send in view::phases(table).iter().flat_map(|p| view::sends(table, p)) {
                let reader = send.peer as usize;
                for (piece, heard) in self.ranks[writer].heard.iter().enumerate() {
                    if heard & (1 << reader) == 0 {
                        return Err(Violation::Unacknowledged { writer, reader, piece });
                    }
                }
            }
        }
        Ok(())
    }

    /// Where results do not need every rank's data, the same as if they did: whoever finishes a step has heard from everybody in
    /// it. Of several pieces, which are equal parts, one is as good as all.
    fn everybody_is_heard(&self) -> Result<(), Violation> {
        for (rank, me) in self.ranks.iter().enumerate() {
            let heard = me.heard.iter().fold(0, |all, heard| all | heard);
            if let Some(peer) = (0..self.ranks.len()).find(|&r| heard & (1 << r) == 0) {
                return Err(Violation::Unheard { rank, peer });
            }
        }
        Ok(())
    }

    /// What a rank's result of a piece must be; none where it must not write one.
    fn wanted(&self, rank: usize, piece: usize, root: Node) -> Option<Node> {
        match self.goal {
            Goal::AllReduce => Some(root),
            Goal::Broadcast { root } => (usize::from(root) != rank).then_some(root.into()),
            Goal::AllGather => (piece != rank).then_some(piece),
            Goal::ReduceScatter => (piece == rank).then_some(root),
        }
    }

    fn results_are(&mut self, tree: &Tree) -> Result<(), Violation> {
        let root = self.expressions.of(tree);
        for (rank, me) in self.ranks.iter().enumerate() {
            for (piece, result) in me.result.iter().enumerate() {
                match (*result, self.wanted(rank, piece, root)) {
                    (got, wanted) if got == wanted => {}
                    (Some(node), _) => {
                        let got = self.expressions.text(node);
                        return Err(Violation::WrongResult {
                            rank,
                            piece,
                            got,
                            tree: tree.to_string(),
                        });
                    }
                    (None, _) => return Err(Violation::MissingResult { rank, piece }),
                }
            }
        }
        Ok(())
    }
}

enum Step {
    Moved,
    Finished,
    Waits(Violation),
}
