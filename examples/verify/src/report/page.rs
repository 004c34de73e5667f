//! The page of `--report`: one HTML file with everything in it, no script and nothing to load.

use super::chart::{self, Bar, Curve};
use super::table::{cells, ms, percent, verdict, COLUMNS};
use super::{Report, Width};
use crate::memory::bytes;
use crate::stamp::{Kind, Part};
use anyhow::{anyhow, Result};

/// The style of the tool's own pages.
const STYLE: &str = include_str!("../../../../src/bin/peerlane/bench/report/page.css");

/// The whole page.
pub fn html(report: &Report) -> Result<String> {
    let widest = report.widths.last().ok_or_else(|| anyhow!("--report: nothing was measured"))?;
    let contexts: Vec<String> = report.contexts.iter().map(usize::to_string).collect();
    let facts: String = [
        ("Result", escape(&verdict(report).unwrap_or_default())),
        ("Machine", escape(&report.machine)),
        ("Model", escape(&report.model)),
        ("Memory", bytes(report.bytes)),
        (
            "Ranks",
            format!(
                "{} {}, islands: {}",
                report.ranks,
                report.ranks_are(),
                escape(&report.islands)
            ),
        ),
        ("Sums by", escape(&report.sums_by())),
        ("Contexts", contexts.join(", ")),
        ("Notes", report.notes.iter().map(|note| escape(note)).collect::<Vec<_>>().join("<br>")),
        ("Version", format!("peerlane {}", report.version)),
        ("Command", format!("<code>{}</code>", escape(&report.command))),
    ]
    .iter()
    .map(|(name, value)| format!("<dt>{name}</dt><dd>{value}</dd>\n"))
    .collect();
    let charts = format!(
        "{}{}{}",
        figure(
            &format!("Time of a layer, {} rows of a sequence", widest.draft),
            "layers",
            &layers_summary(report, widest),
            &chart::stacked(&bars(report, widest))?
        ),
        figure("Time of a pass over draft width", "times", &times_summary(report), &times(report)?),
        figure(
            "Tokens per second over draft width",
            "tokens",
            &tokens_summary(report),
            &tokens(report)?
        ),
    );
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"generator\" content=\"peerlane {}\">\n<title>peerlane verify: what a pass pays for its all-reduces</title>\n\
         <link rel=\"icon\" href=\"data:,\">\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <h1>What a verify pass pays for its all-reduces</h1>\n\
         <p class=\"lead\">A pass verifies some rows of every sequence at once, through all layers, with two all-reduces a layer. \
         Its time is that of the slowest rank, the median of {} passes.</p>\n<dl class=\"facts\">\n{facts}</dl>\n\
         <h2>Charts</h2>\n<div class=\"charts\">\n{charts}</div>\n<h2>Table</h2>\n{}</main>\n</body>\n</html>\n",
        report.version,
        report.passes,
        table(report)
    ))
}

fn figure(title: &str, id: &str, summary: &str, svg: &str) -> String {
    // Plotters opens the element with a fixed size and no name; ours scales with the page and speaks to screen readers.
    let body = svg
        .split_once("<svg ")
        .and_then(|(_, rest)| rest.split_once('>'))
        .map_or("", |(_, body)| body);
    format!(
        "<figure>\n<figcaption>{title}</figcaption>\n<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-labelledby=\"{id}-title {id}-desc\">\n\
         <title id=\"{id}-title\">{title}</title>\n<desc id=\"{id}-desc\">{}</desc>{body}</figure>\n",
        chart::WIDTH,
        chart::HEIGHT,
        escape(summary)
    )
}

/// A bar for each kind of layer: the time of one layer, by part.
fn bars(report: &Report, width: &Width) -> Vec<Bar> {
    [(Kind::Dense, report.dense_layers), (Kind::Moe, report.moe_layers)]
        .into_iter()
        .filter(|(_, layers)| *layers > 0)
        .map(|(kind, layers)| Bar {
            name: format!("{} ({layers})", kind.name()),
            parts: Part::ALL.map(|part| {
                let found = width.parts.iter().find(|s| s.layers == kind && s.part == part);
                (part, found.map_or(0.0, |s| s.ms / layers as f64))
            }),
        })
        .collect()
}

fn layers_summary(report: &Report, width: &Width) -> String {
    let describe = |bar: &Bar| {
        let parts = bar.parts.iter().filter(|(_, time)| *time > 0.0);
        let parts: Vec<_> =
            parts.map(|(part, time)| format!("{} {} ms", part.name(), ms(*time))).collect();
        format!("{}: {}.", bar.name, parts.join(", "))
    };
    bars(report, width).iter().map(describe).collect::<Vec<_>>().join(" ")
}

fn points(report: &Report, of: impl Fn(&Width) -> f64) -> Vec<(f64, f64)> {
    report.widths.iter().map(|width| (width.draft as f64, of(width))).collect()
}

fn times(report: &Report) -> Result<String> {
    chart::lines(
        "milliseconds",
        &[
            Curve { name: "pass", colour: chart::BLUE, points: points(report, |w| w.pass_ms) },
            Curve { name: "no sums", colour: chart::GREEN, points: points(report, |w| w.bare_ms) },
            Curve {
                name: "all-reduce",
                colour: chart::RED,
                points: points(report, |w| w.all_reduce_ms),
            },
            Curve {
                name: "all-reduce, ranks in step",
                colour: chart::AMBER,
                points: points(report, |w| w.all_reduce_in_step_ms),
            },
        ],
    )
}

fn times_summary(report: &Report) -> String {
    let describe = |w: &Width| {
        let (pass, share) = (ms(w.pass_ms), percent(w.all_reduce_share));
        format!("{} rows: {pass} ms, {share} all-reduce.", w.draft)
    };
    report.widths.iter().map(describe).collect::<Vec<_>>().join(" ")
}

fn tokens(report: &Report) -> Result<String> {
    let plain = report.widths.first().map_or(0.0, |width| width.worth.tokens_per_second);
    chart::lines(
        "tokens per second of a sequence",
        &[
            Curve {
                name: "verify",
                colour: chart::BLUE,
                points: points(report, |w| w.worth.tokens_per_second),
            },
            Curve {
                name: "plain decoding",
                colour: chart::GREEN,
                points: points(report, |_| plain),
            },
        ],
    )
}

fn tokens_summary(report: &Report) -> String {
    let describe = |w: &Width| {
        let worth = &w.worth;
        format!(
            "{} rows: {:.1} tokens per second, pays from {:.2} tokens a pass.",
            w.draft, worth.tokens_per_second, worth.break_even
        )
    };
    report.widths.iter().map(describe).collect::<Vec<_>>().join(" ")
}

fn table(report: &Report) -> String {
    let header: String =
        COLUMNS.iter().map(|name| format!("<th scope=\"col\">{name}</th>")).collect();
    let row = |width: &Width| {
        let cells = cells(width);
        let rest: String = cells[1..].iter().map(|cell| format!("<td>{cell}</td>")).collect();
        format!("<tr><th scope=\"row\">{}</th>{rest}</tr>\n", cells[0])
    };
    let rows: String = report.widths.iter().map(row).collect();
    format!(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Table of all draft widths\">\n<table>\n\
         <caption>Times in milliseconds. draft: rows of a sequence, the last committed token and drafted ones. no sums: the \
         pass with nobody summing. all-reduce: waiting for late ranks included; in step: ranks wait for each other before, \
         and that is not counted. calls: all-reduces, of so many bytes each. experts: distinct ones a MoE layer (least-most). \
         tokens: committed a pass and sequence. gain: over plain decoding (from this many tokens a pass on).</caption>\n\
         <thead>\n<tr>{header}</tr>\n</thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>\n"
    )
}

/// Text for an element's content or a quoted attribute.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}
