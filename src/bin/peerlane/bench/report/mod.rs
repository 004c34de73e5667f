//! The page of `--report`: one HTML file with everything in it, no script and nothing to load.

mod chart;

use super::rows::{Measured, Place};
use super::table;
use anyhow::{ensure, Result};
use chart::{size, Curve, Marker};
use std::fmt::Write;

/// A finished run, as the page shows it.
pub struct Run<'a> {
    pub results: &'a [Measured],
    /// Wrong elements of all rows, the rival's included.
    pub wrong: u64,
    pub checked: bool,
    pub command: &'a str,
    pub machine: &'a str,
    /// How many ranks, and what they are.
    pub ranks: &'a str,
    /// Name and version of the rival, where there is one.
    pub rival: Option<&'a str>,
}

/// The whole page.
pub fn page(run: &Run) -> Result<String> {
    let mut charts = String::new();
    let mut from = 0;
    for (number, rows) in
        run.results.chunk_by(|a, b| (a.dtype, a.redop) == (b.dtype, b.redop)).enumerate()
    {
        let figure = figure(run, rows, number)?;
        from += usize::from(!figure.is_empty());
        charts += &figure;
    }
    ensure!(from > 0, "--report: there is nothing to draw");
    let facts: String = [
        ("Results", verdict(run)),
        ("Machine", escape(run.machine)),
        ("Ranks", escape(run.ranks)),
        ("Compared with", run.rival.map_or("nothing (see --rival)".into(), escape)),
        ("Version", format!("peerlane {}", env!("CARGO_PKG_VERSION"))),
        ("Command", format!("<code>{}</code>", escape(run.command))),
    ]
    .iter()
    .map(|(name, value)| format!("<dt>{name}</dt><dd>{value}</dd>\n"))
    .collect();
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"generator\" content=\"peerlane {}\">\n<title>peerlane all-reduce: latency over size</title>\n\
         <link rel=\"icon\" href=\"data:,\">\n<style>\n{}</style>\n</head>\n<body>\n<main>\n\
         <h1>All-reduce: latency over message size</h1>\n\
         <p class=\"lead\">A time is the mean of a call in a batch of calls, averaged over the ranks; shown is the median of \
         the batches. Less is better; both axes are logarithmic.</p>\n<dl class=\"facts\">\n{facts}</dl>\n\
         <h2>Charts</h2>\n<div class=\"charts\">\n{charts}</div>\n<h2>Table</h2>\n{}</main>\n</body>\n</html>\n",
        env!("CARGO_PKG_VERSION"),
        include_str!("page.css"),
        rows_table(run)
    ))
}

/// What was wrong, and how it went beside the rival.
fn verdict(run: &Run) -> String {
    let mut text = match (run.checked, run.wrong) {
        (false, 0) => "not checked (-c 0)".into(),
        (_, 0) => "<span class=\"ok\">every checked element right, bit by bit</span>".into(),
        (_, wrong) => format!("<span class=\"bad\">{wrong} elements wrong</span>"),
    };
    let mut ratios: Vec<f64> = run.results.iter().filter_map(|row| row.ratio).collect();
    ratios.sort_unstable_by(f64::total_cmp);
    if let (Some(best), Some(worst), Some(rival)) = (ratios.first(), ratios.last(), run.rival) {
        let faster = ratios.iter().filter(|&&ratio| ratio < 1.0).count();
        let _ = write!(
            text,
            "; faster than {} in {faster} of {} rows, {best:.2} to {worst:.2} times its time out of place",
            escape(rival),
            ratios.len()
        );
    }
    text
}

/// The chart of one data type and operation; nothing where no size holds an element.
fn figure(run: &Run, rows: &[Measured], number: usize) -> Result<String> {
    // Neither an empty message nor a time of 0 has a place on a logarithmic axis; the table has them.
    let points = |time: &dyn Fn(&Measured) -> Option<f64>| -> Vec<(f64, f64)> {
        rows.iter()
            .filter(|row| row.bytes > 0)
            .filter_map(|row| Some((row.bytes as f64, time(row).filter(|&us| us > 0.0)?)))
            .collect()
    };
    let rival = run.rival.unwrap_or_default();
    let mut curves = vec![
        Curve {
            name: "peerlane, out of place",
            colour: (0x1b, 0x5e, 0x9e),
            marker: Marker::Circle,
            points: points(&|row| Some(row.out_of_place.time_us)),
        },
        Curve {
            name: "peerlane, in place",
            colour: (0x1a, 0x93, 0x6f),
            marker: Marker::Triangle,
            points: points(&|row| Some(row.in_place.time_us)),
        },
        Curve {
            name: rival,
            colour: (0xc4, 0x45, 0x36),
            marker: Marker::Cross,
            points: points(&|row| Some(row.rival.as_ref()?.time_us)),
        },
    ];
    curves.retain(|curve| !curve.points.is_empty());
    let (Some(row), Some(curve)) = (rows.first(), curves.first()) else {
        return Ok(String::new());
    };
    let (Some(smallest), Some(largest)) = (curve.points.first(), curve.points.last()) else {
        return Ok(String::new());
    };
    let title = format!("{} of {}", row.redop, row.dtype);
    let mut summary = String::from("Time of a call over message size, both logarithmic.");
    for curve in &curves {
        if let (Some(first), Some(last)) = (curve.points.first(), curve.points.last()) {
            let (from, to) = (table::time(first.1), table::time(last.1));
            let _ = write!(
                summary,
                " {}: {from} µs at {} bytes, {to} µs at {} bytes.",
                curve.name, first.0, last.0
            );
        }
    }
    let svg = chart::svg(&format!("chart-{number}"), &title, &summary, &curves)?;
    Ok(format!(
        "<figure>\n<figcaption>{}, {} to {} bytes</figcaption>\n{svg}</figure>\n",
        escape(&title),
        size(smallest.0),
        size(largest.0)
    ))
}

fn rows_table(run: &Run) -> String {
    let place =
        "<th scope=\"col\" class=\"edge\">time (µs)</th><th scope=\"col\">algbw (GB/s)</th>\
                 <th scope=\"col\">busbw (GB/s)</th><th scope=\"col\">wrong</th>";
    let (mut groups, mut columns) = (String::new(), String::new());
    if let Some(rival) = run.rival {
        groups =
            format!("<th scope=\"colgroup\" colspan=\"3\" class=\"group\">{}</th>", escape(rival));
        columns = "<th scope=\"col\" class=\"edge\">time (µs)</th><th scope=\"col\">wrong</th>\
                   <th scope=\"col\">ours / theirs</th>"
            .into();
    }
    let rows: String = run.results.iter().map(|row| table_row(row, run.rival.is_some())).collect();
    format!(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Table of all rows\">\n<table>\n\
         <caption>Size: bytes of one rank's input. algbw: size over time. busbw: algbw times 2 (n - 1) / n. wrong: elements, \
         over all ranks and checks.</caption>\n<thead>\n<tr><td colspan=\"5\"></td>\
         <th scope=\"colgroup\" colspan=\"4\" class=\"group\">out of place</th>\
         <th scope=\"colgroup\" colspan=\"4\" class=\"group\">in place</th>{groups}</tr>\n\
         <tr><th scope=\"col\">size (B)</th><th scope=\"col\">elements</th><th scope=\"col\" class=\"text\">type</th>\
         <th scope=\"col\" class=\"text\">operation</th><th scope=\"col\" class=\"text\">served by</th>{place}{place}{columns}\
         </tr>\n</thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>\n"
    )
}

fn table_row(row: &Measured, rival: bool) -> String {
    let place = |p: &Place| {
        format!(
            "<td class=\"edge\">{}</td><td>{:.2}</td><td>{:.2}</td><td>{}</td>",
            table::time(p.time_us),
            p.algbw,
            p.busbw,
            table::wrong(p.wrong)
        )
    };
    let beside = match (&row.rival, row.ratio) {
        (Some(rival), Some(ratio)) => format!(
            "<td class=\"edge\">{}</td><td>{}</td><td>{ratio:.2}</td>",
            table::time(rival.time_us),
            table::wrong(rival.wrong)
        ),
        _ if rival => "<td class=\"edge\">n/a</td><td>n/a</td><td>n/a</td>".into(),
        _ => String::new(),
    };
    format!(
        "<tr><th scope=\"row\">{}</th><td>{}</td><td class=\"text\">{}</td><td class=\"text\">{}</td>\
         <td class=\"text\">{}/{}</td>{}{}{beside}</tr>\n",
        row.bytes,
        row.count,
        row.dtype,
        row.redop,
        escape(&row.algo),
        escape(&row.proto),
        place(&row.out_of_place),
        place(&row.in_place)
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
