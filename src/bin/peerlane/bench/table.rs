//! The table: nccl-tests' columns, a row as soon as it is measured.

use super::rows::{Measured, Place};
use comfy_table::{presets, CellAlignment, Table};
use std::fmt::Write;

/// Prints rows and remembers what the closing lines need.
pub struct Printer {
    rival: bool,
    rows: usize,
    busbw: f64,
    wrong: u64,
    checked: bool,
    served: Vec<Served>,
}

/// What one combination of algorithm and protocol served.
struct Served {
    algo: String,
    proto: String,
    rows: usize,
    smallest: usize,
    largest: usize,
    ratios: Vec<f64>,
}

impl Printer {
    /// A table with or without the columns of a rival.
    pub fn new(rival: bool) -> Self {
        Printer { rival, rows: 0, busbw: 0.0, wrong: 0, checked: false, served: Vec::new() }
    }

    /// The names of the columns.
    pub fn header(&self, rival: Option<&str>) -> String {
        let mut text = String::from("#\n");
        let blank = format!("# {:>11} {:>11} {:>8} {:>6}", "", "", "", "");
        let group = |name: &str| format!(" {name:^36}");
        let mut line = blank.clone() + &group("out-of-place") + &group("in-place");
        if let Some(name) = rival {
            let _ = write!(line, "  {:22} {name:^25}", "");
        }
        text += line.trim_end();
        let place = |a, b, c, d| format!(" {a:>10} {b:>8} {c:>8} {d:>7}");
        let names = place("time", "algbw", "busbw", "#wrong");
        let units = place("(us)", "(GB/s)", "(GB/s)", "");
        let _ = write!(
            text,
            "\n# {:>11} {:>11} {:>8} {:>6}{names}{names}  {:22}",
            "size", "count", "type", "redop", "served by"
        );
        if rival.is_some() {
            let _ = write!(text, " {:>10} {:>7} {:>6}", "time", "#wrong", "ratio");
        }
        let mut last =
            format!("# {:>11} {:>11} {:>8} {:>6}{units}{units}", "(B)", "(elements)", "", "");
        if rival.is_some() {
            let _ = write!(last, "  {:22} {:>10}", "", "(us)");
        }
        text.truncate(text.trim_end().len());
        text + "\n" + last.trim_end()
    }

    /// One row.
    pub fn row(&mut self, m: &Measured) -> String {
        self.rows += 1;
        self.busbw += (m.out_of_place.busbw + m.in_place.busbw) / 2.0;
        self.wrong += m.wrong();
        self.checked |= m.out_of_place.wrong.is_some();
        self.remember(m);
        let place = |p: &Place| {
            format!(
                " {:>10} {:>8.2} {:>8.2} {:>7}",
                time(p.time_us),
                p.algbw,
                p.busbw,
                wrong(p.wrong)
            )
        };
        let mut line = format!(
            "  {:>11} {:>11} {:>8} {:>6}{}{}  {:22}",
            m.bytes,
            m.count,
            m.dtype,
            m.redop,
            place(&m.out_of_place),
            place(&m.in_place),
            format!("{}/{}", m.algo, m.proto)
        );
        match (&m.rival, m.ratio) {
            (Some(rival), Some(ratio)) => {
                let _ = write!(
                    line,
                    " {:>10} {:>7} {:>6.2}",
                    time(rival.time_us),
                    wrong(rival.wrong),
                    ratio
                );
            }
            _ if self.rival => {
                let _ = write!(line, " {:>10} {:>7} {:>6}", "n/a", "n/a", "n/a");
            }
            _ => {}
        }
        line.truncate(line.trim_end().len());
        line
    }

    fn remember(&mut self, m: &Measured) {
        let known = self.served.iter().position(|s| s.algo == m.algo && s.proto == m.proto);
        let at = known.unwrap_or_else(|| {
            self.served.push(Served {
                algo: m.algo.clone(),
                proto: m.proto.clone(),
                rows: 0,
                smallest: m.bytes,
                largest: m.bytes,
                ratios: Vec::new(),
            });
            self.served.len() - 1
        });
        let served = &mut self.served[at];
        served.rows += 1;
        served.smallest = served.smallest.min(m.bytes);
        served.largest = served.largest.max(m.bytes);
        served.ratios.extend(m.ratio);
    }

    /// Wrong elements so far.
    pub fn wrong(&self) -> u64 {
        self.wrong
    }

    /// What served which sizes, and the lines with which nccl-tests closes.
    pub fn footer(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        let mut names = vec!["algorithm", "protocol", "rows", "from (B)", "to (B)"];
        if self.rival {
            names.extend(["best ratio", "worst ratio"]);
        }
        table.set_header(names);
        for served in &self.served {
            let mut cells = vec![
                served.algo.clone(),
                served.proto.clone(),
                served.rows.to_string(),
                served.smallest.to_string(),
                served.largest.to_string(),
            ];
            if self.rival {
                let of =
                    |pick: fn(f64, f64) -> f64| match served.ratios.iter().copied().reduce(pick) {
                        Some(ratio) => format!("{ratio:.2}"),
                        None => "n/a".into(),
                    };
                cells.extend([of(f64::min), of(f64::max)]);
            }
            table.add_row(cells);
        }
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let mut text = String::from("#\n");
        for line in table.to_string().lines() {
            let _ = writeln!(text, "#{}", line.trim_end());
        }
        let verdict = match (self.checked, self.wrong) {
            (false, 0) => "N/A (not checked)".into(),
            (_, 0) => "0 OK".into(),
            (_, wrong) => format!("{wrong} FAILED"),
        };
        let _ = writeln!(text, "#\n# Out of bounds values : {verdict}");
        let _ = write!(
            text,
            "# Avg bus bandwidth    : {:.4} GB/s",
            self.busbw / self.rows.max(1) as f64
        );
        text
    }
}

/// Microseconds with three or four significant digits.
pub fn time(us: f64) -> String {
    match us {
        us if us < 100.0 => format!("{us:.2}"),
        us if us < 1000.0 => format!("{us:.1}"),
        us => format!("{us:.0}"),
    }
}

/// Wrong elements, or N/A where nothing was checked.
pub fn wrong(count: Option<u64>) -> String {
    count.map_or("N/A".into(), |n| n.to_string())
}

#[cfg(test)]
mod tests {
    use super::super::rows::RivalResult;
    use super::*;

    fn measured(wrong: Option<u64>) -> Measured {
        Measured {
            bytes: 14336,
            count: 3584,
            dtype: "float",
            redop: "sum",
            algo: "one_shot".into(),
            proto: "flagged".into(),
            out_of_place: Place::new(14336, 4, 2.0, wrong),
            in_place: Place::new(14336, 4, 2.5, Some(0)),
            foreign_us: None,
            rival: Some(RivalResult {
                name: "Open MPI".into(),
                version: "4.1.4".into(),
                time_us: 8.0,
                wrong: Some(0),
            }),
            ratio: Some(0.25),
        }
    }

    #[test]
    fn columns_stand_under_their_names() {
        let mut printer = Printer::new(true);
        let header = printer.header(Some("Open MPI 4.1.4"));
        let row = printer.row(&measured(Some(0)));
        let names = header.lines().nth(2).unwrap();
        for (name, value) in
            [("size", "14336"), ("count", "3584"), ("redop", "sum"), ("ratio", "0.25")]
        {
            let end = |text: &str, what: &str| text.find(what).unwrap() + what.len();
            assert_eq!(end(names, name), end(&row, value), "{name}\n{header}\n{row}");
        }
    }

    #[test]
    fn the_footer_says_whether_anything_was_wrong() {
        let mut printer = Printer::new(true);
        printer.row(&measured(Some(0)));
        let footer = printer.footer();
        assert!(footer.contains("# Out of bounds values : 0 OK"), "{footer}");
        assert!(footer.contains("# Avg bus bandwidth"), "{footer}");
        assert!(footer.contains("one_shot"), "{footer}");
        printer.row(&measured(Some(3)));
        assert_eq!(printer.wrong(), 3);
        assert!(printer.footer().contains("# Out of bounds values : 3 FAILED"));
        let mut unchecked = Printer::new(false);
        unchecked.row(&measured(None));
        assert!(unchecked.footer().contains("not checked"));
    }
}
