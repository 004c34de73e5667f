//! The JSON report.

use super::rows::Measured;
use serde::Serialize;
use std::io::Write;

/// The whole of a run.
#[derive(Serialize)]
pub struct Report<'a> {
    pub results: &'a [Measured],
    /// Wrong elements of all rows, the rival's included.
    pub wrong_total: u64,
    pub command: &'a str,
    pub machine: &'a str,
}

impl Report<'_> {
    /// Writes the report, for people too: indented.
    pub fn write(&self, out: &mut dyn Write) -> std::io::Result<()> {
        serde_json::to_writer_pretty(&mut *out, self)?;
        out.write_all(b"\n")
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
            foreign_us: None,
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
