//! A schedule as text, from its tables.

use super::view;
use crate::launch::*;
use std::fmt::Write;

/// Phase by phase: who sends which piece to whom and in which type, and what every rank sums. Meant for tables that
/// [`check`](super::check()) has proven; others are shown as far as they can be read.
pub fn explain(tables: &[pl_table]) -> String {
    let mut text = summary(tables);
    let Some(first) = tables.first() else { return text };
    text.push('\n');
    for phase in 0..first.phases as usize {
        let wide = first.phase.get(phase).is_some_and(|p| p.wire_f32 == 1);
        let wire = if wide { "accumulator type (f32 for 16-bit floats)" } else { "caller's type" };
        // Writing to a String cannot fail.
        let _ = writeln!(text, "phase {phase}, wire: {wire}");
        for table in tables {
            let Some(head) = view::phases(table).get(phase) else { continue };
            for line in sends(table, head).into_iter().chain(folds(table, head)) {
                let _ = writeln!(text, "  rank {:2} {line}", table.rank);
            }
        }
    }
    text
}

/// One line: ranks, phases, pieces and what they are, direction, slots.
pub fn summary(tables: &[pl_table]) -> String {
    let Some(t) = tables.first() else { return "no ranks\n".into() };
    let cuts: Vec<String> =
        t.cut_num.iter().take(t.pieces as usize + 1).map(u16::to_string).collect();
    let direction = if t.pull == 1 { "pull" } else { "push" };
    format!(
        "{} rank(s), {} phase(s), {direction}; {} piece(s) cut at {} of {}; {} data slot(s), {} arrival(s)\n",
        t.n,
        t.phases,
        t.pieces,
        cuts.join(" "),
        t.cut_den,
        t.slots,
        t.flag_slots
    )
}

/// Sends of one value to several peers share a line.
fn sends(table: &pl_table, head: &pl_phase) -> Vec<String> {
    let mut groups: Vec<((u8, u8), Vec<String>)> = Vec::new();
    for s in view::sends(table, head) {
        match groups.last_mut() {
            Some((key, peers)) if *key == (s.src, s.piece) => peers.push(s.peer.to_string()),
            _ => groups.push(((s.src, s.piece), vec![s.peer.to_string()])),
        }
    }
    let source = |src| match u32::from(src) {
        PL_SRC_INPUT => "input",
        PL_SRC_PARTIAL => "partial",
        PL_SRC_RESULT => "result",
        PL_SRC_NOTHING => "nothing but a flag",
        _ => "unknown",
    };
    groups
        .into_iter()
        .map(|((src, piece), peers)| {
            format!("sends {} of piece {piece} to {}", source(src), peers.join(", "))
        })
        .collect()
}

fn folds(table: &pl_table, head: &pl_phase) -> Vec<String> {
    view::folds(table, head)
        .iter()
        .map(|fold| {
            let value = expression(view::items(table, fold));
            match u32::from(fold.dst) {
                PL_DST_RESULT => format!("result of piece {} = {value}", fold.piece),
                PL_DST_PARTIAL => format!("partial of piece {} = {value}", fold.piece),
                _ => format!("waits for piece {} {value}", fold.piece),
            }
        })
        .collect()
}

/// The sum with its brackets; an operand is `input`, `partial` or whom it came from.
fn expression(items: &[pl_item]) -> String {
    let mut stack: Vec<String> = Vec::new();
    for item in items {
        stack.push(match u32::from(item.from) {
            PL_FROM_INPUT => "input".into(),
            PL_FROM_PARTIAL => "partial".into(),
            _ => format!("from {}", item.from),
        });
        for _ in 0..item.merge {
            if let (Some(b), Some(a)) = (stack.pop(), stack.pop()) {
                stack.push(format!("({a} + {b})"));
            }
        }
    }
    stack.join(", ")
}
