//! The JSON report.

use super::rows::Measured;
use anyhow::{Context, Result};
use serde::Serialize;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// The whole of a run.
#[derive(Serialize)]
pub struct Report<'a> {
    pub results: &'a [Measured],
    /// Wrong elements of all rows, the rival's included.
    pub wrong_total: u64,
    pub command: &'a str,
    pub machine: &'a str,
}

/// The report's file; opened before the run, so that a path that cannot be written fails at once.
pub struct Output<'a> {
    path: &'a Path,
    file: File,
}

impl<'a> Output<'a> {
    /// Creates or empties `path`.
    pub fn create(path: &'a Path) -> Result<Self> {
        let file = File::create(path)
            .with_context(|| format!("--json: cannot write {}", path.display()))?;
        Ok(Output { path, file })
    }

    /// Writes the report.
    pub fn write(self, report: &Report) -> Result<()> {
        let mut out = BufWriter::new(self.file);
        serde_json::to_writer_pretty(&mut out, report)
            .map_err(std::io::Error::from)
            .and_then(|()| out.write_all(b"\n"))
            .and_then(|()| out.flush())
            .with_context(|| format!("--json: cannot write {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::{Place, RivalResult};
    use super::*;

    #[test]
    fn the_fields_are_the_documented_ones() {
        let row = Measured {
            bytes: 8,
            count: 2,
            dtype: "float",
            redop: "sum",
            algo: "one_shot".into(),
            proto: "flagged".into(),
            out_of_place: Place::new(8, 2, 1.0, Some(0)),
            in_place: Place::new(8, 2, 1.0, None),
            rival: Some(RivalResult {
                name: "Open MPI".into(),
                version: "4.1.4".into(),
                time_us: 2.0,
                wrong: Some(0),
            }),
            ratio: Some(0.5),
        };
        let report =
            Report { results: &[row], wrong_total: 0, command: "peerlane bench", machine: "a box" };
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(
            text,
            "{\"results\":[{\"bytes\":8,\"count\":2,\"type\":\"float\",\"redop\":\"sum\",\"algo\":\"one_shot\",\
             \"proto\":\"flagged\",\"out_of_place\":{\"time_us\":1.0,\"algbw\":0.008,\"busbw\":0.008,\"wrong\":0},\
             \"in_place\":{\"time_us\":1.0,\"algbw\":0.008,\"busbw\":0.008,\"wrong\":null},\"rival\":{\"name\":\"Open MPI\",\
             \"version\":\"4.1.4\",\"time_us\":2.0,\"wrong\":0},\"ratio\":0.5}],\"wrong_total\":0,\
             \"command\":\"peerlane bench\",\"machine\":\"a box\"}"
        );
    }
}
