//! The rows of a table: what is measured, and what came of it.

use super::args::Args;
use super::orders::Call;
use anyhow::Result;
use peerlane::{DType, Op};
use serde::Serialize;

/// One row to measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    pub count: usize,
    pub dtype: DType,
    pub op: Op,
}

impl Row {
    /// The all-reduce of the row.
    pub fn call(&self, in_place: bool) -> Call {
        Call { count: self.count, dtype: self.dtype, op: self.op, in_place }
    }
}

/// Every row of a run: types, then operations, then sizes, as nccl-tests orders them.
pub fn rows(args: &Args) -> Result<Vec<Row>> {
    let sizes = args.sizes()?;
    let mut rows = Vec::new();
    for &dtype in &args.dtypes.0 {
        for &op in &args.ops.0 {
            for &size in &sizes {
                let count = usize::try_from(size / dtype.size() as u64)?;
                rows.push(Row { count, dtype, op });
            }
        }
    }
    Ok(rows)
}

/// One of the two ways to call: into another buffer, or in place.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Place {
    pub time_us: f64,
    /// GB/s: the size over the time.
    pub algbw: f64,
    /// GB/s: what a link carries at least, `algbw * 2 (n - 1) / n`.
    pub busbw: f64,
    /// Elements, over all ranks and checks; `None` where nothing was checked.
    pub wrong: Option<u64>,
}

impl Place {
    /// The figures of a call of `bytes` bytes over `ranks` ranks that takes `time_us`.
    pub fn new(bytes: usize, ranks: usize, time_us: f64, wrong: Option<u64>) -> Self {
        let algbw = if time_us > 0.0 { bytes as f64 / time_us / 1e3 } else { 0.0 };
        let busbw = algbw * 2.0 * (ranks as f64 - 1.0) / ranks as f64;
        Place { time_us, algbw, busbw, wrong }
    }
}

/// What the rival did with the row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RivalResult {
    pub name: String,
    pub version: String,
    pub time_us: f64,
    pub wrong: Option<u64>,
}

/// A measured row; the fields are those of the JSON report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    pub bytes: usize,
    pub count: usize,
    #[serde(rename = "type")]
    pub dtype: &'static str,
    pub redop: &'static str,
    /// What served the calls, as the library counted them.
    pub algo: String,
    pub proto: String,
    pub out_of_place: Place,
    pub in_place: Place,
    /// With `--between`: what the foreign kernel before each call took, which the times above do not contain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub foreign_us: Option<f64>,
    /// `None` where there is no rival or it has no such type or operation.
    pub rival: Option<RivalResult>,
    /// Our out-of-place time over the rival's.
    pub ratio: Option<f64>,
}

impl Measured {
    /// Wrong elements of ours and of the rival.
    pub fn wrong(&self) -> u64 {
        let rival = self.rival.as_ref().and_then(|r| r.wrong);
        [self.out_of_place.wrong, self.in_place.wrong, rival].into_iter().flatten().sum()
    }
}

/// The median; 0 of nothing.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidths_follow_nccl_tests() {
        let place = Place::new(1 << 20, 4, 100.0, Some(0));
        assert!((place.algbw - 10.48576).abs() < 1e-9);
        assert!((place.busbw - 10.48576 * 1.5).abs() < 1e-9);
        assert_eq!(Place::new(1024, 1, 2.0, None).busbw, 0.0);
        assert_eq!(Place::new(0, 4, 0.0, None).algbw, 0.0);
    }

    #[test]
    fn the_median_ignores_one_outlier() {
        assert_eq!(median(&[1.0, 900.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn the_issue_s_matrix_has_350_rows() {
        use clap::Parser;
        #[derive(Parser)]
        struct Tool {
            #[command(flatten)]
            args: Args,
        }
        let line = "bench --ranks 8 -b 1K -e 4M -f 4 -d all -o all -c 1";
        let rows = rows(&Tool::parse_from(line.split(' ')).args).unwrap();
        assert_eq!(rows.len(), 350);
        assert_eq!(rows[0], Row { count: 1024, dtype: DType::I8, op: Op::Sum });
        assert_eq!(rows[349], Row { count: 2 << 20, dtype: DType::BF16, op: Op::Avg });
    }
}
