//! The report on a terminal.

use super::{Report, Width};
use crate::memory::bytes;
use crate::stamp::{Kind, Part};
use comfy_table::{presets, CellAlignment, Table};
use std::fmt::Write;

/// The whole report.
pub fn text(report: &Report) -> String {
    let mut text = String::new();
    let ranks = format!("{} {}, islands: {}", report.ranks, report.ranks_are(), report.islands);
    let contexts: Vec<String> = report.contexts.iter().map(usize::to_string).collect();
    for (name, value) in [
        ("machine", report.machine.clone()),
        ("model", report.model.clone()),
        ("memory", bytes(report.bytes)),
        ("ranks", ranks),
        ("sums by", report.sums_by()),
        ("contexts", contexts.join(", ")),
        ("command", report.command.clone()),
    ] {
        let _ = writeln!(text, "# {name:9}{value}");
    }
    let _ = writeln!(
        text,
        "#\n# A pass (ms), median of {}. no sums: nobody sums; all-reduce: in a pass, waiting for late ranks included; in step: after a\n\
         # barrier; alone: with nothing between them; calls: all-reduces, of so many bytes each; experts: distinct ones a MoE layer (least-most); tokens: committed a\n\
         # pass and sequence; tokens/s: of a sequence; gain: over plain decoding (from this many tokens a pass on).\n",
        report.passes
    );
    text += &widths(report);
    if let Some(widest) = report.widths.last() {
        let _ = writeln!(
            text,
            "\n# Where the time of a pass goes, {} rows of a sequence (ms):\n",
            widest.draft
        );
        text += &parts(widest);
    }
    text.push('\n');
    for note in &report.notes {
        let _ = writeln!(text, "# {note}");
    }
    if let Some(verdict) = verdict(report) {
        let _ = writeln!(text, "#\n# {verdict}");
    }
    text
}

/// The run in a sentence.
pub fn verdict(report: &Report) -> Option<String> {
    let (plain, widest) = (report.widths.first()?, report.widths.last()?);
    if widest.draft == 1 {
        return Some(format!(
            "Plain decoding: {} ms a pass, {} of it all-reduce; {:.1} tokens/s a sequence.",
            ms(plain.pass_ms),
            percent(plain.all_reduce_share),
            plain.worth.tokens_per_second
        ));
    }
    Some(format!(
        "Verifying {} rows: {} ms a pass, {} of it all-reduce ({} with ranks in step); {:.1} tokens/s a sequence, {:.2} times \
         plain decoding. It pays from {:.2} tokens a pass.",
        widest.draft,
        ms(widest.pass_ms),
        percent(widest.all_reduce_share),
        percent(widest.all_reduce_in_step_share),
        widest.worth.tokens_per_second,
        widest.worth.gain,
        widest.worth.break_even
    ))
}

/// Names of the columns of [`cells`]; times are milliseconds.
pub const COLUMNS: [&str; 15] = [
    "draft",
    "rows",
    "pass",
    "no sums",
    "all-reduce",
    "share",
    "in step",
    "share",
    "alone",
    "calls",
    "bytes",
    "experts",
    "tokens",
    "tokens/s",
    "gain (from)",
];

/// One draft width.
pub fn cells(width: &Width) -> [String; 15] {
    [
        width.name(),
        width.rows.to_string(),
        ms(width.pass_ms),
        ms(width.bare_ms),
        ms(width.all_reduce_ms),
        percent(width.all_reduce_share),
        ms(width.all_reduce_in_step_ms),
        percent(width.all_reduce_in_step_share),
        width.all_reduce_alone_ms.map_or("-".into(), ms),
        width.all_reduces.to_string(),
        width.all_reduce_bytes.to_string(),
        format!("{:.1} ({}-{})", width.experts_mean, width.experts_least, width.experts_most),
        format!("{:.2}", width.worth.tokens_per_pass),
        format!("{:.1}", width.worth.tokens_per_second),
        format!("{:.2} ({:.2})", width.worth.gain, width.worth.break_even),
    ]
}

fn widths(report: &Report) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(COLUMNS);
    for width in &report.widths {
        table.add_row(cells(width));
    }
    lines(table)
}

fn parts(width: &Width) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let used: Vec<Part> = Part::ALL
        .into_iter()
        .filter(|part| width.parts.iter().any(|stretch| stretch.part == *part))
        .collect();
    table.set_header([""].into_iter().chain(used.iter().map(|part| part.name())));
    for kind in Kind::ALL {
        let of = |part: Part| {
            width.parts.iter().find(|stretch| stretch.layers == kind && stretch.part == part)
        };
        if used.iter().any(|&part| of(part).is_some()) {
            let cells = used.iter().map(|&part| of(part).map_or("".into(), |s| ms(s.ms)));
            table.add_row([kind.name().to_string()].into_iter().chain(cells));
        }
    }
    lines(table)
}

fn lines(mut table: Table) -> String {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string().lines().fold(String::new(), |mut text, line| {
        let _ = writeln!(text, " {}", line.trim_end());
        text
    })
}

/// Milliseconds with three significant digits or more.
pub fn ms(ms: f64) -> String {
    match ms {
        ms if ms < 10.0 => format!("{ms:.3}"),
        ms if ms < 100.0 => format!("{ms:.2}"),
        ms => format!("{ms:.1}"),
    }
}

pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}
