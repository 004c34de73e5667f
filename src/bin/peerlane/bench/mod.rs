//! `peerlane bench`: measures and checks all-reduce, with nccl-tests' flags and table.

mod args;
mod burst;
mod json;
mod machine;
pub mod orders;
mod output;
pub mod parent;
mod payload;
mod rank;
mod report;
mod rival_mpi;
mod rows;
mod table;

pub use args::Args;

use anyhow::{anyhow, bail, ensure, Result};
use args::Rival;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use orders::{Answer, Call, Order, Settings, Timing};
use output::Output;
use parent::Ranks;
use peerlane::schedule::Islands;
use rival_mpi::{Mpi, Plan};
use rows::{median, Measured, Place, Row};
use std::io::{BufReader, Write};
use std::process::ExitCode;
use std::time::Duration;
use table::Printer;

/// Where rank 0 chooses: a batch is about this long, and a row's batches together about this long.
const BATCH_US: f64 = 5_000.0;
const BUDGET_US: f64 = 150_000.0;
const ITERS: (f64, f64) = (5.0, 1000.0);
const BATCHES: (f64, f64) = (5.0, 21.0);

/// Runs the benchmark; an error is anything that makes its figures worthless.
pub fn run(args: &Args) -> Result<()> {
    args.validate()?;
    let rows = rows::rows(args)?;
    ensure!(
        rows.iter().any(|row| row.count > 0),
        "nothing to measure: every size is smaller than one element"
    );
    let json = args.json.as_deref().map(|path| Output::create("--json", path)).transpose()?;
    let page = args.report.as_deref().map(|path| Output::create("--report", path)).transpose()?;
    let (command, machine) = (command_line(), machine::describe());

    let settings = Settings {
        ranks: args.ranks,
        islands: args.islands.clone(),
        algo: args.algo,
        proto: args.proto,
        direction: args.direction,
        deadline: args.deadline,
        seed: args.seed,
        slab: None,
        compare_calls: None,
        run_dir: None,
    };
    let islands = match settings.config()?.islands {
        Some(islands) => islands,
        None => Islands::single(args.ranks)?,
    };
    let ranks =
        if args.threads { Ranks::threads(&settings)? } else { Ranks::processes(&settings)? };
    let rival = match args.rival {
        Some(Rival::Mpi) => Some(Mpi::start(args.rival_driver.as_deref(), args.ranks)?),
        None => None,
    };
    let title = rival.as_ref().map(Mpi::title);

    let mut printer = Printer::new(rival.is_some());
    let show = Screen::new(rows.len() as u64);
    let kind = match (args.threads, args.ranks) {
        (true, 1) => "thread",
        (true, _) => "threads",
        (false, 1) => "process",
        (false, _) => "processes",
    };
    show.line(&format!("# peerlane {} bench: all-reduce, cpu device", env!("CARGO_PKG_VERSION")))?;
    show.line(&format!("# machine: {machine}"))?;
    let shape = format!("{} {kind}, islands: {islands}", args.ranks);
    show.line(&format!("# ranks: {shape}{}", pids(&ranks)))?;
    show.line(&format!("# command: {command}"))?;
    show.line("# time: mean of a call in a batch, averaged over the ranks; median of the batches")?;
    show.line(&printer.header(title.as_deref()))?;

    let mut bench = Bench { args, ranks, rival, data: 0 };
    let mut results = Vec::with_capacity(rows.len());
    for row in &rows {
        let measured = bench.measure(row)?;
        show.line(&printer.row(&measured))?;
        show.bar.inc(1);
        results.push(measured);
    }
    show.bar.finish_and_clear();
    bench.ranks.leave()?;
    bench.rival.map_or(Ok(()), Mpi::finish)?;
    show.line(&printer.footer())?;
    if let Some(output) = json {
        let report = json::Report {
            results: &results,
            wrong_total: printer.wrong(),
            command: &command,
            machine: &machine,
        };
        output.write(|out| report.write(out))?;
    }
    if let Some(output) = page {
        let html = report::page(&report::Run {
            results: &results,
            wrong: printer.wrong(),
            checked: args.check > 0,
            command: &command,
            machine: &machine,
            ranks: &shape,
            rival: title.as_deref(),
        })?;
        output.write(|out| out.write_all(html.as_bytes()))?;
    }
    ensure!(printer.wrong() == 0, "{} elements were wrong; see #wrong above", printer.wrong());
    Ok(())
}

/// One rank of a run of [`run`], as a process.
pub fn serve_rank() -> Result<ExitCode> {
    let served = rank::serve(BufReader::new(std::io::stdin()), std::io::stdout())?;
    Ok(if served { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

struct Bench<'a> {
    args: &'a Args,
    ranks: Ranks,
    rival: Option<Mpi>,
    /// Data sets that the rival has used.
    data: u64,
}

/// What the ranks answered about one way to call.
struct Timed {
    place: Place,
    algo: String,
    proto: String,
    timing: Timing,
}

impl Bench<'_> {
    fn measure(&mut self, row: &Row) -> Result<Measured> {
        let out = self.place(&row.call(false))?;
        let inside = self.place(&row.call(true))?;
        let mut rival = None;
        if let Some(mpi) = &mut self.rival {
            let plan = Plan {
                // The rival has no groups: as many calls, one by one.
                iters: out.timing.iters.saturating_mul(out.timing.aggregate),
                batches: out.timing.batches,
                warmup: self.args.warmup,
                checks: self.args.check,
                seed: self.args.seed,
                data: self.data,
                ours: Duration::from_secs_f64(
                    out.place.time_us
                        * 1e-6
                        * f64::from(out.timing.iters)
                        * f64::from(out.timing.aggregate)
                        * f64::from(out.timing.batches),
                ),
            };
            rival = mpi.measure(&row.call(false), &plan)?;
            self.data += u64::from(self.args.check) + 1;
        }
        let either = |a: String, b: String| if a == b { a } else { format!("{a}+{b}") };
        Ok(Measured {
            bytes: row.call(false).bytes(),
            count: row.count,
            dtype: row.dtype.name(),
            redop: row.op.name(),
            algo: either(out.algo, inside.algo),
            proto: either(out.proto, inside.proto),
            ratio: rival
                .as_ref()
                .filter(|r| r.time_us > 0.0)
                .map(|r| out.place.time_us / r.time_us),
            out_of_place: out.place,
            in_place: inside.place,
            rival,
        })
    }

    fn place(&mut self, call: &Call) -> Result<Timed> {
        let mut wrong = 0;
        if self.args.check > 0 {
            let order = Order::Check { call: *call, iterations: self.args.check };
            for answer in self.ranks.ask(&order)? {
                match answer {
                    Answer::Checked { wrong: n } => wrong += n,
                    other => bail!("a rank answered a check with {other:?}"),
                }
            }
        }
        let timing = self.timing(call)?;
        let (answers, late) = self.time(call, timing)?;
        wrong += late;
        let n = answers.len() as f64;
        let means: Vec<f64> = (0..timing.batches as usize)
            .map(|batch| answers.iter().map(|(batches, ..)| batches[batch]).sum::<f64>() / n)
            .collect();
        let (_, algo, proto) =
            answers.into_iter().next().ok_or_else(|| anyhow!("no rank answered"))?;
        let wrong = (self.args.check > 0).then_some(wrong);
        let place = Place::new(call.bytes(), self.args.ranks, median(&means), wrong);
        Ok(Timed { place, algo, proto, timing })
    }

    /// The counts of a row: the flags', or those that rank 0's trial suggests. Every rank then gets the same.
    fn timing(&mut self, call: &Call) -> Result<Timing> {
        let mut timing = Timing {
            warmup: self.args.warmup,
            iters: self.args.iters,
            batches: self.args.batches,
            aggregate: self.args.aggregate,
            verify: self.args.check > 0,
        };
        if timing.iters > 0 && timing.batches > 0 {
            return Ok(timing);
        }
        let mut iters = if timing.iters > 0 { timing.iters } else { 4 };
        let iteration_us = loop {
            let trial = Timing { iters, batches: 1, verify: false, ..timing };
            let (answers, _) = self.time(call, trial)?;
            let rank0 = answers[0].0[0] * f64::from(timing.aggregate);
            // A trial of a few fast calls measures the clock and a cold cache.
            if timing.iters > 0 || iters >= 64 || rank0 * f64::from(iters) > BATCH_US / 10.0 {
                break rank0.max(1e-3);
            }
            iters *= 4;
        };
        if timing.iters == 0 {
            timing.iters = (BATCH_US / iteration_us).clamp(ITERS.0, ITERS.1) as u32;
        }
        if timing.batches == 0 {
            let batch_us = iteration_us * f64::from(timing.iters);
            timing.batches = (BUDGET_US / batch_us).clamp(BATCHES.0, BATCHES.1) as u32;
        }
        Ok(timing)
    }

    /// Every rank's batches and what served them, and the wrong elements of all.
    #[allow(clippy::type_complexity)]
    fn time(
        &mut self,
        call: &Call,
        timing: Timing,
    ) -> Result<(Vec<(Vec<f64>, String, String)>, u64)> {
        let mut total = 0;
        let mut ranks = Vec::with_capacity(self.args.ranks);
        for answer in self.ranks.ask(&Order::Time { call: *call, timing })? {
            match answer {
                Answer::Timed { batch_us, wrong, algo, proto }
                    if batch_us.len() == timing.batches as usize =>
                {
                    total += wrong;
                    ranks.push((batch_us, algo, proto));
                }
                other => bail!("a rank answered a timing with {other:?}"),
            }
        }
        Ok((ranks, total))
    }
}

/// Standard output, and on a terminal a progress bar below it on standard error.
struct Screen {
    bar: ProgressBar,
}

impl Screen {
    fn new(rows: u64) -> Self {
        // Drawn on terminals only; indicatif looks.
        let bar = ProgressBar::with_draw_target(Some(rows), ProgressDrawTarget::stderr());
        let style = "{wide_bar} {pos}/{len} rows, {eta} left";
        bar.set_style(ProgressStyle::with_template(style).unwrap_or(ProgressStyle::default_bar()));
        Screen { bar }
    }

    fn line(&self, text: &str) -> Result<()> {
        Ok(self.bar.suspend(|| writeln!(std::io::stdout(), "{text}"))?)
    }
}

fn pids(ranks: &Ranks) -> String {
    let pids: Vec<_> = ranks.pids().iter().map(u32::to_string).collect();
    if pids.is_empty() {
        String::new()
    } else {
        format!(", pids: {}", pids.join(" "))
    }
}

fn command_line() -> String {
    std::env::args().collect::<Vec<_>>().join(" ")
}
